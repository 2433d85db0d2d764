"""Messages while a model loads: announcements and progress of long work, and warnings about slow paths.

Long work happens once per machine: models are converted, kernels compiled, forwards measured.
`logging.getLogger("slipstream").setLevel(logging.WARNING)` silences its messages.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

log = logging.getLogger("slipstream")


def is_silenced() -> bool:
    """True if the user wants warnings only."""
    return log.level > logging.INFO


def announce(message: str) -> None:
    """Announce long work in one line: in the log if it shows level INFO, else on standard error.

    Without it a script or a notebook would seem to hang for a minute.
    """
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info(message)
    elif not is_silenced() and sys.stderr is not None:
        print(f"slipstream: {message}", file=sys.stderr, flush=True)


class OneLineProgress(Progress):
    """A progress display that stays on one line: in a narrow terminal its bar becomes shorter."""

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        """The columns; only bars may shrink."""
        table = super().make_tasks_table(tasks)
        for shown, column in zip(table.columns, self.columns, strict=True):
            shown.no_wrap = not isinstance(column, BarColumn)
        return table


class TimeLeft(TimeRemainingColumn):
    """The remaining time; at the end, the total time."""

    def __init__(self) -> None:
        super().__init__(elapsed_when_finished=True)

    def render(self, task: Task) -> Text:
        """For example "0:01:05 left"."""
        return super().render(task).append(" in all" if task.finished else " left")


@contextmanager
def progress_bar(description: str, message: str, *columns: ProgressColumn, **task: Any) -> Iterator[Progress]:
    """Show a progress bar on standard error until the block ends; if that is not a terminal, announce `message`.

    columns: what to show after the description and the bar; task: arguments of `Progress.add_task`. The yielded
    `Progress` has this one task.
    """
    console = Console(stderr=True)
    is_shown = console.is_terminal and not is_silenced()
    if not is_shown:
        announce(message)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), *columns
    with OneLineProgress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        progress.add_task(description, **task)
        yield progress


@cache
def warn_slower(reason: str) -> None:
    """Warn, once per process and reason, that a faster implementation cannot be used. The results are the same."""
    log.warning("slower than it could be: %s", reason)
