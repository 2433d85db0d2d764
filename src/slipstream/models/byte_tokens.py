"""A tokenizer read as bytes: what each token stands for, and plain text cut into tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Encoding:
    """A text as token ids. starts: for each, the character of the text at which it begins."""

    ids: list[int]
    starts: list[int]


@dataclass(frozen=True)
class ByteTokens:
    """A tokenizer's tokens as bytes.

    texts: the bytes of every token that stands for text; special and unknown tokens do not. fallback: those of them
    that stand for one byte each and are used only where no other token fits. special: name to id.
    opening: ids that the tokenizer puts in front of every text.
    adds_space: whether the first token of a text begins with a space that is not in the text.
    encode: plain text to ids: no special tokens, none recognised by its name. beginning: at the beginning of a text,
    where a tokenizer may add a space.
    """

    texts: Mapping[int, bytes]
    special: Mapping[str, int]
    encode: Callable[[str, bool], Encoding]
    fallback: frozenset[int] = frozenset()
    opening: tuple[int, ...] = ()
    adds_space: bool = False


@runtime_checkable
class ReadableAsBytes(Protocol):
    """Optional capability of a tokenizer: its tokens can be read as bytes."""

    def byte_tokens(self) -> ByteTokens:
        """The tokens; raises UsageError saying why they cannot be read."""

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of one token; None if it stands for no text. Raises as `byte_tokens`, but reads no others."""
