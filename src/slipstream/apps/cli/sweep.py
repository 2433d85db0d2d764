"""`slipstream sweep`: a benchmark of several draft lengths for each drafter and temperature."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from slipstream.apps.cli.application import command, prompt_set
from slipstream.apps.cli.flags import (
    MEASURING,
    BenchOptions,
    Json,
    Models,
    PromptChoice,
    flag,
    flags,
    raw_flag,
    read_batch_sizes,
    repeats_flag,
    report_flag,
    runs_flag,
)
from slipstream.config import DecoderConfig
from slipstream.drafters import preferred
from slipstream.errors import UsageError
from slipstream.models.weights.model_files import NO_DRAFT
from slipstream.sampling.params import SamplingParams


@dataclass(frozen=True)
class SweepOptions:
    """The settings that the sweep varies, and its repeats and output."""

    drafters: str = flag("", MEASURING, "drafters, separated by commas; default: the decoder's own", "NAMES")
    lengths: str = flag("0-8", MEASURING, "draft lengths, e.g. 0-8 or 0,1,2,4,8", "RANGES")
    temperatures: str = flag("0", MEASURING, "temperatures, separated by commas, e.g. 0,0.8", "NUMBERS")
    batch_size: int = flag(1, MEASURING, "prompts decoded together", "N", min=1)
    repeats: int = repeats_flag()
    raw: bool = raw_flag()
    report: bool = report_flag()
    out_folder: Path | None = runs_flag()


@command(
    "sweep",
    "slipstream sweep --limit 1",
    "slipstream sweep --drafters ngram,suffix --lengths 0-4,8",
    "slipstream sweep --temperatures 0,0.8 --out runs/sweep --report",
)
@flags(Models, PromptChoice, SweepOptions, DecoderConfig, SamplingParams, measures=True, max_tokens=64)
def sweep_command(
    models: Models,
    choice: PromptChoice,
    options: SweepOptions,
    config: DecoderConfig,
    params: SamplingParams,
    json_file: Json = None,
) -> None:
    """Find the best draft length of each drafter and temperature.

    Also prints where speculation does not pay off. Plain decoding is length 0 and always measured. Exit code 1 if a
    lossless setting's output differs by more than a tie, or if a setting failed.
    """
    if config.num_draft_tokens != "auto":
        raise UsageError(f"--num-draft-tokens {config.num_draft_tokens} names one length; allowed: --lengths")
    if params.temperature != SamplingParams().temperature:
        raise UsageError(f"--temperature {params.temperature:g} names one temperature; allowed: --temperatures")
    if options.drafters and config.drafter != "auto":
        raise UsageError(f"--drafter {config.drafter} with --drafters; allowed: one of the two")
    if not re.fullmatch(r"\d{1,3}(-\d{1,3})?(,\d{1,3}(-\d{1,3})?)*", options.lengths):
        raise UsageError(f"--lengths {options.lengths!r}; allowed: whole numbers and ranges, e.g. 0-4,8")
    spans = [part.partition("-") for part in options.lengths.split(",")]
    for first, dash, last in spans:
        if dash and int(last) < int(first):
            raise UsageError(f"--lengths {options.lengths!r}: the range {first}-{last} is empty; allowed: e.g. 0-4,8")
    lengths = {n for first, _, last in spans for n in range(int(first), int(last or first) + 1)} - {0}
    if not lengths:
        raise UsageError(f"--lengths {options.lengths!r} has no length above 0; allowed: e.g. 0-4,8")
    if not re.fullmatch(r"\d+(\.\d+)?(,\d+(\.\d+)?)*", options.temperatures):
        raise UsageError(f"--temperatures {options.temperatures!r}; allowed: numbers, 0 or more, e.g. 0,0.8")
    drafters = [part.strip() for part in (options.drafters or config.drafter).split(",")]
    if drafters == ["auto"]:
        drafters = [preferred(draft_model=models.draft not in (None, NO_DRAFT), costs=False)]
    names: list[str] = []
    for temperature in options.temperatures.split(","):
        names.append(f"none~{temperature}")
        names += [f"{drafter}@{n}~{temperature}" for drafter in drafters for n in sorted(lengths)]
    batches = read_batch_sizes(str(options.batch_size), config.max_batch_size)
    folder = options.out_folder or Path("runs") / f"sweep-{datetime.now():%Y%m%d-%H%M%S}"
    shared = BenchOptions(repeats=options.repeats, raw=options.raw, report=options.report, out_folder=folder)
    from slipstream.apps.cli.measuring import run_arms

    run_arms(",".join(names), prompt_set(choice), batches, (models, config, params), shared, json_file)
