"""The protocols between the loop and what plugs into it: drafters, models, policies, samplers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from slipstream.core.rng import Race, Stream
from slipstream.core.types import Draft, Row, Verdict


class Sampler(Protocol):
    """The sampling options of the rows of one batch. B rows, J positions, V vocabulary."""

    rows: list[Row]
    race: Race
    device: torch.device
    all_greedy: bool  # every row decodes greedily
    changes_logits: bool  # bias, penalties or processors change a row's logits
    plain: bool  # every row decodes greedily, and nothing changes its logits
    branching: bool  # no row brings processors of its own, so that a tree can be chosen from

    @property
    def failures(self) -> Mapping[int, tuple[int, Exception]]:
        """Rows whose own logits processors failed: place in the batch -> the first position at which, and why."""

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
        """[B, K + 1] the target's own token after the committed tokens and after each draft token: what plain decoding
        would commit there. What stands after a draft token that is not the target's own does not count."""

    def draw(self, probs: Tensor, first: int = 0, stream: Stream = Stream.TOKEN) -> Tensor:
        """[B, J] one token per position from probs [B, J, V], by (seed, stream, absolute position)."""

    def leaders(self, scores: Tensor, first: int, count: int, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[B, count] the tokens that lead in the race of position `first` if these are the target's scores [B, V], the
        likeliest ones in greedy rows, and [B, count] their shares of it. token_ids: as in `PartialVocabulary`."""

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
        """Called after every verdict; reading any of it waits for the device. The tokens are not yet committed.

        logits: [B, K + 1, V], the target's; position j follows the first j draft tokens, of a tree node j - 1.
        """


@runtime_checkable
class Extender(Protocol):
    """Optional capability of a drafter: continues another one's draft."""

    def extend(
        self, row: Row, tokens: Sequence[int], length: int, acceptance_prob: float
    ) -> tuple[list[int], list[float]]:
        """Up to `length` tokens after `tokens`, and for each the probability that all up to it are accepted.

        acceptance_prob: that of `tokens`.
        """


@runtime_checkable
class Learner(Protocol):
    """Optional capability of a drafter: remembers earlier requests."""

    def forget(self) -> None:
        """Drop what was learned."""


class DraftScorer(Protocol):
    """A draft model and its KV cache: what a drafter needs of a `Session`."""

    @property
    def backend(self) -> Backend: ...

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        """Logits after the committed tokens and after each draft token."""

    def draft_greedy(self, rows: Sequence[Row], steps: int, vocab_size: int) -> Tensor | None:
        """[B, steps] greedy tokens in one call, where the model can."""

    def keep_drafts(self, lengths: Sequence[int]) -> None:
        """Only the first lengths[i] tokens scored for row i are its draft."""


class Policy(Protocol):
    """Decides how much to draft. `lengths` is called once a round; only `observe` learns."""

    def observe(self, rows: Sequence[Row]) -> None:
        """Learn from the newest round of each row (`row.rounds[-1]`); called once after every round."""

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """Tokens to ask the drafter for, per row; the loop shortens those that would overrun a row's end."""

    def worth_verifying(self, rows: Sequence[Row], draft: Draft) -> Draft:
        """The draft, cut where verifying more is not expected to pay."""


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

    Both methods read and write slots 0 to B - 1. tokens: [B, W], of which row i has counts[i] real columns, written
    from position starts[i] on.
    """

    def draft_greedy(
        self, tokens: Tensor, starts: list[int], counts: list[int], *, steps: int, vocab_size: int
    ) -> Tensor:
        """[B, steps] int64: the likeliest of the first `vocab_size` tokens after each row, after that one, and so on.

        The last of them is not computed on.
        """

    def verify_greedy(
        self, tokens: Tensor, starts: list[int], counts: list[int], lengths: Sequence[int], *, width: int
    ) -> Tensor:
        """[B, 2] int64: how many draft tokens are the model's own choice, and the token it chooses after them.

        The last `width` real columns of a row are its draft, of which the first lengths[i] were proposed.
        """


@runtime_checkable
class PromptLogits(Protocol):
    """Optional capability of a backend: a long forward returns the logits of a few of its columns only."""

    def answer(self, tokens: Tensor, start: int, *, slot: int, columns: Tensor) -> Tensor:
        """As `forward` of one row, tokens [1, W]; returns the logits [1, C, V] of the given columns [C] only."""


@runtime_checkable
class PartialVocabulary(Protocol):
    """Optional capability of a draft model's backend: it scores only some tokens.

    token_ids: [N], ascending, on the backend's device: the tokens of the logits that `forward` returns; None for all.
    """

    token_ids: Tensor | None


@runtime_checkable
class AttendedLengths(Protocol):
    """Optional capability of a backend: attention over other lengths than multiples of `attended_unit`.

    attended_lengths: the lengths it may read where one is enough, ascending; empty for multiples of the unit only.
    """

    attended_lengths: tuple[int, ...]

    def attended_length_agrees(self, widths: Sequence[int], length: int, full_length: int) -> bool:
        """Whether attention of these widths, and of prompts, gives the same bits over both lengths."""


@runtime_checkable
class Checkpoints(Protocol):
    """Optional capability of a backend whose state is known at some positions only, as that of recurrent layers is.

    A forward begins at such a position, and the state becomes known at those of its tokens that are not yet final.
    """

    def checkpoint(self, slot: int, limit: int) -> int:
        """The last position, at most `limit`, at which the state of a slot is known; 0 if there is no other."""

    def mark_final(self, slot: int, position: int) -> None:
        """Called before a forward of a slot: its text is final up to `position`; no later forward begins before."""


@runtime_checkable
class LongTexts(Protocol):
    """Optional capability of a backend that reads long texts otherwise than short ones, from their first token on.

    longest_short: the most tokens of a short text; None if all are read alike. reads_anew: a text that becomes long as
    it is generated is read again; else what was read of it stays.
    """

    longest_short: int | None
    reads_anew: bool

    def read_as(self, slot: int, *, is_long: bool) -> None:
        """Called before forwards of a slot: whether its text is a long one."""


def set_attended_lengths(backend: Backend, unit: int, lengths: tuple[int, ...]) -> None:
    """Make attention read the cache up to one of `lengths` if it can and one is enough, else a multiple of `unit`."""
    backend.attended_unit = unit
    if isinstance(backend, AttendedLengths):
        backend.attended_lengths = lengths
