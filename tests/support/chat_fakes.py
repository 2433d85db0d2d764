"""Conversations for tests: a recording display, chats with the toy and a tiny model, and lines typed into them."""

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.apps.chat.conversation import Chat
from slipstream.apps.chat.slash_commands import handle
from tests.support import tiny_models

LETTERS_ONLY = {0: -1e9, 1: -1e9, 2: -1e9}  # special tokens have no text, so they would not come back with the history


class Recorder:
    """A display that records; after `stop_after` pieces it raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.thoughts: list[str] = []
        self.said: list[str] = []
        self.notes: list[str] = []
        self.errors: list[str] = []
        self.stop_after: int | None = None

    def token(self, text: str) -> None:
        self.pieces.append(text)
        if self.stop_after is not None and text != "\n":
            self.stop_after -= 1
            if self.stop_after == 0:
                self.stop_after = None
                raise KeyboardInterrupt

    def thought(self, text: str) -> None:
        self.thoughts.append(text)

    def show(self, line: str | Text) -> None:
        self.said.append(str(line))

    def show_pairs(self, pairs: Sequence[tuple[str, str]]) -> None:
        self.said.append("\n".join(f"{name} {meaning}" for name, meaning in pairs))

    def remark(self, line: str) -> None:
        self.notes.append(line)

    def error(self, line: str) -> None:
        self.errors.append(line)


def toy(max_tokens: int = 24, draft: str | None = None, **options: Any) -> Chat:
    decoder = SpeculativeDecoder("toy", draft, reproducible=False)
    return Chat(decoder, Recorder(), SamplingParams(max_tokens=max_tokens, **options))


def face(chat: Chat) -> Recorder:
    assert isinstance(chat.display, Recorder)
    return chat.display


def type_in(chat: Chat, *lines: str) -> str:
    """Types the lines, without an error, and returns the last line shown."""
    for line in lines:
        handle(chat, line)
    assert face(chat).errors == []
    return face(chat).said[-1] if face(chat).said else ""


def refused(chat: Chat, line: str) -> str:
    before = len(face(chat).errors)
    handle(chat, line)
    assert len(face(chat).errors) == before + 1
    error = face(chat).errors[-1]
    assert "\n" not in error
    return error


def letters(reproducible: bool) -> Chat:
    decoder = SpeculativeDecoder(
        tiny_models.shared("llama"), tokenizer=tiny_models.tokenizer(), reproducible=reproducible
    )
    return Chat(decoder, Recorder(), SamplingParams(max_tokens=20, logit_bias=LETTERS_ONLY))
