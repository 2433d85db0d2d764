"""A language model of a few kilobytes: byte n-gram counts with back-off. It needs no download.

It counts the n-grams of the fable below. Like any backend it reads its context only from its cache, so it exercises the
same code as a transformer. "toy" looks 5 bytes back; "toy:2" looks 2 bytes back and serves as a draft model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slipstream.core.trees import TreeSegment
from slipstream.errors import UsageError
from slipstream.models.loaded import Loaded
from slipstream.tokenization.byte_vocabulary import ByteTokens, Encoding
from slipstream.tokenization.tokenizer import PLAIN_CHAT, ChatForm

END = 256
VOCAB_SIZE = 257
DEFAULT_ORDER = 5

FABLE = """A heron and a sparrow shared a river. The heron was slow and never wrong. It looked at the water for a long
time, and then it took one fish. The sparrow was quick and often wrong. It flew ahead of the heron and called out what
it saw: a fish, a fish, a stone, a fish. The heron did not believe the sparrow. It looked at all the places the sparrow
had named, in one long look, and took the fish, and where the sparrow had named a stone, it stopped and chose for
itself. So the heron ate exactly the fish it would have eaten alone, and no stone, and it was home before the rain.
The sparrow was proud. "I am fast," said the sparrow. "You are fast," said the heron, "and I am right, and the river
does not know that there are two of us." Then the wind changed, and the sparrow called stone after stone. The heron
heard it and went on alone, slow and never wrong, until the sparrow could see again.
"""


class ToyTokenizer:
    """Bytes as token ids, and 256 as the end of the text."""

    has_chat_template = False

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def bare(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The bytes as text: ids that are not bytes are dropped, broken sequences become the replacement character."""
        return bytes(i for i in ids if i < END).decode(errors="replace")

    def chat(self, messages: Sequence[dict[str, Any]], form: ChatForm = PLAIN_CHAT) -> list[int]:
        """The toy has no chat format."""
        raise UsageError("the toy model has no chat template; allowed: a text or a list of token ids")

    def vocabulary(self) -> dict[str, int]:
        return {f"<0x{i:02X}>": i for i in range(END)} | {"<end>": END}

    def byte_tokens(self) -> ByteTokens:
        """Every token except the end token is a byte."""
        return ByteTokens({i: bytes([i]) for i in range(END)}, {"<end>": END}, _encoding)

    def bytes_of(self, token: int) -> bytes | None:
        return bytes([token]) if token < END else None


def _encoding(text: str, beginning: bool) -> Encoding:
    """The bytes of a text, which are the same wherever it appears."""
    sizes = [len(character.encode()) for character in text]
    return Encoding(list(text.encode()), [character for character, size in enumerate(sizes) for _ in range(size)])


class TokenCache:
    """The toy's KV cache: token ids by slot and position. Layer subsets share it."""

    def __init__(self) -> None:
        self.slots = torch.zeros(0, 0, dtype=torch.int64)

    def reserve(self, rows: int, length: int) -> None:
        """Hold at least `rows` slots of `length` positions; existing content stays."""
        old = self.slots
        if rows > old.shape[0] or length > old.shape[1]:
            self.slots = torch.zeros(max(rows, old.shape[0]), max(length, old.shape[1]), dtype=torch.int64)
            self.slots[: old.shape[0], : old.shape[1]] = old


@cache
def _counted(
    order: int, layers: tuple[int, ...] | None
) -> tuple[dict[tuple[int, ...], dict[int, int]], dict[tuple[int, ...], Tensor]]:
    """Counts of the tokens that follow each context, and a memo of distributions; equal toys share both."""
    counts: dict[tuple[int, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    text = [*FABLE.replace("\n", " ").strip().encode(), END]
    for place, token in enumerate(text):
        for length in range(min(order, place) + 1):
            if layers is None or length in layers:
                counts[tuple(text[place - length : place])][token] += 1
    return counts, {}


class ToyBackend:
    """Logits from byte n-gram counts, mixed over all lengths of context; the longest weighs most.

    Its layers are these lengths, from 0 to `order`.
    """

    vocab_size = VOCAB_SIZE
    max_length = 1 << 20
    branching = flat = True

    def __init__(
        self, order: int = DEFAULT_ORDER, layers: Sequence[int] | None = None, cache: TokenCache | None = None
    ) -> None:
        """layers: lengths of context to use, all by default. cache: another backend's, to share it."""
        self.device, self.attended_unit, self.num_layers = torch.device("cpu"), 1, order + 1
        self._order, self._cache = order, TokenCache() if cache is None else cache
        self._counts, self._distributions = _counted(order, None if layers is None else tuple(layers))

    def weights_digest(self) -> str:
        return f"toy-{self._order}"

    def layer_subset(self, layers: Sequence[int]) -> ToyBackend:
        return ToyBackend(self._order, layers, self._cache)

    def reserve(self, rows: int, length: int) -> None:
        self._cache.reserve(rows, length)

    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        """Write the tokens, then read each position's context back from the cache."""
        rows, width = tokens.shape
        for row, start in enumerate(starts):
            self._cache.slots[first_slot + row, start : start + width] = tokens[row]
        if not logits:
            return torch.empty(0)
        out = torch.empty(rows, width, self.vocab_size, dtype=torch.float32)
        for row, start in enumerate(starts):
            for column in range(width):
                end = start + column + 1
                context = self._cache.slots[first_slot + row, max(0, end - self._order) : end].tolist()
                out[row, column] = self._distribution(tuple(context))
        return out

    def forward_tree(self, tokens: Tensor, segments: Sequence[TreeSegment], *, widths: Sequence[int] | None) -> Tensor:
        out, first = torch.zeros(len(tokens), self.vocab_size, dtype=torch.float32), 0
        for segment in segments:
            slot, end = self._cache.slots[segment.slot], segment.place + segment.count
            slot[segment.place : end] = tokens[first : first + segment.count]
            fork = segment.start - len(segment.detour)
            places = [*range(fork), *segment.detour, *range(segment.place, end)]
            for column in range(segment.count):
                seen = places[: segment.start + column + 1][-self._order :] if self._order else []
                out[first + column] = self._distribution(tuple(slot[seen].tolist()))
            first += segment.count
        return out

    def move(self, slot: int, places: Sequence[int], start: int) -> None:
        self._cache.slots[slot, start : start + len(places)] = self._cache.slots[slot, list(places)]

    def copy(self, source: int, destination: int, length: int) -> None:
        self._cache.slots[destination, :length] = self._cache.slots[source, :length]

    def _distribution(self, context: tuple[int, ...]) -> Tensor:
        distribution = self._distributions.get(context)
        if distribution is None:
            probs = torch.full((VOCAB_SIZE,), 1e-4 / VOCAB_SIZE, dtype=torch.float64)
            for length in range(min(len(context), self._order) + 1):
                counts = self._counts.get(context[len(context) - length :])
                if counts:
                    total = sum(counts.values())
                    fresh = torch.zeros_like(probs)
                    fresh[list(counts)] = torch.tensor([c / total for c in counts.values()], dtype=torch.float64)
                    probs = 0.15 * probs + 0.85 * fresh
            distribution = self._distributions[context] = probs.log().float()
        return distribution


def load_toy(name: str) -> Loaded:
    """Load "toy" or "toy:ORDER"; ORDER is how many bytes the model looks back."""
    _, _, order = name.partition(":")
    if name != "toy" and not (order.isdigit() and 1 <= int(order) <= 16):
        raise UsageError(f"model {name!r}; allowed: 'toy' or 'toy:ORDER' with ORDER from 1 to 16")
    return Loaded(ToyBackend(int(order or DEFAULT_ORDER)), name, (END,), ToyTokenizer(), fingerprint=name)
