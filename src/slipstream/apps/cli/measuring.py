"""What the measuring commands share on the terminal: progress, and how an interrupted measurement can continue."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from slipstream.apps.cli.application import err, print_error
from slipstream.bench.plan import Measurement
from slipstream.bench.records import Run
from slipstream.bench.summary_tables import progress_line


@contextmanager
def interruptible(folder: Path) -> Iterator[None]:
    """Ctrl-C is one line that says how to continue, and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        where = shlex.quote(str(folder))
        print_error(f"interrupted; finished runs are saved: the same command with --out {where} continues")
        raise typer.Exit(130) from None


def watched(runs: Iterator[Run], planned: Sequence[Measurement], before: Sequence[Run]) -> Iterator[Run]:
    """The runs as they come: a progress bar on a terminal, elsewhere a line per finished group of prompts."""
    if before:
        err.print(f"{len(before)} of {len(planned)} measurements are in the folder already")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=err, disable=not err.is_terminal) as progress:
        task = progress.add_task("warming up", total=len(planned), completed=len(before))
        lines = _Lines(planned, before)
        for run in runs:
            progress.update(task, advance=1, description=escape(f"{run.prompts[0]} {run.arm}"))
            line = lines.add(run)
            if line is not None and not err.is_terminal:
                err.print(line, soft_wrap=True)
            yield run


class _Lines:
    """Gathers the runs of a group of prompts until all arms and repeats are there."""

    def __init__(self, planned: Sequence[Measurement], before: Sequence[Run]) -> None:
        self._groups: dict[tuple[int, tuple[str, ...]], list[Run]] = {}
        self._wanted: dict[tuple[int, tuple[str, ...]], int] = {}
        for one in planned:
            at = one.batch, tuple(one.group.ids)
            self._wanted[at] = self._wanted.get(at, 0) + 1
        for run in before:
            self.add(run)

    def add(self, run: Run) -> str | None:
        """The line of the group that this run completes."""
        at = run.batch, tuple(run.prompts)
        self._groups.setdefault(at, []).append(run)
        if len(self._groups[at]) < self._wanted[at]:
            return None
        done = sum(len(runs) == self._wanted[group] for group, runs in self._groups.items())
        return progress_line(done, len(self._wanted), self._groups[at])
