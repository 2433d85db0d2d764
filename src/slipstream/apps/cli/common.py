"""What the commands share: the application, consoles, options, and how failures reach the user."""

from __future__ import annotations

import json
import sys
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from slipstream.apps.cli import tables as show
from slipstream.config import DecoderConfig
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import UsageError
from slipstream.text.prompts import NamedPrompt, builtin_prompts, read_prompts

app = typer.Typer(
    name="slipstream",
    help="Speculative decoding that changes the speed of a language model and nothing else.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
# output that goes to a file or a pipe is not folded at 80 columns
out = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True, highlight=False, emoji=False, width=None if sys.stderr.isatty() else 120)

Target = Annotated[
    str, typer.Option("--target", help="hub id, folder, .gguf file, a name from `slipstream models`, or toy")
]
DraftModel = Annotated[str | None, typer.Option("--draft", help="draft model, named like the target")]
PromptTexts = Annotated[list[str], typer.Option("-p", "--prompt", help="prompt; may be given several times")]
PromptFile = Annotated[Path | None, typer.Option("--prompt-file", help="a text, or .jsonl with a prompt per line")]
Category = Annotated[list[str], typer.Option("--category", help="only these categories of a .jsonl file")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="at most this many prompts of each category")]
Json = Annotated[Path | None, typer.Option("--json", help="write the full result to this file")]
Raw = Annotated[bool, typer.Option("--raw", help="no chat template around the prompts")]
Debug = Annotated[
    bool, typer.Option("--debug", help="show every round: accepted, rejected and the target's own tokens")
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="decoder settings as JSON, instead of their flags")]


def load_decoder(target: str, draft: str | None, config: DecoderConfig, config_file: Path | None) -> SpeculativeDecoder:
    """The decoder the flags or the configuration file describe; a lossy rule is announced."""
    config = config_from(config, config_file)
    decoder = SpeculativeDecoder(target, draft, **vars(config))
    if not decoder.lossless:
        show.lossy_warning(err, config.acceptance)
    return decoder


def config_from(flags: DecoderConfig, file: Path | None) -> DecoderConfig:
    """The settings of --config, or those of the flags."""
    if file is None:
        return flags
    if flags != DecoderConfig():
        raise UsageError("--config replaces the decoder's flags; allowed: one or the other")
    return DecoderConfig.from_json(file)


def prompt_set(file: Path | None, category: list[str], limit: int | None) -> list[NamedPrompt]:
    """The prompts of a file, or the package's own."""
    if file is None:
        return builtin_prompts(categories=category, limit=limit)
    return read_prompts(file, categories=category, limit=limit)


def gather_prompts(texts: list[str], file: Path | None, category: list[str], limit: int | None) -> list[NamedPrompt]:
    """The prompts of --prompt or of --prompt-file."""
    if bool(texts) == (file is not None):
        raise UsageError("prompts come from --prompt or from --prompt-file; allowed: exactly one of them")
    if file is not None:
        return read_prompts(file, categories=category, limit=limit)
    if category or limit:
        raise UsageError("--category and --limit choose from a --prompt-file; allowed: together with one")
    return [NamedPrompt(text) for text in texts]


def write_json(path: Path | None, value: dict[str, Any]) -> None:
    """Write the full result where --json asks for it."""
    if path is not None:
        try:
            path.write_text(json.dumps(value, indent=2) + "\n")
        except OSError as error:
            raise UsageError(f"--json {str(path)!r} cannot be written: {error.strerror}") from error


def demo_data() -> list[dict[str, str]]:
    """The prompts of the demonstration: category, prompt and why it is in."""
    data: list[dict[str, str]] = json.loads(resources.files("slipstream").joinpath("data/demo.json").read_text())
    return data
