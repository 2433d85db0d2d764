"""The protocols between the loop and what plugs into it: drafters, models, policies, samplers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from slipstream.core.rng import Race, Stream
from slipstream.core.rounds import Seconds
from slipstream.core.types import Draft, PromptImages, Row, Verdict


class Sampler(Protocol):
    """The sampling options of the rows of one batch. B rows, J positions, V vocabulary."""

    rows: list[Row]
    race: Race
    device: torch.device
    all_greedy: bool  # every row decodes greedily
    changes_logits: bool  # bias, penalties or processors change a row's logits
    plain: bool  # every row decodes greedily, and nothing changes its logits
    branching: bool  # trees can be verified: no row brings processors of its own

    @property
    def failures(self) -> Mapping[int, tuple[int, Exception]]:
        """Rows whose own logits processors raised: index in the batch -> the first such position, the exception."""

    def drafted(self) -> None:
        """Forget the processors that failed while the draft was made: verification calls them again."""

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        """Note what row number `row` of this batch has committed."""

    def scores(self, logits: Tensor, draft: Tensor, first: int = 0, *, guess: bool = False) -> Tensor:
        """[B, J, V] logits after bias, penalties and processors; position j has seen first + j draft tokens.

        In float32, or in their own type where nothing changes them.
        """

    def probs(self, scores: Tensor) -> Tensor:
        """[B, J, V] float32 distribution of each position: one-hot for greedy rows."""

    def choose(self, logits: Tensor, draft: Draft) -> Tensor:
        """[B, K + 1] the token that plain decoding would commit after the committed tokens and after each draft token.

        Entries that follow a draft token which the target would not have chosen are ignored.
        """

    def draw(self, probs: Tensor, first: int = 0, stream: Stream = Stream.DRAFT) -> Tensor:
        """[B, J] one token per position from probs [B, J, V], keyed by (seed, stream, absolute position).

        first: number of draft tokens before these positions. A draft with `Draft.probs` needs draws that are
        independent of the target's, which come from Stream.TOKEN, and of each other: each token its own position.
        """

    def leaders(self, scores: Tensor, first: int, count: int, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The tokens that would lead the race for position `first` if the target's scores [B, V] were these.

        In greedy rows they are the likeliest tokens. Returns them and their shares of all speeds, both [B, count]; see
        `Race.leaders`. token_ids: as in `PartialVocabulary`.
        """

    def draw_at(self, probs: Tensor, offsets: Tensor, width: int) -> Tensor:
        """[B] one token per row from probs [B, V], at offsets[i] <= width positions after row i's tokens."""

    def round_keys(self, stream: Stream) -> list[int]:
        """One key per row for random draws of this round."""


@runtime_checkable
class Drafter(Protocol):
    """Proposes the next tokens of rows."""

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """Up to lengths[i] tokens for row i, fewer being always allowed, as a `Draft` on the target's device.

        The output distribution rests on one promise: `Draft.probs` is what the tokens were sampled from, or None.
        """


@runtime_checkable
class Observer(Protocol):
    """Optional capability of a drafter: sees what the target made of its drafts."""

    def observe(self, rows: Sequence[Row], draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        """Called after every verdict, before its tokens are committed. Reading the tensors waits for the device.

        logits: [B, K + 1, V], the target's; position j follows the first j draft tokens, or node j - 1 of a tree.
        """


@runtime_checkable
class Extender(Protocol):
    """Optional capability of a drafter: continues another one's draft."""

    def extend(
        self, row: Row, tokens: Sequence[int], length: int, acceptance_prob: float
    ) -> tuple[list[int], list[float]]:
        """Up to `length` tokens after `tokens`, and for each the probability that all up to it are accepted.

        acceptance_prob: the probability that all of `tokens` are accepted.
        """


@runtime_checkable
class Learner(Protocol):
    """Optional capability of a drafter: remembers earlier requests."""

    def forget(self) -> None:
        """Drop what was learned."""


class DraftScorer(Protocol):
    """A draft model and its KV cache: the part of `Session` that drafters use."""

    backend: Backend
    token_ids: Tensor | None = None  # [N] the tokens of the logits that `score` returned last; None for all

    def begin(self, width: int) -> int:
        """Prepare for a draft of `width` tokens; returns the most tokens that it may have."""
        return width

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        """Logits after the committed tokens and after each draft token."""

    def acceptance(self, rows: Sequence[Row], draft: Tensor) -> Tensor | None:
        """[B] the probability that the token after this draft, scored last, is accepted; None if not estimated."""
        return None

    def draft_greedy(self, rows: Sequence[Row], steps: int, vocab_size: int) -> Tensor | None:
        """[B, steps] greedy tokens in one call; None where that is impossible."""
        return None

    def keep_drafts(self, lengths: Sequence[int]) -> None:
        """Note that only the first lengths[i] of the tokens scored for row i are its draft."""


@dataclass(frozen=True)
class Source:
    """A drafter, and what the loop and its policy must know of it. A round asks its sources in order."""

    drafter: Drafter
    takes_forwards: bool = True  # each drafted token takes a forward pass of a model
    of_predictions: bool = False  # it drafts only for rows whose request predicts its output


class PlainTimes(Protocol):
    """Estimates how long steps would take without drafts."""

    def plain_seconds(self, lengths: Sequence[int], seconds: Seconds) -> float | None:
        """About how many seconds plain decoding would have taken for a step without prompts; None if not measured.

        lengths: number of draft tokens of each row; seconds: what the step took.
        """


@runtime_checkable
class Policy(Protocol):
    """Decides how much to draft, and from which source; only `observe` learns.

    A subclass need only define `lengths`.
    """

    def observe(self, rows: Sequence[Row]) -> None:
        """Learn from the newest round of each row (`row.rounds[-1]`); called once after every round."""
        return None

    def lengths(self, rows: Sequence[Row], source: Source, draft: Draft, room: Sequence[int]) -> list[int]:
        """Number of tokens to ask a source for, per row, at most room[i]; 0 keeps the row's `draft`.

        draft: what the sources before this one propose.
        """

    def worth_verifying(self, rows: Sequence[Row], draft: Draft) -> Draft:
        """The draft, cut where verifying more is not expected to pay."""
        return draft

    def expects_drafts(self, row: Row) -> bool:
        """True if a draft model is expected to draft for a row, so that reading its prompt ahead pays."""
        return True

    @property
    def plain_times(self) -> PlainTimes | None:
        """Estimates how long steps would take without drafts; None if the policy has not measured that."""
        return None


class Grammar(Protocol):
    """The part of constraints that drafts need; see `slipstream.constraints`."""

    def forced(self, rows: Sequence[Row]) -> list[list[int]]:
        """Per row, the tokens that come next because no other is legal."""

    def room_after(self, rows: Sequence[Row], forced: Sequence[Sequence[int]]) -> list[int]:
        """Per row, the most tokens that may be drafted after its forced ones."""

    def around(self, rows: Sequence[Row], forced: Sequence[Sequence[int]], draft: Draft) -> Draft:
        """The forced tokens, the legal part of the draft after them, and the tokens which that forces."""


class Backend(Protocol):
    """A causal language model and its KV cache of `reserve`d slots, addressed by absolute position."""

    vocab_size: int
    max_length: int
    device: torch.device
    attended_unit: int  # attention reads the cache up to the next multiple of this

    def reserve(self, rows: int, length: int) -> None:
        """Hold at least `rows` slots of `length` positions; what is cached already stays."""

    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        """Write tokens [B, W] at positions starts[i]... of slots first_slot... and attend to what lies before them.

        Returns [B, W, V] logits, or an empty tensor when `logits` is False. Positions of a slot beyond those written
        may hold leftovers; they are never attended to.
        """

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""


@runtime_checkable
class GreedyRounds(Protocol):
    """Optional capability of a backend: drafts or verifies a whole greedy round without returning to the host.

    Both methods read and write slots 0 to B - 1. tokens: [B, W]; row i has counts[i] real columns, written
    from position starts[i] on.
    """

    def draft_greedy(
        self, tokens: Tensor, starts: list[int], counts: list[int], *, steps: int, vocab_size: int
    ) -> Tensor:
        """[B, steps] int64: the likeliest of the first `vocab_size` tokens after each row, after that one, and so on.

        The last one is not fed to the model.
        """

    def verify_greedy(
        self, tokens: Tensor, starts: list[int], counts: list[int], lengths: Sequence[int], *, width: int
    ) -> Tensor:
        """[B, 2] int64: how many draft tokens are the model's own choice, and the token it chooses after them.

        The last `width` real columns of a row are its draft; the first lengths[i] of them were proposed.
        """


@runtime_checkable
class PromptLogits(Protocol):
    """Optional capability of a backend: a long forward returns the logits of a few of its columns only."""

    def answer(self, tokens: Tensor, start: int, *, slot: int, columns: Tensor) -> Tensor:
        """`forward` of one row, tokens [1, W]; returns the logits [1, C, V] of the given columns [C] only."""


@runtime_checkable
class PartialVocabulary(Protocol):
    """Optional capability of a draft model's backend: it scores only some tokens.

    token_ids: [N], ascending, on the backend's device: the tokens of the logits that `forward` returns; None for all.
    """

    token_ids: Tensor | None


@runtime_checkable
class AttendedLengths(Protocol):
    """Optional capability of a backend: attention can read cache lengths that are not multiples of `attended_unit`.

    attended_lengths: lengths to read, ascending; the first that covers the text is used. Where none does, or if there
    are none, a multiple of the unit is read.
    """

    attended_lengths: tuple[int, ...]

    def attended_length_agrees(self, widths: Sequence[int], length: int, full_length: int) -> bool:
        """True if forwards of these widths, and of prompts, give the same bits whichever length attention reads."""


@runtime_checkable
class Checkpoints(Protocol):
    """Optional capability of a backend with recurrent layers, whose state exists at some positions only.

    A forward begins at such a position, and makes the state available at each of its tokens that is not yet final.
    """

    def checkpoint(self, slot: int, limit: int) -> int:
        """The last position, at most `limit`, at which the state of a slot exists; 0 if there is no other."""

    def mark_final(self, slot: int, position: int) -> None:
        """Called before a forward of a slot: its text is final up to `position`; no later forward begins earlier."""


@runtime_checkable
class LongTexts(Protocol):
    """Optional capability of a backend: it computes long texts differently from short ones, from the first token on."""

    longest_short: int | None  # tokens of the longest short text; None if all texts are computed alike
    # a text that becomes long while it is generated must be read again; if False, its cache stays valid
    reads_anew: bool

    def read_as(self, slot: int, *, is_long: bool) -> None:
        """Called before forwards of a slot. is_long: its text is a long one."""


@runtime_checkable
class SeesImages(Protocol):
    """Optional capability of a backend: it reads prompts with images."""

    def show(self, slot: int, images: PromptImages | None) -> None:
        """Called before forwards of a slot: these are the images of its text."""


class Experts(Protocol):
    """The experts of a mixture: each of its `layers` has `count`, and a token uses `used` of them."""

    layers: int
    count: int
    used: int

    def num_read(self) -> int:
        """Experts that forwards have read so far: of all layers, each once per forward that uses it."""

    def force(self, choice: Tensor | None) -> None:
        """Use these experts [T, used] in all layers of forwards of T tokens; None: those that the routers choose."""


@runtime_checkable
class MixtureOfExperts(Protocol):
    """Optional capability of a backend: it counts the experts that its forwards read.

    experts: None for a dense model.
    """

    experts: Experts | None


def counted_experts(backend: Backend) -> Experts | None:
    """The experts of a backend that counts what its forwards read of them."""
    return backend.experts if isinstance(backend, MixtureOfExperts) else None


def set_attended_lengths(backend: Backend, unit: int, lengths: tuple[int, ...]) -> None:
    """Set how much of the cache attention reads: a multiple of `unit`, or one of `lengths` if the backend can."""
    backend.attended_unit = unit
    if isinstance(backend, AttendedLengths):
        backend.attended_lengths = lengths
