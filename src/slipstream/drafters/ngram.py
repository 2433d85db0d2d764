"""Prompt lookup: continue as the text continued where its last few tokens occurred before (Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from slipstream.core.interfaces import Sampler
from slipstream.core.types import Draft, Row, Traits
from slipstream.drafters import Setup
from slipstream.errors import UsageError

LONGEST, SHORTEST = 4, 2


class _Index:
    """Maps each n-gram of a row's tokens to the position after its latest occurrence."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 1  # n-grams ending before this position have been entered

    def follow(self, tokens: Sequence[int], length: int) -> list[int]:
        """Up to `length` tokens that followed the longest, then most recent, earlier occurrence of the tokens' end."""
        for end in range(self._indexed, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, len(tokens))
        for size in reversed(self._sizes):
            start = self._after.get(tuple(tokens[len(tokens) - size :])) if size <= len(tokens) else None
            if start is not None:
                # a match that reaches the end of the text goes on with its own copy: periodic text stays periodic
                period = len(tokens) - start
                return [tokens[start + j % period] for j in range(length)]
        return []


@dataclass
class NgramDrafter:
    """Looks up n-grams of `longest` down to `shortest` tokens in the row's prompt and output; costs microseconds."""

    longest: int = LONGEST
    shortest: int = SHORTEST
    _indexes: WeakKeyDictionary[Row, _Index] = field(default_factory=WeakKeyDictionary, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest <= 64:
            raise UsageError(
                f"ngram sizes shortest={self.shortest}, longest={self.longest}; allowed: 1 <= shortest <= longest <= 64"
            )

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        proposals = list[list[int]]()
        for row, length in zip(rows, lengths, strict=True):
            index = self._indexes.get(row)
            if index is None:
                index = self._indexes[row] = _Index(range(self.shortest, self.longest + 1))
            proposals.append(index.follow(row.tokens, length) if length else [])
        return Draft.from_lists(proposals, sampler.device)


TRAITS = Traits(samples=False, needs_forwards=False, default_length=7, in_other_engines=True)


def build(setup: Setup, argument: str) -> NgramDrafter:
    """ "ngram", "ngram:LONGEST" or "ngram:SHORTEST-LONGEST"."""
    first, dash, last = argument.partition("-")
    if argument and not (first.isdecimal() and (last.isdecimal() or not dash)):
        raise UsageError(f"drafter='ngram:{argument}'; allowed: ngram, ngram:LONGEST or ngram:SHORTEST-LONGEST")
    longest = int(last or first or LONGEST)
    shortest = int(first) if dash else min(SHORTEST, longest)
    return NgramDrafter(longest, shortest)
