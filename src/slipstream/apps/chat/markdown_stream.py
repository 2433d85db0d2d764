"""Renders Markdown on a terminal while it is being written."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

MIN_SECONDS, RENDERING_SHARE = 0.06, 0.2  # least time between two redraws; most of the time that they may take
FENCES = ("```", "~~~")


def finished_blocks(text: str) -> int:
    """Number of characters up to the last blank line outside a code block."""
    end = position = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        position += len(line)
        mark = line.strip()[:3]
        if mark in FENCES and fence in ("", mark):
            fence = "" if fence else mark
        elif not line.strip() and not fence and line.endswith("\n"):
            end = position
    return end


class MarkdownStream:
    """Prints finished blocks for good; below them it redraws the unfinished one, or as much of its end as fits."""

    def __init__(self, console: Console) -> None:
        self._console, self._text, self._is_first = console, "", True
        self._shown = Live(console=console, auto_refresh=False, transient=True)
        self._next_redraw = 0.0

    def write(self, text: str) -> None:
        self._text += text
        if end := finished_blocks(self._text):
            self._print(self._text[:end])
            self._text, self._next_redraw = self._text[end:], 0.0
        began = perf_counter()
        if began >= self._next_redraw:
            self._shown.start()
            self._shown.update(_Lines(self._text, is_tail=True), refresh=True)
            now = perf_counter()
            self._next_redraw = now + max(MIN_SECONDS, (now - began) / RENDERING_SHARE)

    def end(self) -> None:
        """Print the rest; the next output begins on a new line."""
        self._print(self._text)
        self._text = ""

    def _print(self, text: str) -> None:
        self._shown.update("", refresh=self._shown.is_started)
        self._shown.stop()
        if text.strip():
            if not self._is_first:
                self._console.print()
            self._console.print(_Lines(text))
            self._is_first = False


class _Lines:
    """Lines without trailing blanks and without empty lines before them.

    is_tail: only the last ones, as many as fit on the screen.
    """

    def __init__(self, text: str, *, is_tail: bool = False) -> None:
        self._text, self._is_tail = text, is_tail

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        markdown = Markdown(self._text, code_theme="ansi_dark", hyperlinks=False)
        lines = console.render_lines(markdown, options, pad=False)
        while lines and not "".join(segment.text for segment in lines[0]).strip():
            del lines[0]
        for line in lines[-max(1, options.size.height - 2) :] if self._is_tail else lines:
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
            yield from line
            yield Segment.line()
