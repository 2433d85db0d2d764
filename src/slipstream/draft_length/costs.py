"""The seconds of each part of a round: the calibration, corrected by the times of past rounds.

This module knows no model and no drafter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from statistics import median

from slipstream.core.rounds import Seconds
from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.draft_length.acceptance_model import Yield
from slipstream.reproducibility.calibration import Calibration
from slipstream.reproducibility.expert_reads import ExpertReads
from slipstream.reproducibility.timing import DraftTimes

# a surprise: the logarithm of measured over predicted seconds, from -0.4 to 0.4
SPEED = 0.4  # share of a surprise that corrects the machine's speed
SHAPE = 0.07  # share of a surprise that corrects the shape
# assumed without a calibration, as shares of a forward of one token: a further token, a step of the draft model
COLUMN, STEP = 0.04, 0.25
ROW = 0.5  # each further row adds this share to a step of the draft model


def between(measured: Mapping[int, float], tokens: int) -> float:
    """Interpolate linearly between the two nearest of at least two measurements."""
    counts = sorted(measured)
    index = next((i for i, count in enumerate(counts) if count >= tokens), len(counts) - 1)
    low, high = counts[max(index - 1, 0)], counts[max(index, 1)]
    slope = (measured[high] - measured[low]) / (high - low)
    if tokens > high:  # beyond the measurements: the slope of their second half
        low = counts[min(len(counts) // 2, len(counts) - 2)]
        slope = max(0.0, measured[high] - measured[low]) / (high - low)
    return measured[high] + slope * (tokens - high)


@dataclass
class CostModel:
    """Predicts the seconds of a round's parts.

    seconds(forward) = calibrated(shape) * correction(shape) * machine_speed; the last two are learned from every round,
    so that a shape last seen while the machine was busy does not look expensive for that.

    Of a mixture, calibrated(shape) is a base and the time of the distinct experts that the shape is expected to read. A
    round is compared with those that it did read, so that unusual choices of routers are not taken for a slow machine.
    """

    pad: Callable[[int, int], int] = lambda width, rows: width  # (tokens per row, rows) -> width of their forward
    # (rows, draft tokens of all) -> tokens of the ragged forward; None if the target has none
    ragged: Callable[[int, int], int | None] = lambda rows, drafted: None
    # the calibration, in milliseconds
    measured: Mapping[int, float] = field(default_factory=dict)  # a forward of one row, by tokens
    together: Mapping[int, float] = field(default_factory=dict)  # a ragged forward of `max_batch_size` rows, by tokens
    max_batch_size: int = 1
    steps: Mapping[int, float] = field(default_factory=dict)  # a step of the draft model, by rows
    token: float | None = None  # a token that the draft model reads
    experts: ExpertReads | None = None  # of a mixture; `measured` and `together` then leave their time out
    timed: bool = True  # the clock measures the parts of a round; on a GPU only the total
    _corrections: dict[tuple[int, int], float] = field(default_factory=dict)  # logarithms, by shape
    _speed: float | None = None  # logarithm of seconds per calibrated millisecond; None before the first round
    _seconds_per_millisecond: float = 1e-3  # at the machine's current speed
    _drafting: dict[int, deque[tuple[int, float]]] = field(default_factory=dict)  # latest steps and seconds, by rows
    _seconds_per_token_read: float | None = None  # by the draft model
    _has_read: bool = False
    _draft_seconds: dict[int, tuple[float, float]] = field(default_factory=dict)  # of `drafting`, until more is learned
    # shape (rows, tokens of all) and calibrated milliseconds, by the arguments of `verify`
    _forwards: dict[tuple[int, int, int], tuple[tuple[int, int], float]] = field(default_factory=dict)
    _last_step: int = -1

    def __post_init__(self) -> None:
        # every row costs what the longest does, so that shorter drafts save nothing
        self.even = self.ragged(2, 0) is None

    @classmethod
    def calibrated(
        cls, target: Session, calibration: Calibration | None, times: DraftTimes, max_batch_size: int
    ) -> CostModel:
        """The table that a calibration has measured, if there is one, with nothing learned yet."""
        measured = {} if calibration is None else calibration.milliseconds
        together = {} if calibration is None else calibration.totals
        experts = None if calibration is None or calibration.experts is None else replace(calibration.experts)
        if experts is not None:
            measured, together = experts.left_out(measured), experts.left_out(together)
        return cls(
            pad=target.shapes.width_for,
            ragged=target.num_tokens,
            measured=measured,
            together=together,
            max_batch_size=max_batch_size,
            steps=times.steps,
            token=times.token,
            experts=experts,
            timed=target.backend.device.type == "cpu",
        )

    def learn(self, rows: Sequence[Row], read: int = 0) -> None:
        """Learn from the rows' newest round, once. read: tokens of texts that the draft model read before drafting."""
        rounds = [row.rounds[-1] for row in rows if row.rounds]
        if not rounds or (step := max(round.step for round in rounds)) == self._last_step:
            return
        self._last_step = step
        rounds = [round for round in rounds if round.step == step]
        first, longest = rounds[0], max(len(round.draft) for round in rounds)
        count, steps, total = first.num_rows, first.num_draft_steps, first.seconds.total - first.seconds.prefill
        has_first_round = any(len(row.rounds) == 1 for row in rows)  # includes work that is done once
        if read and steps and self.timed:
            step_seconds, beginning = self.drafting(count)
            each = max(0.0, first.seconds.draft - beginning - steps * step_seconds) / read
            if self._has_read:  # the first reading includes work that is done once, so it is not counted
                earlier = self._seconds_per_token_read
                self._seconds_per_token_read = each if earlier is None else min(each, (earlier + each) / 2)
            self._has_read = True
        if has_first_round or read or len(rounds) < count or total <= 0:
            return
        drafted = sum(len(round.draft) for round in rounds)
        verifying, drafting = first.seconds.verify, first.seconds.draft
        if not self.timed:  # the device works on while the host reads the clock: only the total is right
            is_first = self._speed is None
            verifying = total / (1 + STEP * steps) if is_first else self.verify(count, longest, drafted)
            verifying = min(verifying, total) if steps else total
            drafting = total - verifying
        shape, calibrated = self._forward(count, longest, drafted)
        if self.experts is not None and first.experts_read is not None:
            calibrated += self.experts.milliseconds * first.experts_read
            self.experts.learn(*shape, first.experts_read)
        elif self.experts is not None:
            calibrated += self.experts.milliseconds * self.experts.expected(*shape)
        self._learn_forward(shape, calibrated, verifying)
        if steps:
            self._drafting.setdefault(count, deque(maxlen=9)).append((steps, drafting))
            self._draft_seconds.clear()

    def _learn_forward(self, shape: tuple[int, int], calibrated: float, seconds: float) -> None:
        if seconds <= 0:
            return
        log_ratio = log(seconds / calibrated) - self._corrections.get(shape, 0.0)
        if self._speed is None:
            self._speed = log_ratio
        surprise = max(-0.4, min(0.4, log_ratio - self._speed))  # one slow round says little
        self._speed += SPEED * surprise
        self._seconds_per_millisecond = exp(self._speed)
        self._corrections[shape] = self._corrections.get(shape, 0.0) + SHAPE * surprise
        self._draft_seconds.clear()

    def verify(self, rows: int, longest: int, drafted: int | None = None) -> float:
        """Seconds of a forward that verifies up to `longest` tokens per row, `drafted` in all (default: all)."""
        key = rows, longest, rows * longest if drafted is None else drafted
        shape, calibrated = self._forwards.get(key) or self._forward(*key)
        if self.experts is not None:
            calibrated += self.experts.milliseconds * self.experts.expected(*shape)
        return calibrated * self._seconds_per_millisecond * exp(self._corrections.get(shape, 0.0))

    def plain_seconds(self, lengths: Sequence[int], seconds: Seconds) -> float | None:
        """Seconds of a step without its drafts, of `lengths` tokens; None without a calibration.

        seconds: what the step took. The forward is scaled by the ratio of the two shapes' seconds, so that a slow
        moment of the machine counts for both.
        """
        if len(self.measured) < 2:
            return None
        plain = self.verify(len(lengths), 0)
        if not self.timed:
            return plain
        others = seconds.total - seconds.prefill - seconds.draft - seconds.verify
        return others + seconds.verify * plain / self.verify(len(lengths), max(lengths), sum(lengths))

    def _forward(self, rows: int, longest: int, drafted: int) -> tuple[tuple[int, int], float]:
        key = rows, longest, drafted
        if key not in self._forwards:  # every round asks for many, mostly the same ones
            even, ragged = rows * self.pad(longest + 1, rows), self.ragged(rows, drafted)
            tokens = even if ragged is None else min(even, ragged)
            # noisy measurements must not make a forward free
            self._forwards[key] = (rows, tokens), max(1e-3, self._calibrated(rows, tokens))
        return self._forwards[key]

    def _calibrated(self, rows: int, tokens: int) -> float:
        """Milliseconds of a forward, interpolated from the calibration; without one, in forwards of one token."""
        if len(self.measured) < 2:
            return 1 + COLUMN * (tokens - 1)
        if rows == 1 or len(self.together) < 2:
            return between(self.measured, tokens)
        fewest = min(self.together)
        all_rows_add = self.together[fewest] - between(self.measured, fewest)
        each_row_adds = max(0.0, all_rows_add) / (self.max_batch_size - 1)
        if tokens < fewest:
            return between(self.measured, tokens) + (rows - 1) * each_row_adds
        return between(self.together, tokens) - (self.max_batch_size - rows) * each_row_adds

    def step(self, rows: int) -> float:
        """Seconds of one more step of the draft model."""
        return self.drafting(rows)[0]

    def drafting(self, rows: int) -> tuple[float, float]:
        """Seconds of each step of the draft model, and of the rest of a draft: search, planning, cold caches.

        Both are estimated from the latest drafts of the nearest number of rows; a step takes no more than calibrated.
        """
        if rows not in self._draft_seconds:
            step, beginning = self._assumed_step(rows), 0.0
            nearest = min(self._drafting, key=lambda count: abs(count - rows), default=None)
            if nearest is not None:
                scale, latest = step / self._assumed_step(nearest), self._drafting[nearest]
                observed = scale * median(seconds / steps for steps, seconds in latest)
                step = min(observed, step) if self.steps else observed
                beginning = max(0.0, median(scale * seconds - steps * step for steps, seconds in latest))
            self._draft_seconds[rows] = step, beginning
        return self._draft_seconds[rows]

    def _assumed_step(self, rows: int) -> float:
        if self.steps:
            milliseconds = between(self.steps, rows) if len(self.steps) > 1 else self.steps[1]
            return milliseconds * self._seconds_per_millisecond
        return STEP * self.verify(1, 0) * (1 + ROW * (rows - 1))

    def reading(self, tokens: int) -> float:
        """Seconds that the draft model takes to read this many tokens before its first step."""
        if self._seconds_per_token_read is not None:
            return tokens * self._seconds_per_token_read
        if self.token is not None:
            return tokens * (self.token * self._seconds_per_millisecond)
        return tokens * STEP * max(0.0, self.verify(1, 7) - self.verify(1, 0)) / 7

    def rate(self, expected: Sequence[Yield], rows: int, retrieved_probs: Sequence[Sequence[float]]) -> float:
        """Tokens per second of a round in which a draft model drafts for some rows, and retrieval for others.

        expected: the yields of the draft model's drafts. retrieved_probs: acceptance probabilities of retrieval's.
        """
        longest = max((draft.drafted for draft in expected), default=0.0)
        step, beginning = self.drafting(rows)
        drafting = beginning + longest * step
        total = sum(draft.drafted for draft in expected)

        def seconds(retrieved: int, drafted: int) -> float:
            return drafting + self.verify(rows, max(retrieved, round(longest)), drafted + round(total))

        base_tokens = rows + sum(draft.accepted for draft in expected)
        return best_lengths(retrieved_probs, seconds, base_tokens, even=self.even)[1]


def best_lengths(
    acceptance_probs: Sequence[Sequence[float]],
    seconds: Callable[[int, int], float],
    base_tokens: float,
    *,
    even: bool = True,
) -> tuple[list[int], float]:
    """The number of tokens of each row's draft to verify for the most tokens per second, and that rate.

    acceptance_probs[i][j]: the probability that the first j + 1 draft tokens of row i are all accepted. seconds: (the
    longest draft, tokens of all drafts) -> seconds of the round. base_tokens: expected tokens without any of these.
    even: every row costs what the longest does, so all get as many tokens as that one; else the likeliest tokens are
    taken, whichever rows they are of.
    """
    num_columns = max(map(len, acceptance_probs), default=0)
    by_column = ([i for i, row in enumerate(acceptance_probs) if len(row) > n] for n in range(num_columns))
    lengths = [0] * len(acceptance_probs)
    best, rate, expected, longest, drafted = lengths, base_tokens / seconds(0, 0), base_tokens, 0, 0
    not_taken = sum(map(sum, acceptance_probs))
    for rows in by_column if even else _by_probability(acceptance_probs):  # that get one more token each
        lengths = lengths.copy()
        for row in rows:
            prob = acceptance_probs[row][lengths[row]]
            expected, not_taken = expected + prob, not_taken - prob
            lengths[row] += 1
            longest, drafted = max(longest, lengths[row]), drafted + 1
        total = seconds(longest, drafted)
        if expected / total > rate:
            best, rate = lengths, expected / total
        elif (expected + not_taken) / total <= rate:  # not even if all other tokens cost nothing
            break
    return best, rate


def _by_probability(acceptance_probs: Sequence[Sequence[float]]) -> list[list[int]]:
    """The row of each token, the most likely first; a row's tokens come in order, as probabilities never rise."""
    ordered = sorted(
        (-acceptance_prob, n, i) for i, row in enumerate(acceptance_probs) for n, acceptance_prob in enumerate(row)
    )
    return [[i] for *_, i in ordered]
