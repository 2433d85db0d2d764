"""What the commands here share: a console, and one line for every wrong use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from slipstream.errors import SlipstreamError, UsageError

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
Count = Annotated[int, typer.Option(min=1)]


def _writable(file: Path | None) -> Path | None:
    """The file as it was given; wrong use before a measurement is lost, not after it."""
    if file is not None:
        try:
            file.open("a").close()
        except OSError as error:
            raise UsageError(f"--json {str(file)!r} cannot be written: {error.strerror}") from error
    return file


JsonFile = Annotated[Path | None, typer.Option("--json", help="write the full result here", callback=_writable)]


def run(main: Callable[..., Any]) -> None:
    """Run a command; a failure is one line and an exit code, 2 for wrong use."""
    try:
        typer.run(main)
    except SlipstreamError as error:
        console.print(str(error), markup=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
