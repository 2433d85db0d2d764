"""The command line, and the commands of benchmarks, in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import typer

from slipstream.apps import cli

built = typer.main.get_command
built_once = cache(built)  # typer builds all commands again whenever one is called


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """`slipstream` with these arguments: exit status, standard output, standard error."""
    changes = "--help-all" in arguments  # it changes the options to show hidden ones
    monkeypatch.setattr(typer.main, "get_command", built if changes else built_once)
    return run_main(capsys, monkeypatch, cli.main, *arguments)


def run_main(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, main: Callable[[], Any], *arguments: object
) -> tuple[int, str, str]:
    """Like `run`, for the `main` of any command that exits."""
    monkeypatch.setattr(sys, "argv", ["slipstream", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_info:
        main()
    captured = capsys.readouterr()
    code = exit_info.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err
