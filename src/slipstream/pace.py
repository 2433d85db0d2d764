"""What the parts of a round cost: seconds by rows and width, learned from the rounds themselves.

This module knows no model and no drafter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from slipstream.types import Row

KEPT = 9  # of the latest measurements of a shape; their median counts
COLUMN = 0.04  # what a further token costs, as a share of a forward of one, where nothing was measured
STEP = 0.25  # what a step of a draft model costs, likewise


@dataclass
class Pace:
    """Seconds of a round's parts.

    pad: tokens per row -> width of the forward that takes them. measured: milliseconds of a forward by its tokens,
    from a calibration; it says how they rise until rounds of the same shape have been seen. timed: whether the parts of
    a round have times of their own.
    """

    pad: Callable[[int], int] = lambda width: width
    measured: Mapping[int, float] = field(default_factory=dict)
    timed: bool = True
    _verified: dict[tuple[int, int], deque[float]] = field(default_factory=dict)
    _steps: dict[int, deque[float]] = field(default_factory=dict)
    _known: dict[tuple[int, int], float] = field(default_factory=dict)  # answers since something was learned
    _last: int = -1

    def learn(self, rows: Sequence[Row]) -> None:
        """Take in the rows' newest round, once."""
        done = [row.rounds[-1] for row in rows if row.rounds]
        if not done or (step := max(one.step for one in done)) == self._last:
            return
        self._last = step
        done = [one for one in done if one.step == step]
        first, longest = done[0], max(len(one.draft) for one in done)
        count, steps, taken = first.num_rows, first.num_draft_steps, first.seconds.total - first.seconds.prefill
        new = any(len(row.rounds) == 1 for row in rows)  # a draft model may still have read the prompt
        if new or len(done) < count:
            return
        shape = count, self.pad(longest + 1)
        if self.timed:
            verifying, drafting = first.seconds.verify, first.seconds.draft
        else:  # the clock stood beside a device that had not finished: only the total is known
            verifying = min(self.verify(count, longest), taken) if self._verified else taken / (1 + STEP * steps)
            verifying, drafting = (verifying, taken - verifying) if steps else (taken, 0.0)
        self._known.clear()
        self._verified.setdefault(shape, deque(maxlen=KEPT)).append(verifying)
        if steps:
            self._steps.setdefault(count, deque(maxlen=KEPT)).append(drafting / steps)

    def verify(self, rows: int, drafted: int) -> float:
        """Seconds of a forward that verifies up to `drafted` tokens per row."""
        shape = rows, self.pad(drafted + 1)
        if shape not in self._known:
            seen = self._verified.get(shape)
            self._known[shape] = median(seen) if seen else self._shape(rows * shape[1]) * self._unit()
        return self._known[shape]

    def step(self, rows: int) -> float:
        """Seconds of one step of the draft model."""
        seen = self._steps.get(rows) or next(iter(self._steps.values()), None)
        return median(seen) if seen else STEP * self.verify(rows, 0)

    def _shape(self, tokens: int) -> float:
        """Relative cost of a forward by its tokens."""
        known = sorted(self.measured)
        if len(known) < 2:
            return 1 + COLUMN * (tokens - 1)
        at = next((i for i, n in enumerate(known) if n >= tokens), len(known) - 1)
        low, high = known[max(at - 1, 0)], known[max(at, 1)]
        slope = (self.measured[high] - self.measured[low]) / (high - low)
        if tokens > high:  # beyond what was measured: the slope of its second half
            low = known[len(known) // 2]
            slope = max(0.0, self.measured[high] - self.measured[low]) / (high - low)
        return self.measured[high] + slope * (tokens - high)

    def _unit(self) -> float:
        """Seconds per unit of `_shape`, from the shapes that were seen."""
        ratios = [median(seen) / self._shape(rows * width) for (rows, width), seen in self._verified.items()]
        return median(ratios) if ratios else 1e-3


def best_length(hopes: Sequence[Sequence[float]], seconds: Callable[[int], float], sure: float) -> tuple[int, float]:
    """How many tokens of the drafts to verify, and the tokens per second that this promises.

    hopes[i][j]: the chance that the first j + 1 draft tokens of row i all come true. seconds: of a round by the
    longest draft in it, which all rows wait for. sure: tokens that the round brings anyway.
    """
    best, brought = (0, sure / seconds(0)), sure
    for length in range(1, max(map(len, hopes), default=0) + 1):
        brought += sum(row[length - 1] for row in hopes if len(row) >= length)
        rate = brought / seconds(length)
        if rate > best[1]:
            best = length, rate
    return best
