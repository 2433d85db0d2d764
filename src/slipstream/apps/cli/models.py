"""`slipstream models`: lists the local cache; checks whether one model can draft for another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.apps.cli.application import SETTINGS, app, quiet_libraries, write_json
from slipstream.apps.cli.command_classes import Command, Group
from slipstream.apps.cli.consoles import out
from slipstream.apps.cli.flags import NAMED, Json
from slipstream.errors import SlipstreamError

models_app = typer.Typer(cls=Group, rich_markup_mode=None, add_completion=False, context_settings=SETTINGS)
app.add_typer(models_app, name="models", help="List the models in the local cache; check that two fit together.")


@models_app.callback(invoke_without_command=True)
def models(
    context: typer.Context,
    fetch: Annotated[bool, typer.Option("--fetch", help="fetch and convert the embedded default model")] = False,
    json_file: Json = None,
) -> None:
    """List the models in the local cache; --fetch gets the embedded default."""
    if context.invoked_subcommand is not None:
        return
    quiet_libraries()
    from slipstream.models.weights.model_files import list_models
    from slipstream.models.weights.resolve import embedded_model

    if fetch:
        embedded_model()
    cached = list_models()
    for item in cached:
        out.print(f"{item['name']:24} {item['architecture']:28} {item['gigabytes']:.2f} GB  {item['folder']}")
    if not cached:
        out.print("no models in the cache; 'slipstream models --fetch' gets the default one")
    write_json(json_file, {"models": cached})


@models_app.command(cls=Command, context_settings=SETTINGS)
def check(
    target: Annotated[str, typer.Argument(help=NAMED)],
    draft: Annotated[str, typer.Argument(help="draft model, named like the target")],
    text: Annotated[Path | None, typer.Option("--text", help="try drafts through bytes on this file's text")] = None,
    json_file: Json = None,
) -> None:
    """Can DRAFT draft for TARGET? Tokens, heads, special tokens and templates; no weights are loaded.

    A draft model of another vocabulary drafts through bytes; how much of its drafts that can lose is tried on a text.
    Exit code 1 if it cannot draft at all.
    """
    quiet_libraries()
    from slipstream.models.weights.tokenizer_loading import inspect_vocabulary
    from slipstream.text.prompt_sets import read_prompts
    from slipstream.wiring.vocabulary_report import compare_vocabularies

    sample = "" if text is None else "\n\n".join(prompt.prompt for prompt in read_prompts(text))
    report = compare_vocabularies(inspect_vocabulary(target), inspect_vocabulary(draft), sample)
    for line in report.lines():
        out.print(line, soft_wrap=True)
    write_json(json_file, report.to_dict())
    if not report.usable:
        raise SlipstreamError(f"{draft!r} cannot draft for {target!r}: {report.conclusion}")
