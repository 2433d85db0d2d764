"""When a draft model stops before it has drafted what was asked for.

A draft may end by anything that is known when it does, as long as the tokens sampled so far stay in it: which tokens
the target is asked about is then no choice among tokens (docs/exactness.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from slipstream.core.types import Row
from slipstream.draft_length.confidence import bin_of, sibling_bin
from slipstream.draft_length.controller import DraftController
from slipstream.draft_length.draft_yields import DraftNote

REPRODUCIBLE = 0.4  # least probability of the draft so far, where drafts must depend on nothing but the row


class Stop(Protocol):
    """Says which rows' drafts end with the token drafted last."""

    def ends(
        self, rows: Sequence[Row], lengths: Sequence[int], chances: Sequence[Sequence[float]], sampled: bool
    ) -> list[bool]:
        """chances[i]: how sure the draft model is of each token of row i so far; lengths: how many are asked for.

        sampled: the tokens are sampled by random numbers of their own, so that the text depends on the draft.
        """

    def acceptance_probs(self, row: Row, chances: Sequence[float]) -> list[float] | None:
        """The probability that the first 1, 2, ... tokens of a row's draft are all accepted, if it is known."""

    def sibling_probs(self, row: Row, chances: Sequence[float], beside: Sequence[float]) -> list[float] | None:
        """The probability that the token beside each of a row's draft is accepted, if it may be verified too."""

    def note(self, length: int, chances: Sequence[float], beside: Sequence[tuple[int, float]] = ()) -> DraftNote:
        """What the policy learns from. chances: of the row's draft; length: how many tokens were asked for.

        beside: for each token of the draft the one beside it, and how sure the draft model is of that.
        """


@dataclass(frozen=True)
class Below(ABC):
    """A draft ends, row by row, with the token that makes it less sure than `threshold` (confidence.py)."""

    threshold: float

    def ends(
        self, rows: Sequence[Row], lengths: Sequence[int], chances: Sequence[Sequence[float]], sampled: bool
    ) -> list[bool]:
        """See `Stop`."""
        return [self._chance(own) < self.threshold for own in chances]

    def acceptance_probs(self, row: Row, chances: Sequence[float]) -> list[float] | None:
        """Not known."""
        return None

    def sibling_probs(self, row: Row, chances: Sequence[float], beside: Sequence[float]) -> list[float] | None:
        """Chains only."""
        return None

    def note(self, length: int, chances: Sequence[float], beside: Sequence[tuple[int, float]] = ()) -> DraftNote:
        """Nothing that the draft itself does not tell."""
        return DraftNote()

    @abstractmethod
    def _chance(self, own: Sequence[float]) -> float:
        """What is compared, of how sure the draft model was of each of a row's tokens so far."""


class PathBelow(Below):
    """Of all the draft's tokens together."""

    def _chance(self, own: Sequence[float]) -> float:
        return prod(own)


class TokenBelow(Below):
    """Of the last token; in greedy rows that is Hugging Face's `assistant_confidence_threshold`."""

    def _chance(self, own: Sequence[float]) -> float:
        return own[-1]


@dataclass(frozen=True)
class WhilePays:
    """All drafts end where another step of the draft model would cost more than it can be expected to bring.

    Rows whose request says how many tokens to draft get them. Where the text depends on the draft costs do not count,
    so that a seed gives the same text again.
    """

    controller: DraftController

    def ends(
        self, rows: Sequence[Row], lengths: Sequence[int], chances: Sequence[Sequence[float]], sampled: bool
    ) -> list[bool]:
        """All rows at once, or row by row."""
        asked = [row.params.num_draft_tokens is not None for row in rows]
        if sampled:
            return [prod(own) < REPRODUCIBLE and not mine for own, mine in zip(chances, asked, strict=True)]
        wanting = [i for i, length in enumerate(lengths) if length > len(chances[i])]
        pays = self.controller.another_step([rows[i] for i in wanting], [chances[i] for i in wanting], len(rows))
        return [not (pays or mine) for mine in asked]

    def acceptance_probs(self, row: Row, chances: Sequence[float]) -> list[float]:
        """The probability that the first 1, 2, ... tokens of a row's draft are all accepted."""
        return self.controller.confidence.acceptance_probs(row, chances)

    def sibling_probs(self, row: Row, chances: Sequence[float], beside: Sequence[float]) -> list[float] | None:
        """By what the draft model's tokens have brought; none for rows that asked for a number of tokens."""
        if row.params.num_draft_tokens is not None:
            return None
        return self.controller.confidence.sibling_probs(row, chances, beside)

    def note(self, length: int, chances: Sequence[float], beside: Sequence[tuple[int, float]] = ()) -> DraftNote:
        """How many tokens were asked for and drafted, and how confident the draft model was of each."""
        siblings = zip(chances, beside, strict=False)
        kinds = tuple((token, sibling_bin(chance, other)) for chance, (token, other) in siblings)
        return DraftNote(length, len(chances), kinds=tuple(map(bin_of, chances)), siblings=kinds)
