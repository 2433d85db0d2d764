"""How many tokens to draft for each row of the next round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.types import MAX_DRAFT_TOKENS, Row, UsageError


class Policy(Protocol):
    """Chooses draft lengths from what the rows have been through (`row.rounds`)."""

    def num_draft_tokens(self, rows: Sequence[Row]) -> list[int]:
        """One length per row; the loop shortens those that would overrun a row's end."""


@dataclass(frozen=True)
class Fixed:
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


def lengths_for(policy: Policy, rows: Sequence[Row], limit: int | None = None) -> list[int]:
    """The policy's choice, a request's own `num_draft_tokens` in its place, and never past a row's last token.

    A round commits at least one token of the target's own, so a row drafts at most `remaining - 1`. limit: the longest
    draft that the target's forward shapes allow.
    """
    longest = MAX_DRAFT_TOKENS if limit is None else min(limit, MAX_DRAFT_TOKENS)
    chosen = policy.num_draft_tokens(rows)
    own = [row.params.num_draft_tokens for row in rows]
    return [
        max(0, min(length if mine is None else mine, row.remaining - 1, longest))
        for row, length, mine in zip(rows, chosen, own, strict=True)
    ]
