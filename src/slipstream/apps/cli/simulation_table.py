"""A simulation on the terminal: the table of predicted speed-ups, and what follows from it."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.bench.speed_model.accepted_lengths import Acceptance
from slipstream.bench.speed_model.formula import Simulation, conclusions
from slipstream.bench.speed_model.round_costs import Costs


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
        cells = [_cell(simulation, batch, length) for batch in simulation.batches]
        size = [f"{simulation.nodes[length]:.3g}"] if simulation.chains else []
        table.add_row(str(length), *size, f"{simulation.tokens[length]:.2f}", *cells)
    return table


def _cell(simulation: Simulation, batch: int, length: int) -> Text:
    text = simulation.marked(batch, length)
    style = {"*": "bold green", "-": "red"}.get(text[-1])
    return Text(text, style) if style else Text(f"{text} ")
