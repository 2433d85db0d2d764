"""Standard output and standard error as rich consoles: output is never markup and cannot steer the terminal.

The model's output goes to standard output, everything else to standard error.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.segment import Segment
from rich.text import Text

from slipstream.models.notices import OneLineProgress, TimeLeft
from slipstream.text.terminal_text import harmless

PIPE_COLUMNS = 120  # width of tables in files and pipes
WIDE = "\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef"  # scripts whose lines are broken between any two characters
PADDING = re.compile(r" +\n")
PARTS = re.compile(rf"\n|[^\S\n]+|[{WIDE}]|[^\s{WIDE}]+")


class Stream(Console):
    """A console that raises an error if its pipe is closed, as after any other failed write.

    Text is never markup, and its control characters become pictures: see `harmless`. In files and pipes, lines of
    tables are not padded with blanks.
    """

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments to print, without control characters."""
        segments = super().render(renderable, options)
        for segment in segments if self.is_terminal else _unpadded(segments):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)

    def on_broken_pipe(self) -> NoReturn:
        raise

    def sentence(self, text: str | Text, style: str | None = None) -> None:
        """Print a sentence for people: broken between words on a terminal, on one line elsewhere."""
        self.print(text, style=style, soft_wrap=not self.is_terminal)


def _unpadded(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Segments without trailing blanks in each line."""
    blanks = ""  # held back, since the line may end after them
    for segment in segments:
        if segment.control:
            yield segment
            continue
        text = PADDING.sub("\n", blanks + segment.text)
        written = text.rstrip(" ")
        blanks = text[len(written) :]
        if written:
            yield Segment(written, segment.style)
    if blanks:
        yield Segment(blanks)


def _stream(*, stderr: bool) -> Stream:
    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() else PIPE_COLUMNS
    return Stream(stderr=stderr, highlight=False, emoji=False, markup=False, width=width)


# a process that was started without standard streams (`>&-`) gets empty ones
for _name, _mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, _name) is None:
        setattr(sys, _name, open(os.devnull, _mode, encoding="utf-8"))  # noqa: SIM115  # open to the end
out, err = _stream(stderr=False), _stream(stderr=True)


class WordWrap:
    """Breaks text between words while it is being written, so that lines have at most `width` columns.

    A word that is longer than a line is left whole. Each word is held back until the blank after it has arrived: only
    then is it known whether it fits.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._blanks = ""  # before the word that is held back
        self._word = ""
        self._is_inside = False  # whether a word's beginning is written, because it was too long to be held back

    def push(self, text: str) -> str:
        """The text that can be written once this piece has arrived."""
        written = []
        for part in PARTS.findall(text):
            if part == "\n":
                written += [self.flush(), "\n"]
                self._column, self._blanks, self._is_inside = 0, "", False
            elif part.isspace():
                written.append(self._place())
                self._blanks, self._is_inside = self._blanks + part, False
            elif cell_len(part) == 2 * len(part):
                written.append(self._place())
                self._word, self._is_inside = part, False
                written.append(self._place())
            else:
                self._word += part
        if cell_len(self._word) >= self._width:
            written.append(self._place())
            self._is_inside = True
        return "".join(written)

    def flush(self) -> str:
        word = self._place()
        rest, self._blanks = self._blanks, ""
        self._column += cell_len(rest)
        return word + rest

    def _place(self) -> str:
        if not self._word:
            return ""
        word, self._word = self._word, ""
        blanks, self._blanks = self._blanks, ""
        columns, gap = cell_len(word), cell_len(blanks)
        if self._column and not self._is_inside and self._column + gap + columns > self._width:
            self._column = columns
            return "\n" + word
        self._column += gap + columns
        return blanks + word


class TextWriter:
    """Writes output piece by piece: unchanged into files and pipes, broken between words on a terminal."""

    def __init__(self) -> None:
        self._wrap = WordWrap(out.width) if out.is_terminal else None

    def write(self, text: str) -> None:
        write_raw(text if self._wrap is None else self._wrap.push(harmless(text)))

    def end(self) -> None:
        """Write the text that is held back, and end the line."""
        write_raw(("" if self._wrap is None else self._wrap.flush()) + "\n")


def write_raw(text: str) -> None:
    """Write a piece of output unchanged."""
    out.file.write(text)  # rich would expand tabs and drop others
    out.file.flush()


def clock_time(seconds: float) -> str:
    """Hours, minutes and seconds as on a clock."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def print_error(message: str) -> None:
    """Print an error on one line, which terminals break between words."""
    err.sentence(Text.assemble(("error:", "red"), " ", message))


def progress_bar(*columns: ProgressColumn) -> Progress:
    """A bar with these columns on standard error, shown only on terminals, which vanishes at its end."""
    return OneLineProgress(*columns, console=err, disable=not err.is_terminal, transient=True)


class RunBar:
    """A progress bar over runs that names the current one; only on a terminal."""

    def __init__(self, total: int) -> None:
        self._started = -1
        name = TextColumn("{task.description}", markup=False)
        self._progress = progress_bar(name, BarColumn(), MofNCompleteColumn(), TimeLeft())
        self._task = self._progress.add_task("", total=total)

    def show(self, doing: str) -> None:
        """Show the run that begins now; the one before it counts as finished."""
        self._started += 1
        self._progress.update(self._task, description=doing, completed=self._started)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the bar inside the block, so that something can be printed."""
        self._progress.stop()
        yield
        self._progress.start()

    def __enter__(self) -> RunBar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
