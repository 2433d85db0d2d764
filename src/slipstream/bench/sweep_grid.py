"""Draft length by drafter by temperature: which arms a sweep runs, and what follows from their summaries.

    grid = Grid(drafters=("ngram", "model"), lengths=range(9), temperatures=(0.0, 0.8))
    arms = grid.arms()                                  # a benchmark of these arms, see slipstream.bench
    series = series_of(summarise_by_temperature(runs, "none~0"))
    [best_of(entry) for entry in series]

A sweep is a benchmark whose arms form a grid; it leaves the same records and continues in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from slipstream.bench.arms import PLAIN, Arm, label, parse_arm
from slipstream.bench.records import Run
from slipstream.bench.summary import ArmSummary, Estimate, summarise
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.errors import UsageError


@dataclass(frozen=True)
class Grid:
    """The drafters, lengths and temperatures of a sweep.

    Length 0, plain decoding, is measured once per temperature whether it is given or not.
    """

    drafters: tuple[str, ...]
    lengths: tuple[int, ...]
    temperatures: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("drafters", "lengths", "temperatures"):
            values = getattr(self, name)
            if not values:
                raise UsageError(f"{name}=[]; allowed: at least one, each once")
            if twice := [value for value in values if values.count(value) > 1]:
                raise UsageError(f"{name}: {twice[0]!r} is given twice; allowed: at least one, each once")
        if PLAIN in self.drafters:
            raise UsageError(f"drafters={list(self.drafters)!r}; allowed: drafters; {PLAIN} is draft length 0")
        if wrong := [length for length in self.lengths if not 0 <= length <= MAX_DRAFT_TOKENS]:
            raise UsageError(f"draft length {wrong[0]}; allowed: 0 to {MAX_DRAFT_TOKENS}")
        if max(self.lengths) == 0:
            raise UsageError(f"lengths={list(self.lengths)!r}; allowed: at least one of them above 0")

    def arms(self) -> list[Arm]:
        """Plain decoding and every drafter at every length above 0, temperature by temperature."""
        lengths = sorted(length for length in self.lengths if length > 0)
        names = []
        for temperature in self.temperatures:
            names.append(f"{PLAIN}~{_number(temperature)}")
            names += [f"{drafter}@{n}~{_number(temperature)}" for drafter in self.drafters for n in lengths]
        return [parse_arm(name) for name in names]

    @property
    def reference(self) -> str:
        """The name of plain decoding at the first temperature."""
        return f"{PLAIN}~{_number(self.temperatures[0])}"


@dataclass(frozen=True)
class Cell:
    """One draft length of a series."""

    length: int
    summary: ArmSummary


@dataclass(frozen=True)
class Series:
    """One drafter, with its rule and temperature, at one batch size, from the shortest draft length to the longest.

    name: as in the arms, without the length.
    """

    name: str
    batch: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Best:
    """The draft length with the highest speed-up over plain decoding. length 0: do not speculate.

    certain: whether the interval of the speed-up lies above 1. parity: counts of texts by verdict.
    """

    series: str
    batch: int
    length: int
    tokens_per_second: float
    speed_up: Estimate
    certain: bool
    parity: str

    @property
    def sentence(self) -> str:
        where = f"{label(self.series)}, batch {self.batch}"
        if self.length == 0:
            return f"{where}: do not speculate (plain decoding is fastest, {self.tokens_per_second:.1f} tok/s)"
        text = f"{where}: draft {self.length}, {self.speed_up.value:.2f}x plain decoding"
        if self.speed_up.low is not None and self.speed_up.high is not None:
            text += f" ({self.speed_up.low:.2f} to {self.speed_up.high:.2f})"
        text += f", {self.tokens_per_second:.1f} tok/s, texts: {self.parity}"
        return text if self.certain else f"{text}; the measurement cannot distinguish it from plain decoding"


def references(names: Sequence[str], default: str) -> dict[str, str]:
    """The arm that each arm is compared with: plain decoding at its own temperature where that was run, else `default`.

    names: of the arms, as in the header of a folder of runs.
    """
    plain = {arm.temperature: arm.name for arm in map(parse_arm, names) if arm.drafter == PLAIN and arm.fast is None}
    plain.pop(None, None)
    return {name: plain.get(parse_arm(name).temperature, default) for name in names}


def summarise_by_temperature(runs: Sequence[Run], default: str) -> list[ArmSummary]:
    """Like `summarise`, but each arm against its own reference, see `references`."""
    base = references(list(dict.fromkeys(run.arm for run in runs)), default)
    summaries: list[ArmSummary] = []
    for reference in dict.fromkeys(base.values()):
        compared = [run for run in runs if base[run.arm] == reference or run.arm == reference]
        summaries += [summary for summary in summarise(compared, reference) if base[summary.arm] == reference]
    return summaries


def series_of(summaries: Iterable[ArmSummary]) -> list[Series]:
    """Every drafter with two lengths or more. Plain decoding at the same temperature and weights is length 0."""
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


def best_of(series: Series) -> Best | None:
    """The fastest length, the shortest of equals; None if plain decoding was not run or an arm of the series failed.

    Lengths are compared by their speed-ups, which pair the prompts and repeats of both arms.
    """
    measured = [
        (cell, cell.summary.speed, ratio)
        for cell in series.cells
        if cell.summary.speed is not None and (ratio := cell.summary.speed_up) is not None
    ]
    if len(measured) < len(series.cells) or measured[0][0].length != 0:
        return None
    cell, speed, ratio = max(measured, key=lambda entry: (entry[2].value, -entry[0].length))
    certain = cell.length == 0 or ratio.is_above_one
    parity = parity_of([cell.summary])
    return Best(series.name, series.batch, cell.length, speed.tokens_per_second.value, ratio, certain, parity)


def parity_of(summaries: Iterable[ArmSummary]) -> str:
    """Counts of texts by verdict, over all these arms, such as "5 identical, 1 tie"."""
    total: Counter[str] = Counter()
    for arm in summaries:
        total.update(arm.verdicts)
    return ", ".join(f"{count} {name}" for name, count in total.items() if count) or "none"


def sweep_report(series: Sequence[Series]) -> list[dict[str, Any]]:
    """The series for JSON: every cell with speed, parity and statistics, and the best length."""
    return [
        {
            "series": entry.name,
            "batch": entry.batch,
            "lengths": [{"length": cell.length, **cell.summary.to_dict()} for cell in entry.cells],
            "best": None if (best := best_of(entry)) is None else {**asdict(best), "sentence": best.sentence},
        }
        for entry in series
    ]


def _number(temperature: float) -> str:
    """A temperature in few characters and without an exponent, which names of arms cannot have."""
    return f"{temperature:.6f}".rstrip("0").rstrip(".")
