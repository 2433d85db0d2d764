"""From runs to figures: per arm and batch size, over all prompts and per family. Nothing is measured here.

Intervals come from a seeded two-level percentile bootstrap over prompts and, within them, repeats: a resample picks
prompts with replacement, then each picked prompt's repeats with replacement (Davison and Hinkley 1997, section 3.8).
Compared arms share every draw, so whatever slowed both at one moment cancels out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.bench.records import Run, VerdictName
from slipstream.text.results import Stats

RESAMPLES, LEVEL, SEED = 2000, 0.95, 0
FEWEST_GROUPS = 5  # prompts (or groups of prompts) of an interval that is shown
# from the most favorable on; of several repeats the least favorable verdict counts
_ORDER: tuple[VerdictName, ...] = ("identical", "reference", "not compared", "tie", "different")
PARTS = ("prefill", "draft", "verify", "accept")
Floats = NDArray[np.float64]
RepeatedSeconds = Sequence[Sequence[float]]  # seconds: one list of repeats per group of prompts
Group = tuple[str, ...]
RunsByRepeat = dict[int, Run]


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; low and high are None if a single measurement gives none."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_above_one(self) -> bool:
        """True if the whole interval lies above 1; False without an interval."""
        return self.low is not None and self.low > 1


def speed(tokens: Sequence[int], seconds: RepeatedSeconds) -> Estimate:
    """Tokens per second over all groups: total tokens over the sum of each group's median seconds."""
    counts = np.array(tokens, dtype=np.float64)
    table = _table(seconds)
    draws = _Draws.sample(seconds)
    value = counts.sum() / np.nanmedian(table, axis=1).sum()
    if draws is None:
        return Estimate(float(value))
    medians = draws.medians(table)
    return estimated(value, counts[draws.groups].sum(axis=1) / medians.sum(axis=1))


def speed_up(
    tokens: Sequence[int], seconds: RepeatedSeconds, base_tokens: Sequence[int], base_seconds: RepeatedSeconds
) -> Estimate:
    """Geometric mean over groups of the tokens per second relative to the base arm's on the same group.

    Groups and repeats of the two arms correspond one to one.
    """
    counts = np.array(tokens, dtype=np.float64) / np.array(base_tokens, dtype=np.float64)
    seconds_table = _table(seconds)
    base_table = _table(base_seconds)
    draws = _Draws.sample(seconds)
    logs = np.log(counts * np.nanmedian(base_table, axis=1) / np.nanmedian(seconds_table, axis=1))
    value = np.exp(logs.mean())
    if draws is None:
        return Estimate(float(value))
    resampled = np.log(counts[draws.groups] * draws.medians(base_table) / draws.medians(seconds_table))
    return estimated(value, np.exp(resampled.mean(axis=1)))


@dataclass(frozen=True)
class _Draws:
    """Indices of the sampled groups and repeats."""

    groups: NDArray[np.int64]  # [N, G]
    repeats: NDArray[np.int64]  # [N, G, R] of each sampled group
    absent: NDArray[np.bool_] | None  # [N, G, R] draws that a group with fewer repeats does not make

    @staticmethod
    def sample(seconds: RepeatedSeconds) -> _Draws | None:
        """The draws for a table of this shape; None if there is nothing to draw from."""
        lengths = np.array([len(row) for row in seconds])
        groups, repeats = len(lengths), int(lengths.max())
        if groups == 1 and repeats == 1:
            return None
        rng = np.random.default_rng(SEED)
        sampled = rng.integers(0, groups, (RESAMPLES, groups))
        counts = lengths[sampled][:, :, None]  # of the repeats of each sampled group
        picked = (rng.random((RESAMPLES, groups, repeats)) * counts).astype(np.int64)
        absent = np.arange(repeats) >= counts
        return _Draws(sampled, picked, absent if absent.any() else None)

    def medians(self, table: Floats) -> Floats:
        """[N, G] median seconds of each sampled group over its sampled repeats."""
        values = table[self.groups[:, :, None], self.repeats]
        if self.absent is None:
            return np.asarray(np.median(values, axis=2))
        return np.asarray(np.nanmedian(np.where(self.absent, np.nan, values), axis=2))


def _table(seconds: RepeatedSeconds) -> Floats:
    """[G, R] with NaN where a group has fewer repeats than others."""
    width = max(map(len, seconds))
    return np.array([[*row, *[np.nan] * (width - len(row))] for row in seconds], dtype=np.float64)


def estimated(value: float, resampled: Floats) -> Estimate:
    """A value with the interval of its resamples."""
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return Estimate(float(value), float(low), float(high))


@dataclass(frozen=True)
class Speed:
    """The speed of an arm."""

    groups: int
    tokens: int
    tokens_per_second: Estimate
    speed_up: Estimate | None  # against the reference arm on the same prompts; None if that has no times


@dataclass(frozen=True)
class ArmSummary:
    """One arm at one batch size."""

    arm: str
    batch: int
    speed: Speed | None  # None if any run failed: the rest would not be the same work
    families: dict[str, Speed]  # those without a failed run
    verdicts: dict[str, int]  # outputs by verdict, each counted once with the least favorable verdict of its repeats
    failed: int
    error: str | None
    stats: Stats | None = None  # totals over all runs; None for baselines
    # shares of the measured seconds, "overhead" for the rest; None if a baseline does not report them
    time_split: dict[str, float] | None = None
    tokens_per_forward: float | None = None  # of baselines at batch size 1

    @property
    def speed_up(self) -> Estimate | None:
        """Against the reference arm; None if it or this arm has no speed."""
        return None if self.speed is None else self.speed.speed_up

    @property
    def lossless(self) -> bool:
        """True if the arm promises plain decoding's output or distribution; baselines promise nothing here."""
        return self.stats is not None and self.stats.lossless

    @property
    def lossy(self) -> bool:
        """True if the arm's rule changes the output."""
        return self.stats is not None and not self.stats.lossless

    @property
    def block_efficiency(self) -> float | None:
        """Output tokens per forward of the target and row; None if unknown."""
        if self.stats is None or not self.stats.num_rounds:
            return self.tokens_per_forward
        return self.stats.block_efficiency

    @property
    def round_overhead(self) -> float | None:
        """Share of the rounds' time that is neither drafting nor verifying nor accepting."""
        if self.stats is None or self.stats.total_seconds <= self.stats.prefill_seconds:
            return None
        return self.stats.overhead_seconds / (self.stats.total_seconds - self.stats.prefill_seconds)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of draft tokens accepted at each position of the draft."""
        if self.stats is None:
            return []
        pairs = zip(self.stats.accepted_per_position, self.stats.drafted_per_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]

    def to_dict(self) -> dict[str, Any]:
        """The fields and the figures derived from them, for JSON."""
        stats = None if self.stats is None else self.stats.to_dict()
        derived = ("acceptance_by_position", "round_overhead", "block_efficiency")
        return asdict(self) | {"stats": stats} | {name: getattr(self, name) for name in derived}


def summarize(runs: Sequence[Run], reference: str) -> list[ArmSummary]:
    """A summary per batch size and arm, in the order they were first run."""
    by_arm: dict[tuple[int, str], list[Run]] = {}
    for run in runs:
        by_arm.setdefault((run.batch, run.arm), []).append(run)
    return [_arm(arm_runs, by_arm.get((batch, reference), [])) for (batch, _), arm_runs in by_arm.items()]


def wrong_texts(summaries: Sequence[ArmSummary]) -> list[ArmSummary]:
    """Arms that promise plain decoding's output and broke the promise by more than a tie."""
    return [arm for arm in summaries if arm.lossless and arm.verdicts.get("different")]


def total_stats(stats: Sequence[Mapping[str, Any]]) -> Stats:
    """The sum of several `Stats.to_dict()`."""
    return sum((Stats(**{f.name: part[f.name] for f in fields(Stats)}) for part in stats), Stats())


def without_few_prompts(arm: ArmSummary) -> ArmSummary:
    """The summary without intervals over fewer than `FEWEST_GROUPS` prompts, which repeats would make too narrow."""
    families = {name: _checked(speed) for name, speed in arm.families.items()}
    return replace(arm, speed=None if arm.speed is None else _checked(arm.speed), families=families)


def _checked(speed: Speed) -> Speed:
    if speed.groups >= FEWEST_GROUPS:
        return speed
    ratio = None if speed.speed_up is None else Estimate(speed.speed_up.value)
    return replace(speed, tokens_per_second=Estimate(speed.tokens_per_second.value), speed_up=ratio)


def _arm(runs: Sequence[Run], base: Sequence[Run]) -> ArmSummary:
    errors = [run.error for run in runs if run.error is not None]
    by_group, base_by_group = _by_group(runs), _by_group(base)
    families: dict[str, Speed] = {}
    for family in dict.fromkeys(run.family for run in runs):
        if not any(run.error for run in runs if run.family == family):
            members = {group: repeats for group, repeats in by_group.items() if repeats[min(repeats)].family == family}
            families[family] = _speed(members, base_by_group)
    counted = [run.stats for run in runs if run.stats is not None]
    total = total_stats(counted) if counted else None
    return ArmSummary(
        arm=runs[0].arm,
        batch=runs[0].batch,
        speed=None if errors else _speed(by_group, base_by_group),
        families=families,
        verdicts=_verdicts(runs),
        failed=len(errors),
        error=errors[0] if errors else None,
        stats=total,
        time_split=_time_split(total, runs),
        tokens_per_forward=_per_forward(runs),
    )


def _per_forward(runs: Sequence[Run]) -> float | None:
    forwards = sum(run.num_forwards or 0 for run in runs if run.batch == 1)
    return sum(run.num_output_tokens for run in runs if run.num_forwards) / forwards if forwards else None


def _by_group(runs: Sequence[Run]) -> dict[Group, RunsByRepeat]:
    groups: dict[Group, RunsByRepeat] = {}
    for run in runs:
        if run.error is None:
            groups.setdefault(tuple(run.prompts), {})[run.repeat] = run
    return groups


def _speed(groups: Mapping[Group, RunsByRepeat], base: Mapping[Group, RunsByRepeat]) -> Speed:
    """The speed over all groups; the speed-up over those that both arms have run, repeat by repeat."""
    seconds = [[run.seconds for run in repeats.values()] for repeats in groups.values()]
    tokens = [_tokens(repeats) for repeats in groups.values()]
    pairs = [
        (repeats, base[group], sorted(repeats.keys() & base[group].keys()))
        for group, repeats in groups.items()
        if group in base
    ]
    pairs = [pair for pair in pairs if pair[2]]
    ratio = None
    if len(pairs) == len(groups):  # else an arm would be compared on some prompts only
        ratio = speed_up(
            [_tokens(repeats) for repeats, _, _ in pairs],
            [[repeats[number].seconds for number in both] for repeats, _, both in pairs],
            [_tokens(base_repeats) for _, base_repeats, _ in pairs],
            [[base_repeats[number].seconds for number in both] for _, base_repeats, both in pairs],
        )
    return Speed(len(groups), sum(tokens), speed(tokens, seconds), ratio)


def _tokens(repeats: RunsByRepeat) -> int:
    return repeats[min(repeats)].num_output_tokens


def _verdicts(runs: Sequence[Run]) -> dict[str, int]:
    worst: dict[tuple[Group, int], int] = {}
    for run in runs:
        for row, verdict in enumerate(run.verdicts):
            text = tuple(run.prompts), row
            worst[text] = max(worst.get(text, 0), _ORDER.index(verdict))
    counts = Counter(_ORDER[place] for place in worst.values())
    return {name: counts[name] for name in _ORDER}


def _time_split(total: Stats | None, runs: Sequence[Run]) -> dict[str, float] | None:
    seconds = sum(run.seconds for run in runs)
    parts = [run.parts for run in runs if run.parts is not None]
    if total is not None:
        shares = {part: getattr(total, f"{part}_seconds") / seconds for part in PARTS}
    elif parts:
        shares = {part: sum(seconds_of.get(part, 0.0) for seconds_of in parts) / seconds for part in PARTS}
    else:
        return None
    return shares | {"overhead": max(0.0, 1 - sum(shares.values()))}
