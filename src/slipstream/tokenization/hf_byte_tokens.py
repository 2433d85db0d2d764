"""The tokens of a Hugging Face tokenizer as bytes, and its encoding of plain text.

The bytes of a token follow from the tokenizer's kind. Two kinds are known: byte-level alphabets, and sentencepiece's,
which writes another character for the space and has one token per byte as a fallback. Text is encoded by a second
tokenizer over the same model, which adds no special tokens and recognizes none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from slipstream.errors import UsageError
from slipstream.tokenization.byte_vocabulary import ByteTokens, Encoding

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's character for a space
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
EXACT_DECODERS = {"Fuse", "Strip", "Replace", "ByteFallback", "Metaspace", "ByteLevel"}


class TokenNames:
    """Reads tokens' bytes from their names. Raises `UsageError` for tokenizers whose names do not determine them."""

    def __init__(self, backend: Tokenizer) -> None:
        parts = _parts(backend.decoder)
        self._spaces = _written_spaces(backend.model, parts)
        self._byte_level = any(part["type"] == "ByteLevel" for part in parts)
        self._byte_fallback = any(part["type"] == "ByteFallback" for part in parts)
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.special = {token.content: number for number, token in added.items() if token.special}
        self._unknown = None if isinstance(backend.model, models.Unigram) else backend.model.unk_token

    def is_fallback(self, name: str, number: int) -> bool:
        """True if a token is one of those for single bytes."""
        return self._byte_fallback and number not in self._added and BYTE.fullmatch(name) is not None

    def text(self, name: str, number: int) -> bytes | None:
        """The bytes of a token; None if it stands for no text."""
        if name in self.special or name == self._unknown:
            return None
        if self.is_fallback(name, number):
            return bytes.fromhex(name[3:-1])
        if self._byte_level and number not in self._added:
            alphabet = byte_alphabet()
            return bytes(alphabet[c] for c in name) if all(c in alphabet for c in name) else name.encode()
        for space in self._spaces:
            name = name.replace(space, " ")
        return name.encode()


def read_byte_tokens(backend: Tokenizer, opening: tuple[int, ...]) -> ByteTokens:
    """The tokens of a tokenizer; UsageError says why they cannot be read. opening: see `ByteTokens`."""
    names, vocabulary = TokenNames(backend), backend.get_vocab(with_added_tokens=True)
    all_texts = {number: names.text(name, number) for name, number in vocabulary.items()}
    texts = {number: text for number, text in all_texts.items() if text is not None}
    fallback = {number for name, number in vocabulary.items() if number in texts and names.is_fallback(name, number)}
    inside = _text_encoder(backend, inside=True)
    beginning = _text_encoder(backend, inside=False) if _adds_space(backend) else inside

    def encode(text: str, at_beginning: bool) -> Encoding:
        return (beginning if at_beginning else inside)(text)

    first = encode("a", True).ids[:1]
    adds_space = bool(first) and texts.get(first[0], b"")[:1] == b" "
    return ByteTokens(texts, names.special, encode, frozenset(fallback), opening, adds_space)


def _written_spaces(model: Any, decoder: Sequence[dict[str, Any]]) -> list[str]:
    """The characters for a space in tokens' names; UsageError for tokenizers whose names do not determine the texts."""
    if not isinstance(model, models.BPE | models.Unigram | models.WordLevel):
        raise UsageError(f"its tokens cannot be read as bytes: they are of the kind {type(model).__name__}")
    if isinstance(model, models.BPE) and (mark := model.continuing_subword_prefix or model.end_of_word_suffix):
        raise UsageError(f"its tokens cannot be read as bytes: {mark!r} in them marks parts of words")
    for part in decoder:
        if part["type"] not in EXACT_DECODERS or part.get("content", " ") not in (" ", SPACE):
            raise UsageError(f"its tokens cannot be read as bytes: its decoder {part['type']} changes characters")
    replaced = [part["pattern"].get("String", SPACE) for part in decoder if part["type"] == "Replace"]
    return replaced + [part["replacement"] for part in decoder if part["type"] == "Metaspace"]


@cache
def byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level tokens (GPT-2's)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _state(component: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(component.__getstate__())
    return state


def _parts(component: Any) -> list[dict[str, Any]]:
    """The parts of a normalizer, pre-tokenizer or decoder as they are written in a file."""
    return [] if component is None else list(_flat(_state(component)))


def _flat(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    inner = next((state[key] for key in ("normalizers", "pretokenizers", "decoders") if key in state), None)
    if inner is None:
        yield state
    else:
        for part in inner:
            yield from _flat(part)


def _adds_space(backend: Tokenizer) -> bool:
    """True if the tokenizer may put a space in front of a text."""
    parts = _parts(backend.normalizer) + _parts(backend.pre_tokenizer)
    return any(
        part["type"] == "Prepend" or part.get("add_prefix_space") or part.get("prepend_scheme", "never") != "never"
        for part in parts
    )


def _text_encoder(backend: Tokenizer, *, inside: bool) -> Callable[[str], Encoding]:
    """An encoding that adds and recognizes no special tokens. inside: it adds no space in front of a text, either."""
    plain = Tokenizer(backend.model)
    normalizer, splitters = _parts(backend.normalizer), _parts(backend.pre_tokenizer)
    if inside:
        normalizer = [part for part in normalizer if part["type"] != "Prepend"]
        splitters = [_without_space(part) for part in splitters]
    if normalizer:
        plain.normalizer = _sequence_of(normalizers.Sequence([]), "normalizers", normalizer)
    if splitters:
        plain.pre_tokenizer = _sequence_of(pre_tokenizers.Sequence([]), "pretokenizers", splitters)
    # special tokens are left out, so that their names in a text stay text
    added = {number: token for number, token in sorted(backend.get_added_tokens_decoder().items()) if not token.special}
    plain.add_tokens(list(added.values()))
    original_ids = {plain.token_to_id(token.content): number for number, token in added.items()}

    def encode(text: str) -> Encoding:
        encoded = plain.encode(text, add_special_tokens=False)
        return Encoding(
            [original_ids.get(number, number) for number in encoded.ids], [start for start, _ in encoded.offsets]
        )

    return encode


def _sequence_of(empty: Any, key: str, parts: Sequence[dict[str, Any]]) -> Any:
    empty.__setstate__(json.dumps({"type": "Sequence", key: parts}).encode())
    return empty


def _without_space(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "Metaspace":
        return part | {"prepend_scheme": "never"}
    return part | {"add_prefix_space": False} if part["type"] == "ByteLevel" else part
