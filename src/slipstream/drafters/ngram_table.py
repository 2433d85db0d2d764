"""Adaptive n-gram drafts: each token is the most frequent continuation of the longest context known so far.

Ou, Chen and Tian, "Lossless Acceleration of Large Language Model via Adaptive N-gram Parallel Decoding" (NAACL 2024,
industry track), with its multi-level n-grams. Every row has a table that learns from its prompt and its output.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from slipstream.core.interfaces import Sampler
from slipstream.core.types import Draft, Row, Traits, Verdict
from slipstream.draft_length.acceptance_model import AcceptanceModel
from slipstream.drafters import Setup
from slipstream.drafters._tree_growth import Alternatives, Node, draft_of, grown, learn
from slipstream.errors import UsageError

SHORTEST, LONGEST, LIMIT = 2, 5, 16  # sizes of n-grams: a context and the token that followed it
AGREED, SIZES = 3, 4  # kinds of tokens: by how far their context's occurrences agree, and by its length, up to 4
# acceptance probability of each kind, the first of which is what the target ranked; then those of a place's second and
# third candidates, given that the ones before are wrong
PRIOR = (0.25, 0.08, 0.3, 0.3, 0.2, 0.55, 0.6, 0.4, 0.6, 0.75, 0.3, 0.6, 0.9)
CHANCES = (*PRIOR, *(0.17 for _ in PRIOR), *(0.1 for _ in PRIOR))
SPAN = 1 << 16  # a table covers the last SPAN to 2 * SPAN tokens of its row
# the nodes of the last 0, 1, ... tokens before a token, and that token; -1 for the end of the row's text
Place = tuple[list[int], int]
ARGUMENT = re.compile(r"(?:(?:(\d+)-)?(\d+)(\+fill)?|(fill))?")


class _Table:
    """The n-grams of a row's tokens as a tree: the children of a context are the tokens that followed it.

    Node 0 is the empty context. Per node: its token, how often it occurred, and which child occurred most often (of
    several, the latest). Memory: at most one node per n-gram size and token, up to 150 bytes each.
    """

    def __init__(self, sizes: range, vocab_size: int, start: int) -> None:
        self.start = self._learned = start
        self._shortest, self._longest = sizes[0] - 1, sizes[-1] - 1  # of the contexts
        self._stride = vocab_size | 1  # odd, so that the low bits of a key depend on the node as well
        self._child: dict[int, int] = {}  # node * stride + token -> node
        self._token, self._count, self._best = array("q", [0]), array("q", [0]), array("q", [0])
        self._last = -1
        self._ends = [0]  # the nodes of the last 0, 1, ... tokens
        self._ranks: dict[int, dict[int, int]] = {}  # token -> what the target ranked high after it, and how high
        self._leader: dict[int, int] = {}  # token -> the highest of those

    def learn(self, tokens: Sequence[int]) -> None:
        """Enter the n-grams that end with the tokens that came since the last call."""
        child, count, best = self._child, self._count, self._best
        for token in tokens[self._learned :]:
            ends = [0]
            for node in self._ends:
                key = node * self._stride + token
                gram = child.get(key)
                if gram is None:
                    gram = child[key] = len(count)
                    self._token.append(token)
                    count.append(0)
                    best.append(0)
                count[gram] += 1
                if count[gram] >= count[best[node]]:
                    best[node] = gram
                ends.append(gram)
            self._ends = ends[: self._longest + 1]
        self._learned = len(tokens)
        self._last = tokens[-1]

    def rank(self, token: int, ranking: Sequence[int]) -> None:
        """Note what the target ranked highest after a token, best first; ranks add up over its occurrences."""
        ranks = self._ranks.setdefault(token, {})
        for weight, follower in enumerate(reversed(ranking), start=1):
            ranks[follower] = ranks.get(follower, 0) + weight
            if ranks[follower] >= ranks.get(self._leader.get(token, -1), 0):
                self._leader[token] = follower

    def follow(self, last: int, length: int) -> list[int]:
        """Up to `length` tokens after the row's last, each the likeliest after all before it, while one is known."""
        ends, drafted = self._ends, list[int]()
        while len(drafted) < length and (token := self._likeliest(ends, last)) is not None:
            drafted.append(token)
            ends, last = self._after(ends, token), token
        return drafted

    @property
    def end(self) -> Place:
        """The place at the end of the row's text."""
        return self._ends, -1

    def alternatives(self, place: Place) -> Iterator[tuple[int, int, Place]]:
        """The tokens that may follow a place, in the order of `_likeliest`: token, kind and the place it leads to.

        Every context gives its most frequent token, the target's ranking all of its tokens.
        """
        (before, token), seen = place, list[int]()
        ends, last = (before, self._last) if token < 0 else (self._after(before, token), token)
        for token, kind in self._candidates(ends, last):
            if token not in seen:
                yield token, kind, (ends, token)
                seen.append(token)

    def _candidates(self, ends: list[int], last: int) -> Iterator[tuple[int, int]]:
        first = max(self._shortest, 2)
        for size in range(len(ends) - 1, first - 1, -1):
            if gram := self._best[ends[size]]:
                yield self._token[gram], self._kind(size, ends[size], gram)
        if last in self._leader:
            yield self._leader[last], 0
            ranks = self._ranks[last]
            yield from ((token, 0) for token in sorted(ranks, key=ranks.__getitem__, reverse=True))
        if self._shortest == 1 and len(ends) > 1 and (gram := self._best[ends[1]]):
            yield self._token[gram], self._kind(1, ends[1], gram)

    def _kind(self, size: int, node: int, gram: int) -> int:
        """The kind: by the context's length, and by whether up to half, more or all of its occurrences agree."""
        # the context may be the end of the text, which nothing has followed yet
        share = self._count[gram] / max(1, self._count[node] - (node in self._ends))
        return AGREED * (min(size, SIZES) - 1) + 1 + (share > 0.5) + (share >= 1)

    def _likeliest(self, ends: list[int], last: int) -> int | None:
        """The best after the longest context of two tokens or more; else as the target ranks; else after one token."""
        first = max(self._shortest, 2)
        gram = next((best for node in reversed(ends[first:]) if (best := self._best[node])), 0)
        if not gram and last in self._leader:
            return self._leader[last]
        if not gram and self._shortest == 1 and len(ends) > 1:
            gram = self._best[ends[1]]
        return self._token[gram] if gram else None

    def _after(self, ends: list[int], token: int) -> list[int]:
        """The nodes of the last 0, 1, ... tokens once `token` has followed, up to the longest context known."""
        after = [0]
        for node in ends[: self._longest]:
            gram = self._child.get(node * self._stride + token)
            if gram is None:
                break  # an n-gram is entered with all its ends, so no longer one is known
            after.append(gram)
        return after


@dataclass
class NgramTableDrafter:
    """Counts n-grams of `shortest` to `longest` tokens in the row's prompt and output; costs microseconds per token.

    Drafts are one-hot. A row's table is dropped with the row; it covers at most the row's last 131,072 tokens
    and takes up to 150 bytes per n-gram size and token (80 MB at worst with the default sizes). Real text repeats
    itself and takes less.
    """

    vocab_size: int
    longest: int = LONGEST
    shortest: int = SHORTEST
    # where no context of two tokens is known, go on with what the target has ranked highest after the last token so far
    fill: bool = False
    acceptance_model: AcceptanceModel | None = None
    branches: int = 0
    fixed_tree: bool = False
    _guesses: WeakKeyDictionary[Row, tuple[int, list[Node]]] = field(default_factory=WeakKeyDictionary, repr=False)
    _tables: WeakKeyDictionary[Row, _Table] = field(default_factory=WeakKeyDictionary, repr=False)

    def __post_init__(self) -> None:
        if not 2 <= self.shortest <= self.longest <= LIMIT:
            raise UsageError(
                f"table sizes shortest={self.shortest}, longest={self.longest}; "
                f"allowed: 2 <= shortest <= longest <= {LIMIT}"
            )

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        if self.acceptance_model is not None:
            branches = self.branches if sampler.branching else 0
            drafts = [
                self._grown(self.acceptance_model, row, length, branches) if length else []
                for row, length in zip(rows, lengths, strict=True)
            ]
            return draft_of(drafts, lengths, sampler.device)
        proposals = [
            self._table(row).follow(row.tokens[-1], length) if length else []
            for row, length in zip(rows, lengths, strict=True)
        ]
        return Draft.from_lists(proposals, sampler.device)

    def _grown(self, acceptance_model: AcceptanceModel, row: Row, length: int, branches: int) -> list[Node]:
        table = self._table(row)
        if row in self._guesses:
            learn(acceptance_model, row, *self._guesses[row])
        likely = Alternatives(cache(partial(acceptance_model.chance, row)), 1 + branches, len(PRIOR), ranks=3)
        deepest = -(-length // (1 + branches)) if self.fixed_tree else None
        nodes = grown(lambda place, prob: likely.followers(table.alternatives(place), prob), table.end, length, deepest)
        self._guesses[row] = len(row.tokens), nodes
        return nodes

    def observe(self, rows: Sequence[Row], draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        """Note the target's likeliest tokens after each row's last token and accepted draft tokens; see `Observer`."""
        if not self.fill:
            return
        top = logits.topk(min(4, logits.shape[-1]), dim=-1).indices
        lines: list[list[int]] = torch.cat([verdict.accepted[:, None], draft.tokens, top.flatten(1)], dim=1).tolist()
        paths = [range(draft.width)] * len(rows) if verdict.path is None else verdict.path.tolist()
        for row, path, (accepted, *others) in zip(rows, paths, lines, strict=True):
            table = self._tables.get(row)
            if table is None:
                continue  # never asked for a draft
            size, ranking = top.shape[-1], others[draft.width :]
            for j in (0, *(1 + node for node in path[:accepted])):
                token = others[j - 1] if j else row.tokens[-1]
                table.rank(token, ranking[j * size : (j + 1) * size])

    def _table(self, row: Row) -> _Table:
        start = max(0, len(row.tokens) // SPAN - 1) * SPAN
        table = self._tables.get(row)
        if table is None or table.start != start:
            sizes = range(self.shortest, self.longest + 1)
            table = self._tables[row] = _Table(sizes, self.vocab_size, start)
        table.learn(row.tokens)
        return table


TRAITS = Traits(samples=False, needs_forwards=False, branches=True, default_length=7)


def build(setup: Setup, argument: str) -> NgramTableDrafter:
    """ "ngram_table[:LONGEST]" or "ngram_table:SHORTEST-LONGEST", with "+fill" after sizes, or "ngram_table:fill"."""
    match = ARGUMENT.fullmatch(argument)
    if match is None:
        raise UsageError(
            f"drafter='ngram_table:{argument}'; allowed: ngram_table, ngram_table:LONGEST or "
            "ngram_table:SHORTEST-LONGEST, each with +fill after the sizes, or ngram_table:fill"
        )
    first, last, with_sizes, alone = match.groups()
    longest = int(last or LONGEST)
    return NgramTableDrafter(
        setup.vocab_size,
        longest,
        int(first or SHORTEST),
        fill=bool(with_sizes or alone),
        acceptance_model=AcceptanceModel(CHANCES, shared=False) if setup.siblings else None,
        branches=setup.siblings if setup.fixed_tree or not setup.siblings else 2,
        fixed_tree=setup.fixed_tree,
    )
