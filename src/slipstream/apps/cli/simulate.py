"""`slipstream simulate`: predicted speed-up over draft length and batch, from costs measured or computed on paper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slipstream.apps.cli.common import DraftModel, Json, app, err, out, write_json
from slipstream.apps.cli.flags import flags
from slipstream.bench.prediction.accepted_lengths import Acceptance
from slipstream.bench.prediction.costs import Costs, Machine, paper_costs
from slipstream.bench.prediction.probe import measure_costs
from slipstream.bench.prediction.simulation import Simulation, conclusions, simulate
from slipstream.config import DecoderConfig
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import UsageError


def print_simulation(
    console: Console, costs: Costs, acceptance: Acceptance | float, simulation: Simulation
) -> dict[str, Any]:
    """Print the table and what follows from it; returns costs and table for JSON."""
    console.print(simulation_table(simulation))
    for line in conclusions(costs, simulation):
        console.print(escape(line), soft_wrap=True)
    shown = vars(acceptance) if isinstance(acceptance, Acceptance) else acceptance
    return {"costs": costs.to_dict(), "acceptance": shown, "simulation": simulation.to_dict()}


def simulation_table(simulation: Simulation) -> Table:
    """Speed-ups, a line per draft length and a column per batch: best of a column bold green, below 1 red."""
    table = Table(box=box.SIMPLE, pad_edge=False, title="predicted speed-up (* best, - slower than plain)")
    for name in ("draft\nlength", "tokens\nper round", *(f"batch\n{batch}" for batch in simulation.batches)):
        table.add_column(name, justify="right")
    for length in simulation.lengths:
        cells = [_cell(simulation, batch, length) for batch in simulation.batches]
        table.add_row(str(length), f"{simulation.tokens[length]:.2f}", *cells)
    return table


def _cell(simulation: Simulation, batch: int, length: int) -> str:
    text = simulation.marked(batch, length)
    style = {"*": "bold green", "-": "red"}.get(text[-1])
    return f"[{style}]{text}[/]" if style else f"{text} "


@app.command("simulate")
@flags(DecoderConfig)
def simulate_command(
    config: DecoderConfig,
    target: Annotated[str | None, typer.Option("--target", help="measure the costs of this model")] = None,
    draft: DraftModel = None,
    costs_file: Annotated[Path | None, typer.Option("--costs", help="or take the costs of this file")] = None,
    target_params: Annotated[float, typer.Option(help="or compute them: parameters of the target, as 8e9")] = 0.0,
    draft_params: Annotated[float, typer.Option(help="parameters of the draft model; 0: a free look-up")] = 0.0,
    bandwidth: Annotated[float, typer.Option(help="memory bandwidth of the machine on paper, bytes/s")] = 0.0,
    flops: Annotated[float, typer.Option(help="its FLOP/s")] = 0.0,
    alpha: Annotated[float | None, typer.Option(help="acceptance per token, independent of position")] = None,
    stats: Annotated[Path | None, typer.Option(help="or the statistics in the --json of compare")] = None,
    length: Annotated[list[int], typer.Option(min=1, help="draft length; may be given several times")] = [],  # noqa: B006
    batch: Annotated[list[int], typer.Option(min=1, help="rows decoded together; several times")] = [],  # noqa: B006
    seconds: Annotated[float, typer.Option(help="time for measuring")] = 20.0,
    save_costs: Annotated[Path | None, typer.Option(help="write the costs to this file")] = None,
    json_file: Json = None,
) -> None:
    """Predict the speed-up over draft length and batch, the best length, and where speculation stops paying."""
    acceptance = _acceptance(alpha, stats)
    if sum([target is not None, costs_file is not None, target_params != 0]) != 1:
        raise UsageError("costs come from --target, --costs or --target-params; allowed: exactly one of them")
    if target_params == 0 and (draft_params or bandwidth or flops):
        raise UsageError("--draft-params, --bandwidth and --flops belong to --target-params; allowed: together with it")
    if target is not None:
        costs = _measure(target, draft, config, batch or [1, 4], max(length, default=8), seconds)
    else:
        if draft is not None or config != DecoderConfig():
            raise UsageError("--draft and the decoder's flags belong to --target; allowed: together with it")
        costs = Costs.read(costs_file) if costs_file else _paper(target_params, draft_params, bandwidth, flops)
    if save_costs is not None:
        costs.save(save_costs)
    simulation = simulate(costs, acceptance, length or None, batch or None)
    write_json(json_file, print_simulation(out, costs, acceptance, simulation))


def _measure(
    target: str, draft: str | None, config: DecoderConfig, batches: list[int], longest: int, seconds: float
) -> Costs:
    for name in ("num_draft_tokens", "acceptance"):
        if getattr(config, name) != "auto":
            raise UsageError(f"{name}={getattr(config, name)!r}; allowed: 'auto', costs are measured for all --length")
    decoder = SpeculativeDecoder(target, draft, **vars(config))
    err.print("measuring ...")
    return measure_costs(decoder, batches, range(1, longest + 2), seconds=seconds)


def _paper(target_params: float, draft_params: float, bandwidth: float, flops: float) -> Costs:
    return paper_costs(target_params, draft_params, Machine(memory_bandwidth=bandwidth, flops=flops))


def _acceptance(alpha: float | None, stats: Path | None) -> Acceptance | float:
    """From --alpha, or from the `stats` of a JSON file: of `compare --json`, or those of `Stats.to_dict()` alone."""
    if (alpha is None) == (stats is None):
        raise UsageError("the acceptance comes from --alpha or from --stats; allowed: exactly one of them")
    if stats is None:
        assert alpha is not None
        return Acceptance.constant(alpha)
    try:
        values = json.loads(stats.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"--stats {str(stats)!r} cannot be read: {error}") from error
    inner = values.get("summary", values) if isinstance(values, dict) else None
    found = inner.get("stats", inner) if isinstance(inner, dict) else None
    if not isinstance(found, dict):
        raise UsageError(f"--stats {str(stats)!r} holds no statistics; allowed: what compare --json writes")
    return Acceptance.from_stats(found)
