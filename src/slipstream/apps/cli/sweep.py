"""`slipstream sweep`: a benchmark of several draft lengths for each drafter and temperature."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

from slipstream.apps.cli.application import command, config_from, prompt_set
from slipstream.apps.cli.bench import BenchOptions, run_arms
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
    read_batch_sizes,
)
from slipstream.config import DecoderConfig
from slipstream.drafters import preferred
from slipstream.errors import UsageError
from slipstream.models.weights.model_files import NO_DRAFT
from slipstream.sampling.params import SamplingParams

DRAFTERS = "drafters, separated by commas; default: the decoder's own"
TEMPERATURES = "temperatures, separated by commas, e.g. 0,0.8"
Ranges = Annotated[str, option(MEASURING, "--lengths", text="draft lengths, e.g. 0-8 or 0,1,2,4,8", metavar="RANGES")]
Size = Annotated[int, option(MEASURING, "--batch-size", text="prompts decoded together", metavar="N", min=1)]


@dataclass(frozen=True)
class SweepOptions:
    """The settings that the sweep varies, and its repeats and output."""

    drafters: Annotated[str, option(MEASURING, "--drafters", text=DRAFTERS, metavar="NAMES")] = ""
    lengths: Ranges = "0-8"
    temperatures: Annotated[str, option(MEASURING, "--temperatures", text=TEMPERATURES, metavar="NUMBERS")] = "0"
    batch_size: Size = 1
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

    Also prints where speculation does not pay off. Plain decoding is length 0 and always measured. Exit code 1 if a
    lossless setting's output differs by more than a tie, or if a setting failed.
    """
    config = config_from(config, models.config_file)
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
    more = vars(options)
    shared = {name: more[name] for name in ("repeats", "raw", "report")}
    shared["out_folder"] = options.out_folder or Path("runs") / f"sweep-{datetime.now():%Y%m%d-%H%M%S}"
    run_arms(",".join(names), prompt_set(choice), batches, (models, config, params), BenchOptions(**shared), json_file)
