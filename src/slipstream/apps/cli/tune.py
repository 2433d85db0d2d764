"""`slipstream tune`: what to use on this machine and these prompts, measured, and ready settings for other engines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from slipstream.apps.cli.application import command, config_from, prompt_set
from slipstream.apps.cli.flags import (
    MEASURING,
    MODELS,
    OUTPUT,
    BatchSizes,
    ConfigFile,
    Json,
    PromptChoice,
    Raw,
    Target,
    flags,
    option,
    read_batch_sizes,
)
from slipstream.apps.cli.output_files import check_folder
from slipstream.config import DecoderConfig
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.errors import UsageError
from slipstream.models.weights.model_files import EMBEDDED
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompt_sets import NamedPrompt


@dataclass(frozen=True)
class TuneOptions:
    """What is considered, and for how long."""

    target: Target = EMBEDDED
    draft: Annotated[
        list[str], option(MODELS, "--draft", text="draft model; may be given several times, or not", metavar="MODEL")
    ] = ()  # type: ignore[assignment]
    config_file: ConfigFile = None
    batch_sizes: BatchSizes = "1"
    longest: Annotated[
        int,
        option(
            MEASURING,
            "--longest",
            text="longest draft that is considered",
            metavar="N",
            min=1,
            max=MAX_DRAFT_TOKENS,
        ),
    ] = 8
    budget: Annotated[
        float, option(MEASURING, "--budget", text="seconds to measure, loading not counted", metavar="SECONDS")
    ] = 300.0
    raw: Raw = False
    out_folder: Annotated[
        Path | None,
        option(
            OUTPUT,
            "--out",
            text="new folder; default: runs/tune-...",
            metavar="FOLDER",
            callback=check_folder("--out"),
        ),
    ] = None

    @property
    def drafts(self) -> list[str]:
        """The draft models, in the order given."""
        return list(self.draft)


@dataclass(frozen=True)
class TuneRequest:
    """All that was asked for, parsed and checked. batches: the sizes."""

    config: DecoderConfig
    params: SamplingParams
    prompts: list[NamedPrompt]
    options: TuneOptions
    batches: list[int]


@command("tune")
@flags(TuneOptions, PromptChoice, DecoderConfig, SamplingParams, max_tokens=64)
def tune_command(
    options: TuneOptions,
    choice: PromptChoice,
    config: DecoderConfig,
    params: SamplingParams,
    json_file: Json = None,
) -> None:
    """Find what pays here: drafter, draft length and draft model, or not to speculate.

    Measures for each batch size. Writes the answer as a configuration for --config and as settings for vLLM, SGLang and
    llama.cpp. Exit code 1 if a candidate failed or its text differs from plain decoding's by more than a tie.
    """
    config = config_from(config, options.config_file)
    _refuse(config, options.budget)
    batches = read_batch_sizes(options.batch_sizes, config.max_batch_size)
    params = replace(params, seed=params.seed or 0)
    request = TuneRequest(config, params, prompt_set(choice), options, batches)
    from slipstream.apps.cli.tune_run import run

    run(request, json_file)


def _refuse(config: DecoderConfig, budget: float) -> None:
    """Refuse settings that would answer what is asked here, and rules that change the text."""
    if not 0 < budget < float("inf"):
        raise UsageError(f"--budget {budget:g}; allowed: a number of seconds > 0")
    if config.drafter != "auto":
        raise UsageError(f"--drafter {config.drafter} is what tune is to find; allowed: auto")
    if config.num_draft_tokens != "auto":
        raise UsageError(f"--num-draft-tokens {config.num_draft_tokens} is what tune is to find; allowed: --longest")
