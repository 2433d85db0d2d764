"""`slipstream batch`: answers a file of requests line by line; after a kill it continues where it stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.apps.cli.application import announce_loading, command, draft_name, load_decoder, write_json
from slipstream.apps.cli.consoles import clock_time, err, progress_bar
from slipstream.apps.cli.flags import (
    OUTPUT,
    PROMPTS,
    RAW,
    Json,
    Models,
    Structure,
    TemplateKwargs,
    flags,
    json_object,
    option,
)
from slipstream.config import SERVED, DecoderConfig
from slipstream.integrations.ray.ray_options import RayOptions
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.integrations.ray.ray_job import RayJob
    from slipstream.jobs.batch_job import BatchJob, JobReport, Progress
    from slipstream.jobs.job_lines import JobFiles

LINE_SECONDS = 60.0  # between two progress lines, if there is no terminal for a bar


@command(
    "batch",
    "slipstream batch requests.jsonl answers.jsonl",
    "slipstream batch in.jsonl out.jsonl --max-tokens 100 --raw",
    "slipstream batch in.jsonl out.jsonl --ray auto",
)
@flags(
    Models,
    DecoderConfig,
    SamplingParams,
    Structure,
    RayOptions,
    acceptance=SERVED.acceptance,
    also=("n", "logprobs"),
    without=("seed",),
)
def batch_command(
    source: Annotated[Path, typer.Argument(metavar="IN", help="requests: JSON lines, plain or OpenAI's")],
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="file of answers, in the order in which they finish; an unfinished one is continued"
        ),
    ],
    models: Models,
    config: DecoderConfig,
    params: SamplingParams,
    cluster: RayOptions,
    errors: Annotated[
        Path | None,
        option(
            OUTPUT,
            "--errors",
            "file of failed lines and reasons; default: NAME.errors.jsonl next to OUT",
            "FILE",
        ),
    ] = None,
    token_ids: Annotated[bool, option(OUTPUT, "--token-ids", "also write the token ids of plain lines")] = False,
    model_name: Annotated[
        str,
        option(PROMPTS, "--model-name", "name of the model in requests; default: the target's", "NAME"),
    ] = "",
    raw: Annotated[bool, option(PROMPTS, "--raw", RAW)] = False,
    template_kwargs: TemplateKwargs = "{}",
    json_file: Json = None,
) -> None:
    """Answer a file of requests, line by line.

    Exit code 1 if a line failed. To continue an interrupted job, run the same command again.
    """
    from slipstream.jobs.job_lines import JobFiles
    from slipstream.jobs.job_output import JobOutput

    files = JobFiles.checked(source, output, errors)
    if files.output.exists():  # refuse a file of something else before a model is loaded
        JobOutput(files.output).close()
    if err.is_terminal and not cluster.ray:  # now, as the imports below take a second
        announce_loading(models)
    from slipstream.jobs.line_formats import JobOptions

    variables = json_object("--chat-template-kwargs", template_kwargs)
    options = JobOptions(
        params=params,
        chat=not raw,
        chat_template_kwargs=variables,
        model_name=model_name,
        token_ids=token_ids,
    )
    if cluster.ray:
        from slipstream.integrations.ray.ray_engine import EngineSpec
        from slipstream.integrations.ray.ray_job import RayJob

        threads = 0 if cluster.ray_gpus else ceil(cluster.ray_cpus)
        spec = EngineSpec(models.target, models.draft, config, options, threads)
        report, draft = _run(RayJob(files, spec, cluster), files), models.draft
    else:
        from slipstream.jobs.batch_job import BatchJob

        decoder = load_decoder(models, config, is_announced=True)
        report, draft = _run(BatchJob(decoder, files, options), files), draft_name(models, decoder)
    write_json(json_file, {"target": models.target, "draft": draft} | report.to_dict())
    raise typer.Exit(1 if report.failed else 0)


def _run(job: BatchJob | RayJob, files: JobFiles) -> JobReport:
    """Run a job with its progress on standard error, and say what failed."""
    try:
        with _progress() as on_progress:
            report = job.run(on_progress)
    except KeyboardInterrupt:
        err.sentence(f"interrupted: {_summary(job.report)}; the same command continues")
        raise
    for line in report.errors:
        err.sentence(line)
    if report.failed:
        lines = "the failed line is" if report.failed == 1 else f"all {report.failed} failed lines are"
        err.sentence(f"{lines} in {files.errors}")
    err.sentence(_summary(report))
    return report


def _summary(report: JobReport) -> str:
    before = f" now, {report.answered_before} earlier" if report.answered_before else ""
    failed = f", {report.failed} failed" if report.failed else ""
    remaining = f", {report.remaining} left" if report.remaining > 0 else ""
    counts = f"{report.answered} of {report.total} answered{before}{failed}{remaining}"
    return f"{counts} in {report.seconds:.1f} s{_speed(report)}"


def _speed(report: JobReport) -> str:
    speed, rate = report.tokens_per_second, report.work.acceptance_rate
    tokens = f", {speed:.0f} tokens/s" if speed and report.work.output_tokens else ""
    return tokens + (f", acceptance {100 * rate:.0f} %" if rate is not None else "")


@contextmanager
def _progress() -> Iterator[Progress]:
    """On a terminal, a bar with speed, acceptance and time left; elsewhere, as in logs, one line per minute."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    with progress_bar(BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")) as bar:
        task = bar.add_task("reading", total=None)
        printed = monotonic()

        def show(report: JobReport) -> None:
            nonlocal printed
            if not err.is_terminal:
                if monotonic() - printed >= LINE_SECONDS:
                    printed = monotonic()
                    err.sentence(_summary(report))
                return
            time_left = "" if report.seconds_left is None else f", {clock_time(report.seconds_left)} left"
            completed = report.answered_before + report.answered + report.failed
            bar.update(
                task,
                total=report.total,
                completed=completed,
                description=f"{report.seconds:.0f} s{_speed(report)}{time_left}",
            )

        yield show
