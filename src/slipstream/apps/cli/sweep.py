"""`slipstream sweep`: which draft length is best for each drafter and temperature, and when not to speculate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

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
from slipstream.apps.cli.progress import interruptible, watched
from slipstream.bench.bootstrap import Estimate
from slipstream.bench.lineup import Lineup
from slipstream.bench.plan import name_prompts, plan
from slipstream.bench.records import FILE
from slipstream.bench.report import require_matplotlib, write_report
from slipstream.bench.run_header import make_header, open_folder
from slipstream.bench.runner import Runner
from slipstream.bench.saved_costs import Kept
from slipstream.bench.summary import ArmSummary, wrong_texts
from slipstream.bench.sweep_grid import Cell, Grid, Series, best_of, series_of, summarise_by_temperature, sweep_report
from slipstream.config import DecoderConfig
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.hf.model_files import EMBEDDED
from slipstream.sampling.params import SamplingParams
from slipstream.text.figures_as_text import percent

WORDS = {"reference": "plain", "different": "DIFFER"}
WHOLE = 1000  # tokens per second from which decimals are left out


@app.command("sweep")
@flags(DecoderConfig, SamplingParams, max_tokens=64)
def sweep_command(
    config: DecoderConfig,
    params: SamplingParams,
    target: Target = EMBEDDED,
    draft: DraftModel = None,
    drafters: Annotated[str, typer.Option("--drafters", help="with commas between; default: the decoder's own")] = "",
    lengths: Annotated[str, typer.Option("--lengths", help="draft lengths, e.g. 0-8 or 0,1,2,4,8")] = "0-8",
    temperatures: Annotated[str, typer.Option("--temperatures", help="with commas between, e.g. 0,0.8")] = "0",
    prompt_file: PromptFile = None,
    category: Category = [],  # noqa: B006
    limit: Limit = None,
    raw: Raw = False,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="prompts decoded together")] = 1,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="runs of each setting on each prompt")] = 3,
    predict: Annotated[
        float, typer.Option("--predict", min=0, help="seconds per drafter to measure costs for predictions; 0: none")
    ] = 5.0,
    report: Annotated[bool, typer.Option("--report", help="write plots and an HTML page into the folder")] = False,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="folder for runs.jsonl; a folder begun before is gone on with")
    ] = None,
    config_file: ConfigFile = None,
    json_file: Json = None,
) -> None:
    """Measure draft length x drafter x temperature: the best setting of each, or that speculation does not pay.

    Plain decoding is length 0 and always measured. Exit code 1 if a lossless setting's text differs by more than a tie.
    """
    if report:
        require_matplotlib()
    config = config_from(config, config_file)
    _refuse_single_settings(config, params)
    if batch_size > config.max_batch_size:
        raise UsageError(f"--batch-size {batch_size}; allowed: up to max_batch_size ({config.max_batch_size})")
    grid = Grid(_drafters(drafters, config, draft), _lengths(lengths), _temperatures(temperatures))
    prompts = name_prompts(prompt_set(prompt_file, category, limit))
    config, params = replace(config, drafter="auto"), replace(params, seed=params.seed or 0)
    planned = plan(grid.arms(), prompts, [batch_size], repeats)
    settings = {"reference": grid.reference, "batch_sizes": [batch_size], "repeats": repeats, "chat": not raw}
    header = make_header({"target": target, "draft": draft}, grid.arms(), prompts, config, params, **settings)
    folder = out_folder or Path(f"sweep-{datetime.now():%Y%m%d-%H%M%S}")
    before = open_folder(folder, header)
    with interruptible(folder):
        lineup = Lineup(load_decoder(target, draft, config, None), grid.arms(), params, chat=not raw)
        runs = [*before, *watched(Runner(lineup, planned, folder).run(before), planned, before)]
        summaries = summarise_by_temperature(runs, grid.reference)
        if predict:
            summaries = _predicted(summaries, lineup, folder, predict)
    series = series_of(summaries)
    _print(series)
    err.print(f"raw runs: {escape(str(folder / FILE))}", soft_wrap=True)
    if report:
        page = write_report(folder, lineup.decoder.tokenizer)
        err.print(f"report: {escape(str(page))}", soft_wrap=True)
    write_json(json_file, asdict(header) | {"sweep": sweep_report(series)})
    _fail_on_difference(summaries)


def _print(series: Sequence[Series]) -> None:
    for one in series:
        out.print(series_table(one), positions_table(one))
    for one in series:
        best = best_of(one)
        out.print(escape(best.sentence if best else f"{one.name}: no advice, since runs of it failed"), soft_wrap=True)


def series_table(series: Series) -> Table:
    """One line per draft length: speed with its interval, parity, and how much was accepted."""
    title = f"{series.name}, batch size {series.batch}; speed-up against length 0, 95 % intervals"
    table = Table(box=box.SIMPLE, pad_edge=False, title=title, title_justify="left", padding=(0, 1, 0, 0))
    predicted = any(cell.summary.prediction for cell in series.cells)
    names = ["length", "tok/s", "", "speed-up", "", "texts", "accep-\ntance", "alpha", "tokens\nper round"]
    for name in names + ["predic-\nted", "without\nprefill"] * predicted:
        table.add_column(name, justify="right", no_wrap=True)
    for cell in series.cells:
        table.add_row(*_line(cell), *(_prediction(cell.summary) if predicted else []))
    return table


def positions_table(series: Series) -> Table:
    """Which share of the tokens drafted at each position was kept, a line per draft length."""
    title = f"{series.name}, batch size {series.batch}; kept at each position of the draft"
    table = Table(box=box.SIMPLE, pad_edge=False, title=title, title_justify="left")
    for name in ("length", *map(str, range(1, series.cells[-1].length + 1))):
        table.add_column(name, justify="right")
    for cell in series.cells:
        if cell.length > 0:
            table.add_row(str(cell.length), *map(percent, cell.summary.acceptance_by_position))
    return table


def _line(cell: Cell) -> list[str]:
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


def _prediction(one: ArmSummary) -> list[str]:
    if one.prediction is None:
        return ["-", "-"]
    return [f"{one.prediction[key]:.2f}x" for key in ("predicted", "observed")]


def _estimate(estimate: Estimate | None, form: str, unit: str = "") -> list[str]:
    if estimate is None:
        return ["-", ""]
    interval = "" if estimate.low is None else f"{estimate.low:{form}} to {estimate.high:{form}}"
    return [f"{estimate.value:{form}}{unit}", interval]


def _refuse_single_settings(config: DecoderConfig, params: SamplingParams) -> None:
    """Refuse flags that name one setting of what is swept over."""
    if config.num_draft_tokens != "auto":
        raise UsageError(f"--num-draft-tokens {config.num_draft_tokens} names one length; allowed: --lengths")
    if params.temperature != SamplingParams().temperature:
        raise UsageError(f"--temperature {params.temperature:g} names one temperature; allowed: --temperatures")


def _drafters(text: str, config: DecoderConfig, draft: str | None) -> tuple[str, ...]:
    if text and config.drafter != "auto":
        raise UsageError(f"--drafter {config.drafter} beside --drafters; allowed: one of the two")
    own = config.drafter if config.drafter != "auto" else "ngram" if draft is None else "model"
    return tuple(part.strip() for part in (text or own).split(","))


def _lengths(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,3}(-\d{1,3})?(,\d{1,3}(-\d{1,3})?)*", text):
        raise UsageError(f"--lengths {text!r}; allowed: whole numbers and ranges with commas between, e.g. 0-4,8")
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _temperatures(text: str) -> tuple[float, ...]:
    if not re.fullmatch(r"\d+(\.\d{1,6})?(,\d+(\.\d{1,6})?)*", text):
        raise UsageError(f"--temperatures {text!r}; allowed: numbers >= 0 with commas between, e.g. 0,0.8")
    return tuple(float(part) for part in text.split(","))


def _predicted(summaries: Sequence[ArmSummary], lineup: Lineup, folder: Path, seconds: float) -> list[ArmSummary]:
    """Predictions, which are kept beside the runs."""
    from slipstream.bench.predicted_speed import measured_costs, with_predictions

    costs = measured_costs(summaries, lineup, seconds)
    made = with_predictions(summaries, lineup, costs)
    Kept.of(made, costs, seconds, simulated=False).save(folder)
    return made


def _fail_on_difference(summaries: Sequence[ArmSummary]) -> None:
    wrong = wrong_texts(summaries)
    if wrong:
        raise SlipstreamError(
            f"{wrong[0].arm}: {wrong[0].verdicts['different']} of {sum(wrong[0].verdicts.values())} texts differ from "
            "plain decoding and are no ties"
        )
