"""`slipstream models`: lists, downloads and removes models; checks whether one model can draft for another."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from slipstream.apps.cli.application import SETTINGS, app, write_json
from slipstream.apps.cli.command_classes import Command, Group
from slipstream.apps.cli.consoles import err, out
from slipstream.apps.cli.flags import NAMED, Json
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.weights.model_files import EMBEDDED, quiet
from slipstream.models.weights.named_models import named_model, short_names

models_app = typer.Typer(cls=Group, rich_markup_mode=None, add_completion=False, context_settings=SETTINGS)
app.add_typer(models_app, name="models", help="List, download and remove models; check that two fit together.")

# a target, and a draft model of its family: the same vocabulary, a tenth of its size or less
PAIRS = (
    ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"),
    ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
    ("Qwen/Qwen2.5-Coder-7B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"),
    ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
)
UNITS = (("year", 365 * 86400), ("month", 30 * 86400), ("day", 86400), ("hour", 3600), ("minute", 60))
PULLED = (
    f"short name, such as qwen3:4b, OWNER/REPO:Q4_K_M for a GGUF file, or a hub id; {EMBEDDED} is the default model"
)
Name = Annotated[str, typer.Argument(help=PULLED, metavar="NAME")]


@models_app.callback(invoke_without_command=True)
def models(context: typer.Context, json_file: Json = None) -> None:
    """List the models on this machine, in Slipstream's and Hugging Face's caches, short names, and pairs that fit.

    Packed ones are matrices of GGUF files, made when such a file was loaded; removing them loses nothing but time.
    Unfinished ones are downloads that were interrupted; pulling the model continues them.
    """
    if context.invoked_subcommand is not None:
        return
    quiet()
    from slipstream.models.weights.stored_models import stored_models

    stored = stored_models()
    lines = [(m.name, size(m.num_bytes), f"{age(time.time() - m.modified)} ago", m.place) for m in stored]
    lines.append(("toy", "-", "-", "built in"))
    width = max(len(name) for name, *_ in (("NAME",), *lines))
    for name, num_bytes, modified, place in (("NAME", "SIZE", "MODIFIED", "CACHE"), *lines):
        out.print(f"{name:{width}}  {num_bytes:>7}  {modified:15}  {place}", soft_wrap=True)
    _print_short_names()
    other = "" if stored else f", in addition to {EMBEDDED}, the default"
    err.sentence(f"\nPairs for --model and --draft that fit together{other}:")
    width = max(len(target) for target, _ in PAIRS)
    for target, draft in PAIRS:
        err.print(f"  {target:{width}}  {draft}", soft_wrap=True)
    err.sentence("`slipstream models pull NAME` downloads a model, `slipstream models rm NAME` removes it.")
    report = {"models": [m.to_dict() for m in stored], "pairs": [list(pair) for pair in PAIRS]}
    names = [{**asdict(named), "gigabytes_needed": named.gigabytes_needed} for named in short_names().values()]
    write_json(json_file, {**report, "names": names})


def _print_short_names() -> None:
    """Print the table of short names, each with its draft model and whether this machine's memory is large enough."""
    from slipstream.models.cpu.processor import memory_bytes

    memory = (memory_bytes() or 0) / 1e9
    lines = [("NAME", "SIZE", "DRAFT MODEL", "NEEDS", "FITS HERE")]
    for named in short_names().values():
        fits = "unknown" if not memory else "yes" if named.gigabytes_needed <= memory else "no"
        needed = f"{named.gigabytes_needed:.0f} GB"
        lines.append((named.name, size(round(named.gigabytes * 1e9)), named.draft or "-", needed, fits))
    err.sentence(f"\nShort names for --model, downloaded when first used (memory here: {memory:.0f} GB):")
    for name, num_bytes, draft, needed, fits in lines:
        err.print(f"  {name:18}  {num_bytes:>7}  {draft:18}  {needed:>5}  {fits}", soft_wrap=True)


@models_app.command(cls=Command, context_settings=SETTINGS)
def pull(name: Name, json_file: Json = None) -> None:
    """Download a model, so that it can be used offline; with a short name, its draft model as well."""
    from slipstream.models.weights.stored_models import pull_model

    folder = pull_model(name)
    err.print(f"{name} is in {folder}", soft_wrap=True)
    named = named_model(name)
    if named is not None and named.draft is not None:
        err.print(f"{named.draft}, its draft model, is in {pull_model(named.draft)}", soft_wrap=True)
    write_json(json_file, {"name": name, "folder": str(folder)})


@models_app.command(cls=Command, context_settings=SETTINGS)
def rm(name: Annotated[str, typer.Argument(help="a name from `slipstream models`")], json_file: Json = None) -> None:
    """Remove a model from the disk."""
    quiet()
    from slipstream.models.weights.stored_models import remove_model

    model = remove_model(name)
    err.print(f"removed {model.name} ({size(model.num_bytes)}) from {model.folder}", soft_wrap=True)
    write_json(json_file, {"removed": model.to_dict()})


@models_app.command(cls=Command, context_settings=SETTINGS)
def check(
    target: Annotated[str, typer.Argument(help=NAMED)],
    draft: Annotated[str, typer.Argument(help="draft model or draft head, named like the target")],
    text: Annotated[Path | None, typer.Option("--text", help="sample for drafts through text", metavar="FILE")] = None,
    json_file: Json = None,
) -> None:
    """Check whether DRAFT can draft for TARGET.

    Compares tokens; weights are loaded only for a draft head. A draft model with another vocabulary drafts through
    text; the loss is measured on a sample text. A draft head guesses tokens of the target, with the
    settings of its config.json and with others that may have been meant. Exit code 1 if DRAFT cannot draft at all.
    """
    if err.is_terminal:
        err.sentence(f"reading {target} and {draft} ...", style="dim")
    quiet()
    if _check_as_head(target, draft, text, json_file):
        return
    from slipstream.models.weights.tokenizer_loading import inspect_vocabulary
    from slipstream.text.prompt_sets import read_prompts
    from slipstream.wiring.vocabulary_report import compare_vocabularies

    sample = "" if text is None else "\n\n".join(prompt.prompt for prompt in read_prompts(text))
    report = compare_vocabularies(inspect_vocabulary(target), inspect_vocabulary(draft), sample)
    write_json(json_file, report.to_dict())
    if not report.usable:
        raise SlipstreamError(f"{draft!r} cannot draft for {target!r}: {report.verdict}")
    for line in (report.verdict, *report.notes):
        out.sentence(line)


def _check_as_head(target: str, draft: str, text: Path | None, json_file: Path | None) -> bool:
    """If DRAFT is a draft head, let it guess tokens of the target. Returns True if it is one."""
    from slipstream.models.heads.head_check import agreement
    from slipstream.models.heads.head_files import head_files
    from slipstream.models.heads.load import load_head
    from slipstream.models.load import load
    from slipstream.models.loaded import LoadOptions, is_toy

    options = LoadOptions()
    files = None if is_toy(draft) else head_files(draft, options)
    if files is None:
        return False
    if text is not None:
        raise UsageError(f"--text {str(text)!r} with the draft head {draft!r}; allowed: with a draft model")
    err.sentence(f"loading {target} and trying {draft} on a sample ...", style="dim")
    loaded = load(target, options)
    head = load_head(files, loaded, options)
    trial = agreement(head, loaded)
    write_json(json_file, {"target": target, "draft": draft, **({} if trial is None else asdict(trial))})
    line = (
        f"draft head {draft!r} fits {target!r}; its guesses were not tried"
        if trial is None
        else trial.line(draft, target)
    )
    out.print(("Works badly: " if trial and trial.is_warning else "Works: ") + line, soft_wrap=True)
    return True


def size(num_bytes: int) -> str:
    """A size for people: 269 MB, 1.5 GB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 999.5e6 else f"{max(1, round(num_bytes / 1e6))} MB"


def age(seconds: float) -> str:
    """A time for people: 3 days, 1 hour, less than a minute."""
    for unit, length in UNITS:
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return "moments"
