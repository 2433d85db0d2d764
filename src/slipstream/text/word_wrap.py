"""Breaks a text at words while it is still being written."""

from __future__ import annotations

import re

from rich.cells import cell_len

WIDE = "\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef"  # scripts whose lines are broken between any two characters
PARTS = re.compile(rf"\n|[^\S\n]+|[{WIDE}]|[^\s{WIDE}]+")


class WordWrap:
    """Inserts line ends so that no word is broken at `width` columns, unless it is longer than a line.

    A word is held back until the blank after it has come: only then is it known whether it still fits.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._blanks = ""  # before the word that is held back
        self._word = ""

    def push(self, text: str) -> str:
        """What can be written once this piece has come."""
        written = []
        for part in PARTS.findall(text):
            if part == "\n":
                written += [self.flush(), "\n"]
                self._column, self._blanks = 0, ""
            elif part.isspace():
                written.append(self._place())
                self._blanks += part
            elif cell_len(part) == 2 * len(part):
                written.append(self._place())
                self._word = part
                written.append(self._place())
            else:
                self._word += part
        if cell_len(self._word) >= self._width:
            written.append(self._place())
        return "".join(written)

    def flush(self) -> str:
        """What is held back."""
        return self._place() + self._rest()

    def _rest(self) -> str:
        rest, self._blanks = self._blanks, ""
        self._column += cell_len(rest)
        return rest

    def _place(self) -> str:
        if not self._word:
            return ""
        word, self._word = self._word, ""
        blanks, self._blanks = self._blanks, ""
        columns, gap = cell_len(word), cell_len(blanks)
        if self._column and self._column + gap + columns > self._width:
            self._column = columns
            return "\n" + word
        self._column += gap + columns
        return blanks + word
