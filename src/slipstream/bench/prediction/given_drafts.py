"""Drafts of given shapes, for timing: tokens of no merit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from slipstream.core.interfaces import Sampler
from slipstream.core.types import Draft, Row

POINTS = 6  # numbers of tokens at which a kind of forward is timed, where any would be allowed


@dataclass(frozen=True)
class Given:
    """Proposes a draft of levels[i] tokens for row i, and beside each of them as many siblings."""

    levels: tuple[int, ...]
    device: torch.device
    siblings: int = 0

    @property
    def size(self) -> int:
        """The most tokens of a row."""
        return max(self.levels) * (1 + self.siblings)

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """The same at every call."""
        wide = 1 + self.siblings
        tokens = torch.ones(len(rows), self.size, dtype=torch.int64, device=self.device)
        parents = None
        if self.siblings:
            parents = tuple(
                tuple((node // wide - 1) * wide if node >= wide else -1 for node in range(n * wide))
                for n in self.levels
            )
        return Draft(tokens, tuple(n * wide for n in self.levels), parents=parents)


def uneven(drafted: int, rows: int, pad: Callable[[int], int]) -> tuple[int, ...] | None:
    """Lengths of `rows` drafts of so many tokens in all, whose rectangle would take more; None if there are none.

    pad: tokens per row -> width of the rectangle.
    """
    for longest in range(1, drafted + 1):
        if rows * longest >= drafted and rows * pad(longest + 1) > rows + drafted:
            return tuple(min(longest, max(0, drafted - row * longest)) for row in range(rows))
    return None


def even(total: int, rows: int) -> tuple[int, ...]:
    """`total` levels shared among rows."""
    return tuple(total // rows + (row < total % rows) for row in range(rows))


def some(values: Sequence[int], most: int = POINTS) -> list[int]:
    """At most so many of ascending values, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]
