"""`slipstream simulate`: predicted speed-up over draft length and batch, from costs measured or computed on paper."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.apps.cli.application import command, quiet_libraries, write_json
from slipstream.apps.cli.consoles import err, out
from slipstream.apps.cli.flags import MEASURING, MODELS, NAMED, OUTPUT, DraftModel, Json, flags, option
from slipstream.apps.cli.output_files import check_file
from slipstream.checks import read_json
from slipstream.config import DecoderConfig
from slipstream.errors import UsageError

if TYPE_CHECKING:
    from slipstream.bench.arms import Arm
    from slipstream.bench.speed_model.accepted_lengths import Acceptance
    from slipstream.bench.speed_model.round_costs import Costs

PAPER, GRID = "Costs on paper", "What is predicted"


@dataclass(frozen=True)
class Measured:
    """A pair of models whose costs are measured, or a file of costs that were measured before."""

    target: Annotated[
        str | None,
        option(MODELS, "-m", "--target", "--model", text=f"measure the costs of this target: {NAMED}", metavar="MODEL"),
    ] = None
    draft: DraftModel = None
    seconds: Annotated[float, option(MEASURING, "--seconds", text="time for measuring", metavar="SECONDS")] = 20.0
    costs_file: Annotated[
        Path | None, option(MEASURING, "--costs", text="read the costs from this file instead", metavar="FILE")
    ] = None


def read_size(text: str | float) -> float:
    """A number that may end in k, m, b or g (1e9), or t, as in 8b."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)([kmbgt]?)", str(text).strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r}; allowed: a number, which may end in k, m, b, g or t")
    return float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}[match[2]]


def _size(name: str, text: str) -> Any:
    return option(PAPER, name, text=text, metavar="NUMBER", parser=read_size)


@dataclass(frozen=True)
class OnPaper:
    """A pair of models and a machine, by their numbers."""

    target_params: Annotated[float, _size("--target-params", "parameters of the target, as 8b or 8e9")] = 0.0
    draft_params: Annotated[float, _size("--draft-params", "parameters of the draft model; 0: drafts cost nothing")] = (
        0.0
    )
    bandwidth: Annotated[float, _size("--bandwidth", "memory bandwidth of the machine in bytes/s, as 100g")] = 0.0
    flops: Annotated[float, _size("--flops", "its FLOP/s, as 10t")] = 0.0

    @property
    def is_given(self) -> bool:
        """Whether any of these numbers is given."""
        return self != OnPaper()


@dataclass(frozen=True)
class Grid:
    """What is predicted, and from which acceptance."""

    alpha: Annotated[
        float | None,
        option(GRID, "--alpha", text="acceptance per token, independent of position", metavar="NUMBER", min=0, max=1),
    ] = None
    stats: Annotated[
        Path | None,
        option(
            GRID, "--stats", text="or the acceptance of a run: a folder of bench, or --json of compare", metavar="RUN"
        ),
    ] = None
    arm: Annotated[
        str | None, option(GRID, "--arm", text="the arm in that folder, if several draft", metavar="ARM")
    ] = None
    length: Annotated[
        list[int],
        option(GRID, "--length", text="draft length; several times", metavar="N", min=1),
    ] = ()  # type: ignore[assignment]
    batch: Annotated[
        list[int], option(GRID, "--batch", text="rows decoded together; several times", metavar="N", min=1)
    ] = ()  # type: ignore[assignment]


@dataclass(frozen=True)
class RecordedArm:
    """An arm's acceptance in a run.

    arm: None if the run was no benchmark. stats, plain: by batch size, the statistics of the arm and of plain decoding
    in that run, as `Stats.to_dict()`.
    """

    acceptance: Acceptance
    arm: Arm | None = None
    stats: dict[int, dict[str, Any]] = field(default_factory=dict)
    plain: dict[int, dict[str, Any]] = field(default_factory=dict)


EXAMPLE = OnPaper(target_params=8e9, draft_params=5e8, bandwidth=1e12, flops=1e14)
EXAMPLE_ALPHA = 0.7


@command(
    "simulate",
    "slipstream simulate --target-params 8b --draft-params 0.6b --bandwidth 1e12 --flops 1e14",
    "slipstream simulate --model smollm2 --alpha 0.8",
    "slipstream simulate --model smollm2 --stats runs/today",
)
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
    """Predict the speed-up of a pair of models before trying it.

    Prints the best length, and where speculation stops paying. Without options: an example on paper.
    """
    _refuse_two_acceptances(grid)
    is_example = not paper.is_given and measured == Measured()
    if is_example:
        paper = EXAMPLE
    _refuse_two_sources(config, measured, paper)
    recorded = None if grid.stats is None else _recorded_arm(grid.stats, grid.arm)
    acceptance = (EXAMPLE_ALPHA if grid.alpha is None else grid.alpha) if recorded is None else recorded.acceptance
    costs = _costs(config, measured, paper, grid, recorded)
    if save_costs is not None:
        costs.save(save_costs)
    from slipstream.apps.cli.tables import print_simulation
    from slipstream.bench.speed_model.formula import simulate

    simulation = simulate(costs, acceptance, grid.length or None, grid.batch or None)
    if is_example:
        err.sentence(
            "EXAMPLE, nothing is measured: an 8B target and a 0.5B draft model in bf16 at 1 TB/s and 100 TFLOP/s; your "
            "own: --model MODEL, or --target-params and the like"
        )
    if grid.alpha is None and recorded is None:
        err.sentence(f"assumed: {EXAMPLE_ALPHA:.0%} of tested tokens are accepted; measured: --stats RUN")
    result = print_simulation(out, costs, acceptance, simulation)
    if recorded is not None and recorded.arm is not None:
        result["observed"] = _print_observed(costs, recorded)
    write_json(json_file, result)


def _refuse_two_sources(config: DecoderConfig, measured: Measured, paper: OnPaper) -> None:
    if sum([measured.target is not None, measured.costs_file is not None, paper.target_params != 0]) != 1:
        raise UsageError("costs come from --target, --costs or --target-params; allowed: exactly one of them")
    if paper.target_params == 0 and paper.is_given:
        raise UsageError("--draft-params, --bandwidth and --flops belong to --target-params; allowed: together with it")
    if measured.target is None and (measured.draft is not None or config != DecoderConfig()):
        raise UsageError("--draft and the decoder's flags belong to --target; allowed: together with it")
    if measured.target is None and measured.seconds != Measured().seconds:
        raise UsageError("--seconds is the time for measuring a --target; allowed: together with it")
    for name in ("num_draft_tokens", "acceptance"):
        if getattr(config, name) != "auto":
            raise UsageError(f"{name}={getattr(config, name)!r}; allowed: 'auto', costs are measured for all --length")
    for name in ("bandwidth", "flops"):
        if paper.target_params != 0 and getattr(paper, name) == 0:
            raise UsageError(f"--target-params without --{name}; allowed: with --bandwidth NUMBER and --flops NUMBER")


def _costs(
    config: DecoderConfig, measured: Measured, paper: OnPaper, grid: Grid, recorded: RecordedArm | None
) -> Costs:
    from slipstream.bench.speed_model.round_costs import Costs, Machine, paper_costs

    if measured.costs_file is not None:
        return Costs.read(measured.costs_file)
    if measured.target is None:
        machine = Machine(memory_bandwidth=paper.bandwidth, flops=paper.flops)
        return paper_costs(paper.target_params, paper.draft_params, machine)
    quiet_libraries()
    from slipstream.bench.speed_model.probe import measure_costs
    from slipstream.decoder import SpeculativeDecoder

    if recorded is not None and recorded.arm is not None and config.drafter == "auto":
        config = replace(config, drafter=recorded.arm.drafter or "auto")
    chains = replace(config, num_draft_tokens="chain")  # trees are not predicted
    decoder = SpeculativeDecoder(measured.target, measured.draft, **vars(chains))
    err.print(f"measuring for {measured.seconds:g} s ...")
    usual = 8 if recorded is None else max(1, recorded.acceptance.longest)
    batches = grid.batch or sorted({1, 4, *(recorded.stats if recorded else ())})
    lengths = range(1, max(grid.length, default=usual) + 2)
    return measure_costs(decoder, batches, lengths, seconds=measured.seconds)


def _refuse_two_acceptances(grid: Grid) -> None:
    if grid.alpha is not None and grid.stats is not None:
        raise UsageError("the acceptance comes from --alpha or from --stats; allowed: one of them")
    if grid.arm is not None and (grid.stats is None or not grid.stats.is_dir()):
        raise UsageError(f"--arm {grid.arm} names an arm of a benchmark; allowed: together with --stats FOLDER")


def _recorded_arm(path: Path, arm: str | None) -> RecordedArm:
    """The arm in the folder of a benchmark, or in a JSON file of `compare --json` or of `Stats.to_dict()`."""
    from slipstream.bench.speed_model.accepted_lengths import Acceptance

    if path.is_dir():
        return _arm_of_folder(path, arm)
    values = read_json("--stats", path)
    inner = values.get("summary", values) if isinstance(values, dict) else None
    stats = inner.get("stats", inner) if isinstance(inner, dict) else None
    if not isinstance(stats, dict):
        raise UsageError(f"--stats {str(path)!r} holds no statistics; allowed: what compare --json writes, or a folder")
    return RecordedArm(Acceptance.from_stats(stats))


def _arm_of_folder(folder: Path, name: str | None) -> RecordedArm:
    """The arm called `name` in the folder of a benchmark; None: the only one that drafts."""
    from slipstream.bench.arms import PLAIN, parse_arm
    from slipstream.bench.records import read_records
    from slipstream.bench.speed_model.accepted_lengths import Acceptance
    from slipstream.bench.summary import summarise, total_stats

    _, runs = read_records(folder)
    summaries = summarise(runs, PLAIN)
    names = list(dict.fromkeys(s.arm for s in summaries if s.stats is not None and s.stats.num_draft_tokens))
    if not names:
        raise UsageError(f"--stats {str(folder)!r} has no arm that drafts; allowed: a folder in which one does")
    if name is None and len(names) > 1:
        raise UsageError(
            f"--stats {str(folder)!r} has {len(names)} arms that draft; allowed: --arm {' or '.join(names)}"
        )
    name = name or names[0]
    if name not in names:
        raise UsageError(f"--arm {name!r} drafted nothing in {str(folder)!r}; allowed: {', '.join(names)}")
    arm = parse_arm(name)

    def is_plain(other: Arm) -> bool:
        return other.drafter == PLAIN and (other.fast, other.temperature) == (arm.fast, arm.temperature)

    stats = {s.batch: s.stats.to_dict() for s in summaries if s.arm == name and s.stats}
    plain = {s.batch: s.stats.to_dict() for s in summaries if s.stats and is_plain(parse_arm(s.arm))}
    return RecordedArm(Acceptance.from_stats(total_stats(list(stats.values())).to_dict()), arm, stats, plain)


def _print_observed(costs: Costs, recorded: RecordedArm) -> dict[int, dict[str, float]]:
    """Print the run's speed-up beside the one predicted from its rounds, for the batch sizes that the costs cover."""
    from slipstream.bench.speed_model.formula import predict_from_stats

    observed = {}
    for batch, stats in recorded.stats.items():
        if batch not in recorded.plain:
            continue
        try:
            prediction = predict_from_stats(stats, costs, plain=recorded.plain[batch])
        except UsageError as error:
            err.sentence(f"batch {batch}: no prediction for this run: {error}")
            continue
        out.sentence(
            f"batch {batch}: this run was {prediction.observed:.2f}x plain decoding, "
            f"{prediction.predicted:.2f}x is predicted from its rounds"
        )
        observed[batch] = prediction.to_dict()
    return observed
