"""Messages while a model loads: that long work begins, how far it is, and what runs slower than it could.

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
    """Announce long work in one line: in the log if that shows messages of level INFO, else on standard error.

    Without it a script or a notebook would seem to hang for a minute.
    """
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info(message)
    elif not is_silenced() and sys.stderr is not None:
        print(f"slipstream: {message}", file=sys.stderr, flush=True)


@contextmanager
def progress_bar(description: str, message: str, *columns: ProgressColumn, **task: Any) -> Iterator[Progress]:
    """Show a progress bar on standard error until the block ends; if that is no terminal, announce `message` instead.

    columns: what to show after the description and the bar; task: arguments of `Progress.add_task`. The yielded
    `Progress` has this one task.
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
