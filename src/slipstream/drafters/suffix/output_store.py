"""Past outputs as token ids: bounded, searched through suffix automata, saved to a file if wanted.

This module knows neither rows nor models.
"""

from __future__ import annotations

import os
import zipfile
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.checks import expanded, why_unreadable
from slipstream.drafters.suffix.automaton import LIMIT, SuffixAutomaton
from slipstream.durable_files import replaced
from slipstream.errors import SlipstreamError, UsageError, os_reason

FORMAT = "slipstream suffix store 1"
FIELDS = ("format", "vocab_size", "tokenizer", "lengths", "tokens")
LARGEST = 1 << 24  # tokens; more would take gigabytes


class _Half:
    """Texts and the automaton of their substrings."""

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.texts: list[array[int]] = []

    def add(self, text: array[int]) -> None:
        self.texts.append(text)
        self.automaton.begin()
        self.automaton.learn(text)


class SuffixStore:
    """Stores the newest texts: at most `budget` tokens, and at least half as many once it has been full.

    An automaton cannot forget, so there are two, each for half of the budget: when the newer one has no room for a
    text, the older one is dropped with its texts. Of a text longer than that only the end is kept. budget=0: nothing is
    stored.
    tokenizer: a name of the tokenizer; files that carry another name are refused, unless either name is empty.
    """

    def __init__(self, vocab_size: int, budget: int, tokenizer: str = "") -> None:
        if budget != 0 and not 2 * LIMIT <= budget <= LARGEST:
            raise UsageError(f"suffix outputs={budget} (tokens stored); allowed: 0, or {2 * LIMIT} to {LARGEST}")
        self.vocab_size, self.budget, self.tokenizer = vocab_size, budget, tokenizer
        self._seeded: deque[array[int]] = deque()
        self._older, self._newer = _Half(), _Half()

    @property
    def automata(self) -> list[SuffixAutomaton]:
        """The automata that are not empty, the newer first."""
        return [half.automaton for half in (self._newer, self._older) if half.texts]

    @property
    def num_tokens(self) -> int:
        """Number of stored tokens."""
        return self._newer.automaton.num_tokens + self._older.automaton.num_tokens

    def texts(self) -> Iterator[list[int]]:
        """The stored texts, oldest first."""
        for half in (self._older, self._newer):
            yield from (text.tolist() for text in half.texts)

    def add(self, tokens: Sequence[int]) -> None:
        """Store a text; if there is no room, drop the older half."""
        self._add(self._cut(tokens))

    def seed(self, texts: Iterable[Sequence[int]]) -> None:
        """Store a user's texts, which outlive `reset`; raises UsageError for an id outside the vocabulary."""
        checked = [self._cut(self._ids(number, tokens)) for number, tokens in enumerate(texts)]
        for text in checked:
            self._seeded.append(text)
            self._add(text)
        while sum(map(len, self._seeded)) > self.budget:
            self._seeded.popleft()

    def reset(self) -> None:
        """Drop all texts but those that were seeded and loaded."""
        self._older, self._newer = _Half(), _Half()
        for text in self._seeded:
            self._add(text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the texts to an .npz file (4 bytes per token), whole or not at all."""
        path, texts = expanded(path), list(self.texts())
        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        tokens = np.array([token for text in texts for token in text], dtype=np.int32)
        size, tokenizer = np.array(self.vocab_size), np.array(self.tokenizer)
        values: tuple[Any, ...] = (np.array(FORMAT), size, tokenizer, lengths, tokens)
        try:
            with replaced(path) as partial, partial.open("wb") as file:
                np.savez(file, **dict(zip(FIELDS, values, strict=True)))
        except OSError as error:
            raise SlipstreamError(f"store {str(path)!r} cannot be written: {os_reason(error)}") from error

    def load(self, path: str | os.PathLike[str]) -> None:
        """Seed with the texts of a file; one of another vocabulary or tokenizer is refused."""
        path = expanded(path)
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                parts = {name: np.asarray(archive[name]) for name in FIELDS}
        except FileNotFoundError as error:
            raise UsageError(f"store {str(path)!r} does not exist; allowed: a file that save has written") from error
        except OSError as error:
            raise UsageError(f"store {str(path)!r} cannot be read: {why_unreadable(error)}") from error
        except (ValueError, KeyError, TypeError, EOFError, NotImplementedError, zipfile.BadZipFile) as error:
            raise UsageError(
                f"store {str(path)!r} cannot be read: it is not a store, or it is damaged; allowed: a file that save "
                "has written"
            ) from error
        self._check(f"store {str(path)!r}", parts)
        lengths, tokens = parts["lengths"].tolist(), iter(parts["tokens"].tolist())
        self.seed([list(islice(tokens, length)) for length in lengths])

    def _cut(self, tokens: Sequence[int]) -> array[int]:
        """The end of a text, as much of it as one half holds."""
        return array("i", tokens[max(0, len(tokens) - self.budget // 2) :])

    def _add(self, text: array[int]) -> None:
        if self._newer.automaton.num_tokens + len(text) > self.budget // 2:
            self._older, self._newer = self._newer, _Half()
        if text:
            self._newer.add(text)

    def _ids(self, number: int, tokens: Sequence[int]) -> list[int]:
        if not isinstance(tokens, Iterable):
            raise UsageError(f"text {number} is {tokens!r:.60}; allowed: a list of token ids")
        ids = list(tokens)
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < self.vocab_size:
                raise UsageError(f"text {number} holds {token!r:.60}; allowed: ids from 0 to {self.vocab_size - 1}")
        return ids

    def _check(self, name: str, parts: dict[str, NDArray[Any]]) -> None:
        """Raise UsageError unless the file is a store of this vocabulary and tokenizer."""
        if str(parts["format"]) != FORMAT:
            raise UsageError(f"{name} has format {str(parts['format'])!r:.60}; allowed: {FORMAT!r}")
        sizes = (parts["vocab_size"], parts["lengths"], parts["tokens"])
        if [(part.dtype.kind, part.ndim) for part in sizes] != [("i", 0), ("i", 1), ("i", 1)]:
            raise UsageError(f"{name} is damaged: its sizes and tokens are not whole numbers in the shapes expected")
        if (parts["lengths"] < 0).any() or int(parts["lengths"].sum()) != len(parts["tokens"]):
            raise UsageError(f"{name} is damaged: its texts' lengths do not fit its {len(parts['tokens'])} tokens")
        if int(parts["vocab_size"]) != self.vocab_size:
            raise UsageError(f"{name} has a vocabulary of {int(parts['vocab_size'])}; allowed: {self.vocab_size}")
        tokenizer = str(parts["tokenizer"])
        if self.tokenizer and tokenizer and tokenizer != self.tokenizer:
            raise UsageError(f"{name} belongs to tokenizer {tokenizer!r}; allowed: {self.tokenizer!r}")
        if (outside := (parts["tokens"] < 0) | (parts["tokens"] >= self.vocab_size)).any():
            raise UsageError(f"{name} is damaged: it holds the token id {int(parts['tokens'][outside][0])}")
