"""Token recycling: what the target ranked highest after a token is stored and drafted when the token comes again.

Luo et al. 2024, "Turning Trash into Treasure" (arXiv:2408.08696). Where trees are verified, a draft is a tree of
alternatives, grown along the likeliest paths; else it is the chain of the best ones. The drafter learns from every
verified position, even after a rejected draft token, as the target's ranking there is right for the drafted text.
Unlike in the paper, contexts have up to three tokens, and the drafter learns from a row's own text, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from operator import itemgetter
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from slipstream.checks import check_whole
from slipstream.core.interfaces import Sampler
from slipstream.core.types import Draft, Row, Traits, Verdict
from slipstream.draft_length.acceptance_model import AcceptanceModel
from slipstream.drafters import Setup
from slipstream.drafters._tree_growth import UNLIKELY, Alternatives, LearnedByGroup, Node, draft_of, grown, learn
from slipstream.errors import UsageError

SPAN = 1 << 15  # a table holds the last SPAN to 2 * SPAN contexts
CONTEXT = 3  # tokens of the longest context
WIDTH, LIMIT = 4, 64  # alternatives stored per context
# acceptance probability after a context of one, two, three tokens, in the row's table and in the shared one
PRIOR = (0.2, 0.15, 0.45, 0.35, 0.6, 0.5)
BESIDE = (0.3, 0.2)  # of the second and third best, given that those before them are wrong
CHANCES = (*PRIOR, *(chance for chance in BESIDE for _ in PRIOR))
TRAITS = Traits(samples=False, needs_forwards=False, branches=True, default_length=7)


class FollowerTable:
    """For each context of a few tokens, the tokens that followed it, most likely first, with their weights.

    A ranking of n tokens gives them the weights `width`, `width` - 1, ...; the sums of earlier ones fade. Contexts are
    numbers (`_contexts`). When SPAN have been entered, those not seen among the SPAN before are dropped.
    """

    def __init__(self, width: int) -> None:
        self._weights = range(width, 0, -1)
        self._young: dict[int, dict[int, float]] = {}
        self._old: dict[int, dict[int, float]] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def enter(self, contexts: Sequence[int], ranking: Sequence[int]) -> None:
        """Note what the target ranked highest after a position, which is the end of all these contexts."""
        for context in contexts:
            weights = self._find(context)
            ranks: dict[int, float] = dict(zip(ranking, self._weights, strict=False))
            if weights is not None:
                for token, weight in weights.items():
                    ranks[token] = ranks.get(token, 0.0) + 0.9 * weight  # older rankings fade
                ranks = dict(sorted(ranks.items(), key=itemgetter(1), reverse=True)[: len(self._weights)])
            self._young[context] = ranks
        if len(self._young) >= SPAN:
            self._old, self._young = self._young, {}

    def best(self, contexts: Sequence[int], count: int = 1) -> tuple[list[int], int] | None:
        """The `count` likeliest followers of the last of these contexts that has any, and that context's index."""
        for index in range(len(contexts) - 1, -1, -1):
            weights = self._find(contexts[index])
            if weights is not None:
                return list(islice(weights, count)), index
        return None

    def _find(self, context: int) -> dict[int, float] | None:
        weights = self._young.get(context)
        return self._old.get(context) if weights is None else weights


@dataclass
class TokenRecyclingDrafter:
    """Drafts the chain of the target's best alternatives after contexts that were verified before.

    Every row has its own table, which first learns the text as it stands at the first draft; what the target ranked in
    any row goes into a shared table as well. Contexts of two and three tokens are looked up before single ones, and in
    the row's table before the shared one. Drafts are one-hot. A table holds at most 2 * SPAN contexts.
    """

    vocab_size: int
    width: int = WIDTH  # alternatives stored per context
    acceptance_model: AcceptanceModel | None = None  # gives drafts acceptance probabilities, learned from their kinds
    branches: int = 0  # alternatives proposed next to the best of each place
    fixed_tree: bool = False  # a chain with as many alternatives next to each token as the user asked for
    _guesses: WeakKeyDictionary[Row, tuple[int, list[Node]]] = field(default_factory=WeakKeyDictionary, repr=False)
    _row_tables: WeakKeyDictionary[Row, FollowerTable] = field(default_factory=WeakKeyDictionary, repr=False)

    def __post_init__(self) -> None:
        check_whole("token_recycling width", self.width, 1, LIMIT)
        self._commons = LearnedByGroup(lambda: FollowerTable(self.width))

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        branches = self.branches if sampler.branching else 0
        drafts = [
            self._draft(row, length, branches) if length else [] for row, length in zip(rows, lengths, strict=True)
        ]
        return draft_of(drafts, lengths, sampler.device, has_probs=self.acceptance_model is not None)

    def observe(self, rows: Sequence[Row], draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        """Note the target's likeliest tokens at every verified position; see `Observer`. Waits for the device."""
        size = min(self.width, logits.shape[-1])
        top = logits.topk(size, dim=-1).indices
        lines: list[list[int]] = torch.cat([verdict.accepted[:, None], draft.tokens, top.flatten(1)], dim=1).tolist()
        paths: list[Sequence[int]] = [range(draft.width)] * len(rows)
        if verdict.path is not None:
            paths = verdict.path.tolist()
        for i, (row, length, (accepted, *others)) in enumerate(zip(rows, draft.lengths, lines, strict=True)):
            tokens, rankings = others[:length], others[draft.width :]
            parents = range(-1, length - 1) if draft.parents is None else draft.parents[i]
            texts = [row.tokens[-CONTEXT:]]  # of the root and of each node
            for parent, token in zip(parents, tokens, strict=True):
                texts.append([*texts[parent + 1], token][-CONTEXT:])
            row_table = self._row_tables.get(row)
            common = self._commons.of(row.group)
            tables = [common] if row_table is None else [common, row_table]
            # where a draft repeats itself, accepted tokens have the last word
            path = [0, *(1 + node for node in paths[i][:accepted])]
            for j in (*sorted({*range(length + 1)} - {*path}), *path):
                contexts = self._contexts(texts[j])
                for table in tables:
                    table.enter(contexts, rankings[j * size : (j + 1) * size])

    def forget(self) -> None:
        """Drop what was learned from requests; running rows learn their text again."""
        self._commons = LearnedByGroup(lambda: FollowerTable(self.width))
        self._row_tables.clear()
        if self.acceptance_model is not None:
            self.acceptance_model.forget()

    def _draft(self, row: Row, length: int, branches: int) -> list[Node]:
        if self.acceptance_model is not None and row in self._guesses:
            learn(self.acceptance_model, row, *self._guesses[row])
        text = row.tokens[-CONTEXT:]
        nodes = self._tree(row, text, length) if branches else self._chain(row, text, length)
        self._guesses[row] = len(row.tokens), nodes
        return nodes

    def _chain(self, row: Row, text: list[int], length: int) -> list[Node]:
        """Up to `length` tokens after a text, each the best after those before it.

        With an acceptance model, the chain ends before it becomes UNLIKELY.
        """
        tables, nodes, prob = self._tables(row), list[Node](), 1.0
        while len(nodes) < length and (best := next(self._candidates(tables, 1, text), None)) is not None:
            token, kind, text = best
            prob *= self._chance(row, kind)
            if self.acceptance_model is not None and prob < UNLIKELY:
                break
            nodes.append(Node(len(nodes) - 1, token, kind, prob))
        return nodes

    def _tree(self, row: Row, text: list[int], length: int) -> list[Node]:
        """Up to `length` nodes, the likeliest first."""
        tables, count = self._tables(row), 1 + self.branches
        likely = Alternatives(cache(partial(self._chance, row)), count, len(PRIOR), ranks=1 + len(BESIDE))
        deepest = -(-length // count) if self.fixed_tree else None
        return grown(
            lambda end, prob: likely.followers(self._candidates(tables, count, end), prob), text, length, deepest
        )

    def _candidates(
        self, tables: Sequence[FollowerTable], count: int, text: list[int]
    ) -> Iterator[tuple[int, int, list[int]]]:
        """The best followers of a text: token, kind and the text with the token.

        Kinds: two for each length of context, one for each of the tables.
        """
        contexts = self._contexts(text)
        for first, part in ((1, contexts[1:]), (0, contexts[:1])):
            for common, table in enumerate(tables):
                if (best := table.best(part, count)) is not None:
                    for token in best[0]:
                        yield token, 2 * (first + best[1]) + common, [*text[-CONTEXT + 1 :], token]
                    return

    def _chance(self, row: Row, kind: int) -> float:
        if self.acceptance_model is not None:
            return self.acceptance_model.chance(row, kind)
        return CHANCES[kind]

    def _tables(self, row: Row) -> tuple[FollowerTable, FollowerTable]:
        table = self._row_tables.get(row)
        if table is None:
            table = self._row_tables[row] = FollowerTable(self.width)
            # the newest of the text, as much as the table can hold
            for end in range(max(1, len(row.tokens) - SPAN), len(row.tokens)):
                table.enter(self._contexts(row.tokens[max(0, end - CONTEXT) : end]), row.tokens[end : end + 1])
        return table, self._commons.of(row.group)

    def _contexts(self, text: Sequence[int]) -> list[int]:
        """The last 1, 2, ... CONTEXT tokens of a text, each as one number."""
        numbers, number = list[int](), 1  # the leading 1 tells contexts of different lengths apart
        for token in reversed(text[-CONTEXT:]):
            number = number * self.vocab_size + token
            numbers.append(number)
        return numbers


def build(setup: Setup, argument: str) -> TokenRecyclingDrafter:
    """ "token_recycling" or "token_recycling:WIDTH", the alternatives stored per context."""
    if argument and not (argument.isdecimal() and 1 <= int(argument) <= LIMIT):
        raise UsageError(
            f"drafter='token_recycling:{argument}'; allowed: token_recycling, or token_recycling:WIDTH with 1 to "
            f"{LIMIT} alternatives"
        )
    acceptance_model = AcceptanceModel(CHANCES) if setup.acceptance_probs else None
    branches = setup.siblings if setup.fixed_tree or not setup.siblings else len(BESIDE)
    return TokenRecyclingDrafter(setup.vocab_size, int(argument or WIDTH), acceptance_model, branches, setup.fixed_tree)
