"""A tuning run: measured within its budget, printed, and written as settings."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from time import perf_counter

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from slipstream.apps.cli.application import err, load_decoder, out, print_error, write_json
from slipstream.apps.cli.flags import Models
from slipstream.apps.cli.tune import TuneRequest
from slipstream.bench.arms import PLAIN
from slipstream.bench.plan import BenchPrompt, groups, name_prompts
from slipstream.bench.records import FILE, Header, exists, make_header, read_records, start
from slipstream.bench.tuning.advice import Advice, Tuned, advice_table, needs_draft, positions, tune
from slipstream.bench.tuning.engine_settings import write_files
from slipstream.bench.tuning.search import Budget, Meter, SearchSpace, Tell, at_length, predictable
from slipstream.core.acceptance import load_rule
from slipstream.errors import SlipstreamError, UsageError


def run(request: TuneRequest, json_file: Path | None) -> None:
    """Measure, print, write; fail if a candidate failed."""
    options, config = request.options, request.config
    if config.acceptance != "auto" and not load_rule(config.acceptance).lossless:
        raise UsageError(f"--acceptance {config.acceptance} changes the text; allowed: lossless rules")
    prompts = name_prompts(request.prompts)
    for batch in request.batches:
        groups(prompts, batch)  # refuses a batch larger than the prompts
    folder = options.out_folder or Path("runs") / f"tune-{datetime.now():%Y%m%d-%H%M%S}"
    _refuse_used(folder)
    with _interruptible(folder):
        models = Models(options.target, options.drafts[0] if options.drafts else None)
        space = SearchSpace(load_decoder(models, config), options.drafts, request.params, chat=not options.raw)
        header = _header(request, models, space, prompts)
        start(folder, header)
        with _watched(options.budget) as tell:
            meter = Meter(space.lineup, folder, Budget(options.budget), tell)
            tuned = tune(space, meter, prompts, request.batches, options.longest)
    _finish(tuned, space, folder, header, json_file)


def _header(request: TuneRequest, models: Models, space: SearchSpace, prompts: list[BenchPrompt]) -> Header:
    options = request.options
    arms = [space.plain, *(space.arm(at_length(kind, options.longest)) for kind in predictable(options.drafts))]
    settings = {"reference": PLAIN, "batch_sizes": request.batches, "chat": not options.raw}
    settings |= {"budget": options.budget, "longest": options.longest, "drafts": options.drafts}
    names = {"target": models.target, "draft": models.draft}
    return make_header(names, arms, prompts, request.config, request.params, **settings)


def _finish(tuned: Tuned, space: SearchSpace, folder: Path, header: Header, json_file: Path | None) -> None:
    """Print, write, and fail where a candidate failed."""
    for advice in tuned.advice:
        out.print(advice_table(advice))
    for advice in tuned.advice:
        out.print(advice.sentence, soft_wrap=True)
        if advice.best is not None:
            out.print(f"  {positions(advice)}", soft_wrap=True)
    for batch in tuned.unmeasured:
        err.print(f"batch {batch}: the budget was over before it; give more --budget", soft_wrap=True)
    result = asdict(header) | tuned.to_dict()
    early = [one.best is not None and space.stops_early(one.best.candidate) for one in tuned.advice]
    paths = write_files(folder, list(zip(tuned.advice, early, strict=True)), space.lineup.decoder.config, result)
    out.print(f"use it: {_command(tuned.advice[0], header, folder)}", soft_wrap=True)
    err.print(f"in {folder}: {', '.join([FILE, *(path.name for path in paths)])}", soft_wrap=True)
    write_json(json_file, result)
    for advice, one in tuned.wrong:
        raise SlipstreamError(f"{one.name}, batch {advice.batch}: {one.lost}")


def _command(advice: Advice, header: Header, folder: Path) -> str:
    words = ["slipstream", "generate", "--target", str(header.settings["target"])]
    if advice.best is not None and needs_draft(advice.best.candidate):
        words += ["--draft", str(advice.best.candidate.draft)]
    return shlex.join([*words, "--config", str(folder / "slipstream.json")])


class _Left(ProgressColumn):
    """The time left of the budget, which the task's total is."""

    def render(self, task: Task) -> Text:
        return Text(f"{max(0.0, (task.total or 0.0) - (task.elapsed or 0.0)):.0f} s left")


@contextmanager
def _watched(budget: float) -> Iterator[Tell]:
    """A function that shows what is being done: a bar over the budget; elsewhere a line when a stage begins."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), _Left())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        task, begun = progress.add_task("starting", total=budget), perf_counter()
        stages: set[str] = set()

        def tell(stage: str, doing: str) -> None:
            passed = perf_counter() - begun
            progress.update(task, description=escape(f"{stage}: {doing}"), completed=min(passed, budget))
            if not err.is_terminal and stage not in stages:
                stages.add(stage)
                err.print(f"{passed:.0f} s of {budget:g}: {stage}", soft_wrap=True)

        yield tell


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    """Ctrl-C is one line that says what is saved, and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        saved = (
            f"finished runs are saved in {folder / FILE}" if (folder / FILE).exists() else "nothing was measured yet"
        )
        message = (
            f"interrupted; {saved}, no advice yet: what to measure depends on times, so start anew with another --out"
        )
        print_error(message)
        raise typer.Exit(130) from None


def _refuse_used(folder: Path) -> None:
    if exists(folder) and read_records(folder)[1]:
        raise UsageError(f"--out {str(folder)!r} holds runs already; allowed: a new folder")
