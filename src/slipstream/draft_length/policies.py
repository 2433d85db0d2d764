"""How many tokens to draft for each row of the next round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from slipstream.core.interfaces import Policy
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.loop import PREDICTION
from slipstream.core.types import Draft, Row, Traits
from slipstream.draft_length.choice import LengthChoice
from slipstream.draft_length.planner import Planner
from slipstream.errors import UsageError

FIRST, UP, DOWN = 5, 2, 1  # of the heuristic schedule


@dataclass(frozen=True)
class Fixed:
    """Always the same number."""

    count: int

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or not 0 <= self.count <= MAX_DRAFT_TOKENS:
            raise UsageError(
                f"num_draft_tokens={self.count!r}; allowed: 'auto' or a whole number from 0 to {MAX_DRAFT_TOKENS}"
            )

    def observe(self, rows: Sequence[Row]) -> None:
        """Nothing to learn."""

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """The number, for every row."""
        return [self.count] * len(rows)

    def worth_verifying(self, rows: Sequence[Row], draft: Draft) -> Draft:
        """The draft as it is."""
        return draft


@dataclass
class Heuristic:
    """Two more after a draft that was accepted whole, one less after any other; Hugging Face's "heuristic" schedule.

    A row begins with 5 tokens. Each row has its own number, which stays between 1 and `longest`.
    """

    longest: int = MAX_DRAFT_TOKENS
    _lengths: WeakKeyDictionary[Row, int] = field(default_factory=WeakKeyDictionary)

    def observe(self, rows: Sequence[Row]) -> None:
        """Move each row's number by its newest round."""
        for row in rows:
            done = row.rounds[-1].without_forced
            if done.draft and done.origin.source != PREDICTION:
                by = UP if done.num_accepted_tokens == done.num_draft_tokens else -DOWN
                self._lengths[row] = max(1, min(self._length(row) + by, self.longest))

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """Each row's number."""
        return [self._length(row) for row in rows]

    def worth_verifying(self, rows: Sequence[Row], draft: Draft) -> Draft:
        """The draft as it is."""
        return draft

    def _length(self, row: Row) -> int:
        return self._lengths.get(row, min(FIRST, self.longest))


def make_policy(choice: LengthChoice, traits: Traits, planner: Planner | None, *, limit: int | None) -> Policy:
    """The policy of a choice for a drafter of these traits.

    planner: given where costs decide. limit: the longest draft that the forward shapes allow, None for any.
    """
    if planner is not None:
        return planner
    most = MAX_DRAFT_TOKENS if limit is None else limit
    if choice.kind == "auto":
        return Fixed(traits.default_length)
    if choice.kind == "confidence":
        return Fixed(most)
    length = most if choice.count is None else choice.count
    if length > most:
        why = "" if limit is None else " in reproducible mode, or reproducible=False"
        said: object = f"heuristic:{length}" if choice.kind == "heuristic" else length
        if choice.siblings > 0:
            said = f"'{length // (1 + choice.siblings)}x{1 + choice.siblings}', a tree of {length} tokens"
        raise UsageError(f"num_draft_tokens={said}; allowed: at most {most}{why}")
    return Heuristic(length) if choice.kind == "heuristic" else Fixed(length)


def drafts_for(policy: Policy, row: Row) -> bool:
    """Whether a draft model will draft for a row, as far as is known beforehand."""
    asked = row.params.num_draft_tokens
    if asked is not None:
        return asked > 0
    return policy.drafts_for(row) if isinstance(policy, Planner) else policy.lengths([row])[0] > 0
