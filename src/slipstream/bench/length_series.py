"""Arms of one drafter at several draft lengths, each against plain decoding at its temperature, and the best length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from slipstream.bench.arms import PLAIN, Arm, label, parse_arm
from slipstream.bench.records import Run
from slipstream.bench.summary import ArmSummary, summarize, without_few_prompts


@dataclass(frozen=True)
class Cell:
    """One draft length of a series."""

    length: int
    summary: ArmSummary


@dataclass(frozen=True)
class Series:
    """One drafter, with its rule and temperature, at one batch size, from the shortest draft length to the longest."""

    name: str  # as in the arms, without the length
    batch: int
    cells: tuple[Cell, ...]


def references(names: Sequence[str], default: str) -> dict[str, str]:
    """The arm that each arm is compared with: plain decoding at its temperature if that was run, else `default`.

    names: of the arms, as in the header of a folder of runs.
    """
    plain = {arm.temperature: arm.name for arm in map(parse_arm, names) if arm.drafter == PLAIN and arm.fast is None}
    plain.pop(None, None)
    return {name: plain.get(parse_arm(name).temperature, default) for name in names}


def summarize_over(runs: Sequence[Run], base: Mapping[str, str]) -> list[ArmSummary]:
    """Summaries for tables and charts. base: the reference of each arm."""
    summaries: list[ArmSummary] = []
    for reference in dict.fromkeys(base[run.arm] for run in runs):
        compared = [run for run in runs if base[run.arm] == reference or run.arm == reference]
        summaries += [summary for summary in summarize(compared, reference) if base[summary.arm] == reference]
    return [without_few_prompts(summary) for summary in summaries]


def series_of(summaries: Iterable[ArmSummary]) -> list[Series]:
    """Every drafter with at least two lengths. Plain decoding at the same temperature and weights is length 0."""
    cells: dict[tuple[Arm, int], list[Cell]] = {}
    plain: dict[tuple[float | None, bool | None, int], ArmSummary] = {}
    for summary in summaries:
        arm = parse_arm(summary.arm)
        if arm.drafter == PLAIN:
            plain[arm.temperature, arm.fast, summary.batch] = summary
        elif isinstance(arm.num_draft_tokens, int) and arm.baseline is None:
            kind = replace(arm, name=arm.name.replace(f"@{arm.num_draft_tokens}", ""), num_draft_tokens=None)
            cells.setdefault((kind, summary.batch), []).append(Cell(arm.num_draft_tokens, summary))
    series = []
    for (kind, batch), lengths in cells.items():
        zero = plain.get((kind.temperature, kind.fast, batch))
        lengths += [] if zero is None else [Cell(0, zero)]
        if len(lengths) > 1:
            series.append(Series(kind.name, batch, tuple(sorted(lengths, key=lambda cell: cell.length))))
    return series


def best_length(series: Series) -> str | None:
    """The length with the highest speed-up, in words; ties go to the shortest.

    None if plain decoding was not run or an arm of the series failed. Speed-ups pair the prompts and repeats of both.
    """
    ratios = {cell.length: cell.summary.speed_up for cell in series.cells if cell.summary.speed_up is not None}
    if len(ratios) < len(series.cells) or 0 not in ratios:
        return None
    cell = max(series.cells, key=lambda cell: (ratios[cell.length].value, -cell.length))
    ratio = ratios[cell.length]
    speed = cell.summary.speed
    where = f"{label(series.name)}, batch {series.batch}"
    assert speed is not None
    if cell.length == 0:
        return f"{where}: do not speculate (plain decoding is fastest, {speed.tokens_per_second.value:.1f} tok/s)"
    interval = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    text = f"{where}: draft {cell.length}, {ratio.value:.2f}x plain decoding{interval}"
    text += f", {speed.tokens_per_second.value:.1f} tok/s, texts: {parity_of([cell.summary])}"
    return text if ratio.is_above_one else f"{text}; the measurement cannot distinguish it from plain decoding"


def best_lengths(summaries: Iterable[ArmSummary]) -> list[str]:
    """The best draft length, in words, of each drafter that was measured at several."""
    several = [series for series in series_of(summaries) if sum(cell.length > 0 for cell in series.cells) > 1]
    return [best for series in several if (best := best_length(series)) is not None]


def parity_of(summaries: Iterable[ArmSummary]) -> str:
    """Counts of outputs by verdict, over all these arms, such as "5 identical, 1 tie"."""
    total: Counter[str] = Counter()
    for arm in summaries:
        total.update(arm.verdicts)
    return ", ".join(f"{count} {name}" for name, count in total.items() if count) or "none"
