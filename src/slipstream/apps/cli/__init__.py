"""The `slipstream` command, one file per command. Commands parse flags, call the library and print."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer
from rich.markup import escape
from typer.exceptions import TyperException

from slipstream.models.cpu.thread_placement import bind_threads

bind_threads(os.environ)  # before PyTorch is imported

from slipstream import __version__  # noqa: E402
from slipstream.apps.cli import bench, chat, compare, generate, models, report, simulate, sweep, tune, verify
from slipstream.apps.cli.common import app, err, out  # noqa: E402
from slipstream.errors import SlipstreamError, UsageError  # noqa: E402


@app.callback(invoke_without_command=True)
def _common(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit


def _quiet_libraries() -> None:
    """Only our own notes reach the user; the libraries' advice to developers does not."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(level=logging.ERROR, format="%(message)s", stream=sys.stderr)
    logging.getLogger("slipstream").setLevel(logging.INFO)
    from slipstream.models.hf.model_files import quiet

    quiet()


def main() -> None:
    """Run the command; every failure is one line on standard error and an exit code (2 wrong use, 1 failure)."""
    _quiet_libraries()
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except TyperException as error:
        _exit(str(error.format_message()), error.exit_code)
    except UsageError as error:
        _exit(str(error), 2)
    except SlipstreamError as error:
        _exit(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        _exit("interrupted", 130)


def _exit(message: str, code: int) -> None:
    err.print(f"[red]error:[/] {escape(' '.join(message.split()))}", soft_wrap=True)
    sys.exit(code)
