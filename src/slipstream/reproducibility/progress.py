"""How far a calibration is, on a terminal with the time it will still take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

log = logging.getLogger("slipstream")

T = TypeVar("T")
Report = Callable[[float], None]  # told the share of the work that is done, 0 to 1


def silent(done: float) -> None:
    """Report to nobody."""


@contextmanager
def progress_bar(description: str) -> Iterator[Report]:
    """A bar on standard error that goes when the work is done; where that is no terminal, a line in the log."""
    err = Console(stderr=True)
    if not err.is_terminal:
        log.info("%s ...", description)
        yield silent
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(description, total=1.0)
        yield lambda done: bar.update(task, completed=done)


class Stages:
    """Splits work into stages of known shares."""

    def __init__(self, report: Report) -> None:
        self._report, self._done = report, 0.0

    def over(self, share: float, items: Sequence[T]) -> Iterator[T]:
        """The items of a stage that takes this share of all the work, reporting after each; it may be left early."""
        begun = self._done
        self._done = begun + share
        for number, item in enumerate(items, 1):
            yield item
            self._report(min(1.0, begun + share * number / len(items)))
