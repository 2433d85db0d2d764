"""`slipstream simulate`: predicted speed-up by draft length and batch size, from measured costs or from a roofline."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from slipstream.apps.cli.application import command, load_decoder, write_json
from slipstream.apps.cli.consoles import err, out
from slipstream.apps.cli.flags import MODELS, NAMED, Json, Models, draft_flag, flag, flags
from slipstream.checks import read_json
from slipstream.config import DecoderConfig
from slipstream.errors import UsageError

if TYPE_CHECKING:
    from slipstream.bench.speed_formula import Accepted

PAPER, GRID = "Costs on paper", "What is predicted"


@dataclass(frozen=True)
class Measured:
    """A pair of models whose costs are measured."""

    target: str | None = flag(None, MODELS, f"predict for this target: {NAMED}", "MODEL", names="-m --target --model")
    draft: str | None = draft_flag()


def read_size(text: str | float) -> float:
    """A number with an optional suffix k, m, b or g (1e9), or t, for example 8b."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)([kmbgt]?)", str(text).strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r}; allowed: a number, 0 or more, which may end in k, m, b, g or t")
    return float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}[match[2]]


@dataclass(frozen=True)
class OnPaper:
    """A pair of models and a machine, described by numbers."""

    target_params: float = flag(0.0, PAPER, "parameters of the target, e.g. 8b or 8e9", "NUMBER", parser=read_size)
    draft_params: float = flag(
        0.0, PAPER, "parameters of the draft model; 0: drafts cost nothing", "NUMBER", parser=read_size
    )
    bandwidth: float = flag(
        0.0, PAPER, "memory bandwidth of the machine in bytes/s, e.g. 100g", "NUMBER", parser=read_size
    )
    flops: float = flag(0.0, PAPER, "its FLOP/s, e.g. 10t", "NUMBER", parser=read_size)


@dataclass(frozen=True)
class Grid:
    """The predicted lengths and batch sizes, and the acceptance they are based on."""

    alpha: float | None = flag(None, GRID, "acceptance per token, independent of position", "NUMBER", min=0, max=1)
    stats: Path | None = flag(None, GRID, "or the acceptance of a run: bench's folder, or compare's --json file", "RUN")
    arm: str | None = flag(None, GRID, "the arm in that folder, if several draft", "ARM")
    length: list[int] = flag((), GRID, "draft length; may be given several times; default: 1 to 8", "N", min=1)
    batch: list[int] = flag((), GRID, "rows decoded together; may be given several times", "N", min=1)


EXAMPLE = OnPaper(target_params=8e9, draft_params=5e8, bandwidth=1e12, flops=1e14)
EXAMPLE_ALPHA = 0.7
USUAL_LENGTHS = range(1, 9)


@command(
    "simulate",
    "slipstream simulate --target-params 8b --draft-params 0.6b --bandwidth 1e12 --flops 1e14",
    "slipstream simulate --model smollm2 --alpha 0.8",
    "slipstream simulate --model smollm2 --stats runs/today",
)
@flags(Measured, OnPaper, Grid, DecoderConfig)
def simulate_command(
    config: DecoderConfig, measured: Measured, paper: OnPaper, grid: Grid, json_file: Json = None
) -> None:
    """Predict the speed-up of a pair of models before trying it.

    Prints the best length, and where speculation stops paying off. Without options: an example on paper.
    """
    if grid.alpha is not None and grid.stats is not None:
        raise UsageError("the acceptance comes from --alpha or from --stats; allowed: one of them")
    if grid.arm is not None and (grid.stats is None or not grid.stats.is_dir()):
        raise UsageError(f"--arm {grid.arm} names an arm of a benchmark and needs --stats FOLDER")
    is_example = measured == Measured() and paper == OnPaper()
    if is_example:
        paper = EXAMPLE
    _refuse_two_sources(config, measured, paper)
    from slipstream.apps.cli.tables import simulation_table
    from slipstream.bench.speed_formula import independent, roofline, simulate, table_of
    from slipstream.draft_length.costs import STEP

    alpha = EXAMPLE_ALPHA if grid.alpha is None else grid.alpha
    accepted = independent(alpha) if grid.stats is None else _recorded(grid.stats, grid.arm)
    if measured.target is None:
        costs = roofline(paper.target_params, paper.draft_params, paper.bandwidth, paper.flops)
    else:
        costs = load_decoder(Models(measured.target, measured.draft), config).costs
    lengths = grid.length or [n for n in USUAL_LENGTHS if n <= len(accepted)]
    batches = grid.batch or [1 << n for n in range(costs.max_batch_size.bit_length())]
    simulation = simulate(costs, accepted, lengths, batches)
    if not costs.steps:
        err.sentence(f"assumed: drafting a token takes {STEP:.0%} of a forward of the target")
    if is_example:
        err.sentence(
            "EXAMPLE, nothing is measured: an 8B target and a 0.5B draft model in bf16 at 1 TB/s and 100 TFLOP/s; your "
            "own: --model MODEL, or --target-params and the like"
        )
    if grid.alpha is None and grid.stats is None:
        err.sentence(f"assumed: {EXAMPLE_ALPHA:.0%} of tested tokens are accepted; measured: --stats RUN")
    out.print(simulation_table(simulation))
    for line in simulation.conclusions:
        out.sentence(line)
    acceptance = alpha if grid.stats is None else accepted
    write_json(json_file, {"costs": table_of(costs), "acceptance": acceptance, "simulation": vars(simulation)})


def _refuse_two_sources(config: DecoderConfig, measured: Measured, paper: OnPaper) -> None:
    if (measured.target is None) == (paper.target_params == 0):
        raise UsageError("costs come from --model or from --target-params; allowed: one of them")
    if paper.target_params == 0 and paper != OnPaper():
        raise UsageError("--draft-params, --bandwidth and --flops need --target-params")
    if measured.target is None and (measured.draft is not None or config != DecoderConfig()):
        raise UsageError("--draft and the decoder's flags need --model")
    for name in ("num_draft_tokens", "acceptance"):
        if getattr(config, name) != "auto":
            raise UsageError(f"{name}={getattr(config, name)!r}; allowed: 'auto', as every --length is predicted")
    for name in ("bandwidth", "flops"):
        if paper.target_params != 0 and getattr(paper, name) == 0:
            raise UsageError(f"--target-params without --{name}; allowed: with --bandwidth NUMBER and --flops NUMBER")


def _recorded(path: Path, arm: str | None) -> Accepted:
    """The acceptance of an arm in a benchmark's folder, or in a JSON file of `compare` or of `Stats`."""
    from slipstream.bench.speed_formula import recorded
    from slipstream.bench.summary import total_stats

    if path.is_dir():
        return recorded(total_stats(_stats_of_arm(path, arm)))
    values = read_json("--stats", path)
    inner = values.get("summary", values) if isinstance(values, dict) else None
    stats = inner.get("stats", inner) if isinstance(inner, dict) else None
    try:
        return recorded(total_stats([stats]))  # type: ignore[list-item]
    except (AttributeError, TypeError, KeyError) as error:
        raise UsageError(
            f"--stats {str(path)!r} holds no statistics; allowed: what compare --json writes, or a folder"
        ) from error


def _stats_of_arm(folder: Path, name: str | None) -> list[dict[str, Any]]:
    """Statistics of each run of the arm; name None: the only arm that drafts."""
    from slipstream.bench.records import read_records

    by_arm: dict[str, list[dict[str, Any]]] = {}
    for run in read_records(folder)[1]:
        if run.stats is not None and run.stats["num_draft_tokens"]:
            by_arm.setdefault(run.arm, []).append(run.stats)
    if not by_arm:
        raise UsageError(f"--stats {str(folder)!r} has no arm that drafts; allowed: a folder in which one does")
    if name is None and len(by_arm) > 1:
        arms = " or ".join(by_arm)
        raise UsageError(f"--stats {str(folder)!r} has {len(by_arm)} arms that draft; allowed: --arm {arms}")
    name = name or next(iter(by_arm))
    if name not in by_arm:
        raise UsageError(f"--arm {name!r} drafted nothing in {str(folder)!r}; allowed: {', '.join(by_arm)}")
    return by_arm[name]
