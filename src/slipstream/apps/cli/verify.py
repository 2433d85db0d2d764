"""`slipstream verify`: runs the certificate's checks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.text import Text

from slipstream import drafters
from slipstream.apps.cli.application import (
    command,
    demo_data,
    draft_name,
    load_decoder,
    prompt_set,
    write_json,
)
from slipstream.apps.cli.consoles import out, progress_bar
from slipstream.apps.cli.flags import MEASURING, Json, Models, PromptChoice, flag, flags
from slipstream.config import DecoderConfig
from slipstream.errors import SlipstreamError
from slipstream.models.weights.model_files import NO_DRAFT
from slipstream.text.prompt_sets import NamedPrompt, chosen_prompts

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.certificate.checks import Check
    from slipstream.decoder import SpeculativeDecoder


@dataclass(frozen=True)
class Extent:
    """The length of the compared outputs and the time limit."""

    max_tokens: int = flag(48, MEASURING, "tokens per compared output", "N", min=1)
    budget: float = flag(120.0, MEASURING, "target time in seconds; outputs are shortened", "SECONDS", min=1)


@command(
    "verify",
    "slipstream verify",
    "slipstream verify --model Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B",
    "slipstream verify --acceptance typical   # a lossy rule is called LOSSY",
)
@flags(Models, PromptChoice, Extent, DecoderConfig)
def verify_command(
    models: Models, choice: PromptChoice, extent: Extent, config: DecoderConfig, json_file: Json = None
) -> None:
    """Check that the output is exactly the target's own.

    Exit code 1 if any check fails.
    """
    if choice.prompt_file is None:
        demo = [NamedPrompt(item["prompt"], item["category"]) for item in demo_data()]
        categories = list(choice.category)
        prompts = chosen_prompts(demo, "the demonstration's prompts", categories=categories, limit=choice.limit)
    else:
        prompts = prompt_set(choice)
    alone = _target_alone(models, config, prompts)
    decoder = load_decoder(models, config)
    checks = _run(decoder, prompts, extent, None if decoder.draft is None else alone)
    from slipstream.apps.cli import tables
    from slipstream.certificate.checks import verdict_on

    out.print(tables.certificate(checks))
    failed = [check for check in checks if check.failed]
    settings = f"{models.target}, drafter {decoder.drafter_name}, acceptance {decoder.config.acceptance}"
    mode = (
        "reproducible: outputs must be bit-identical" if decoder.reproducible else "not reproducible: ties are allowed"
    )
    passed, total = sum(check.passed for check in checks), len(checks)
    counts = f"{passed} of {total} checks passed"
    counts += f", {total - passed - len(failed)} not applicable" if passed + len(failed) < total else ""
    verdict = verdict_on(decoder, checks)
    style = {"VERIFIED": "bold green", "FAILED": "bold red", "LOSSY": "bold yellow"}[verdict]
    out.sentence(Text.assemble((verdict, style), f" {settings} ({counts}; {mode})"))
    named = {"target": models.target, "draft": draft_name(models, decoder)}
    results = {"verdict": verdict, "verified": verdict == "VERIFIED", "lossless": decoder.lossless}
    report = named | {"config": vars(decoder.config)} | results
    write_json(json_file, report | {"checks": [check.to_dict() for check in checks]})
    if verdict == "LOSSY":
        raise SlipstreamError(f"acceptance {decoder.config.acceptance} is lossy: its text is not the target's own")
    if failed:
        raise SlipstreamError(f"not exact: {failed[0].name}: {failed[0].detail}")


def _target_alone(models: Models, config: DecoderConfig, prompts: list[NamedPrompt]) -> list[list[Tensor]] | None:
    """The target's logits before a draft model or head is loaded; None if none will be."""
    if models.draft == NO_DRAFT or not (config.drafter == "auto" or drafters.traits(config.drafter).needs_draft_model):
        return None
    plain = replace(config, drafter="none", num_draft_tokens="auto", acceptance="auto")
    with load_decoder(replace(models, draft=NO_DRAFT), plain) as decoder:
        from slipstream.certificate.checks import target_logits

        return target_logits(decoder, prompts)


def _run(
    decoder: SpeculativeDecoder, prompts: list[NamedPrompt], extent: Extent, alone: list[list[Tensor]] | None
) -> list[Check]:
    """The checks, with a progress bar on a terminal."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    from slipstream.certificate.checks import Verifier

    checks = []
    with progress_bar(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()) as progress:
        verifier = Verifier(decoder, prompts, extent.max_tokens, extent.budget, alone)
        task = progress.add_task("verifying", total=len(verifier.checks))
        for check in verifier.run():
            checks.append(check)
            progress.update(task, advance=1, description=check.name)
    return checks
