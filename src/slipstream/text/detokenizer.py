"""Turns token ids into text as they arrive, without half characters, and cuts it at stop strings.

This module knows neither models nor sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.errors import UsageError
from slipstream.sampling.params import SamplingParams
from slipstream.tokenization.byte_vocabulary import ReadableAsBytes
from slipstream.tokenization.tokenizer import Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns token ids into text as they come, never showing half a character.

    Only the tokens since the last finished piece are decoded, so the cost per token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_emitted = 0  # ids whose text has been returned
        self._context_start = 0  # the first id to decode: those up to `_num_emitted` only give context to the next

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._context_start : self._num_emitted])
        now = self._tokenizer.decode(self._ids[self._context_start :])
        if len(now) <= len(before) or now.endswith(BROKEN):
            return ""
        self._context_start, self._num_emitted = self._num_emitted, len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        """The remaining text at the end, incomplete characters included."""
        before = self._tokenizer.decode(self._ids[self._context_start : self._num_emitted])
        self._num_emitted = len(self._ids)
        return self._tokenizer.decode(self._ids[self._context_start :])[len(before) :]


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


class VisibleText:
    """The text of one request as its tokens come: stop strings cut it, but none before `min_tokens` tokens."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._text, self._stops = TextStream(tokenizer), StopStrings(params.stop_strings)
        self._unwatched = max(0, params.min_tokens - 1)

    def push(self, token: int) -> str:
        """The text that may be shown once this token has come."""
        piece = self._text.push(token)
        if self._unwatched > 0:
            self._unwatched -= 1
            return piece
        return self._stops.push(piece)

    def flush(self) -> str:
        """The remaining text when the request is over."""
        return self._stops.push(self._text.flush(), final=True)

    def completes_stop(self, token: int) -> bool:
        """Whether this token completes a stop string."""
        self.push(token)
        return self._stops.found


def visible_text(tokenizer: Tokenizer, params: SamplingParams, ids: Sequence[int]) -> str:
    """The text of a finished request."""
    if not params.stop_strings:
        return tokenizer.decode(ids)
    text = VisibleText(tokenizer, params)
    return "".join(map(text.push, ids)) + text.flush()
