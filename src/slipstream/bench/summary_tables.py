"""A summary as tables for a terminal. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from rich import box
from rich.table import Table
from rich.text import Text

from slipstream.bench.records import Run
from slipstream.bench.summary import PARTS, ArmSummary, Estimate
from slipstream.text.round_view import percent

MOST_NAMES = 8  # of prompts that a line lists


def tables(summaries: Sequence[ArmSummary], reference: str) -> Iterator[Table]:
    """Speeds beside parity, speed-ups per family, where the time went, and what failed."""
    for batch in dict.fromkeys(one.batch for one in summaries):
        own = [one for one in summaries if one.batch == batch]
        yield _overall(own, batch, reference)
        if len({family for one in own for family in one.families}) > 1:
            yield _families(own, reference)
        if any(one.time_split is not None for one in own):
            yield _time(own)
    if any(one.failed for one in summaries):
        yield _failures(summaries)


def progress_line(number: int, total: int, runs: Sequence[Run]) -> str:
    """One line for a finished group of prompts: the median speed of each arm, and a verdict that is bad news."""
    parts = []
    for arm in dict.fromkeys(run.arm for run in runs):
        own = [run for run in runs if run.arm == arm]
        speeds = [run.tokens_per_second for run in own if run.tokens_per_second is not None]
        different = any("different" in run.verdicts for run in own)
        remark = "" if not different else " DIFFERS" if own[0].num_forwards is None else " (another text)"
        state = "FAILED" if len(speeds) < len(own) else f"{median(speeds):.1f} tok/s"
        parts.append(f"{arm} {state}{remark}")
    names = runs[0].prompts
    named = ", ".join(names) if len(names) <= MOST_NAMES else f"{names[0]} to {names[-1]}, {len(names)} prompts"
    return f"{number}/{total} {named}, batch {runs[0].batch}: {'; '.join(parts)}"


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, title=title, title_justify="left")
    for number, name in enumerate(columns):
        left = number == 0 or name in ("texts", "first error")
        table.add_column(name, justify="left" if left else "right", no_wrap=number == 0, overflow="fold")
    return table


def _overall(summaries: Sequence[ArmSummary], batch: int, reference: str) -> Table:
    title = f"batch size {batch}; speed-up against {reference}; 95 % intervals behind the values"
    acceptance = ("acceptance\nrate", "alpha", "tokens per\nround")
    table = _table(title, "arm", "tok/s", "speed-up", "texts", *acceptance)
    for one in summaries:
        speeds = ["failed", ""]
        if one.speed is not None:
            speeds = [_estimate(one.speed.tokens_per_second), _estimate(one.speed.speed_up, "x")]
        table.add_row(_name(one), *speeds, _texts(one), *_acceptance(one))
    return table


def _families(summaries: Sequence[ArmSummary], reference: str) -> Table:
    names = list(dict.fromkeys(family for one in summaries for family in one.families))
    table = _table(f"speed-up against {reference} per family, geometric means", "arm", *names)
    for one in summaries:
        ratios = [one.families[name].speed_up if name in one.families else None for name in names]
        failed = ["-" if name in one.families else "failed" for name in names]
        cells = [
            _estimate(ratio, "x", narrow=True) if ratio else none for ratio, none in zip(ratios, failed, strict=True)
        ]
        table.add_row(_name(one), *cells)
    return table


def _time(summaries: Sequence[ArmSummary]) -> Table:
    columns = (*PARTS, "overhead", "overhead\nof a round", "accepted at draft position 1, 2, ...")
    table = _table("where the time went", "arm", *columns)
    for one in summaries:
        if one.time_split is not None:
            shares = [f"{one.time_split[part]:.1%}" for part in (*PARTS, "overhead")]
            cells: list[str | Text] = [
                _name(one),
                *shares,
                "-" if one.round_overhead is None else f"{one.round_overhead:.1%}",
                " ".join(percent(share) for share in one.acceptance_by_position) or "-",
            ]
            table.add_row(*cells)
    return table


def _failures(summaries: Sequence[ArmSummary]) -> Table:
    table = _table("failed", "arm", "batch", "runs", "first error")
    for one in summaries:
        if one.failed:
            table.add_row(_name(one), str(one.batch), str(one.failed), Text(one.error or ""))
    return table


def _name(one: ArmSummary) -> Text:
    return Text(f"{one.arm} (lossy)" if one.lossy else one.arm)


def _estimate(estimate: Estimate | None, unit: str = "", *, narrow: bool = False) -> str:
    """The value and its interval, in lines below it where columns are narrow."""
    if estimate is None:
        return "-"
    form = ".2f" if unit else ".1f" if estimate.value < 1000 else ".0f"
    interval = ""
    if estimate.low is not None and estimate.high is not None and estimate.low < estimate.high:
        low, high = f"{estimate.low:{form}}", f"{estimate.high:{form}}"
        interval = f"\n{low}-\n{high}" if narrow else f"  {low}-{high}"
    return f"{estimate.value:{form}}{unit}{interval}"


def _texts(one: ArmSummary) -> Text:
    """The counts of verdicts that occur; a broken promise in red."""
    text = Text()
    for name, count in one.verdicts.items():
        if count:
            bad = name == "different" and one.lossless
            text.append(f"{', ' if text else ''}{count} {'DIFFERENT' if bad else name}", "bold red" if bad else "")
    return text


def _acceptance(one: ArmSummary) -> list[str]:
    efficiency = "" if one.block_efficiency is None else f"{one.block_efficiency:.2f}"
    if one.stats is None or not one.stats.num_rounds:
        return ["", "", efficiency]
    return [percent(one.stats.acceptance_rate), percent(one.stats.alpha), efficiency]
