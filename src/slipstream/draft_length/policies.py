"""How many tokens to draft for each row of the next round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.types import Draft, Row
from slipstream.draft_length.controller import DraftController
from slipstream.errors import UsageError

FIRST, UP, DOWN = 5, 2, 1  # of the heuristic schedule


class Whole:
    """What policies that never shorten a draft have in common."""

    def worth_verifying(self, rows: Sequence[Row], draft: Draft) -> Draft:
        """The draft as it is."""
        return draft


@dataclass(frozen=True)
class Fixed(Whole):
    """Always the same number."""

    count: int

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or not 0 <= self.count <= MAX_DRAFT_TOKENS:
            raise UsageError(
                f"num_draft_tokens={self.count!r}; allowed: 'auto' or a whole number from 0 to {MAX_DRAFT_TOKENS}"
            )

    def num_draft_tokens(self, rows: Sequence[Row]) -> list[int]:
        """The number, for every row."""
        return [self.count] * len(rows)


@dataclass
class Heuristic(Whole):
    """Two more after a draft that was accepted whole, one less after any other; Hugging Face's "heuristic" schedule.

    A row begins with 5 tokens. Each row has its own number, which stays between 1 and `longest`.
    """

    longest: int = MAX_DRAFT_TOKENS
    _reached: WeakKeyDictionary[Row, tuple[int, int]] = field(default_factory=WeakKeyDictionary)  # after n rounds

    def num_draft_tokens(self, rows: Sequence[Row]) -> list[int]:
        """What each row's rounds lead to."""
        return [self._length(row) for row in rows]

    def _length(self, row: Row) -> int:
        seen, length = self._reached.get(row, (0, min(FIRST, self.longest)))
        for done in row.rounds[seen:]:
            if done.draft:
                length += UP if done.num_accepted_tokens == done.num_draft_tokens else -DOWN
                length = max(1, min(length, self.longest))
        self._reached[row] = len(row.rounds), length
        return length


@dataclass
class Auto:
    """As many tokens as pay, by measured costs and by what drafts have brought; see `control`.

    steady: tokens for sampled rows whose text depends on the draft (drawn: the drafter draws by dice of its own); costs
    do not count for them, so that a seed gives the same text again.
    stepwise: every token of a draft costs time; else drafts cost nothing but their verification.
    """

    controller: DraftController
    steady: int
    drawn: bool = False
    stepwise: bool = False

    def num_draft_tokens(self, rows: Sequence[Row]) -> list[int]:
        """As many as can pay; where drafts say what to hope for, as many as may be cut afterwards."""
        self.controller.learn(rows)
        chosen = self.controller.lengths(rows) if self.stepwise else [self.controller.longest] * len(rows)
        return [self.steady if self._is_steady(row) else length for row, length in zip(rows, chosen, strict=True)]

    def worth_verifying(self, rows: Sequence[Row], draft: Draft) -> Draft:
        """The draft as far as it is worth its verification."""
        if any(map(self._is_steady, rows)):
            return draft
        return self.controller.cut(rows, draft)

    def _is_steady(self, row: Row) -> bool:
        return self.drawn and row.params.temperature > 0
