"""The protocols between the loop and what plugs into it: drafters, models, policies, and their declared traits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from slipstream.core.types import Draft, Row, Verdict
from slipstream.sampling.sampler import Sampler


@runtime_checkable
class Drafter(Protocol):
    """Proposes how the rows go on."""

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """Up to lengths[i] tokens for row i, as a `Draft` on the target's device.

        Fewer are always allowed. The target's output law rests on one promise: `Draft.probs` is the law the tokens
        were drawn from, or None if they were not drawn at all.
        """


@runtime_checkable
class Observer(Protocol):
    """What a drafter is besides if it wants to see what the target made of its drafts."""

    def observe(self, rows: Sequence[Row], draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        """Called after every verdict, before its tokens are committed. logits: [B, K + 1, V], the target's.

        Position j of a row follows its first j draft tokens. Everything is still on the device: reading it waits.
        """


@runtime_checkable
class Continuation(Protocol):
    """What a drafter is besides if it can go on behind another one's draft."""

    def goes_on(
        self, row: Row, tokens: Sequence[int], length: int, acceptance_prob: float
    ) -> tuple[list[int], list[float]]:
        """Up to `length` tokens behind `tokens`, and the chances that all up to each come true.

        hope: the chance that `tokens` do. Asked in a round in which `propose` was asked before.
        """


@runtime_checkable
class Learner(Protocol):
    """What a drafter is besides if it keeps what it learned from earlier requests."""

    def forget(self) -> None:
        """Drop it."""


class Policy(Protocol):
    """Chooses draft lengths from what the rows have been through (`row.rounds`)."""

    def num_draft_tokens(self, rows: Sequence[Row]) -> list[int]:
        """One length per row; the loop shortens those that would overrun a row's end."""

    def worth_verifying(self, rows: Sequence[Row], draft: Draft) -> Draft:
        """The draft, or less of the rows for which it says what can be expected of it (`Draft.hopes`)."""


class Backend(Protocol):
    """A causal language model and its key-value memory of `reserve`d slots, addressed by absolute position."""

    vocab_size: int
    max_length: int
    device: torch.device
    attended_unit: int  # attention reads the cache up to the next multiple of this

    def reserve(self, rows: int, length: int) -> None:
        """Hold at least `rows` slots of `length` positions; what is held already stays."""

    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        """Write tokens [B, W] at positions starts[i]... of slots first_slot... and attend to what lies before them.

        Returns [B, W, V] logits, or an empty tensor when `logits` is False. Positions of a slot beyond those written
        may hold leftovers; they are never attended to.
        """

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""


@runtime_checkable
class GreedyRounds(Protocol):
    """What a backend is besides if it can do a greedy round's work without coming back to the host in between.

    Both methods read and write slots 0 to B - 1. tokens: [B, W], of which row i has counts[i] real columns, written
    from position starts[i] on.
    """

    def draft_greedy(
        self, tokens: Tensor, starts: list[int], counts: list[int], *, steps: int, vocab_size: int
    ) -> Tensor:
        """[B, steps] int64: the likeliest of the first `vocab_size` tokens after each row, fed and repeated.

        The last of them is not fed.
        """

    def verify_greedy(
        self, tokens: Tensor, starts: list[int], counts: list[int], lengths: Sequence[int], *, width: int
    ) -> Tensor:
        """[B, 2] int64: how many draft tokens the model itself would have said, and the token it says then.

        The last `width` real columns of a row are its draft, of which the first lengths[i] were proposed.
        """


@runtime_checkable
class PromptLogits(Protocol):
    """What a backend is besides if a long forward can give the logits of few of its columns."""

    def answer(self, tokens: Tensor, start: int, *, slot: int, columns: Tensor) -> Tensor:
        """As `forward` of one row, tokens [1, W]; returns the logits [1, C, V] of the given columns [C] only."""


@runtime_checkable
class AttendedLengths(Protocol):
    """Optional capability: attention that reads other lengths of the cache than multiples of `attended_unit`.

    attended_lengths: the lengths it may read where one is enough, ascending; empty for multiples of the unit only.
    """

    attended_lengths: tuple[int, ...]

    def attended_length_agrees(self, widths: Sequence[int], length: int, whole: int) -> bool:
        """Whether attention of these widths, and of prompts, gives the same bits over `length` positions as `whole`."""


def set_attended_lengths(backend: Backend, unit: int, lengths: tuple[int, ...]) -> None:
    """Make attention read the cache up to one of `lengths` if it can and one is enough, else a multiple of `unit`."""
    backend.attended_unit = unit
    if isinstance(backend, AttendedLengths):
        backend.attended_lengths = lengths


@dataclass(frozen=True)
class RowSegment:
    """Some tokens of one row in a forward of several: `count` of them, written to `slot` from `start` on."""

    slot: int
    start: int
    count: int


@runtime_checkable
class RaggedForwards(Protocol):
    """What a backend is besides if a forward can take a different number of tokens of each row.

    ragged: whether it can with this model here.
    """

    ragged: bool

    def forward_ragged(
        self,
        tokens: Tensor,
        segments: Sequence[RowSegment],
        *,
        widths: Sequence[int] | None,
        columns: Tensor | None = None,
    ) -> Tensor:
        """One forward of tokens [T], the pieces' one behind the other; any behind the last piece continue it.

        widths: for rounds, whose slots follow each other: in how many columns attention may take a row's tokens,
        ascending; none for as many as there are. None for prompts, each of which attends as if alone. Returns logits
        [T, V], or [C, V] of the given columns [C].
        """
