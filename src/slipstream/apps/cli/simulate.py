"""`slipstream simulate`: predicted speed-up over draft length and batch, from costs measured or computed on paper."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from slipstream.apps.cli.application import command, err, out, quiet_libraries, write_json
from slipstream.apps.cli.flags import MEASURING, MODELS, NAMED, OUTPUT, DraftModel, Json, flags, option
from slipstream.apps.cli.output_files import check_file
from slipstream.config import DecoderConfig
from slipstream.errors import UsageError

if TYPE_CHECKING:
    from slipstream.bench.speed_model.accepted_lengths import Acceptance
    from slipstream.bench.speed_model.round_costs import Costs

PAPER, GRID = "Costs on paper", "What is predicted"


@dataclass(frozen=True)
class Measured:
    """A target whose costs are measured."""

    target: Annotated[
        str | None, option(MODELS, "--target", text=f"measure the costs of it: {NAMED}", metavar="MODEL")
    ] = None
    draft: DraftModel = None
    seconds: Annotated[float, option(MEASURING, "--seconds", text="time for measuring", metavar="SECONDS")] = 20.0
    costs_file: Annotated[
        Path | None, option(MEASURING, "--costs", text="or take the costs of this file", metavar="FILE")
    ] = None


@dataclass(frozen=True)
class OnPaper:
    """A pair of models and a machine, by their numbers."""

    target_params: Annotated[
        float, option(PAPER, "--target-params", text="parameters of the target, as 8e9", metavar="NUMBER")
    ] = 0.0
    draft_params: Annotated[
        float,
        option(PAPER, "--draft-params", text="parameters of the draft model; 0: drafts cost nothing", metavar="NUMBER"),
    ] = 0.0
    bandwidth: Annotated[
        float, option(PAPER, "--bandwidth", text="memory bandwidth of the machine, bytes/s", metavar="NUMBER")
    ] = 0.0
    flops: Annotated[float, option(PAPER, "--flops", text="its FLOP/s", metavar="NUMBER")] = 0.0

    @property
    def given(self) -> bool:
        """Whether any of the numbers is."""
        return self != OnPaper()


@dataclass(frozen=True)
class Grid:
    """What is predicted, and from which acceptance."""

    alpha: Annotated[
        float | None,
        option(GRID, "--alpha", text="acceptance per token, independent of position", metavar="NUMBER"),
    ] = None
    sibling_alpha: Annotated[
        list[float],
        option(
            GRID,
            "--sibling-alpha",
            text="draft trees: beside each draft token another, accepted in its place this often; again for a third",
            metavar="NUMBER",
        ),
    ] = ()  # type: ignore[assignment]
    stats: Annotated[
        Path | None, option(GRID, "--stats", text="or the statistics in the --json of compare", metavar="FILE")
    ] = None
    length: Annotated[
        list[int],
        option(GRID, "--length", text="draft length, of trees their depth; several times", metavar="N", min=1),
    ] = ()  # type: ignore[assignment]
    batch: Annotated[
        list[int], option(GRID, "--batch", text="rows decoded together; several times", metavar="N", min=1)
    ] = ()  # type: ignore[assignment]


EXAMPLE = OnPaper(target_params=8e9, draft_params=5e8, bandwidth=1e12, flops=1e14)
EXAMPLE_ALPHA = 0.7
TREE_DEPTH = 4  # trees are measured down to this where no --length is given


@command("simulate")
@flags(Measured, OnPaper, Grid, DecoderConfig)
def simulate_command(
    config: DecoderConfig,
    measured: Measured,
    paper: OnPaper,
    grid: Grid,
    save_costs: Annotated[
        Path | None,
        option(
            OUTPUT,
            "--save-costs",
            text="write the costs to this file",
            metavar="FILE",
            callback=check_file("--save-costs"),
        ),
    ] = None,
    json_file: Json = None,
) -> None:
    """Predict the speed-up over draft length and batch, before anything is built.

    Says the best length, and where speculation stops paying. Without options: an example on paper.
    """
    acceptance = _acceptance(grid)
    if not paper.given and measured == Measured():
        paper = EXAMPLE
        err.print("costs: an 8B target and a 0.5B draft model in bf16 at 1 TB/s and 100 TFLOP/s; others: --target T")
    _refuse_two_sources(config, measured, paper)
    costs = _costs(config, measured, paper, grid)
    if save_costs is not None:
        costs.save(save_costs)
    from slipstream.apps.cli.tables import print_simulation
    from slipstream.bench.speed_model.formula import simulate

    simulation = simulate(costs, acceptance, grid.length or None, grid.batch or None)
    write_json(json_file, print_simulation(out, costs, acceptance, simulation))


def _refuse_two_sources(config: DecoderConfig, measured: Measured, paper: OnPaper) -> None:
    if sum([measured.target is not None, measured.costs_file is not None, paper.target_params != 0]) != 1:
        raise UsageError("costs come from --target, --costs or --target-params; allowed: exactly one of them")
    if paper.target_params == 0 and paper.given:
        raise UsageError("--draft-params, --bandwidth and --flops belong to --target-params; allowed: together with it")
    if measured.target is None and (measured.draft is not None or config != DecoderConfig()):
        raise UsageError("--draft and the decoder's flags belong to --target; allowed: together with it")
    if measured.target is None and measured.seconds != Measured().seconds:
        raise UsageError("--seconds is the time for measuring a --target; allowed: together with it")
    for name in ("num_draft_tokens", "acceptance"):
        if getattr(config, name) != "auto":
            raise UsageError(f"{name}={getattr(config, name)!r}; allowed: 'auto', costs are measured for all --length")


def _costs(config: DecoderConfig, measured: Measured, paper: OnPaper, grid: Grid) -> Costs:
    from slipstream.bench.speed_model.round_costs import Costs, Machine, paper_costs

    if measured.costs_file is not None:
        return Costs.read(measured.costs_file)
    if measured.target is None:
        machine = Machine(memory_bandwidth=paper.bandwidth, flops=paper.flops)
        return paper_costs(paper.target_params, paper.draft_params, machine)
    quiet_libraries()
    from slipstream.bench.speed_model.probe import measure_costs
    from slipstream.decoder import SpeculativeDecoder

    if grid.sibling_alpha:
        deepest = max(grid.length, default=TREE_DEPTH)
        config = replace(config, num_draft_tokens=f"{deepest}x{1 + len(grid.sibling_alpha)}")
    decoder = SpeculativeDecoder(measured.target, measured.draft, **vars(config))
    err.print(f"measuring for {measured.seconds:g} s ...")
    lengths = range(1, max(grid.length, default=TREE_DEPTH if grid.sibling_alpha else 8) + 2)
    return measure_costs(decoder, grid.batch or [1, 4], lengths, seconds=measured.seconds)


def _acceptance(grid: Grid) -> Acceptance | float:
    """From --alpha, or from the `stats` of a JSON file: of `compare --json`, or those of `Stats.to_dict()` alone."""
    if grid.alpha is not None and grid.stats is not None:
        raise UsageError("the acceptance comes from --alpha or from --stats; allowed: one of them")
    if grid.stats is not None and grid.sibling_alpha:
        raise UsageError("--sibling-alpha beside --stats, which are of chains; allowed: together with --alpha")
    from slipstream.bench.speed_model.accepted_lengths import Acceptance

    if grid.stats is None:
        if grid.alpha is None:
            err.print(f"acceptance: {EXAMPLE_ALPHA:g} per token is assumed; measured: --stats FILE of `compare --json`")
        alpha = EXAMPLE_ALPHA if grid.alpha is None else grid.alpha
        return Acceptance.constant(alpha, siblings=grid.sibling_alpha)
    try:
        values = json.loads(grid.stats.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"--stats {str(grid.stats)!r} cannot be read: {error}") from error
    inner = values.get("summary", values) if isinstance(values, dict) else None
    found = inner.get("stats", inner) if isinstance(inner, dict) else None
    if not isinstance(found, dict):
        raise UsageError(f"--stats {str(grid.stats)!r} holds no statistics; allowed: what compare --json writes")
    return Acceptance.from_stats(found)
