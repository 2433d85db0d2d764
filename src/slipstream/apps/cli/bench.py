"""`slipstream bench`: arms in turn on the same prompts, texts compared, every round kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from slipstream.apps.cli import tables as show
from slipstream.apps.cli.common import (
    Category,
    ConfigFile,
    DraftModel,
    Json,
    Limit,
    PromptFile,
    Raw,
    Target,
    app,
    config_from,
    err,
    load_decoder,
    out,
    prompt_set,
    write_json,
)
from slipstream.apps.cli.flags import flags
from slipstream.apps.cli.plan_file import Plan
from slipstream.apps.cli.progress import interruptible, read_batch_sizes, watched
from slipstream.apps.cli.report import target_tokenizer
from slipstream.apps.cli.simulate import print_simulation
from slipstream.bench.arms import PLAIN, SYNTAX, parse_arms, reference_of
from slipstream.bench.lineup import Lineup
from slipstream.bench.plan import Measurement, name_prompts, plan
from slipstream.bench.records import FILE, Run, finished
from slipstream.bench.report import require_matplotlib, write_report
from slipstream.bench.run_header import make_header, open_folder
from slipstream.bench.runner import Runner
from slipstream.bench.saved_costs import Kept, read_kept
from slipstream.bench.simulated_arms import ArmSimulation, simulate_arms, simulated_batches
from slipstream.bench.summary import ArmSummary, summarise, wrong_texts
from slipstream.bench.summary_tables import tables
from slipstream.config import DecoderConfig
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.hf.model_files import EMBEDDED
from slipstream.sampling.params import SamplingParams


@app.command()
@flags(DecoderConfig, SamplingParams, max_tokens=64)
def bench(
    config: DecoderConfig,
    params: SamplingParams,
    plan_file: Plan = None,
    target: Target = EMBEDDED,
    draft: DraftModel = None,
    arms: Annotated[str | None, typer.Option("--arms", help=f"what to compare, with commas between: {SYNTAX}")] = None,
    reference: Annotated[
        str | None, typer.Option("--reference", help="arm that speed-ups refer to; by default none, else the first")
    ] = None,
    prompt_file: PromptFile = None,
    category: Category = [],  # noqa: B006
    limit: Limit = None,
    raw: Raw = False,
    batch_sizes: Annotated[str, typer.Option("--batch-sizes", help="prompts decoded together, e.g. 1,4")] = "1",
    at_once: Annotated[
        int | None,
        typer.Option("--at-once", help="prompts of one call, where those that finish make room for the next"),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="runs of each arm on each prompt")] = 3,
    predict: Annotated[
        float, typer.Option("--predict", min=0, help="seconds per drafter to measure costs for predictions; 0: none")
    ] = 5.0,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="also predict other draft lengths and batches, as slipstream simulate")
    ] = False,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="folder for runs.jsonl; a folder begun before is gone on with")
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="also write plots and report.html into the folder")] = False,
    config_file: ConfigFile = None,
    json_file: Json = None,
) -> None:
    """Measure arms against each other: medians, intervals, parity, where the time went. Goes on where it was killed.

    Arms take turns on each prompt, then comes the next repeat. --num-draft-tokens and --acceptance hold for arms
    that say nothing else. A finished folder prints its tables again; no model is loaded. Exit code 1 if a lossless
    arm's text differs by more than a tie, or if an arm failed.
    """
    config = config_from(config, config_file)
    if report:
        require_matplotlib()
    if simulate and not predict:
        raise UsageError("--simulate beside --predict 0, which measures no costs; allowed: --predict SECONDS above 0")
    chosen = parse_arms(_arms(arms, config))
    config, params = replace(config, drafter="auto"), replace(params, seed=params.seed or 0)
    prompts = name_prompts(prompt_set(prompt_file, category, limit))
    batches = read_batch_sizes(batch_sizes, config)
    if at_once is not None and batches != [config.max_batch_size]:
        raise UsageError(
            f"--at-once beside batch sizes {batch_sizes}; allowed: max_batch_size ({config.max_batch_size})"
        )
    planned, base = plan(chosen, prompts, batches, repeats, at_once), reference_of(chosen, reference)
    settings = {"reference": base, "batch_sizes": batches, "repeats": repeats, "chat": not raw}
    settings |= {} if at_once is None else {"at_once": at_once}
    header = make_header({"target": target, "draft": draft}, chosen, prompts, config, params, **settings)
    folder = out_folder or Path(f"bench-{datetime.now():%Y%m%d-%H%M%S}")
    before = open_folder(folder, header)
    wanted = _Wanted(folder, planned, base, predict, simulate)
    with interruptible(folder):
        found = wanted.from_folder(before)
        if found is None:
            lineup = Lineup(load_decoder(target, draft, config, None), chosen, params, chat=not raw)
            _announce_lossy(lineup)
            found = wanted.measured(lineup, before)
    for table in tables(found.summaries, base):
        out.print(table)
    simulations = _print_simulations(found) if simulate else []
    if report:
        page = write_report(folder, target_tokenizer(header))
        err.print(f"report: {escape(str(page))}", soft_wrap=True)
    err.print(f"raw runs: {escape(str(folder / FILE))}", soft_wrap=True)
    simulated = {"simulations": {one.arm: one.to_dict() for one in simulations}} if simulate else {}
    write_json(json_file, asdict(header) | {"summary": [one.to_dict() for one in found.summaries]} | simulated)
    _fail_on_wrong_or_failed(found.summaries)


@dataclass(frozen=True)
class _Found:
    """What the tables are made from. kept: None where nothing was predicted."""

    summaries: list[ArmSummary]
    kept: Kept | None


@dataclass(frozen=True)
class _Wanted:
    """What a folder is to hold. predict: seconds per drafter to measure costs, 0 for none."""

    folder: Path
    planned: list[Measurement]
    reference: str
    predict: float
    simulate: bool

    def from_folder(self, before: Sequence[Run]) -> _Found | None:
        """All of it from the folder, if it is there already."""
        kept = read_kept(self.folder) if self.predict else None
        if not finished(before) >= {one.key for one in self.planned}:
            return None
        if self.predict and (kept is None or not kept.answers(self.predict, self.simulate)):
            return None
        err.print(f"all {len(before)} measurements are there already")
        summaries = summarise(before, self.reference)
        return _Found(kept.beside(summaries) if kept else summaries, kept)

    def measured(self, lineup: Lineup, before: Sequence[Run]) -> _Found:
        """What is still missing is measured and left in the folder."""
        runs = Runner(lineup, self.planned, self.folder).run(before)
        summaries = summarise([*before, *watched(runs, self.planned, before)], self.reference)
        if not self.predict:
            return _Found(summaries, None)
        from slipstream.bench.predicted_speed import measured_costs, with_predictions

        batches = simulated_batches(lineup.decoder.config.max_batch_size) if self.simulate else []
        costs = measured_costs(summaries, lineup, self.predict, batches)
        summaries = with_predictions(summaries, lineup, costs)
        kept = Kept.of(summaries, costs, self.predict, self.simulate)
        kept.save(self.folder)
        return _Found(summaries, kept)


def _announce_lossy(lineup: Lineup) -> None:
    for arm in lineup.arms:
        if arm.acceptance is not None and not lineup.decoders[arm.name].lossless:
            show.lossy_warning(err, arm.acceptance)


def _print_simulations(found: _Found) -> list[ArmSimulation]:
    simulations = simulate_arms(found.summaries, found.kept.costs) if found.kept else []
    for one in simulations:
        out.print(f"\nsimulation of {escape(one.arm)}, from what it accepted in this run")
        print_simulation(out, one.costs, one.acceptance, one.simulation)
    return simulations


def _arms(arms: str | None, config: DecoderConfig) -> str:
    if arms is None:
        return f"{PLAIN},{config.drafter}"
    if config.drafter != "auto":
        raise UsageError(f"--drafter {config.drafter} beside --arms, which names the drafters; allowed: one of the two")
    return arms


def _fail_on_wrong_or_failed(summaries: Sequence[ArmSummary]) -> None:
    for one in wrong_texts(summaries):
        raise SlipstreamError(
            f"arm {one.arm}, batch {one.batch}: {one.verdicts['different']} of {sum(one.verdicts.values())} texts "
            "differ from plain decoding and are no ties"
        )
    for one in summaries:
        if one.failed:
            raise SlipstreamError(f"arm {one.arm}, batch {one.batch}: {one.failed} of its runs failed: {one.error}")
