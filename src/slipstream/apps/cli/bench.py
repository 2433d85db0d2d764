"""`slipstream bench`: arms in turn on the same prompts, texts compared, every round recorded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from slipstream.apps.cli.application import command, config_from, prompt_set
from slipstream.apps.cli.flags import (
    MEASURING,
    BatchSizes,
    Json,
    Models,
    OutFolder,
    Plan,
    Predict,
    PromptChoice,
    Raw,
    Repeats,
    Report,
    flags,
    option,
    read_batch_sizes,
)
from slipstream.config import DecoderConfig
from slipstream.errors import UsageError
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompt_sets import NamedPrompt

ARMS = (
    "DRAFTER[@LENGTH][/RULE][.plain][.predicted][~TEMP], hf, hf-assisted, hf-assisted-tuned[@LENGTH], "
    "hf-lookup[@LENGTH], llama, llama-lookup[@LENGTH]"
)


@dataclass(frozen=True)
class BenchOptions:
    """What is compared, how often, and what is predicted beside it."""

    arms: Annotated[
        str | None,
        option(MEASURING, "--arms", text=f"what to compare, with commas between: {ARMS}", metavar="ARMS"),
    ] = None
    reference: Annotated[
        str | None,
        option(
            MEASURING, "--reference", text="arm that speed-ups refer to; default: none, else the first", metavar="ARM"
        ),
    ] = None
    batch_sizes: BatchSizes = "1"
    at_once: Annotated[
        int | None,
        option(
            MEASURING,
            "--at-once",
            text="prompts of one call, where those that finish make room for the next",
            metavar="N",
        ),
    ] = None
    repeats: Repeats = 3
    predict: Predict = 5.0
    simulate: Annotated[
        bool,
        option(
            MEASURING, "--simulate", text="also predict other draft lengths and batches, as slipstream simulate does"
        ),
    ] = False
    raw: Raw = False
    out_folder: OutFolder = None
    report: Report = False


@dataclass(frozen=True)
class BenchRequest:
    """All that was asked for, parsed and checked. arms: as the user writes them; batches: the sizes."""

    models: Models
    config: DecoderConfig
    params: SamplingParams
    prompts: list[NamedPrompt]
    options: BenchOptions
    arms: str
    batches: list[int]


@command("bench")
@flags(Models, PromptChoice, BenchOptions, DecoderConfig, SamplingParams, max_tokens=64)
def bench_command(
    models: Models,
    choice: PromptChoice,
    options: BenchOptions,
    config: DecoderConfig,
    params: SamplingParams,
    plan_file: Plan = None,
    json_file: Json = None,
) -> None:
    """Measure arms against each other: speed with intervals, parity, where the time went.

    Arms take turns on each prompt, then comes the next repeat. --num-draft-tokens and --acceptance hold for arms
    that say nothing else. A run that was killed continues where it stopped; a finished folder prints its tables again,
    and no model is loaded. Exit code 1 if a lossless arm's text differs by more than a tie, or if an arm failed.
    """
    config = config_from(config, models.config_file)
    if options.simulate and not options.predict:
        raise UsageError("--simulate beside --predict 0, which measures no costs; allowed: --predict SECONDS above 0")
    batches = read_batch_sizes(options.batch_sizes, config.max_batch_size)
    if options.at_once is not None and batches != [config.max_batch_size]:
        raise UsageError(
            f"--at-once beside batch sizes {options.batch_sizes}; allowed: max_batch_size ({config.max_batch_size})"
        )
    arms = _arms(options.arms, config)
    config, params = replace(config, drafter="auto"), replace(params, seed=params.seed or 0)
    request = BenchRequest(models, config, params, prompt_set(choice), options, arms, batches)
    from slipstream.apps.cli.bench_run import run

    run(request, json_file)


def _arms(arms: str | None, config: DecoderConfig) -> str:
    if arms is None:
        return f"none,{config.drafter}"
    if config.drafter != "auto":
        raise UsageError(f"--drafter {config.drafter} beside --arms, which names the drafters; allowed: one of the two")
    return arms
