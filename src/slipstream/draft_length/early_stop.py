"""When a draft model stops before it has drafted what was asked for.

A draft may end by anything that is known when it does, as long as the tokens drawn so far stay in it: which tokens the
target is asked about is then no choice among tokens (docs/exactness.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol
from weakref import WeakKeyDictionary

from slipstream.core.types import Row
from slipstream.draft_length.controller import DraftController, bin_of

STEADY = 0.4  # of the draft's own probability, where drafts must depend on nothing but the row


class Stop(Protocol):
    """Says which rows' drafts end with the token drafted last."""

    def ends(
        self, rows: Sequence[Row], lengths: Sequence[int], chances: Sequence[Sequence[float]], sampled: bool
    ) -> list[bool]:
        """chances[i]: the draft model's own probability of each token of row i so far; lengths: how many are asked for.

        sampled: the tokens are drawn by dice of their own, so that the text depends on the draft.
        """

    def acceptance_probs(self, row: Row, chances: Sequence[float]) -> list[float] | None:
        """The chance that the first 1, 2, ... tokens of a row's draft all come true, if it is known."""


@dataclass(frozen=True)
class Below(ABC):
    """A draft ends, row by row, with the token that takes a chance below `threshold`."""

    threshold: float

    def ends(
        self, rows: Sequence[Row], lengths: Sequence[int], chances: Sequence[Sequence[float]], sampled: bool
    ) -> list[bool]:
        """See `Stop`."""
        return [self._sigmoid(own) < self.threshold for own in chances]

    def acceptance_probs(self, row: Row, chances: Sequence[float]) -> list[float] | None:
        """Not known."""
        return None

    @abstractmethod
    def _sigmoid(self, own: Sequence[float]) -> float:
        """What is compared, of the probabilities of a row's tokens so far."""


class PathBelow(Below):
    """The chance is that of all the draft's tokens together."""

    def _sigmoid(self, own: Sequence[float]) -> float:
        return prod(own)


class TokenBelow(Below):
    """The chance is that of the last token, as in Hugging Face's `assistant_confidence_threshold`."""

    def _sigmoid(self, own: Sequence[float]) -> float:
        return own[-1]


@dataclass
class WhilePays:
    """All drafts end where another step of the draft model would cost more than it can be expected to bring.

    Rows whose request says how many tokens to draft get them. Where the text depends on the draft costs do not count,
    so that a seed gives the same text again.
    """

    controller: DraftController
    _drafted: WeakKeyDictionary[Row, tuple[int, list[int]]] = field(default_factory=WeakKeyDictionary)

    def ends(
        self, rows: Sequence[Row], lengths: Sequence[int], chances: Sequence[Sequence[float]], sampled: bool
    ) -> list[bool]:
        """All rows at once, or row by row."""
        asked = [row.params.num_draft_tokens is not None for row in rows]
        if sampled:
            return [prod(own) < STEADY and not mine for own, mine in zip(chances, asked, strict=True)]
        wanting = [i for i, length in enumerate(lengths) if length > len(chances[i])]
        if len(chances[0]) == 1:
            self._learn(rows)
        for row, length, own in zip(rows, lengths, chances, strict=True):
            if length >= len(own):
                self._drafted[row] = len(row.rounds), [bin_of(one) for one in own]
                self.controller.draft_yields.ask(row, length, len(own))
        pays = self.controller.another_step([rows[i] for i in wanting], [chances[i] for i in wanting], len(rows))
        return [not (pays or mine) for mine in asked]

    def acceptance_probs(self, row: Row, chances: Sequence[float]) -> list[float]:
        """The chance that the first 1, 2, ... tokens of a row's draft all come true."""
        return self.controller.acceptance_probs(row, chances)

    def _learn(self, rows: Sequence[Row]) -> None:
        """What the last drafts became."""
        for row in rows:
            number, kinds = self._drafted.pop(row, (0, []))
            if kinds and number == len(row.rounds) - 1:
                done = row.rounds[number]
                self.controller.sure.learn(row, kinds, done.draft, done.tokens)
