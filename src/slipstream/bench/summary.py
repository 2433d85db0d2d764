"""From runs to figures: per arm and batch size, over all prompts and per family. Nothing is measured here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from slipstream.bench.bootstrap import Estimate, speed, speed_up
from slipstream.bench.prediction.level_counts import LevelCounts
from slipstream.bench.records import Run, VerdictName
from slipstream.text.stats import Stats

# of several repeats the verdict that says least in favour counts
_ORDER: tuple[VerdictName, ...] = ("identical", "reference", "not compared", "tie", "different")
PARTS = ("prefill", "draft", "verify", "accept")

Group = tuple[str, ...]
Repeats = dict[int, Run]


@dataclass(frozen=True)
class Speed:
    """How fast an arm was. speed_up: against the reference arm on the same prompts; None if that has no times."""

    groups: int
    tokens: int
    tokens_per_second: Estimate
    speed_up: Estimate | None


@dataclass(frozen=True)
class ArmSummary:
    """One arm at one batch size.

    speed: None if any run failed: the rest would not be the same work. families: those without a failed run.
    verdicts: how many texts, each counted once with the least favourable verdict of its repeats.
    stats: totals over all runs, None for baselines. time_split: shares of the measured seconds, "overhead" being all
    that is not in PARTS; None for baselines that do not tell. tokens_per_forward: of baselines, where a forward serves
    one row; else None.
    prediction: what `slipstream.bench.prediction.formula` makes of the arm, where it was asked. levels: what its
    drafts held, over all runs; None for baselines.
    """

    arm: str
    batch: int
    speed: Speed | None
    families: dict[str, Speed]
    verdicts: dict[str, int]
    failed: int
    error: str | None
    stats: Stats | None = None
    time_split: dict[str, float] | None = None
    tokens_per_forward: float | None = None
    prediction: dict[str, float] | None = field(default=None)
    levels: LevelCounts | None = None

    @property
    def counts(self) -> dict[str, Any] | None:
        """All that is known of how far drafts got: `Stats.to_dict()` and `LevelCounts.to_dict()`."""
        if self.stats is None or self.levels is None:
            return None
        return self.stats.to_dict() | self.levels.to_dict()

    @property
    def lossless(self) -> bool:
        """Whether the arm promises plain decoding's text or distribution; baselines promise nothing here."""
        return self.stats is not None and self.stats.lossless

    @property
    def lossy(self) -> bool:
        """Whether the arm's rule changes the text."""
        return self.stats is not None and not self.stats.lossless

    @property
    def block_efficiency(self) -> float | None:
        """Output tokens per forward of the target and row; None where that is not known."""
        if self.stats is None or not self.stats.num_rounds:
            return self.tokens_per_forward
        return self.stats.block_efficiency

    @property
    def round_overhead(self) -> float | None:
        """What rounds spent on anything but drafting, verifying and accepting, as a share of their time."""
        if self.stats is None or self.stats.total_seconds <= self.stats.prefill_seconds:
            return None
        return self.stats.overhead_seconds / (self.stats.total_seconds - self.stats.prefill_seconds)

    @property
    def acceptance_by_position(self) -> list[float]:
        """The share of draft tokens accepted at each position of the draft."""
        if self.stats is None:
            return []
        pairs = zip(self.stats.accepted_per_position, self.stats.drafted_per_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        stats = None if self.stats is None else self.stats.to_dict()
        derived = ("acceptance_by_position", "round_overhead", "block_efficiency")
        return asdict(self) | {"stats": stats} | {name: getattr(self, name) for name in derived}


def summarise(runs: Sequence[Run], reference: str) -> list[ArmSummary]:
    """A summary per batch size and arm, in the order they were first run."""
    found: dict[tuple[int, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run.batch, run.arm), []).append(run)
    return [_arm(own, found.get((batch, reference), [])) for (batch, _), own in found.items()]


def wrong_texts(summaries: Sequence[ArmSummary]) -> list[ArmSummary]:
    """Arms that promise plain decoding's text and broke the promise by more than a tie."""
    return [one for one in summaries if one.lossless and one.verdicts.get("different")]


def total_stats(stats: Sequence[Mapping[str, Any]]) -> Stats:
    """Several `Stats.to_dict()` added up."""
    total = Stats(lossless=all(one["lossless"] for one in stats))
    for one in stats:
        for f in fields(Stats):
            mine, theirs = getattr(total, f.name), one.get(f.name)
            if f.name != "lossless" and theirs is not None:  # counts of predictions are None without any
                setattr(total, f.name, _added(mine, theirs) if isinstance(theirs, list) else (mine or 0) + theirs)
    return total


def _arm(runs: Sequence[Run], base: Sequence[Run]) -> ArmSummary:
    errors = [run.error for run in runs if run.error is not None]
    own, other = _by_group(runs), _by_group(base)
    families: dict[str, Speed] = {}
    for family in dict.fromkeys(run.family for run in runs):
        if not any(run.error for run in runs if run.family == family):
            members = {group: repeats for group, repeats in own.items() if repeats[min(repeats)].family == family}
            families[family] = _speed(members, other)
    counted = [run.stats for run in runs if run.stats is not None]
    total = total_stats(counted) if counted else None
    return ArmSummary(
        arm=runs[0].arm,
        batch=runs[0].batch,
        speed=None if errors else _speed(own, other),
        families=families,
        verdicts=_verdicts(runs),
        failed=len(errors),
        error=errors[0] if errors else None,
        stats=total,
        time_split=_time_split(total, runs),
        tokens_per_forward=_per_forward(runs),
        levels=LevelCounts.of(done for run in runs for done in run.rounds or ()) if counted else None,
    )


def _per_forward(runs: Sequence[Run]) -> float | None:
    forwards = sum(run.num_forwards or 0 for run in runs if run.batch == 1)
    return sum(run.num_output_tokens for run in runs if run.num_forwards) / forwards if forwards else None


def _by_group(runs: Sequence[Run]) -> dict[Group, Repeats]:
    found: dict[Group, Repeats] = {}
    for run in runs:
        if run.error is None:
            found.setdefault(tuple(run.prompts), {})[run.repeat] = run
    return found


def _speed(own: Mapping[Group, Repeats], base: Mapping[Group, Repeats]) -> Speed:
    """The speed over all groups; the speed-up over those that both arms have run, repeat by repeat."""
    seconds = [[run.seconds for run in repeats.values()] for repeats in own.values()]
    tokens = [_tokens(repeats) for repeats in own.values()]
    pairs = [
        (own[group], base[group], sorted(own[group].keys() & base[group].keys())) for group in own if group in base
    ]
    pairs = [pair for pair in pairs if pair[2]]
    ratio = None
    if len(pairs) == len(own):  # an arm is not compared on the prompts that suit it
        ratio = speed_up(
            [_tokens(mine) for mine, _, _ in pairs],
            [[mine[repeat].seconds for repeat in both] for mine, _, both in pairs],
            [_tokens(theirs) for _, theirs, _ in pairs],
            [[theirs[repeat].seconds for repeat in both] for _, theirs, both in pairs],
        )
    return Speed(len(own), sum(tokens), speed(tokens, seconds), ratio)


def _tokens(repeats: Repeats) -> int:
    return repeats[min(repeats)].num_output_tokens


def _verdicts(runs: Sequence[Run]) -> dict[str, int]:
    worst: dict[tuple[Group, int], int] = {}
    for run in runs:
        for row, verdict in enumerate(run.verdicts):
            at = tuple(run.prompts), row
            worst[at] = max(worst.get(at, 0), _ORDER.index(verdict))
    counts = Counter(_ORDER[place] for place in worst.values())
    return {name: counts[name] for name in _ORDER}


def _time_split(total: Stats | None, runs: Sequence[Run]) -> dict[str, float] | None:
    seconds = sum(run.seconds for run in runs)
    parts = [run.parts for run in runs if run.parts is not None]
    if total is not None:
        shares = {part: getattr(total, f"{part}_seconds") / seconds for part in PARTS}
    elif parts:
        shares = {part: sum(one.get(part, 0.0) for one in parts) / seconds for part in PARTS}
    else:
        return None
    return shares | {"overhead": max(0.0, 1 - sum(shares.values()))}


def _added(mine: list[int], theirs: list[int]) -> list[int]:
    width = max(len(mine), len(theirs))
    pad = [0] * width
    return [a + b for a, b in zip((mine + pad)[:width], (theirs + pad)[:width], strict=True)]
