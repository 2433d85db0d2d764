"""`slipstream bench`: arms in turn on the same prompts, texts compared, every round kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from slipstream import show
from slipstream.backends.files import EMBEDDED
from slipstream.bench.arms import PLAIN, SYNTAX, parse_arms, reference_of
from slipstream.bench.header import make_header, open_folder
from slipstream.bench.lineup import Lineup
from slipstream.bench.plan import Measurement, name_prompts, plan
from slipstream.bench.records import FILE, Header, Run
from slipstream.bench.runner import Runner
from slipstream.bench.summary import ArmSummary, summarise, wrong_texts
from slipstream.bench.tables import progress_line, tables
from slipstream.cli.common import (
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
from slipstream.cli.flags import flags
from slipstream.config import DecoderConfig
from slipstream.params import SamplingParams
from slipstream.report import require_matplotlib, write_report
from slipstream.types import SlipstreamError, UsageError


@app.command()
@flags(DecoderConfig, SamplingParams, max_tokens=64)
def bench(
    config: DecoderConfig,
    params: SamplingParams,
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
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="runs of each arm on each prompt")] = 3,
    predict: Annotated[
        float, typer.Option("--predict", min=0, help="seconds per drafter to measure costs for predictions; 0: none")
    ] = 5.0,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="folder for runs.jsonl; a folder begun before is gone on with")
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="also write plots and report.html into the folder")] = False,
    config_file: ConfigFile = None,
    json_file: Json = None,
) -> None:
    """Measure arms against each other: medians, intervals, parity, where the time went. Goes on where it was killed.

    Arms take turns on each prompt, then comes the next repeat. --num-draft-tokens and --acceptance hold for arms
    that say nothing else. Exit code 1 if a lossless arm's text differs by more than a tie, or if an arm failed.
    """
    config = config_from(config, config_file)
    if report:
        require_matplotlib()
    chosen = parse_arms(_arms(arms, config))
    config, params = replace(config, drafter="auto"), replace(params, seed=params.seed or 0)
    prompts = name_prompts(prompt_set(prompt_file, category, limit))
    batches = _batch_sizes(batch_sizes, config)
    planned, base = plan(chosen, prompts, batches, repeats), reference_of(chosen, reference)
    settings = {"reference": base, "batch_sizes": batches, "repeats": repeats, "chat": not raw}
    header = make_header({"target": target, "draft": draft}, chosen, prompts, config, params, **settings)
    folder = out_folder or Path(f"bench-{datetime.now():%Y%m%d-%H%M%S}")
    before = open_folder(folder, header)
    lineup = Lineup(load_decoder(target, draft, config, None), chosen, params, chat=not raw)
    for arm in chosen:
        if arm.acceptance is not None and not lineup.decoders[arm.name].lossless:
            show.lossy_warning(err, arm.acceptance)
    runs = [*before, *_watched(Runner(lineup, planned, folder).run(before), planned, before)]
    summaries = summarise(runs, base)
    if predict:
        from slipstream.bench.prediction import with_predictions

        summaries = with_predictions(summaries, lineup, predict)
    for table in tables(summaries, base):
        out.print(table)
    if report:
        page = write_report(folder, lineup.decoder.tokenizer, predicted=summaries)
        err.print(f"report: {escape(str(page))}", soft_wrap=True)
    err.print(f"raw runs: {escape(str(folder / FILE))}", soft_wrap=True)
    write_json(json_file, _report(header, summaries))
    _fail_on_wrong_or_failed(summaries)


def _arms(arms: str | None, config: DecoderConfig) -> str:
    if arms is None:
        return f"{PLAIN},{config.drafter}"
    if config.drafter != "auto":
        raise UsageError(f"--drafter {config.drafter} beside --arms, which names the drafters; allowed: one of the two")
    return arms


def _batch_sizes(text: str, config: DecoderConfig) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise UsageError(f"--batch-sizes {text!r}; allowed: whole numbers with commas between, e.g. 1,4")
    sizes = [int(size) for size in text.split(",")]
    if max(sizes) > config.max_batch_size:
        raise UsageError(f"batch size {max(sizes)}; allowed: up to max_batch_size ({config.max_batch_size})")
    return sizes


def _watched(runs: Iterator[Run], planned: Sequence[Measurement], before: Sequence[Run]) -> Iterator[Run]:
    """The runs as they come: a progress bar on a terminal, elsewhere a line per finished group of prompts."""
    if before:
        err.print(f"{len(before)} of {len(planned)} measurements are there already")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=err, disable=not err.is_terminal) as progress:
        task = progress.add_task("warming up", total=len(planned), completed=len(before))
        lines = _Lines(planned, before)
        for run in runs:
            progress.update(task, advance=1, description=escape(f"{run.prompts[0]} {run.arm}"))
            line = lines.add(run)
            if line is not None and not err.is_terminal:
                err.print(escape(line), soft_wrap=True)
            yield run


class _Lines:
    """Gathers the runs of a group of prompts until all arms and repeats are there."""

    def __init__(self, planned: Sequence[Measurement], before: Sequence[Run]) -> None:
        self._groups: dict[tuple[int, tuple[str, ...]], list[Run]] = {}
        self._wanted: dict[tuple[int, tuple[str, ...]], int] = {}
        for one in planned:
            at = one.batch, tuple(one.group.ids)
            self._wanted[at] = self._wanted.get(at, 0) + 1
        for run in before:
            self.add(run)

    def add(self, run: Run) -> str | None:
        """The line of the group that this run completes."""
        at = run.batch, tuple(run.prompts)
        self._groups.setdefault(at, []).append(run)
        if len(self._groups[at]) < self._wanted[at]:
            return None
        done = sum(len(runs) == self._wanted[group] for group, runs in self._groups.items())
        return progress_line(done, len(self._wanted), self._groups[at])


def _report(header: Header, summaries: Sequence[ArmSummary]) -> dict[str, Any]:
    return asdict(header) | {"summary": [one.to_dict() for one in summaries]}


def _fail_on_wrong_or_failed(summaries: Sequence[ArmSummary]) -> None:
    for one in wrong_texts(summaries):
        raise SlipstreamError(
            f"arm {one.arm}, batch {one.batch}: {one.verdicts['different']} of {sum(one.verdicts.values())} texts "
            "differ from plain decoding and are no ties"
        )
    for one in summaries:
        if one.failed:
            raise SlipstreamError(f"arm {one.arm}, batch {one.batch}: {one.failed} of its runs failed: {one.error}")
