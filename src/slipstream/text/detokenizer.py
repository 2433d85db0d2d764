"""Turns token ids into text as they arrive, without half characters, and cuts it at stop strings.

This module knows neither models nor sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import cast

from slipstream.core.types import Row
from slipstream.errors import UsageError
from slipstream.sampling.processors import params_of
from slipstream.tokenization.byte_vocabulary import ReadableAsBytes
from slipstream.tokenization.tokenizer import Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"
MAX_CONTEXT = 32  # ids that are decoded again with the next ones before fewer are kept


class TextStream:
    """Turns token ids into text as they come, never showing half a character.

    Only the latest ids are decoded, so the cost per token does not grow with the text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: tuple[int, ...] = ()  # those that are decoded
        self._num_shown = 0  # of these: their text was returned, and they give context to the others
        self._shown = ""  # the text of these

    def push(self, *tokens: int) -> str:
        """The text that these tokens complete, without a token that leaves a character incomplete at the end."""
        num_earlier, self._ids = len(self._ids), (*self._ids, *tokens)
        for end in range(len(self._ids), num_earlier, -1):
            text = self._decode(self._ids[:end])
            if len(text) <= len(self._shown):
                break
            if not text.endswith(BROKEN):
                return self._show(end, text)
        return ""

    def flush(self) -> str:
        """The remaining text at the end, incomplete characters included."""
        if self._num_shown == len(self._ids):
            return ""
        return self._show(len(self._ids), self._decode(self._ids))

    def _show(self, end: int, text: str) -> str:
        piece = text[len(self._shown) :]
        if end > MAX_CONTEXT:  # what this piece came from is context enough for the next
            self._ids, end = self._ids[self._num_shown :], end - self._num_shown
            text = self._decode(self._ids[:end])
        self._num_shown, self._shown = end, text
        return piece


class TokenTexts:
    """The texts of single tokens, for people who read log-probabilities.

    A part of a character is shown as the replacement character, a special token by its name.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special: dict[int, str] | None = None

    def of(self, token: int) -> str:
        """The text of one token, with its spaces."""
        text = self._own_text(token)
        if text:
            return text
        if self._special is None:  # large vocabularies take some 100 ms
            self._special = {number: name for name, number in self._tokenizer.vocabulary().items()}
        return self._special.get(token, "")

    def _own_text(self, token: int) -> str:
        if isinstance(self._tokenizer, ReadableAsBytes):
            try:
                data = self._tokenizer.bytes_of(token)
            except UsageError:  # this tokenizer's tokens cannot be read as bytes
                return self._tokenizer.decode([token])
            return "" if data is None else data.decode(errors="replace")
        return self._tokenizer.decode([token])


class StopStrings:
    """Watches text for the first of several strings, and holds back text that may turn out to begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._pending = ""
        self.found = False

    def push(self, text: str, *, final: bool = False) -> str:
        """The text that may be shown: cut before the first stop string, without an end that may still become one."""
        if self.found:
            return ""
        if not self._stops:
            return text
        pending = self._pending + text
        ends = [position for stop in self._stops if (position := pending.find(stop)) >= 0]
        if ends:
            self.found, self._pending = True, ""
            return pending[: min(ends)]
        withheld = 0 if final else max((_overlap(pending, stop) for stop in self._stops), default=0)
        self._pending = pending[len(pending) - withheld :]
        return pending[: len(pending) - withheld]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class RowText:
    """The text of one row: its tokens are read as they are committed, and its first stop string cuts it."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._stream, self._stops = TextStream(tokenizer.decode), StopStrings(stops)
        self._text, self._num_taken = "", 0

    def find_stop(self, tokens: Sequence[int], first: int = 1) -> int | None:
        """Read the tokens of a round up to the first, from number `first` on, that completes a stop string.

        Returns its number, counted from 1; None if there is none.
        """
        self._text += self._stream.push(*tokens[: first - 1])
        watched, before = tokens[first - 1 :], (copy(self._stream), copy(self._stops))
        piece = self._stops.push(self._stream.push(*watched))
        if self._stops.found and len(watched) > 1:  # read them again one by one, up to the one that completes it
            self._stream, self._stops = before
            return next((number for number, token in enumerate(watched, first) if self.find_stop([token])), None)
        self._text += piece
        return len(tokens) if self._stops.found else None

    def take(self) -> str:
        """The text that may be shown since the last call."""
        piece, self._num_taken = self._text[self._num_taken :], len(self._text)
        return piece

    def whole(self) -> str:
        """The text of a row that has ended, incomplete characters and beginnings of stop strings included."""
        self._text += self._stops.push(self._stream.flush(), final=True)
        return self._text


def read_as_committed(row: Row, tokenizer: Tokenizer | None) -> None:
    """Have a row's tokens read as they are committed, as stop strings and streams need it."""
    if row.text is None and tokenizer is not None:
        row.text = text = RowText(tokenizer, params_of(row).stop_strings)
        row.find_stop = text.find_stop


def new_text(row: Row, tokenizer: Tokenizer | None) -> str:
    """The text that a row's last round added; if tokens are not read as they are committed, all of it at the end."""
    text = "" if row.finish_reason is None else text_of(row, tokenizer)
    return text if row.text is None else cast(RowText, row.text).take()


def text_of(row: Row, tokenizer: Tokenizer | None) -> str:
    """The text of a row that has ended, cut at its first stop string; empty if there is no tokenizer."""
    if row.text is not None:
        return cast(RowText, row.text).whole()
    return "" if tokenizer is None else tokenizer.decode(row.output)
