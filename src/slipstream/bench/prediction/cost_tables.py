"""Tables of milliseconds: what they may hold, how they are read from JSON and what lies between their entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any

import numpy as np

from slipstream.errors import UsageError

Points = Mapping[int, float]
Grid = Mapping[int, Points]  # batch -> width or tokens -> milliseconds


@dataclass(frozen=True)
class TokenCosts:
    """Milliseconds of rounds whose rows have different numbers of tokens, by batch and by the tokens of all rows.

    forward: one target forward; overhead: what else such a round takes but for drafting.
    """

    forward: Grid
    overhead: Grid

    def __post_init__(self) -> None:
        for name in ("forward", "overhead"):
            check_grid(name, getattr(self, name))

    @property
    def batches(self) -> list[int]:
        """The batches measured."""
        return sorted(self.forward)

    def spans(self, batch: int) -> bool:
        """Whether a batch lies between those measured."""
        return min(self.forward) <= batch <= max(self.forward)

    def most(self, batch: int) -> int:
        """The most tokens measured at a batch."""
        return max(self.forward[batch])

    def milliseconds(self, batch: int, tokens: Sequence[int]) -> Any:
        """[len(tokens)] milliseconds of rounds of so many tokens; beyond the points measured those at the nearest.

        A batch that was not measured lies between its neighbours at the same number of tokens per row.
        """
        found = np.zeros(len(tokens))
        for table in self._tables:
            low, high = neighbours(table, batch, "batch")
            share = (batch - low) / (high - low) if high > low else 0.0
            for near, weight in ((low, 1 - share), (high, share)):
                scaled = np.asarray(tokens, dtype=float) * near / batch
                found += weight * np.interp(scaled, *table[near])
        return found

    @cached_property
    def _tables(self) -> list[dict[int, tuple[Any, Any]]]:
        """Of forwards and of overheads, by batch: ascending tokens and their milliseconds."""
        return [
            {batch: (np.array(sorted(points)), np.array([points[n] for n in sorted(points)])) for batch, points in grid}
            for grid in (self.forward.items(), self.overhead.items())
        ]

    @classmethod
    def from_dict(cls, name: str, values: object) -> TokenCosts | None:
        """What JSON made of it; None stays None."""
        if values is None:
            return None
        if not isinstance(values, dict) or set(values) != {"forward", "overhead"}:
            raise UsageError(f"costs: {name}={values!r}; allowed: null, or an object with forward and overhead")
        return cls(**{part: grid_of(f"{name}.{part}", values[part]) for part in ("forward", "overhead")})


def neighbours(grid: Mapping[int, object], batch: float, name: str) -> tuple[int, int]:
    """The measured batches between which a batch lies; both the same where it was measured itself."""
    low = max((b for b in grid if b <= batch), default=None)
    high = min((b for b in grid if b >= batch), default=None)
    if low is None or high is None:
        raise UsageError(f"{name} {batch:g} was not measured; allowed: {min(grid)} to {max(grid)}")
    return low, high


def at(grid: Grid, batch: float, width: int, name: str) -> float:
    """Linear in the number of tokens: between widths at a measured batch, then between batches at that width."""
    if batch in grid:
        return between(grid[int(batch)], width, f"{name}: width")
    ends = {b: grid[b] for b in neighbours(grid, batch, f"{name}: batch")}
    # a single row may be padded to more than the rows of a batch
    known = {b: between(points, max(width, min(points)), f"{name}: width") for b, points in ends.items()}
    return between(known, batch, f"{name}: batch")


def between(points: Points, x: float, what: str) -> float:
    """Piecewise linear; outside the points nothing is known."""
    if x in points:
        return points[int(x)]
    low = max((p for p in points if p < x), default=None)
    high = min((p for p in points if p > x), default=None)
    if low is None or high is None:
        raise UsageError(f"{what} {x:g} was not measured; allowed: {min(points)} to {max(points)}")
    share = (x - low) / (high - low)
    return points[low] + share * (points[high] - points[low])


def check_grid(name: str, grid: object) -> None:
    """Refuse what is no table of tables."""
    if not isinstance(grid, Mapping) or not grid:
        raise UsageError(f"costs: {name}={grid!r}; allowed: a table batch -> width -> milliseconds")
    for batch, points in grid.items():
        check_points(f"{name}[{batch!r}]", batch, points)


def check_points(name: str, batch: object, points: object) -> None:
    """Refuse what is no table of milliseconds."""
    if not is_count(batch):
        raise UsageError(f"costs: {name} is for a batch of {batch!r}; allowed: whole numbers >= 1")
    if not isinstance(points, Mapping) or not points:
        raise UsageError(f"costs: {name}={points!r}; allowed: a table of milliseconds with at least one entry")
    for x, ms in points.items():
        if not is_count(x) or not is_number(ms) or ms < 0:
            raise UsageError(f"costs: {name} has {x!r}: {ms!r}; allowed: whole numbers >= 1 with milliseconds >= 0")


def is_count(value: object) -> bool:
    """Whether it is a whole number from 1 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_number(value: object) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def points_of(name: str, table: object) -> dict[int, Any]:
    """A table whose keys JSON has made text."""
    if not isinstance(table, dict):
        raise UsageError(f"costs: {name}={table!r}; allowed: a table")
    return {_whole(name, x): ms for x, ms in table.items()}


def grid_of(name: str, table: object) -> dict[int, dict[int, Any]]:
    """The same of a table of tables."""
    return {batch: points_of(name, points) for batch, points in points_of(name, table).items()}


def _whole(name: str, key: object) -> int:
    if not str(key).isdecimal():
        raise UsageError(f"costs: {name} has the key {key!r}; allowed: whole numbers >= 1")
    return int(str(key))
