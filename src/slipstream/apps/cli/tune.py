"""`slipstream tune`: the fastest settings on this machine and these prompts, measured; also for other engines."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from slipstream.apps.cli.application import (
    command,
    draft_name,
    interruptible,
    load_decoder,
    prompt_set,
    write_json,
)
from slipstream.apps.cli.consoles import err, out, progress_bar
from slipstream.apps.cli.flags import (
    MEASURING,
    MODELS,
    OUTPUT,
    Json,
    Models,
    PromptChoice,
    batch_sizes_flag,
    check_folder,
    config_flag,
    flag,
    flags,
    raw_flag,
    read_batch_sizes,
    target_flag,
)
from slipstream.config import DecoderConfig
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.weights.model_files import NO_DRAFT
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.bench.records import Header
    from slipstream.bench.tuning.advice import Tuned
    from slipstream.bench.tuning.search import SearchSpace, ShowProgress


@dataclass(frozen=True)
class TuneOptions:
    """The candidates, the time limit and the output."""

    target: str = target_flag()
    draft: list[str] = flag((), MODELS, "draft model to try; may be given several times", "MODEL")
    config_file: Path | None = config_flag()
    batch_sizes: str = batch_sizes_flag()
    longest: int = flag(8, MEASURING, "longest draft to consider", "N", min=1, max=MAX_DRAFT_TOKENS)
    budget: float = flag(300.0, MEASURING, "seconds for measuring, without loading", "SECONDS")
    raw: bool = raw_flag()
    out_folder: Path | None = flag(
        None, OUTPUT, "new folder; default: runs/tune-...", "FOLDER", names="--out", callback=check_folder("--out")
    )


@command(
    "tune",
    "slipstream tune --model Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B",
    "slipstream tune --prompt-file prompts.jsonl --budget 600",
    "slipstream generate --config runs/tune-.../slipstream.json ...",
)
@flags(TuneOptions, PromptChoice, DecoderConfig, SamplingParams, measures=True, max_tokens=64)
def tune_command(
    options: TuneOptions, choice: PromptChoice, config: DecoderConfig, params: SamplingParams, json_file: Json = None
) -> None:
    """Find the fastest settings for a model on this machine.

    Finds the drafter, draft length and draft model, or that it is better not to speculate, for each batch size. Writes
    the result as a configuration for --config and as settings for vLLM, SGLang and llama.cpp. Exit code 1 if a
    candidate failed or its output differs from plain decoding's by more than a tie.
    """
    if not 0 < options.budget < float("inf"):
        raise UsageError(f"--budget {options.budget:g}; allowed: a number of seconds above 0")
    if config.drafter != "auto":
        raise UsageError(f"--drafter {config.drafter}; allowed: auto, as tune chooses the drafter")
    if config.num_draft_tokens != "auto":
        raise UsageError(f"--num-draft-tokens {config.num_draft_tokens}; allowed: auto with tune; see --longest")
    if NO_DRAFT in options.draft:
        raise UsageError(f"--draft {NO_DRAFT}; allowed: draft models; drafting without one is measured as well")
    batches = read_batch_sizes(options.batch_sizes, config.max_batch_size)
    params = replace(params, seed=params.seed or 0)
    named = prompt_set(choice)
    from slipstream.apps.cli.measuring import command_line
    from slipstream.bench.plan import groups, name_prompts
    from slipstream.bench.records import FILE, exists, make_header, read_records, start
    from slipstream.bench.tuning.advice import tune
    from slipstream.bench.tuning.search import Budget, Meter, SearchSpace, candidates
    from slipstream.core.acceptance import load_rule

    if config.acceptance != "auto" and not load_rule(config.acceptance).lossless:
        raise UsageError(f"--acceptance {config.acceptance} changes the output; allowed: lossless rules")
    prompts = name_prompts(named)
    for batch in batches:
        groups(prompts, batch)  # refuses a batch larger than the prompts
    folder = options.out_folder or Path("runs") / f"tune-{datetime.now():%Y%m%d-%H%M%S}"
    check_folder("--out")(folder)  # the default one, too
    if exists(folder) and read_records(folder)[1]:
        raise UsageError(
            f"--out {str(folder)!r} already holds runs; allowed: another folder; to start over: "
            f"rm -r {shlex.quote(str(folder))}"
        )
    with interruptible(lambda: _what_is_saved(folder / FILE)):
        models = Models(options.target, options.draft[0] if options.draft else None)
        decoder = load_decoder(models, config)
        names = {"target": models.target, "draft": draft_name(models, decoder)}
        drafts = options.draft or [draft for draft in (names["draft"],) if draft]  # what the target brings
        space = SearchSpace(decoder, drafts, params, chat=not options.raw)
        arms = [space.plain, *map(space.arm, candidates(drafts, options.longest))]
        settings = {"reference": space.plain.name, "batch_sizes": batches, "chat": not options.raw}
        settings |= {"budget": options.budget, "longest": options.longest, "drafts": drafts}
        header = make_header(names, arms, prompts, config, params, command_line(), **settings)
        start(folder, header)
        with _watched(options.budget) as show_progress:
            meter = Meter(space.lineup, folder, Budget(options.budget), show_progress)
            tuned = tune(space, meter, prompts, batches, options.longest)
    _finish(tuned, space, folder, header, json_file)


def _finish(tuned: Tuned, space: SearchSpace, folder: Path, header: Header, json_file: Path | None) -> None:
    """Print and write the advice; SlipstreamError if a candidate failed."""
    from slipstream.bench.records import FILE
    from slipstream.bench.tuning.advice import advice_table, needs_draft, positions
    from slipstream.bench.tuning.engine_settings import write_files

    for advice in tuned.advice:
        out.print(advice_table(advice))
    for advice in tuned.advice:
        out.sentence(advice.sentence)
        if advice.best is not None:
            out.sentence(f"  {positions(advice)}")
    for batch in tuned.unmeasured:
        err.sentence(f"batch {batch}: not measured, as the budget was used up; give more --budget")
    result = asdict(header) | tuned.to_dict()
    early = [advice.best is not None and space.stops_early(advice.best.candidate) for advice in tuned.advice]
    advice_files = list(zip(tuned.advice, early, strict=True))
    config = space.lineup.decoder.config
    paths = write_files(folder, advice_files, config, int(header.settings["longest"]), result)
    words = ["slipstream", "generate", "--model", str(header.settings["target"])]
    best = tuned.advice[0].best
    if best is not None and needs_draft(best.candidate):
        words += ["--draft", str(best.candidate.draft)]
    command_line = shlex.join([*words, "--config", str(folder / "slipstream.json")])
    out.print(f"use it: {command_line}", soft_wrap=True)
    err.sentence(f"in {folder}: {', '.join([FILE, *(path.name for path in paths)])}")
    write_json(json_file, result)
    for advice, failed in tuned.wrong:
        raise SlipstreamError(f"{failed.name}, batch {advice.batch}: {failed.lost}")


class _TimeLeft(ProgressColumn):
    """The remaining time of the budget, which is the task's total."""

    def render(self, task: Task) -> Text:
        return Text(f"{max(0.0, (task.total or 0.0) - (task.elapsed or 0.0)):.0f} s left")


@contextmanager
def _watched(budget: float) -> Iterator[ShowProgress]:
    """A function that shows the stage: a bar over the budget; elsewhere, a line when a stage begins."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), _TimeLeft())
    with progress_bar(*columns) as progress:
        task = progress.add_task("starting", total=budget)
        begun = perf_counter()
        stages: set[str] = set()

        def show_progress(stage: str, doing: str) -> None:
            passed = perf_counter() - begun
            progress.update(task, description=escape(f"{stage}: {doing}"), completed=min(passed, budget))
            if not err.is_terminal and stage not in stages:
                stages.add(stage)
                err.sentence(f"{passed:.0f} s of {budget:g}: {stage}")

        yield show_progress


def _what_is_saved(runs: Path) -> str:
    saved = f"finished runs are saved in {runs}" if runs.exists() else "nothing was measured yet"
    return f"{saved}; there is no advice yet: an interrupted race cannot continue, so start over with another --out"
