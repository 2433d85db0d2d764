"""`slipstream verify`: the certificate."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from slipstream.apps.cli import tables as show
from slipstream.apps.cli.common import (
    Category,
    ConfigFile,
    DraftModel,
    Json,
    Limit,
    PromptFile,
    Target,
    app,
    demo_data,
    err,
    load_decoder,
    out,
    write_json,
)
from slipstream.apps.cli.flags import flags
from slipstream.certificate.checks import Verifier
from slipstream.certificate.wrong_rules import load_wrong_rule
from slipstream.config import DecoderConfig
from slipstream.errors import SlipstreamError
from slipstream.models.hf.model_files import EMBEDDED
from slipstream.text.prompts import NamedPrompt, chosen_prompts, read_prompts


@app.command()
@flags(DecoderConfig)
def verify(
    config: DecoderConfig,
    target: Target = EMBEDDED,
    draft: DraftModel = None,
    prompt_file: PromptFile = None,
    category: Category = [],  # noqa: B006
    limit: Limit = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="length of the compared texts")] = 48,
    budget: Annotated[
        float, typer.Option("--budget", min=1, help="seconds to aim for; texts are shortened to fit")
    ] = 120.0,
    wrong_rule: Annotated[str | None, typer.Option("--wrong-rule", hidden=True)] = None,
    config_file: ConfigFile = None,
    json_file: Json = None,
) -> None:
    """The certificate: is the text exactly the target's own? Exit code 1 if any check fails."""
    if prompt_file is None:
        demo = [NamedPrompt(item["prompt"], item["category"]) for item in demo_data()]
        prompts = chosen_prompts(demo, "the demonstration's prompts", categories=category, limit=limit)
    else:
        prompts = read_prompts(prompt_file, categories=category, limit=limit)
    decoder = load_decoder(target, draft, config, config_file)
    if wrong_rule is not None:
        decoder = decoder.using(acceptance=load_wrong_rule(wrong_rule))
    checks = []
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=err) as progress:
        verifier = Verifier(decoder, prompts, max_tokens, budget)
        task = progress.add_task("verifying", total=verifier.num_checks)
        for check in verifier.run():
            checks.append(check)
            progress.update(task, advance=1, description=check.name)
            if not err.is_terminal:
                err.print(f"{len(checks)}/{verifier.num_checks} {check.name}: {check.outcome}")
    out.print(show.certificate(checks))
    failed = [check for check in checks if check.failed]
    passed, total = sum(check.passed for check in checks), len(checks)
    counts = f"{passed} of {total} checks passed" + (
        f", {total - passed - len(failed)} not applicable" if passed + len(failed) < total else ""
    )
    settings = f"{target}, drafter {decoder.drafter_name}, acceptance {decoder.config.acceptance}"
    mode = "reproducible: texts must be bit-identical" if decoder.reproducible else "not reproducible: ties are allowed"
    result = "FAILED" if failed else "VERIFIED"
    out.print(f"[bold {'red' if failed else 'green'}]{result}[/] {settings} ({counts}; {mode})", soft_wrap=True)
    report = {"target": target, "draft": draft, "config": vars(decoder.config), "verified": not failed}
    write_json(json_file, report | {"checks": [check.to_dict() for check in checks]})
    if failed:
        raise SlipstreamError(f"not exact: {failed[0].name}: {failed[0].detail}")
