"""Shared by the benchmarks: a console, types of options, JSON output, child processes, and errors on one line."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Annotated, Any, NoReturn, Self

import typer
from rich.console import Console

from slipstream.errors import SlipstreamError, UsageError

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
Count = Annotated[int, typer.Option(min=1)]


def _writable(file: Path | None) -> Path | None:
    """Return the file. One that cannot be written is refused before the measurement, whose result would be lost."""
    if file is not None:
        try:
            file.open("a", encoding="utf-8").close()
        except OSError as error:
            raise UsageError(f"--json {str(file)!r} cannot be written: {error.strerror}") from error
    return file


JsonFile = Annotated[Path | None, typer.Option("--json", help="write the full result here", callback=_writable)]


def save(file: Path | None, result: Any) -> None:
    """Write a result as JSON where --json asks for it."""
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def run(main: Callable[..., Any]) -> None:
    """Run a command whose options typer parses. An error prints one line; the exit code is 2 for wrong use, else 1."""
    in_one_line(lambda: typer.run(main))


def in_one_line(main: Callable[[], int | None]) -> NoReturn:
    """Run a command that parses its own arguments, and exit with the code it returns. Errors are as in `run`."""
    try:
        sys.exit(main())
    except SlipstreamError as error:
        console.print(str(error), markup=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)


class Child:
    """A process that answers each line of JSON on its standard input with a line of JSON. name: for messages."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        environment = os.environ | (environment or {})
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, text=True, encoding="utf-8", env=environment)

    def ask(self, message: Any) -> Any:
        """Send a message and return the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise SlipstreamError(f"the process of {self.name} ended with exit code {self._process.wait()}; see above")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def positive(text: str) -> int:
    """A whole number of at least 1, as an argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}; allowed: a whole number from 1 on")
    return int(text)


def numbers(option: str, text: str) -> list[int]:
    """Parse whole numbers of at least 1, separated by commas; repeated ones count once. option: its name in errors."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{option} {text!r}; allowed: whole numbers from 1 on, separated by commas")
    return list(dict.fromkeys(map(int, parts)))
