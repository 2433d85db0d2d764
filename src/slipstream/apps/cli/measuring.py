"""Runs the arms of `bench` and `sweep`: shows progress, continues an interrupted run, prints and saves results."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

from slipstream.apps.cli.application import interruptible, load_decoder, warn_lossy, write_json
from slipstream.apps.cli.consoles import err, out
from slipstream.apps.cli.flags import BenchOptions, Models
from slipstream.apps.cli.report import target_tokenizer
from slipstream.bench.arms import parse_arms, reference_of
from slipstream.bench.length_series import best_lengths, references, summarize_over
from slipstream.bench.lineup import Lineup, Runner
from slipstream.bench.llama_cpp import require_llama
from slipstream.bench.plan import Measurement, name_prompts, plan
from slipstream.bench.records import FILE, Header, Run, finished, make_header, open_folder
from slipstream.bench.report import require_matplotlib, write_report
from slipstream.bench.result_tables import bench_tables, progress_line
from slipstream.bench.summary import wrong_texts
from slipstream.config import DecoderConfig
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.notices import OneLineProgress, TimeLeft
from slipstream.models.weights.model_files import NO_DRAFT
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompt_sets import NamedPrompt
from slipstream.wiring.model_pair import brought_draft


def run_arms(
    names: str,
    prompts: Sequence[NamedPrompt],
    batches: Sequence[int],
    settings: tuple[Models, DecoderConfig, SamplingParams],
    options: BenchOptions,
    json_file: Path | None,
) -> None:
    """Make the measurements that the folder lacks, and print and save the results; if it lacks none, load no model.

    SlipstreamError if an arm failed or has a wrong output.
    """
    models, config, params = settings
    config, params = replace(config, drafter="auto"), replace(params, seed=params.seed or 0)
    if options.report:
        require_matplotlib()
    arms = parse_arms(names)
    named = name_prompts(prompts)
    require_llama(arms, models.target)
    predicted = next((arm.name for arm in arms if arm.predicted), None)
    if predicted is not None and all(prompt.prediction is None for prompt in named):
        raise UsageError(
            f"arm {predicted!r}, but no prompt has a prediction; allowed: a .jsonl file in which some have one"
        )
    reference, chat = reference_of(arms, options.reference), not options.raw
    shared = {"reference": reference, "batch_sizes": list(batches), "repeats": options.repeats, "chat": chat}
    shared |= {} if options.at_once is None else {"at_once": options.at_once}
    loaded = {"target": models.target, "draft": draft_before_loading(models, config)}
    planned = plan(arms, named, batches, options.repeats, options.at_once)
    header = make_header(loaded, arms, named, config, params, command_line(), **shared)
    folder = options.out_folder or Path("runs") / f"bench-{datetime.now():%Y%m%d-%H%M%S}"
    runs = open_folder(folder, header)
    if finished(runs) >= {measurement.key for measurement in planned}:
        err.print(f"all {len(runs)} measurements are there already")
    else:
        where = shlex.quote(str(folder))
        with interruptible(lambda: f"finished runs are saved: the same command with --out {where} continues"):
            lineup = Lineup(load_decoder(models, config), arms, params, chat=chat)
            for arm in arms:
                if arm.acceptance is not None and not lineup.decoders[arm.name].lossless:
                    warn_lossy(arm.acceptance)
            runs = [*runs, *watched(Runner(lineup, planned, folder).run(runs), planned, runs)]
    _show_results(header, runs, folder, json_file, page=options.report)


def _show_results(header: Header, runs: Sequence[Run], folder: Path, json_file: Path | None, *, page: bool) -> None:
    """Print tables and write files; SlipstreamError if an arm failed or a lossless arm's output is wrong."""
    compared_with = references(header.settings["arms"], header.settings["reference"])
    summaries = summarize_over(runs, compared_with)
    for base in dict.fromkeys(compared_with.values()):
        for table in bench_tables([arm for arm in summaries if compared_with[arm.arm] == base], base):
            out.print(table)
    best = best_lengths(summaries)
    for sentence in best:
        out.sentence(sentence)
    if page:
        err.print(f"report: {write_report(folder, target_tokenizer(header))}", soft_wrap=True)
    err.print(f"raw runs: {folder / FILE}", soft_wrap=True)
    write_json(json_file, asdict(header) | {"summary": [arm.to_dict() for arm in summaries], "best_lengths": best})
    for arm in wrong_texts(summaries):
        raise SlipstreamError(
            f"arm {arm.arm}, batch {arm.batch}: {arm.verdicts['different']} of {sum(arm.verdicts.values())} texts "
            "differ from plain decoding and are not ties"
        )
    for arm in summaries:
        if arm.failed:
            raise SlipstreamError(f"arm {arm.arm}, batch {arm.batch}: {arm.failed} of its runs failed: {arm.error}")


def draft_before_loading(models: Models, config: DecoderConfig) -> str | None:
    """The draft model as the user named it, or what a named target brings; MTP layers are found only by loading."""
    if models.draft is None:
        return brought_draft(models.target, config)
    return None if models.draft == NO_DRAFT else models.draft


def command_line() -> str:
    """The command as it was typed, without --out, so that repeating it measures again in another folder."""
    arguments = iter(sys.argv[1:])
    kept = []
    for argument in arguments:
        if argument == "--out":
            next(arguments, None)
        elif not argument.startswith("--out="):
            kept.append(argument)
    return shlex.join(["slipstream", *kept])


def watched(runs: Iterator[Run], planned: Sequence[Measurement], earlier: Sequence[Run]) -> Iterator[Run]:
    """Pass the runs on, with a progress bar on a terminal; elsewhere, with a line per finished group of prompts."""
    if earlier:
        err.print(f"{len(earlier)} of {len(planned)} measurements are in the folder already")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeLeft())
    with OneLineProgress(*columns, console=err, disable=not err.is_terminal) as progress:
        task = progress.add_task("warming up", total=len(planned), completed=len(earlier))
        sizes = Counter((measurement.batch, tuple(measurement.group.ids)) for measurement in planned)
        groups: dict[tuple[int, tuple[str, ...]], list[Run]] = {}
        for run in earlier:
            groups.setdefault((run.batch, tuple(run.prompts)), []).append(run)
        for run in runs:
            progress.update(task, advance=1, description=escape(f"{run.prompts[0]} {run.arm}"))
            key = run.batch, tuple(run.prompts)
            group = groups.setdefault(key, [])
            group.append(run)
            if len(group) == sizes[key] and not err.is_terminal:
                num_finished = sum(len(groups[other]) == sizes[other] for other in groups)
                err.sentence(progress_line(num_finished, len(sizes), group))
            yield run
