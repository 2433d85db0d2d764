"""`slipstream batch`: answers a file of requests line by line; after a kill it continues where it stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.apps.cli.application import announce_loading, command, config_from, draft_name, load_decoder, write_json
from slipstream.apps.cli.consoles import clock_time, err, progress_bar
from slipstream.apps.cli.flags import (
    OUTPUT,
    PROMPTS,
    Json,
    Models,
    Raw,
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
    from slipstream.jobs.line_formats import JobOptions

LINE_SECONDS = 60.0  # between two progress lines, if there is no terminal for a bar

Input = Annotated[Path, typer.Argument(metavar="IN", help="requests: JSON lines, plain or OpenAI's")]
Output = Annotated[
    Path,
    typer.Argument(
        metavar="OUT", help="file of answers, in the order in which they finish; an unfinished one is continued"
    ),
]
Errors = Annotated[
    Path | None,
    option(
        OUTPUT,
        "--errors",
        text="file of failed lines and reasons; default: NAME.errors.jsonl next to OUT",
        metavar="FILE",
    ),
]
TokenIds = Annotated[bool, option(OUTPUT, "--token-ids", text="also write the token ids of plain lines")]
ModelName = Annotated[
    str, option(PROMPTS, "--model-name", text="name of the model in requests; default: the target's", metavar="NAME")
]


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
    source: Input,
    output: Output,
    models: Models,
    config: DecoderConfig,
    params: SamplingParams,
    structure: Structure,
    cluster: RayOptions,
    errors: Errors = None,
    token_ids: TokenIds = False,
    model_name: ModelName = "",
    raw: Raw = False,
    template_kwargs: TemplateKwargs = "{}",
    json_file: Json = None,
) -> None:
    """Answer a file of requests, line by line.

    Exit code 1 if a line failed. To continue an interrupted job, run the same command again.
    """
    from slipstream.jobs.job_lines import JobFiles
    from slipstream.jobs.job_output import JobOutput

    config = config_from(config, models.config_file, SERVED)
    files = JobFiles.checked(source, output, errors)
    if files.output.exists():  # refuse a file of something else before a model is loaded
        JobOutput(files.output).close()
    if err.is_terminal and not cluster.ray:  # now, as the imports below take a second
        announce_loading(models)
    from slipstream.jobs.line_formats import JobOptions

    variables = json_object("--chat-template-kwargs", template_kwargs)
    options = JobOptions(
        params=structure.added_to(params),
        chat=not raw,
        chat_template_kwargs=variables,
        model_name=model_name,
        token_ids=token_ids,
    )
    job: BatchJob | RayJob
    if cluster.ray:
        job, draft = _ray_job(models, config, files, options, cluster), models.draft
    else:
        from slipstream.jobs.batch_job import BatchJob

        decoder = load_decoder(models, config, is_announced=True)
        job = BatchJob(decoder, files, options)
        draft = draft_name(models, decoder)
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
    write_json(json_file, {"target": models.target, "draft": draft} | report.to_dict())
    raise typer.Exit(1 if report.failed else 0)


def _ray_job(
    models: Models, config: DecoderConfig, files: JobFiles, options: JobOptions, cluster: RayOptions
) -> RayJob:
    from slipstream.integrations.ray.ray_engine import EngineSpec
    from slipstream.integrations.ray.ray_job import RayJob
    from slipstream.integrations.ray.ray_options import ray_module
    from slipstream.jobs.batch_job import JobReport

    ray_module()
    spec = EngineSpec(models.target, models.draft, config, options, 0 if cluster.ray_gpus else ceil(cluster.ray_cpus))
    return RayJob(files, spec, cluster, JobReport())


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
    if not err.is_terminal:
        printed = monotonic()

        def print_line(report: JobReport) -> None:
            nonlocal printed
            if monotonic() - printed >= LINE_SECONDS:
                printed = monotonic()
                err.sentence(_summary(report))

        yield print_line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    with progress_bar(BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")) as bar:
        task = bar.add_task("reading", total=None)

        def show(report: JobReport) -> None:
            time_left = "" if report.seconds_left is None else f", {clock_time(report.seconds_left)} left"
            completed = report.answered_before + report.answered + report.failed
            bar.update(
                task,
                total=report.total,
                completed=completed,
                description=f"{report.seconds:.0f} s{_speed(report)}{time_left}",
            )

        yield show
