"""`slipstream tune`: what to use on this machine and these prompts, measured, and ready settings for other engines."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from slipstream.apps.cli.common import (
    Category,
    ConfigFile,
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
from slipstream.apps.cli.progress import read_batch_sizes
from slipstream.bench.arms import PLAIN
from slipstream.bench.plan import groups, name_prompts
from slipstream.bench.records import FILE, Header, exists, read_records, start
from slipstream.bench.run_header import make_header
from slipstream.bench.tuning.advice import Advice, needs_draft
from slipstream.bench.tuning.advice_files import write_files
from slipstream.bench.tuning.advice_table import advice_table, positions
from slipstream.bench.tuning.candidates import Ground, at_length, predictable
from slipstream.bench.tuning.meter import Budget, Meter, Tell
from slipstream.bench.tuning.stages import Tuned, tune
from slipstream.config import DecoderConfig
from slipstream.core.acceptance import load_rule
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.hf.model_files import EMBEDDED
from slipstream.sampling.params import SamplingParams


@app.command("tune")
@flags(DecoderConfig, SamplingParams, max_tokens=64)
def tune_command(
    config: DecoderConfig,
    params: SamplingParams,
    target: Target = EMBEDDED,
    draft: Annotated[list[str], typer.Option("--draft", help="draft model; may be given several times, or not")] = [],  # noqa: B006
    prompt_file: PromptFile = None,
    category: Category = [],  # noqa: B006
    limit: Limit = None,
    raw: Raw = False,
    batch_sizes: Annotated[str, typer.Option("--batch-sizes", help="prompts decoded together, e.g. 1,4,8")] = "1",
    longest: Annotated[
        int, typer.Option("--longest", min=1, max=MAX_DRAFT_TOKENS, help="longest draft that is considered")
    ] = 8,
    budget: Annotated[float, typer.Option("--budget", help="seconds to measure, loading not counted")] = 300.0,
    out_folder: Annotated[Path | None, typer.Option("--out", help="new folder; default: runs/tune-...")] = None,
    config_file: ConfigFile = None,
    json_file: Json = None,
) -> None:
    """Measure what pays: the drafter, draft length and draft model for each batch size, or not to speculate.

    Writes the answer as a configuration for --config and as settings for vLLM, SGLang and llama.cpp. Exit code 1 if a
    candidate failed or its text differs from plain decoding's by more than a tie.
    """
    config = config_from(config, config_file)
    _refuse(config, budget)
    batches = read_batch_sizes(batch_sizes, config)
    prompts = name_prompts(prompt_set(prompt_file, category, limit))
    for batch in batches:
        groups(prompts, batch)  # refuses a batch larger than the prompts
    params = replace(params, seed=params.seed or 0)
    folder = out_folder or Path("runs") / f"tune-{datetime.now():%Y%m%d-%H%M%S}"
    _refuse_used(folder)
    with _interruptible(folder):
        ground = Ground(load_decoder(target, draft[0] if draft else None, config, None), draft, params, chat=not raw)
        arms = [ground.plain, *(ground.arm(at_length(kind, longest)) for kind in predictable(draft))]
        settings = {"reference": PLAIN, "batch_sizes": batches, "chat": not raw, "budget": budget, "longest": longest}
        models = {"target": target, "draft": draft[0] if draft else None}
        header = make_header(models, arms, prompts, config, params, drafts=draft, **settings)
        start(folder, header)
        with _watched(budget) as tell:
            tuned = tune(ground, Meter(ground.lineup, folder, Budget(budget), tell), prompts, batches, longest)
    _finish(tuned, ground, folder, header, json_file)


def _finish(tuned: Tuned, ground: Ground, folder: Path, header: Header, json_file: Path | None) -> None:
    """Print, write, and fail where a candidate failed."""
    for advice in tuned.advice:
        out.print(advice_table(advice))
    for advice in tuned.advice:
        out.print(escape(advice.sentence), soft_wrap=True)
        if advice.best is not None:
            out.print(f"  {positions(advice)}", soft_wrap=True)
    for batch in tuned.unmeasured:
        err.print(f"batch {batch}: the budget was over before it; give more --budget", soft_wrap=True)
    result = asdict(header) | tuned.to_dict()
    early = [one.best is not None and ground.stops_early(one.best.candidate) for one in tuned.advice]
    paths = write_files(folder, list(zip(tuned.advice, early, strict=True)), ground.lineup.decoder.config, result)
    out.print(escape(f"use it: {_command(tuned.advice[0], header, folder)}"), soft_wrap=True)
    err.print(escape(f"in {folder}: {', '.join([FILE, *(path.name for path in paths)])}"), soft_wrap=True)
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
                err.print(escape(f"{passed:.0f} s of {budget:g}: {stage}"), soft_wrap=True)

        yield tell


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    """Ctrl-C is one line that says what is kept, and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"finished runs are kept in {folder / FILE}" if (folder / FILE).exists() else "nothing was measured yet"
        message = (
            f"interrupted; {kept}, no advice yet: what to measure depends on times, so start anew with another --out"
        )
        err.print(f"[red]error:[/] {escape(message)}", soft_wrap=True)
        raise typer.Exit(130) from None


def _refuse(config: DecoderConfig, budget: float) -> None:
    """Refuse settings that would answer what is asked here, and rules that change the text."""
    if not 0 < budget < float("inf"):
        raise UsageError(f"--budget {budget:g}; allowed: a number of seconds > 0")
    if config.drafter != "auto":
        raise UsageError(f"--drafter {config.drafter} is what tune is to find; allowed: auto")
    if config.num_draft_tokens != "auto":
        raise UsageError(f"--num-draft-tokens {config.num_draft_tokens} is what tune is to find; allowed: --longest")
    if config.acceptance != "auto" and not load_rule(config.acceptance).lossless:
        raise UsageError(f"--acceptance {config.acceptance} changes the text; allowed: lossless rules")


def _refuse_used(folder: Path) -> None:
    if exists(folder) and read_records(folder)[1]:
        raise UsageError(f"--out {str(folder)!r} holds runs already; allowed: a new folder")
