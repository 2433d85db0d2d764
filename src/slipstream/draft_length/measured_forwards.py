"""What a calibration has measured of forwards, between and beyond the shapes that it tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

COLUMN = 0.04  # what a further token costs, as a share of a forward of one, where nothing was measured
LEAST = 1e-3  # what a forward is taken to cost at least, in the unit of the measurements


class Forward(NamedTuple):
    """shape: rows and tokens in all. plain, whole: units that it takes without its drafts, and with them."""

    shape: tuple[int, int]
    plain: float
    whole: float


@dataclass(frozen=True)
class MeasuredForwards:
    """The fields are those of `CostModel`."""

    pad: Callable[[int, int], int]
    ragged: Callable[[int, int], int | None]
    measured: Mapping[int, float]
    together: Mapping[int, float]
    most: int
    _found: dict[tuple[int, int, int], Forward] = field(default_factory=dict, repr=False)  # shapes do not change
    _taken: dict[tuple[int, int], float] = field(default_factory=dict, repr=False)  # units, by rows and tokens

    def forward(self, rows: int, longest: int, drafted: int) -> Forward:
        """The one that verifies up to `longest` tokens per row, `drafted` in all."""
        asked = rows, longest, drafted
        if asked not in self._found:  # every round asks for many, mostly the same ones
            tokens = self._tokens(rows, longest, drafted)
            plain = self._units(rows, self._tokens(rows, 0, 0))
            self._found[asked] = Forward((rows, tokens), plain, self._units(rows, tokens))
        return self._found[asked]

    def _tokens(self, rows: int, longest: int, drafted: int) -> int:
        even, ragged = rows * self.pad(longest + 1, rows), self.ragged(rows, drafted)
        return even if ragged is None else min(even, ragged)

    def _units(self, rows: int, tokens: int) -> float:
        """Relative cost of a forward; noisy measurements never make one free."""
        if (rows, tokens) not in self._taken:
            self._taken[rows, tokens] = max(LEAST, self._extrapolated(rows, tokens))
        return self._taken[rows, tokens]

    def _extrapolated(self, rows: int, tokens: int) -> float:
        if len(self.measured) < 2:
            return 1 + COLUMN * (tokens - 1)
        if rows == 1 or len(self.together) < 2:
            return between(self.measured, tokens)
        least = min(self.together)
        further = self.together[least] - between(self.measured, least)
        row = max(0.0, further) / (self.most - 1)  # what each further row costs
        if tokens < least:
            return between(self.measured, tokens) + (rows - 1) * row
        return between(self.together, tokens) - (self.most - rows) * row


def between(measured: Mapping[int, float], tokens: int) -> float:
    """The line through the two numbers of tokens next to this one, of two at least."""
    known = sorted(measured)
    at = next((i for i, n in enumerate(known) if n >= tokens), len(known) - 1)
    low, high = known[max(at - 1, 0)], known[max(at, 1)]
    slope = (measured[high] - measured[low]) / (high - low)
    if tokens > high:  # beyond what was measured: the slope of its second half
        low = known[min(len(known) // 2, len(known) - 2)]
        slope = max(0.0, measured[high] - measured[low]) / (high - low)
    return measured[high] + slope * (tokens - high)
