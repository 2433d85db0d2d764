"""The `slipstream` command, one file per command. Commands parse flags, call the library and print.

Help and usage errors come at once: PyTorch and transformers are imported only by a command that runs.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from typing import Annotated

import typer
from typer.exceptions import TyperException

from slipstream.models.cpu.thread_placement import bind_threads

bind_threads(os.environ)  # before PyTorch is imported

from slipstream.apps.cli.application import app  # noqa: E402
from slipstream.apps.cli.command_classes import COMMANDS  # noqa: E402
from slipstream.apps.cli.consoles import out, print_error  # noqa: E402
from slipstream.apps.server.server_log import HANDLER  # noqa: E402
from slipstream.errors import SlipstreamError, UsageError, os_reason  # noqa: E402
from slipstream.text.terminal_text import harmless  # noqa: E402
from slipstream.version import __version__  # noqa: E402

for _name in (name for names in COMMANDS.values() for name in names):
    import_module(f"{__name__}.{_name}")  # registers itself


@app.callback(invoke_without_command=True)
def _common(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="print the version")] = False
) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


class _Harmless(logging.Formatter):
    """Removes control characters: log lines may contain input from clients."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def main() -> None:
    """Run the command; every failure is one line on standard error and an exit code (2: wrong use, 1: failure)."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # where Python lacks fcntl, a lock is a file, which filelock removes once its owner has ended
    warnings.filterwarnings("ignore", "only soft file lock")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python does on standard error
    handler = logging.StreamHandler()
    handler.setFormatter(_Harmless("%(message)s"))
    handler.set_name(HANDLER)
    logging.basicConfig(level=logging.ERROR, handlers=[handler])
    logging.getLogger("slipstream").setLevel(logging.INFO)
    try:
        code = app(prog_name="slipstream", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except TyperException as error:
        _exit(str(error.format_message()), error.exit_code)
    except UsageError as error:
        _exit(str(error), 2)
    except SlipstreamError as error:
        _exit(str(error), 1)
    except ModuleNotFoundError as error:  # of a package that the library alone does not need
        package = str(error.name).partition(".")[0]
        if package == "slipstream":
            raise
        _exit(f"{package} is not installed; run: pip install {package}", 1)
    except (KeyboardInterrupt, typer.Abort):  # the second is a RuntimeError
        _exit("interrupted", 130)
    except (MemoryError, RuntimeError, OSError) as error:
        if _is_lack_of_memory(error):
            _exit("out of memory; allowed: a quantized file, a smaller --max-batch-size, shorter texts", 1)
        if not isinstance(error, OSError):
            raise
        # printing failed; commands report failures of their files themselves
        _exit(f"{error.filename or 'standard output'}: {os_reason(error)}", 1)


def _is_lack_of_memory(error: Exception) -> bool:
    words = str(error).lower()  # PyTorch's own class for it is that of GPUs alone
    return isinstance(error, MemoryError) or "allocate memory" in words or "out of memory" in words


def _exit(message: str, code: int) -> None:
    with suppress(OSError):
        print_error(" ".join(message.split()))
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # drop what cannot be written, so that the interpreter does not retry when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)
