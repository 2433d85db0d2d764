"""`slipstream sweep`: which draft length is best for each drafter and temperature, and when not to speculate."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

from slipstream.apps.cli.application import command, config_from, prompt_set, write_json
from slipstream.apps.cli.flags import (
    MEASURING,
    Json,
    Models,
    OutFolder,
    PromptChoice,
    Raw,
    Repeats,
    Report,
    flags,
    option,
)
from slipstream.config import DecoderConfig
from slipstream.errors import UsageError
from slipstream.models.weights.model_files import NO_DRAFT
from slipstream.sampling.params import SamplingParams


@dataclass(frozen=True)
class SweepOptions:
    """The settings that the sweep varies, and how it measures."""

    drafters: Annotated[
        str,
        option(
            MEASURING, "--drafters", text="drafters, separated by commas; default: the decoder's own", metavar="NAMES"
        ),
    ] = ""
    lengths: Annotated[
        str, option(MEASURING, "--lengths", text="draft lengths, e.g. 0-8 or 0,1,2,4,8", metavar="RANGES")
    ] = "0-8"
    temperatures: Annotated[
        str,
        option(MEASURING, "--temperatures", text="temperatures, separated by commas, e.g. 0,0.8", metavar="NUMBERS"),
    ] = "0"
    batch_size: Annotated[
        int, option(MEASURING, "--batch-size", text="prompts decoded together", metavar="N", min=1)
    ] = 1
    repeats: Repeats = 3
    raw: Raw = False
    report: Report = False
    out_folder: OutFolder = None


@command(
    "sweep",
    "slipstream sweep --limit 1",
    "slipstream sweep --drafters ngram,suffix --lengths 0-4,8",
    "slipstream sweep --temperatures 0,0.8 --out runs/sweep --report",
)
@flags(Models, PromptChoice, SweepOptions, DecoderConfig, SamplingParams, max_tokens=64)
def sweep_command(
    models: Models,
    choice: PromptChoice,
    options: SweepOptions,
    config: DecoderConfig,
    params: SamplingParams,
    json_file: Json = None,
) -> None:
    """Find the best draft length of each drafter and temperature.

    Prints also where speculation does not pay. Plain decoding is length 0 and always measured. Exit code 1 if a
    lossless setting's text differs by more than a tie.
    """
    config = config_from(config, models.config_file)
    _refuse_single_settings(config, params)
    if options.batch_size > config.max_batch_size:
        raise UsageError(f"--batch-size {options.batch_size}; allowed: up to max_batch_size ({config.max_batch_size})")
    lengths, temperatures = _lengths(options.lengths), _temperatures(options.temperatures)
    drafters, prompts = (
        _drafters(options.drafters, config, None if models.draft == NO_DRAFT else models.draft),
        prompt_set(choice),
    )
    config, params = replace(config, drafter="auto"), replace(params, seed=params.seed or 0)
    from slipstream.apps.cli.measuring import Benchmark, fail_on_wrong_texts, report_folder
    from slipstream.apps.cli.tables import print_series
    from slipstream.bench.plan import name_prompts
    from slipstream.bench.report import require_matplotlib
    from slipstream.bench.sweep_grid import Grid, series_of, summarise_by_temperature, sweep_report

    if options.report:
        require_matplotlib()
    grid = Grid(drafters, lengths, temperatures)
    named, batches, chat = name_prompts(prompts), [options.batch_size], not options.raw
    benchmark = Benchmark(
        models, config, params, named, grid.arms(), grid.reference, batches, options.repeats, chat=chat
    )
    folder = options.out_folder or Path("runs") / f"sweep-{datetime.now():%Y%m%d-%H%M%S}"
    header, runs = benchmark.run(folder)
    summaries = summarise_by_temperature(runs, grid.reference)
    series = series_of(summaries)
    print_series(series)
    report_folder(folder, header, page=options.report)
    write_json(json_file, asdict(header) | {"sweep": sweep_report(series)})
    fail_on_wrong_texts(summaries)


def _refuse_single_settings(config: DecoderConfig, params: SamplingParams) -> None:
    """Refuse flags that fix a setting which the sweep varies."""
    if config.num_draft_tokens != "auto":
        raise UsageError(f"--num-draft-tokens {config.num_draft_tokens} names one length; allowed: --lengths")
    if params.temperature != SamplingParams().temperature:
        raise UsageError(f"--temperature {params.temperature:g} names one temperature; allowed: --temperatures")


def _drafters(text: str, config: DecoderConfig, draft: str | None) -> tuple[str, ...]:
    """The drafters of --drafters, or the one that the decoder would use with a fixed draft length."""
    if text and config.drafter != "auto":
        raise UsageError(f"--drafter {config.drafter} beside --drafters; allowed: one of the two")
    if text:
        return tuple(part.strip() for part in text.split(","))
    if config.drafter != "auto":
        return (config.drafter,)
    from slipstream.drafters import preferred

    return (preferred(draft_model=draft is not None, costs=False),)


def _lengths(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,3}(-\d{1,3})?(,\d{1,3}(-\d{1,3})?)*", text):
        raise UsageError(f"--lengths {text!r}; allowed: whole numbers and ranges with commas between, e.g. 0-4,8")
    lengths: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise UsageError(f"--lengths {text!r}: the range {part} is empty; allowed: the smaller number first")
        lengths += range(int(first), int(last or first) + 1)
    return tuple(lengths)


def _temperatures(text: str) -> tuple[float, ...]:
    if not re.fullmatch(r"\d+(\.\d{1,6})?(,\d+(\.\d{1,6})?)*", text):
        raise UsageError(f"--temperatures {text!r}; allowed: numbers, 0 or more, with commas between, e.g. 0,0.8")
    return tuple(float(part) for part in text.split(","))
