"""Between token ids and text: the tokenizer protocol, text that arrives token by token, stop strings.

This module knows neither models nor sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

BROKEN = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """What Slipstream needs of a tokenizer."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` works."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens the model expects at its beginning."""

    def bare(self, text: str) -> list[int]:
        """Token ids of a text and nothing else."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the model's answer."""

    def vocabulary(self) -> dict[str, int]:
        """Token text to id, added tokens included."""


class TextStream:
    """Turns token ids into text as they come, never showing half a character.

    Only the tokens since the last finished piece are decoded, so the cost per token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._done = self._read = 0  # ids before `_done` give context only, ids before `_read` have been emitted

    def push(self, token: int) -> str:
        """The text that has become certain with this token; empty while a character is incomplete."""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._done : self._read])
        now = self._tokenizer.decode(self._ids[self._done :])
        if len(now) <= len(before) or now.endswith(BROKEN):
            return ""
        self._done, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        """What is left at the end, incomplete characters included."""
        before = self._tokenizer.decode(self._ids[self._done : self._read])
        self._read = len(self._ids)
        return self._tokenizer.decode(self._ids[self._done :])[len(before) :]


class StopStrings:
    """Watches text for the first of several strings, and holds back text that may turn out to begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._pending = ""
        self.found = False

    def push(self, text: str, *, final: bool = False) -> str:
        """The text that may be shown: cut before the first stop string, less what may still become one."""
        if self.found:
            return ""
        pending = self._pending + text
        ends = [at for stop in self._stops if (at := pending.find(stop)) >= 0]
        if ends:
            self.found, self._pending = True, ""
            return pending[: min(ends)]
        held = 0 if final else max((_overlap(pending, stop) for stop in self._stops), default=0)
        self._pending = pending[len(pending) - held :]
        return pending[: len(pending) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class StopWatch:
    """A row's stop check: told each output token once, says whether a stop string is complete."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._text, self._stops = TextStream(tokenizer), StopStrings(stops)

    def __call__(self, token: int) -> bool:
        """Whether the text up to this token contains a stop string."""
        self._stops.push(self._text.push(token))
        return self._stops.found


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before its first stop string."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
