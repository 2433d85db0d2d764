"""Seconds of a round's parts by rows and width: the calibration, corrected by what rounds have taken.

This module knows no model and no drafter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median
from typing import NamedTuple

from slipstream.core.types import Row
from slipstream.draft_length.acceptance_model import Yield

NOISE = 0.04  # of one round's time: a standard deviation of its logarithm
SPEED_DRIFT, COST_DRIFT = 0.02, 0.01  # how far either number moves from round to round, likewise
UNSURE = 0.4  # how far a measured cost may be off, likewise
MIN_DRAFT_COST, MAX_DRAFT_COST = 0.25, 4.0  # what drafted tokens may cost
LEAP = 3.0  # standard deviations of a surprise that only another speed of the machine can explain
SURPRISE = 0.4  # what counts of a round at most, as a logarithm
COLUMN = 0.04  # what a further token costs, as a share of a forward of one, where nothing was measured
MIN_FORWARD = 1e-3  # what a forward is taken to cost at least, in the unit of the measurements
REMEMBERED = 9  # latest measurements of which the median counts
SHAPE = 0.07  # share of a surprise that is laid to the shape, in natural logarithms
STEP = 0.25  # what a step of a draft model costs, as a share of a forward of one token, where nothing was measured
ROW = 0.5  # how much longer it takes for each further row, as a share of one row's, until that was seen


class LearnedCosts:
    """speed: seconds per unit of the measurements, as a logarithm; None before the first round.

    draft_cost: what a round's drafted tokens add to a round without any, as a multiple of what was measured.
    """

    def __init__(self) -> None:
        self.speed: float | None = None
        self.draft_cost = 1.0
        self._speed_variance, self._cost_variance, self._together = NOISE**2, UNSURE**2, 0.0

    def units(self, plain: float, whole: float) -> float:
        """What a forward of `whole` measured units takes, if one without drafts takes `plain` units."""
        return plain + self.draft_cost * max(0.0, whole - plain)

    def take_in(self, plain: float, whole: float, seconds: float, shown: float) -> float:
        """Learn from a round; how far it differed from what was expected. shown: by rounds of its shape."""
        if self.speed is None:
            self.speed = log(seconds / self.units(plain, whole)) - shown
        surprise = log(seconds / self.units(plain, whole)) - shown - self.speed
        surprise = max(-SURPRISE, min(SURPRISE, surprise))
        by = max(0.0, whole - plain) / self.units(plain, whole)  # what the logarithm grows by with draft_cost
        speed, cost, both = self._speed_variance, self._cost_variance, self._together
        if surprise**2 > LEAP**2 * (speed + by * (2 * both + by * cost) + NOISE**2):
            speed += surprise**2
        speed_moves, cost_moves = speed + by * both, both + by * cost
        total = speed_moves + by * cost_moves + NOISE**2
        self.speed += speed_moves / total * surprise
        self.draft_cost = max(MIN_DRAFT_COST, min(MAX_DRAFT_COST, self.draft_cost + cost_moves / total * surprise))
        self._speed_variance = speed - speed_moves**2 / total + SPEED_DRIFT**2
        self._cost_variance = min(UNSURE**2, cost - cost_moves**2 / total + COST_DRIFT**2)
        self._together = both - speed_moves * cost_moves / total
        return surprise

    def seconds(self, plain: float, whole: float) -> float:
        """Of a forward."""
        return self.units(plain, whole) * (1e-3 if self.speed is None else exp(self.speed))


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
            self._taken[rows, tokens] = max(MIN_FORWARD, self._extrapolated(rows, tokens))
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


@dataclass
class CostModel:
    """Seconds of a round's parts.

    A forward takes what was measured of its shape, what its drafted tokens add counted as often as all rounds have
    shown, times what rounds of that shape have shown about it, times the speed of the machine lately, which all rounds
    tell: a shape that was last seen while the machine was busy with something else does not look expensive for that.

    pad: tokens per row, rows -> width of the forward that takes them. ragged: rows, draft tokens of all of them ->
    tokens of the ragged forward that takes these, None if there is none. measured: milliseconds of a forward of one row
    by its tokens, from a calibration; together: of a ragged one of `most` rows; steps: of a step of the draft model, by
    rows; token: of a token that it reads. timed: whether the parts of a round have times of their own.
    """

    pad: Callable[[int, int], int] = lambda width, rows: width
    ragged: Callable[[int, int], int | None] = lambda rows, drafted: None
    measured: Mapping[int, float] = field(default_factory=dict)
    together: Mapping[int, float] = field(default_factory=dict)
    most: int = 1
    steps: Mapping[int, float] = field(default_factory=dict)
    token: float | None = None
    timed: bool = True
    _shown: dict[tuple[int, int], float] = field(default_factory=dict)  # of shapes, as logarithms
    _learned: LearnedCosts = field(default_factory=LearnedCosts)
    _steps: dict[int, deque[float]] = field(default_factory=dict)
    _each: float | None = None  # seconds in which the draft model reads a token
    _has_read: bool = False
    _known: dict[tuple[int, int, int], float] = field(default_factory=dict)  # answers since something was learned
    _last: int = -1

    def __post_init__(self) -> None:
        self._forwards = MeasuredForwards(self.pad, self.ragged, self.measured, self.together, self.most)

    def learn(self, rows: Sequence[Row], read: int = 0) -> None:
        """Take in the rows' newest round, once. read: tokens of texts that the draft model read in it beforehand."""
        done = [row.rounds[-1] for row in rows if row.rounds]
        if not done or (step := max(one.step for one in done)) == self._last:
            return
        self._last = step
        done = [one for one in done if one.step == step]
        first, longest = done[0], max(len(one.draft) for one in done)
        count, steps, taken = first.num_rows, first.num_draft_steps, first.seconds.total - first.seconds.prefill
        new = any(len(row.rounds) == 1 for row in rows)  # much happens for the first time
        if read and steps and self.timed:
            each = max(0.0, first.seconds.draft - steps * self.step(count)) / read
            if self._has_read:  # the first time much else is done, which says nothing about later texts
                self._each = each if self._each is None else min(each, (self._each + each) / 2)
            self._has_read = True
        if new or read or len(done) < count or taken <= 0:
            return
        drafted = sum(len(one.draft) for one in done)
        if self.timed:
            verifying, drafting = first.seconds.verify, first.seconds.draft
        else:  # the clock stood beside a device that had not finished: only the total is known
            verifying = (
                min(self.verify(count, longest, drafted), taken)
                if self._learned.speed is not None
                else taken / (1 + STEP * steps)
            )
            verifying, drafting = (verifying, taken - verifying) if steps else (taken, 0.0)
        self._take_in(self._forwards.forward(count, longest, drafted), verifying)
        if steps:
            self._steps.setdefault(count, deque(maxlen=REMEMBERED)).append(drafting / steps)

    def _take_in(self, forward: Forward, seconds: float) -> None:
        if seconds <= 0:
            return
        shown = self._shown.get(forward.shape, 0.0)
        surprise = self._learned.take_in(forward.plain, forward.whole, seconds, shown)
        self._shown[forward.shape] = shown + SHAPE * surprise
        self._known.clear()

    def verify(self, rows: int, longest: int, drafted: int | None = None) -> float:
        """Seconds of a forward that verifies up to `longest` tokens per row; `drafted` in all, if not so many each."""
        asked = rows, longest, rows * longest if drafted is None else drafted
        if asked not in self._known:
            shape, plain, whole = self._forwards.forward(*asked)
            self._known[asked] = self._learned.seconds(plain, whole) * exp(self._shown.get(shape, 0.0))
        return self._known[asked]

    @property
    def even(self) -> bool:
        """Whether all rows may have as many tokens as the one that has the most."""
        return self.ragged(2, 0) is None

    def step(self, rows: int) -> float:
        """Seconds of one step of the draft model."""
        near = min(self._steps, key=lambda count: abs(count - rows), default=None)
        if near is None:
            return self._assumed_step(rows)
        return median(self._steps[near]) * self._assumed_step(rows) / self._assumed_step(near)

    def _assumed_step(self, rows: int) -> float:
        if self.steps:
            return self._seconds(between(self.steps, rows) if len(self.steps) > 1 else self.steps[1])
        return STEP * self.verify(1, 0) * (1 + ROW * (rows - 1))

    def _seconds(self, milliseconds: float) -> float:
        """At the machine's speed lately."""
        return self._learned.seconds(milliseconds, milliseconds)

    def reading(self, tokens: int) -> float:
        """Seconds in which the draft model reads that many tokens before its first step."""
        if self._each is not None:
            return tokens * self._each
        if self.token is not None:
            return tokens * self._seconds(self.token)
        return tokens * STEP * max(0.0, self.verify(1, 7) - self.verify(1, 0)) / 7

    def rate(self, expected: Sequence[Yield], rows: int, beside: Sequence[Sequence[float]]) -> float:
        """Tokens per second of a round in which a draft model drafts for some rows, and retrieval for others.

        expected: what the draft model's drafts have and bring; beside: acceptance probabilities of retrieval's.
        """
        longest, total = max((one.drafted for one in expected), default=0.0), sum(one.drafted for one in expected)

        def seconds(retrieved: int, drafted: int) -> float:
            verify = self.verify(rows, max(retrieved, round(longest)), drafted + round(total))
            return longest * self.step(rows) + verify

        return best_lengths(beside, seconds, rows + sum(one.accepted for one in expected), even=self.even)[1]


def best_lengths(
    acceptance_probs: Sequence[Sequence[float]], seconds: Callable[[int, int], float], sure: float, *, even: bool = True
) -> tuple[list[int], float]:
    """How many tokens of each row's draft to verify, and the tokens per second that this promises.

    acceptance_probs[i][j]: the probability that the first j + 1 draft tokens of row i are all accepted. seconds: of a
    round, by the longest draft in it and the number of tokens of all. sure: tokens that the round brings anyway. even:
    all rows may have as many tokens, since they wait for the longest; else those tokens are taken that promise the
    most.
    """
    lengths = [0] * len(acceptance_probs)
    best, rate, brought, longest, drafted = lengths, sure / seconds(0, 0), sure, 0, 0
    left = sum(map(sum, acceptance_probs))
    for step in _by_column(acceptance_probs) if even else _by_probability(acceptance_probs):
        lengths = lengths.copy()
        for row in step:
            prob = acceptance_probs[row][lengths[row]]
            brought, left = brought + prob, left - prob
            lengths[row] += 1
            longest, drafted = max(longest, lengths[row]), drafted + 1
        taken = seconds(longest, drafted)
        if brought / taken > rate:
            best, rate = lengths, brought / taken
        elif (brought + left) / taken <= rate:  # even if all the others came for nothing
            break
    return best, rate


def _by_column(acceptance_probs: Sequence[Sequence[float]]) -> list[list[int]]:
    """The rows that have a first token, a second one, ..."""
    return [
        [i for i, row in enumerate(acceptance_probs) if len(row) > n]
        for n in range(max(map(len, acceptance_probs), default=0))
    ]


def _by_probability(acceptance_probs: Sequence[Sequence[float]]) -> list[list[int]]:
    """The row of each token, the most likely first; a row's tokens come in order, as probabilities never rise."""
    ordered = sorted(
        (-acceptance_prob, n, i) for i, row in enumerate(acceptance_probs) for n, acceptance_prob in enumerate(row)
    )
    return [[i] for *_, i in ordered]
