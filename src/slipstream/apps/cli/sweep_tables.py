"""A sweep on the terminal: speed by draft length, acceptance by position, and the best setting in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from slipstream.apps.cli.common import out
from slipstream.bench.summary import ArmSummary, Estimate
from slipstream.bench.sweep_grid import Cell, Series, best_of
from slipstream.text.round_view import percent

WORDS = {"reference": "plain", "different": "DIFFER"}
WHOLE = 1000  # tokens per second from which decimals are left out


def print_series(series: Sequence[Series]) -> None:
    """Print the tables of every series, then the best setting of each."""
    for one in series:
        out.print(series_table(one), positions_table(one))
    for one in series:
        best = best_of(one)
        out.print(best.sentence if best else f"{one.name}: no advice, since runs of it failed", soft_wrap=True)


def series_table(series: Series) -> Table:
    """One line per draft length: speed with its interval, parity, and how much was accepted."""
    title = f"{series.name}, batch size {series.batch}; speed-up against length 0, 95 % intervals"
    table = Table(box=box.SIMPLE, pad_edge=False, title=title, title_justify="left", padding=(0, 1, 0, 0))
    predicted = any(cell.summary.prediction for cell in series.cells)
    names = ["length", "tok/s", "", "speed-up", "", "texts", "accep-\ntance", "alpha", "tokens\nper round"]
    for name in names + ["predic-\nted", "without\nprefill"] * predicted:
        table.add_column(name, justify="right", no_wrap=True)
    for cell in series.cells:
        table.add_row(*_line(cell), *(_prediction(cell.summary) if predicted else []))
    return table


def positions_table(series: Series) -> Table:
    """Which share of the tokens drafted at each position was accepted, a line per draft length."""
    title = f"{series.name}, batch size {series.batch}; accepted at each position of the draft"
    table = Table(box=box.SIMPLE, pad_edge=False, title=title, title_justify="left")
    for name in ("length", *map(str, range(1, series.cells[-1].length + 1))):
        table.add_column(name, justify="right")
    for cell in series.cells:
        if cell.length > 0:
            table.add_row(str(cell.length), *map(percent, cell.summary.acceptance_by_position))
    return table


def _line(cell: Cell) -> list[str]:
    one, stats = cell.summary, cell.summary.stats
    speeds = ["failed", "", "", ""]
    if one.speed is not None:
        form = ".1f" if one.speed.tokens_per_second.value < WHOLE else ".0f"
        speeds = [*_estimate(one.speed.tokens_per_second, form), *_estimate(one.speed.speed_up, ".2f", "x")]
    texts = "\n".join(f"{count} {WORDS.get(name, name)}" for name, count in one.verdicts.items() if count)
    accepted = ["-", "-", "-"]
    if stats is not None:
        accepted = [percent(stats.acceptance_rate), percent(stats.alpha), f"{stats.block_efficiency:.2f}"]
    return [str(cell.length), *speeds, texts, *accepted]


def _prediction(one: ArmSummary) -> list[str]:
    if one.prediction is None:
        return ["-", "-"]
    return [f"{one.prediction[key]:.2f}x" for key in ("predicted", "observed")]


def _estimate(estimate: Estimate | None, form: str, unit: str = "") -> list[str]:
    if estimate is None:
        return ["-", ""]
    interval = "" if estimate.low is None else f"{estimate.low:{form}} to {estimate.high:{form}}"
    return [f"{estimate.value:{form}}{unit}", interval]
