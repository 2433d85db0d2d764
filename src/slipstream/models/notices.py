"""Messages of loading a model: that long work begins and how far it is, and what runs slower than it could.

Long work happens once per machine: models are converted, kernels compiled, forwards measured.
`logging.getLogger("slipstream").setLevel(logging.WARNING)` silences that.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

log = logging.getLogger("slipstream")


def is_silenced() -> bool:
    """Whether the user wants warnings only."""
    return log.level > logging.INFO


def announce(message: str) -> None:
    """Say that long work begins, in one line: in the log where it is set up for that, else on standard error.

    Without this a script or a notebook would stand still for a minute and not say why.
    """
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info(message)
    elif not is_silenced() and sys.stderr is not None:
        print(f"slipstream: {message}", file=sys.stderr, flush=True)


@contextmanager
def progress_bar(description: str, message: str, *columns: ProgressColumn, **task: Any) -> Iterator[Progress]:
    """A bar on standard error that goes when the work is done; where that is no terminal, the message.

    columns: besides the description and the bar; task: as in `Progress.add_task`. The bar's task is its only one.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    is_shown = console.is_terminal and not is_silenced()
    if not is_shown:
        announce(message)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), *columns
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        progress.add_task(description, **task)
        yield progress


@cache
def warn_slower(reason: str) -> None:
    """Warn, once per process and reason, that a faster way of computing cannot be used. The results are the same."""
    log.warning("slower than it could be: %s", reason)
