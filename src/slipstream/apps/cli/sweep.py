"""`slipstream sweep`: which draft length is best for each drafter and temperature, and when not to speculate."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from slipstream.apps.cli.application import command, config_from, prompt_set
from slipstream.apps.cli.flags import (
    MEASURING,
    Json,
    Models,
    OutFolder,
    Predict,
    PromptChoice,
    Raw,
    Repeats,
    Report,
    flags,
    option,
)
from slipstream.config import DecoderConfig
from slipstream.errors import UsageError
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompt_sets import NamedPrompt


@dataclass(frozen=True)
class SweepOptions:
    """What is swept over, and how."""

    drafters: Annotated[
        str, option(MEASURING, "--drafters", text="with commas between; default: the decoder's own", metavar="NAMES")
    ] = ""
    lengths: Annotated[
        str, option(MEASURING, "--lengths", text="draft lengths, e.g. 0-8 or 0,1,2,4,8", metavar="RANGES")
    ] = "0-8"
    temperatures: Annotated[
        str, option(MEASURING, "--temperatures", text="with commas between, e.g. 0,0.8", metavar="NUMBERS")
    ] = "0"
    batch_size: Annotated[
        int, option(MEASURING, "--batch-size", text="prompts decoded together", metavar="N", min=1)
    ] = 1
    repeats: Repeats = 3
    predict: Predict = 5.0
    raw: Raw = False
    report: Report = False
    out_folder: OutFolder = None


@dataclass(frozen=True)
class Swept:
    """Drafters, draft lengths and temperatures; every combination is measured."""

    drafters: tuple[str, ...]
    lengths: tuple[int, ...]
    temperatures: tuple[float, ...]


@dataclass(frozen=True)
class SweepRequest:
    """All that was asked for, parsed and checked."""

    models: Models
    config: DecoderConfig
    params: SamplingParams
    prompts: list[NamedPrompt]
    options: SweepOptions
    swept: Swept


@command("sweep")
@flags(Models, PromptChoice, SweepOptions, DecoderConfig, SamplingParams, max_tokens=64)
def sweep_command(
    models: Models,
    choice: PromptChoice,
    options: SweepOptions,
    config: DecoderConfig,
    params: SamplingParams,
    json_file: Json = None,
) -> None:
    """Measure draft length x drafter x temperature: the best setting of each.

    Says also where speculation does not pay. Plain decoding is length 0 and always measured. Exit code 1 if a lossless
    setting's text differs by more than a tie.
    """
    config = config_from(config, models.config_file)
    _refuse_single_settings(config, params)
    if options.batch_size > config.max_batch_size:
        raise UsageError(f"--batch-size {options.batch_size}; allowed: up to max_batch_size ({config.max_batch_size})")
    lengths, temperatures = _lengths(options.lengths), _temperatures(options.temperatures)
    swept = Swept(_drafters(options.drafters, config, models.draft), lengths, temperatures)
    request = SweepRequest(models, config, params, prompt_set(choice), options, swept)
    from slipstream.apps.cli.sweep_run import run

    run(request, json_file)


def _refuse_single_settings(config: DecoderConfig, params: SamplingParams) -> None:
    """Refuse flags that name one setting of what is swept over."""
    if config.num_draft_tokens != "auto":
        raise UsageError(f"--num-draft-tokens {config.num_draft_tokens} names one length; allowed: --lengths")
    if params.temperature != SamplingParams().temperature:
        raise UsageError(f"--temperature {params.temperature:g} names one temperature; allowed: --temperatures")


def _drafters(text: str, config: DecoderConfig, draft: str | None) -> tuple[str, ...]:
    """Those of --drafters, or the one that the decoder would use at a number of draft tokens."""
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
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise UsageError(f"--lengths {text!r}: the range {part} is empty; allowed: the smaller number first")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _temperatures(text: str) -> tuple[float, ...]:
    if not re.fullmatch(r"\d+(\.\d{1,6})?(,\d+(\.\d{1,6})?)*", text):
        raise UsageError(f"--temperatures {text!r}; allowed: numbers >= 0 with commas between, e.g. 0,0.8")
    return tuple(float(part) for part in text.split(","))
