"""A sweep as it is run: measured, continued where it stopped, summarised, printed and written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

from slipstream.apps.cli.application import err, load_decoder, write_json
from slipstream.apps.cli.measuring import interruptible, watched
from slipstream.apps.cli.sweep import SweepRequest
from slipstream.apps.cli.tables import print_series
from slipstream.bench.lineup import Lineup, Runner
from slipstream.bench.plan import name_prompts, plan
from slipstream.bench.predictions import SavedCosts
from slipstream.bench.records import FILE, make_header, open_folder
from slipstream.bench.report import require_matplotlib, write_report
from slipstream.bench.summary import ArmSummary, wrong_texts
from slipstream.bench.sweep_grid import Grid, series_of, summarise_by_temperature, sweep_report
from slipstream.errors import SlipstreamError


def run(request: SweepRequest, json_file: Path | None) -> None:
    """Measure, print, write; fail if a text is wrong."""
    options, models = request.options, request.models
    if options.report:
        require_matplotlib()
    grid = Grid(request.swept.drafters, request.swept.lengths, request.swept.temperatures)
    prompts, sizes = name_prompts(request.prompts), [options.batch_size]
    config, params = replace(request.config, drafter="auto"), replace(request.params, seed=request.params.seed or 0)
    planned = plan(grid.arms(), prompts, sizes, options.repeats)
    names = {"target": models.target, "draft": models.draft}
    settings = {"reference": grid.reference, "batch_sizes": sizes, "repeats": options.repeats, "chat": not options.raw}
    header = make_header(names, grid.arms(), prompts, config, params, **settings)
    folder = options.out_folder or Path(f"sweep-{datetime.now():%Y%m%d-%H%M%S}")
    before = open_folder(folder, header)
    with interruptible(folder):
        lineup = Lineup(load_decoder(models, config), grid.arms(), params, chat=not options.raw)
        runs = [*before, *watched(Runner(lineup, planned, folder).run(before), planned, before)]
        summaries = summarise_by_temperature(runs, grid.reference)
        if options.predict:
            summaries = _predicted(summaries, lineup, folder, options.predict)
    series = series_of(summaries)
    print_series(series)
    err.print(f"raw runs: {folder / FILE}", soft_wrap=True)
    if options.report:
        page = write_report(folder, lineup.decoder.tokenizer)
        err.print(f"report: {page}", soft_wrap=True)
    write_json(json_file, asdict(header) | {"sweep": sweep_report(series)})
    _fail_on_difference(summaries)


def _predicted(summaries: Sequence[ArmSummary], lineup: Lineup, folder: Path, seconds: float) -> list[ArmSummary]:
    """Predictions, which are saved beside the runs."""
    from slipstream.bench.predictions import measured_costs, with_predictions

    costs = measured_costs(summaries, lineup, seconds)
    made = with_predictions(summaries, lineup, costs)
    SavedCosts.of(made, costs, seconds, simulated=False).save(folder)
    return made


def _fail_on_difference(summaries: Sequence[ArmSummary]) -> None:
    wrong = wrong_texts(summaries)
    if wrong:
        raise SlipstreamError(
            f"{wrong[0].arm}: {wrong[0].verdicts['different']} of {sum(wrong[0].verdicts.values())} texts differ from "
            "plain decoding and are no ties"
        )
