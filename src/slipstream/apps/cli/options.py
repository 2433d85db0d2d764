"""Options that several commands share, one by one and grouped in dataclasses (see `flags`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.apps.cli.output_files import check_file, check_folder
from slipstream.config import EMBEDDED
from slipstream.errors import UsageError

MODELS, PROMPTS, MEASURING, OUTPUT = "Models", "Prompts", "Measuring", "Output"
NAMED = "hub id, folder, .gguf file, a name from `slipstream models`, or toy"


def option(section: str, *names: str, text: str, **more: Any) -> Any:
    """A typer option in a section of the help."""
    return typer.Option(*names, help=text, rich_help_panel=section, **more)


Target = Annotated[str, option(MODELS, "--target", text=NAMED, metavar="MODEL")]
DraftModel = Annotated[
    str | None, option(MODELS, "--draft", text="draft model, of any vocabulary, named like the target", metavar="MODEL")
]
ConfigFile = Annotated[
    Path | None,
    option(MODELS, "--config", text="decoder settings as JSON, instead of their flags", metavar="FILE"),
]
PromptTexts = Annotated[
    list[str],
    option(
        PROMPTS, "-p", "--prompt", text="prompt; - reads standard input; may be given several times", metavar="TEXT"
    ),
]
PromptFile = Annotated[
    Path | None,
    option(PROMPTS, "--prompt-file", text="a text, or .jsonl with a prompt per line", metavar="FILE"),
]
Category = Annotated[
    list[str], option(PROMPTS, "--category", text="only this category of a .jsonl file; several times", metavar="NAME")
]
Limit = Annotated[
    int | None,
    option(PROMPTS, "--limit", text="at most this many prompts of each category", metavar="N", min=1),
]
Raw = Annotated[bool, option(PROMPTS, "--raw", text="no chat template around the prompts")]
System = Annotated[
    str, option(PROMPTS, "--system", text="system message of the chat template, before the prompt", metavar="TEXT")
]
Repeats = Annotated[
    int, option(MEASURING, "--repeats", text="runs of each arm on each prompt; times are medians", metavar="N", min=1)
]
Predict = Annotated[
    float,
    option(
        MEASURING,
        "--predict",
        text="seconds per drafter to measure costs for predictions; 0: none",
        metavar="SECONDS",
        min=0,
    ),
]
BatchSizes = Annotated[
    str, option(MEASURING, "--batch-sizes", text="prompts decoded together, e.g. 1,4", metavar="NUMBERS")
]
Json = Annotated[
    Path | None,
    option(OUTPUT, "--json", text="write the full result to this file", metavar="FILE", callback=check_file("--json")),
]
Debug = Annotated[
    bool, option(OUTPUT, "--debug", text="show every round: accepted, rejected and the target's own tokens")
]
OutFolder = Annotated[
    Path | None,
    option(
        OUTPUT,
        "--out",
        text="folder of the runs; a run begun there before continues",
        metavar="FOLDER",
        callback=check_folder("--out"),
    ),
]
Report = Annotated[bool, option(OUTPUT, "--report", text="also write plots and report.html into the folder")]


@dataclass(frozen=True)
class Models:
    """Which models, and a file of decoder settings."""

    target: Target = EMBEDDED
    draft: DraftModel = None
    config_file: ConfigFile = None


@dataclass(frozen=True)
class PromptChoice:
    """Which prompts of a file, or of the package's own."""

    prompt_file: PromptFile = None
    category: Category = ()  # type: ignore[assignment]
    limit: Limit = None


@dataclass(frozen=True)
class PromptSource:
    """Prompts given one by one, or those of a file."""

    prompt: PromptTexts = ()  # type: ignore[assignment]
    prompt_file: PromptFile = None
    category: Category = ()  # type: ignore[assignment]
    limit: Limit = None
    raw: Raw = False


def read_batch_sizes(text: str, most: int) -> list[int]:
    """The numbers of --batch-sizes. most: the decoder's max_batch_size."""
    sizes = [int(size) for size in text.split(",")] if re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", text) else []
    if not sizes or len(set(sizes)) < len(sizes):
        raise UsageError(f"--batch-sizes {text!r}; allowed: different whole numbers with commas between, e.g. 1,4,8")
    if max(sizes) > most:
        raise UsageError(f"batch size {max(sizes)}; allowed: up to max_batch_size ({most})")
    return sizes
