"""What the commands here share: a console, and one line for every wrong use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

from slipstream.types import SlipstreamError, UsageError

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
Count = Annotated[int, typer.Option(min=1)]


def run(main: Callable[..., Any]) -> None:
    """Run a command; a failure is one line and an exit code, 2 for wrong use."""
    try:
        typer.run(main)
    except SlipstreamError as error:
        console.print(str(error), markup=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
