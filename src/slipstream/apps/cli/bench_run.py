"""A benchmark as it is run: measured, continued where it stopped, summarised, printed and written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from slipstream.apps.cli.application import err, load_decoder, out, warn_lossy, write_json
from slipstream.apps.cli.bench import BenchRequest
from slipstream.apps.cli.measuring import interruptible, watched
from slipstream.apps.cli.report import target_tokenizer
from slipstream.apps.cli.tables import print_simulation
from slipstream.bench.arms import Arm, parse_arms, reference_of
from slipstream.bench.lineup import Lineup, Runner
from slipstream.bench.llama_cpp import require_llama
from slipstream.bench.plan import BenchPrompt, Measurement, name_prompts, plan
from slipstream.bench.predictions import ArmSimulation, SavedCosts, read_saved, simulate_arms, simulated_batches
from slipstream.bench.records import FILE, Header, Run, finished, make_header, open_folder
from slipstream.bench.report import require_matplotlib, write_report
from slipstream.bench.summary import ArmSummary, summarise, wrong_texts
from slipstream.bench.summary_tables import tables
from slipstream.errors import SlipstreamError, UsageError


def run(request: BenchRequest, json_file: Path | None) -> None:
    """Measure, print, write; fail if a text is wrong or an arm failed."""
    options = request.options
    if options.report:
        require_matplotlib()
    arms, prompts = parse_arms(request.arms), name_prompts(request.prompts)
    require_llama(arms, request.models.target)
    _check_predictions(arms, prompts)
    base = reference_of(arms, options.reference)
    planned = plan(arms, prompts, request.batches, options.repeats, options.at_once)
    header = _header(request, arms, base)
    folder = options.out_folder or Path(f"bench-{datetime.now():%Y%m%d-%H%M%S}")
    before = open_folder(folder, header)
    wanted = _Wanted(folder, planned, base, options.predict, options.simulate)
    with interruptible(folder):
        found = wanted.from_folder(before)
        if found is None:
            decoder = load_decoder(request.models, request.config)
            lineup = Lineup(decoder, arms, request.params, chat=not options.raw)
            _announce_lossy(lineup)
            found = wanted.measured(lineup, before)
    for table in tables(found.summaries, base):
        out.print(table)
    simulations = _print_simulations(found) if options.simulate else []
    if options.report:
        page = write_report(folder, target_tokenizer(header))
        err.print(f"report: {page}", soft_wrap=True)
    err.print(f"raw runs: {folder / FILE}", soft_wrap=True)
    simulated = {"simulations": {one.arm: one.to_dict() for one in simulations}} if options.simulate else {}
    write_json(json_file, asdict(header) | {"summary": [one.to_dict() for one in found.summaries]} | simulated)
    _fail_on_wrong_or_failed(found.summaries)


def _header(request: BenchRequest, arms: list[Arm], reference: str) -> Header:
    options, models = request.options, {"target": request.models.target, "draft": request.models.draft}
    settings = {"reference": reference, "batch_sizes": request.batches, "repeats": options.repeats}
    settings |= {"chat": not options.raw} | ({} if options.at_once is None else {"at_once": options.at_once})
    return make_header(models, arms, name_prompts(request.prompts), request.config, request.params, **settings)


@dataclass(frozen=True)
class _Found:
    """What the tables are made from. kept: the costs saved in the folder, None where nothing was predicted."""

    summaries: list[ArmSummary]
    kept: SavedCosts | None


@dataclass(frozen=True)
class _Wanted:
    """What a folder is to hold. predict: seconds per drafter to measure costs, 0 for none."""

    folder: Path
    planned: list[Measurement]
    reference: str
    predict: float
    simulate: bool

    def from_folder(self, before: Sequence[Run]) -> _Found | None:
        """All of it from the folder, or None if anything is missing."""
        kept = read_saved(self.folder) if self.predict else None
        if not finished(before) >= {one.key for one in self.planned}:
            return None
        if self.predict and (kept is None or not kept.answers(self.predict, self.simulate)):
            return None
        err.print(f"all {len(before)} measurements are there already")
        summaries = summarise(before, self.reference)
        return _Found(kept.beside(summaries) if kept else summaries, kept)

    def measured(self, lineup: Lineup, before: Sequence[Run]) -> _Found:
        """Measure what is missing and write it into the folder."""
        runs = Runner(lineup, self.planned, self.folder).run(before)
        summaries = summarise([*before, *watched(runs, self.planned, before)], self.reference)
        if not self.predict:
            return _Found(summaries, None)
        from slipstream.bench.predictions import measured_costs, with_predictions

        batches = simulated_batches(lineup.decoder.config.max_batch_size) if self.simulate else []
        costs = measured_costs(summaries, lineup, self.predict, batches)
        summaries = with_predictions(summaries, lineup, costs)
        kept = SavedCosts.of(summaries, costs, self.predict, self.simulate)
        kept.save(self.folder)
        return _Found(summaries, kept)


def _check_predictions(arms: Sequence[Arm], prompts: Sequence[BenchPrompt]) -> None:
    """Refuse arms that are given predictions where no prompt has one."""
    given = next((arm.name for arm in arms if arm.predicted), None)
    if given is not None and all(prompt.prediction is None for prompt in prompts):
        raise UsageError(
            f"arm {given!r}, but no prompt has a prediction; allowed: a .jsonl file in which some have one"
        )


def _announce_lossy(lineup: Lineup) -> None:
    for arm in lineup.arms:
        if arm.acceptance is not None and not lineup.decoders[arm.name].lossless:
            warn_lossy(arm.acceptance)


def _print_simulations(found: _Found) -> list[ArmSimulation]:
    simulations = simulate_arms(found.summaries, found.kept.costs) if found.kept else []
    for one in simulations:
        out.print(f"\nsimulation of {one.arm}, from what it accepted in this run")
        print_simulation(out, one.costs, one.acceptance, one.simulation)
    return simulations


def _fail_on_wrong_or_failed(summaries: Sequence[ArmSummary]) -> None:
    for one in wrong_texts(summaries):
        raise SlipstreamError(
            f"arm {one.arm}, batch {one.batch}: {one.verdicts['different']} of {sum(one.verdicts.values())} texts "
            "differ from plain decoding and are no ties"
        )
    for one in summaries:
        if one.failed:
            raise SlipstreamError(f"arm {one.arm}, batch {one.batch}: {one.failed} of its runs failed: {one.error}")
