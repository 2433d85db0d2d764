"""What the commands print: coloured text, tables, comparisons, simulations, sweeps. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.apps.cli.consoles import out
from slipstream.bench.comparison import BATCH, HF, PLAIN, SPECULATIVE, Comparison
from slipstream.bench.result_tables import (
    Cell,
    Row,
    acceptance_cells,
    speed_cells,
    terminal_table,
    verdict_cell,
)
from slipstream.bench.result_tables import Table as ResultTable
from slipstream.bench.speed_model.accepted_lengths import Acceptance
from slipstream.bench.speed_model.formula import Simulation, conclusions
from slipstream.bench.speed_model.round_costs import Costs
from slipstream.bench.sweep_grid import Series, best_of
from slipstream.certificate.checks import Check
from slipstream.certificate.parity import verdict
from slipstream.text.detokenizer import TextStream
from slipstream.text.results import Result
from slipstream.text.round_view import percent
from slipstream.tokenization.tokenizer import Tokenizer

STYLES = {"accepted": "green", "forced": "yellow", "recovered": "blue", "bonus": "cyan", "plain": ""}
MEANINGS = {
    "accepted": "accepted draft token",
    "forced": "forced by the constraint",
    "bonus": "bonus",
    "recovered": "recovered after a rejection",
}


def coloured(result: Result, tokenizer: Tokenizer, limit: int | None = None) -> Text:
    """A result's text, each token in the colour of its origin."""
    text, stream = Text(), TextStream(tokenizer)
    for decoded in result.rounds:
        for token, origin in zip(decoded.tokens, decoded.origins, strict=True):
            text.append(stream.push(token), STYLES[origin])
    text.append(stream.flush())
    if limit is not None and len(text) > limit:
        text.truncate(limit)
        text.append(" ...", "dim")
    return text


def legend(comparisons: Sequence[Comparison]) -> Text:
    """What the colours of speculative texts mean, as far as they occur."""
    results = [comparison.runs[SPECULATIVE].result for comparison in comparisons]
    rounds = [decoded for result in results if result is not None for decoded in result.rounds]
    shown = {origin for decoded in rounds for origin in decoded.origins}
    return Text("  ").join(Text(meaning, STYLES[origin]) for origin, meaning in MEANINGS.items() if origin in shown)


def side_by_side(comparison: Comparison, tokenizer: Tokenizer) -> Table:
    """Plain text left, speculative text right, in the colours of its tokens' origins."""
    plain, fast = comparison.runs[PLAIN], comparison.runs[SPECULATIVE]
    assert plain.result is not None and fast.result is not None
    table = Table(box=box.SIMPLE, pad_edge=False, expand=True)
    table.add_column(f"{comparison.prompt.category}: plain, {plain.tokens_per_second:.1f} tok/s", ratio=1)
    table.add_column(f"speculative, {fast.tokens_per_second:.1f} tok/s, {verdict(fast.difference)}", ratio=1)
    table.add_row(coloured(plain.result, tokenizer), coloured(fast.result, tokenizer))
    return table


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """One line per prompt."""
    arms = [*([HF] if HF in comparisons[0].runs else []), PLAIN, SPECULATIVE]
    figures = ("speed-up", "acceptance\nrate", "block\nefficiency")
    texts = ("text", "HF's text") if HF in arms else ("text",)
    columns = ("prompt", *(f"{arm}\ntok/s" for arm in arms), *figures, *texts)
    rows = []
    for comparison in comparisons:
        run = comparison.runs[SPECULATIVE]
        assert run.result is not None
        stats = run.result.stats
        row = [comparison.prompt.category, *(f"{comparison.runs[arm].tokens_per_second:.1f}" for arm in arms)]
        row += [f"{comparison.speed_up(SPECULATIVE):.2f}x", percent(stats.acceptance_rate)]
        row += [f"{stats.block_efficiency:.2f}", verdict(run.difference)]
        rows.append([*row, verdict(comparison.runs[HF].difference)] if HF in arms else row)
    return terminal_table(ResultTable("", columns, rows, words=texts))


def summary_table(summary: dict[str, Any]) -> Table:
    """One line per arm."""
    verdicts = ("identical", "ties", "different")
    rows: list[Row] = [
        [
            arm,
            f"{line['tokens_per_second']:.1f}",
            f"{line['speed_up_geometric_mean']:.2f}x",
            f"{line['speed_up_median']:.2f}x",
            *(str(line[verdict]) for verdict in verdicts),
        ]
        for arm, line in summary["arms"].items()
    ]
    if batch := summary.get(BATCH):
        name = f"batch of {min(batch['rows'], batch['max_batch_size'])} against one by one"
        speeds = [f"{batch['tokens_per_second']:.1f}", f"{batch['speed_up']:.2f}x", ""]
        rows.append([name, *speeds, *(str(batch[verdict]) for verdict in verdicts)])
    columns = ("arm", "tok/s", "speed-up\n(geom. mean)", "speed-up\n(median)", *verdicts)
    return terminal_table(ResultTable("", columns, rows))


def certificate(checks: Sequence[Check]) -> Table:
    """One line per check."""
    tones: dict[str, Any] = {"pass": "good", "FAIL": "bad", "not applicable": "faint"}
    rows: list[Row] = [
        [check.name, Cell(check.outcome, tone=tones[check.outcome]), check.detail, f"{check.seconds:.1f}"]
        for check in checks
    ]
    return terminal_table(ResultTable("", ("check", "", "evidence", "seconds"), rows, words=("", "evidence")))


def print_simulation(
    console: Console, costs: Costs, acceptance: Acceptance | float, simulation: Simulation
) -> dict[str, Any]:
    """Print the table and what follows from it; returns costs and table for JSON."""
    console.print(simulation_table(simulation))
    for line in conclusions(costs, simulation):
        console.sentence(line)
    shown = vars(acceptance) if isinstance(acceptance, Acceptance) else acceptance
    return {"costs": costs.to_dict(), "acceptance": shown, "simulation": simulation.to_dict()}


def simulation_table(simulation: Simulation) -> Table:
    """Speed-ups by draft length or tree depth, a column per batch."""
    trees = bool(simulation.chains)
    first = ("tree\ndepth", "draft\ntokens") if trees else ("draft\nlength",)
    columns = (*first, "tokens\nper round", *(f"batch\n{batch}" for batch in simulation.batches))
    rows: list[Row] = [
        [
            str(length),
            *([f"{simulation.nodes[length]:.3g}"] if trees else []),
            f"{simulation.tokens[length]:.2f}",
            *(_speed_up(simulation, batch, length) for batch in simulation.batches),
        ]
        for length in simulation.lengths
    ]
    title = "predicted speed-up (* best, - slower than plain)"
    return terminal_table(ResultTable(title, columns, rows), centred=True)


def _speed_up(simulation: Simulation, batch: int, length: int) -> Cell:
    speed_up = simulation.speed_ups[batch][length]
    if length == simulation.best[batch]:
        return Cell(f"{speed_up:.2f}x*", tone="best")
    return Cell(f"{speed_up:.2f}x-", tone="slower") if speed_up < 1 else Cell(f"{speed_up:.2f}x ")


def print_series(series: Sequence[Series]) -> None:
    """Print the tables of every series, then the best setting of each."""
    for entry in series:
        out.print(series_table(entry), positions_table(entry))
    for entry in series:
        best = best_of(entry)
        out.sentence(best.sentence if best else f"{entry.name}: no advice, since runs of it failed")


def series_table(series: Series) -> Table:
    """One line per draft length: speed with its interval, parity, and how much was accepted."""
    title = f"{series.name}, batch size {series.batch}; speed-up against length 0; 95 % intervals behind the values"
    columns = ("length", "tok/s", "speed-up", "texts", "acceptance\nrate", "alpha", "tokens per\nround")
    rows: list[Row] = [
        [
            str(cell.length),
            *speed_cells(cell.summary),
            verdict_cell(cell.summary.verdicts),
            *acceptance_cells(cell.summary, "-"),
        ]
        for cell in series.cells
    ]
    return terminal_table(ResultTable(title, columns, rows, words=["texts"]))


def positions_table(series: Series) -> Table:
    """Which share of the tokens drafted at each position was accepted, a line per draft length."""
    title = f"{series.name}, batch size {series.batch}; accepted at each position of the draft"
    positions = [str(position) for position in range(1, series.cells[-1].length + 1)]
    rows = []
    for cell in series.cells:
        if cell.length > 0:
            shares = [percent(share) for share in cell.summary.acceptance_by_position]
            rows.append([str(cell.length), *shares, *[""] * (len(positions) - len(shares))])
    return terminal_table(ResultTable(title, ["length", *positions], rows))
