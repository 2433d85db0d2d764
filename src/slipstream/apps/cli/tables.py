"""What the commands print: coloured text, tables, time splits, simulations, sweeps. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.apps.cli.application import out
from slipstream.bench.comparison import BATCH, HF, PLAIN, SPECULATIVE, Comparison
from slipstream.bench.speed_model.accepted_lengths import Acceptance
from slipstream.bench.speed_model.formula import Simulation, conclusions
from slipstream.bench.speed_model.round_costs import Costs
from slipstream.bench.summary import Estimate
from slipstream.bench.sweep_grid import Cell, Series, best_of
from slipstream.certificate.checks import Check
from slipstream.text.detokenizer import TextStream, Tokenizer
from slipstream.text.results import Result
from slipstream.text.round_view import percent, verdict

STYLES = {"accepted": "green", "forced": "yellow", "recovered": "blue", "bonus": "cyan", "plain": ""}
MEANINGS = {
    "accepted": "accepted draft token",
    "forced": "forced by the constraint",
    "bonus": "bonus",
    "recovered": "recovered after a rejection",
}
WORDS = {"reference": "plain", "different": "DIFFER"}
WHOLE = 1000  # tokens per second from which decimals are left out


def coloured(result: Result, tokenizer: Tokenizer, limit: int | None = None) -> Text:
    """A result's text, each token in the colour of its origin."""
    text, stream = Text(), TextStream(tokenizer)
    for done in result.rounds:
        for token, origin in zip(done.tokens, done.origins, strict=True):
            text.append(stream.push(token), STYLES[origin])
    text.append(stream.flush())
    if limit is not None and len(text) > limit:
        text.truncate(limit)
        text.append(" ...", "dim")
    return text


def legend(comparisons: Sequence[Comparison]) -> Text:
    """What the colours of speculative texts mean, as far as they occur."""
    results = [done.runs[SPECULATIVE].result for done in comparisons]
    shown = {origin for result in results if result is not None for done in result.rounds for origin in done.origins}
    return Text("  ").join(Text(meaning, STYLES[origin]) for origin, meaning in MEANINGS.items() if origin in shown)


def side_by_side(done: Comparison, tokenizer: Tokenizer) -> Table:
    """Plain text left, speculative text right, in the colours of its tokens' origins."""
    plain, fast = done.runs[PLAIN], done.runs[SPECULATIVE]
    assert plain.result is not None and fast.result is not None
    table = Table(box=box.SIMPLE, pad_edge=False, expand=True)
    table.add_column(f"{done.prompt.category}: plain, {plain.tokens_per_second:.1f} tok/s", ratio=1)
    table.add_column(f"speculative, {fast.tokens_per_second:.1f} tok/s, {verdict(fast.difference)}", ratio=1)
    table.add_row(coloured(plain.result, tokenizer), coloured(fast.result, tokenizer))
    return table


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """One line per prompt."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("prompt")
    with_hf = HF in comparisons[0].runs
    for name in ([HF] if with_hf else []) + [PLAIN, SPECULATIVE]:
        table.add_column(f"{name}\ntok/s", justify="right")
    for name in ("speed-up", "acceptance\nrate", "block\nefficiency"):
        table.add_column(name, justify="right")
    table.add_column("text")
    if with_hf:
        table.add_column("HF's text")
    for done in comparisons:
        table.add_row(*_line(done, with_hf))
    return table


def _line(done: Comparison, with_hf: bool) -> list[str]:
    run = done.runs[SPECULATIVE]
    assert run.result is not None
    stats = run.result.stats
    speeds = [f"{done.runs[arm].tokens_per_second:.1f}" for arm in ([HF] if with_hf else []) + [PLAIN, SPECULATIVE]]
    cells = [
        done.prompt.category,
        *speeds,
        f"{done.speed_up(SPECULATIVE):.2f}x",
        percent(stats.acceptance_rate),
        f"{stats.block_efficiency:.2f}",
        verdict(run.difference),
    ]
    return [*cells, verdict(done.runs[HF].difference)] if with_hf else cells


def summary_table(summary: dict[str, Any]) -> Table:
    """One line per arm."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("arm", "tok/s", "speed-up\n(geom. mean)", "speed-up\n(median)", "identical", "ties", "different"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for arm, line in summary["arms"].items():
        table.add_row(
            arm,
            f"{line['tokens_per_second']:.1f}",
            f"{line['speed_up_geometric_mean']:.2f}x",
            f"{line['speed_up_median']:.2f}x",
            *(str(line[key]) for key in ("identical", "ties", "different")),
        )
    if batch := summary.get(BATCH):
        table.add_row(
            f"batch of {min(batch['rows'], batch['max_batch_size'])} against one by one",
            f"{batch['tokens_per_second']:.1f}",
            f"{batch['speed_up']:.2f}x",
            "",
            *(str(batch[key]) for key in ("identical", "ties", "different")),
        )
    return table


def certificate(checks: Sequence[Check]) -> Table:
    """One line per check."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("check", "", "evidence", "seconds"):
        table.add_column(name, justify="right" if name == "seconds" else "left")
    for check in checks:
        style = {"pass": "green", "FAIL": "bold red", "not applicable": "dim"}[check.outcome]
        table.add_row(check.name, Text(check.outcome, style), check.detail, f"{check.seconds:.1f}")
    return table


def print_simulation(
    console: Console, costs: Costs, acceptance: Acceptance | float, simulation: Simulation
) -> dict[str, Any]:
    """Print the table and what follows from it; returns costs and table for JSON."""
    console.print(simulation_table(simulation))
    for line in conclusions(costs, simulation):
        console.print(line, soft_wrap=True)
    shown = vars(acceptance) if isinstance(acceptance, Acceptance) else acceptance
    return {"costs": costs.to_dict(), "acceptance": shown, "simulation": simulation.to_dict()}


def simulation_table(simulation: Simulation) -> Table:
    """Speed-ups by draft length or tree depth, a column per batch: best of a column bold green, below 1 red."""
    table = Table(box=box.SIMPLE, pad_edge=False, title="predicted speed-up (* best, - slower than plain)")
    first = ("tree\ndepth", "draft\ntokens") if simulation.chains else ("draft\nlength",)
    for name in (*first, "tokens\nper round", *(f"batch\n{batch}" for batch in simulation.batches)):
        table.add_column(name, justify="right")
    for length in simulation.lengths:
        cells = [_speed_up(simulation, batch, length) for batch in simulation.batches]
        size = [f"{simulation.nodes[length]:.3g}"] if simulation.chains else []
        table.add_row(str(length), *size, f"{simulation.tokens[length]:.2f}", *cells)
    return table


def _speed_up(simulation: Simulation, batch: int, length: int) -> Text:
    """`*` behind the best of its batch, `-` behind what is slower than plain decoding."""
    speed_up = simulation.speed_ups[batch][length]
    if length == simulation.best[batch]:
        return Text(f"{speed_up:.2f}x*", "bold green")
    return Text(f"{speed_up:.2f}x-", "red") if speed_up < 1 else Text(f"{speed_up:.2f}x ")


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
    names = ["length", "tok/s", "", "speed-up", "", "texts", "accep-\ntance", "alpha", "tokens\nper round"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for cell in series.cells:
        table.add_row(*_cell_line(cell))
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


def _cell_line(cell: Cell) -> list[str]:
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


def _estimate(estimate: Estimate | None, form: str, unit: str = "") -> list[str]:
    if estimate is None:
        return ["-", ""]
    interval = "" if estimate.low is None else f"{estimate.low:{form}} to {estimate.high:{form}}"
    return [f"{estimate.value:{form}}{unit}", interval]
