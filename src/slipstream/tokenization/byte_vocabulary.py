"""A tokenizer and a model's vocabulary as bytes, so that the tokens of two models can be compared and translated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from slipstream.core.interfaces import Backend
from slipstream.errors import UsageError
from slipstream.tokenization.tokenizer import Tokenizer

PROBES = (
    " two  spaces,\n\ta tab and a line ",
    "1234567890 and 3.14",
    "def f(x):\n    return x ** 2",
    "na\u00efve \N{GRINNING FACE}\N{ROCKET}",
    "It's THE end.",
)
PLAIN = "the end"  # every tokenizer must have tokens for this


@dataclass(frozen=True)
class Encoding:
    """A text as token ids."""

    ids: list[int]
    starts: list[int]  # for each id, the character of the text at which it begins


@dataclass(frozen=True)
class ByteTokens:
    """A tokenizer's tokens as bytes."""

    texts: Mapping[int, bytes]  # of every token that stands for text; special and unknown tokens do not
    special: Mapping[str, int]  # name to id
    # plain text to ids, in which no special token is recognized; True: at the beginning of a text, where a tokenizer
    # may add a space
    encode: Callable[[str, bool], Encoding]
    fallback: frozenset[int] = frozenset()  # tokens of single bytes, used only where no other token fits
    opening: tuple[int, ...] = ()  # ids that the tokenizer puts in front of every text
    adds_space: bool = False  # the first token of a text begins with a space that is not in the text


@runtime_checkable
class ReadableAsBytes(Protocol):
    """Optional capability of a tokenizer: its tokens can be read as bytes."""

    def byte_tokens(self) -> ByteTokens:
        """The tokens; raises UsageError saying why they cannot be read."""

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of one token; None if it stands for no text. Raises like `byte_tokens`, but reads this one only."""


class NamedModel(Protocol):
    """A model, loaded or not. end_ids: the tokens that end its texts."""

    @property
    def name(self) -> str: ...

    @property
    def end_ids(self) -> tuple[int, ...]: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...


class RunningModel(NamedModel, Protocol):
    """A model that is loaded.

    backend: knows the sizes of its vocabulary and its context. view: None unless the caller has loaded the model.
    """

    @property
    def backend(self) -> Backend: ...

    @property
    def view(self) -> object: ...


@dataclass(frozen=True)
class ByteVocabulary:
    """The tokens of one model as bytes."""

    name: str
    head_size: int  # number of logits; tokens beyond them do not count
    end_ids: tuple[int, ...]
    tokens: ByteTokens
    # chat messages as token ids in the model's own format; UsageError if it refuses them
    render: Callable[[Sequence[Any]], list[int]] | None = None

    @cached_property
    def texts(self) -> list[bytes | None]:
        """The bytes of each id; None for special tokens and for ids that only pad the head."""
        return [self.tokens.texts.get(number) or None for number in range(self.head_size)]

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """The id of each token's text; of several ids with the same text, the one that encoding uses."""
        pairs = [(text, number) for number, text in enumerate(self.texts) if text]
        pairs.sort(key=lambda pair: (pair[1] not in self.tokens.fallback, -pair[1]))
        return dict(pairs)

    @cached_property
    def special(self) -> dict[str, int]:
        """Special tokens that have a logit, by name."""
        return {name: number for name, number in self.tokens.special.items() if number < self.head_size}

    def encode(self, text: str, *, beginning: bool = False) -> Encoding:
        """Plain text as ids; see `ByteTokens.encode`."""
        return self.tokens.encode(text, beginning)

    def spelled(self, text: bytes) -> list[int]:
        """Bytes, perhaps of incomplete characters, as ids: the longest token at each place; other bytes are skipped."""
        ids, place = list[int](), 0
        while place < len(text):
            lengths = range(len(text) - place, 0, -1)
            length = next((n for n in lengths if text[place : place + n] in self.ids), 0)
            if length:
                ids.append(self.ids[text[place : place + length]])
            place += length or 1
        return ids


def byte_vocabulary(model: NamedModel, head_size: int) -> ByteVocabulary:
    """The vocabulary of a model whose tokenizer can be read as bytes; UsageError says why it cannot."""
    tokenizer = model.tokenizer
    if not isinstance(tokenizer, ReadableAsBytes):
        why = "it has no tokenizer" if tokenizer is None else "its tokenizer's tokens cannot be read as bytes"
        raise UsageError(why)
    tokens = tokenizer.byte_tokens()
    _check(tokens)
    render = tokenizer.chat if tokenizer.has_chat_template else None
    return ByteVocabulary(model.name, head_size, model.end_ids, tokens, render)


def _check(tokens: ByteTokens) -> None:
    """Refuse tokens whose bytes are not those of the text they were cut from."""
    if _pieces(tokens, PLAIN) is None:
        raise UsageError(f"it has no tokens for {PLAIN!r}")
    for text in (PLAIN, *PROBES):
        pieces = _pieces(tokens, text)
        if pieces is not None and pieces != text.encode():
            became = pieces.decode(errors="replace")
            raise UsageError(f"its tokens cannot be read as bytes: {text!r} becomes {became!r}")


def _pieces(tokens: ByteTokens, text: str) -> bytes | None:
    """The bytes of a text's tokens, None if one of them stands for no text."""
    pieces = [tokens.texts.get(number) for number in tokens.encode(text, False).ids]
    return None if None in pieces else b"".join(piece for piece in pieces if piece)
