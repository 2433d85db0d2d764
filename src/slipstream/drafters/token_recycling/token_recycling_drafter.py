"""Token recycling: what the target ranked highest after a token is stored and drafted when the token comes again.

Luo et al. 2024, "Turning Trash into Treasure" (arXiv:2408.08696). Where trees are verified a draft is one of
alternatives, grown where they are likeliest; else it is the chain of best ones. Every verified position teaches, also
behind a rejected draft token: the target's ranking there is right for the text that was drafted. Unlike in the paper,
contexts have up to three tokens, and a row's own text teaches too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from slipstream.core.interfaces import Sampler
from slipstream.core.traits import Traits
from slipstream.core.types import Draft, Row, Verdict
from slipstream.draft_length.acceptance_model import AcceptanceModel
from slipstream.drafters import Setup
from slipstream.drafters.token_recycling.follower_table import SPAN, FollowerTable
from slipstream.errors import UsageError

CONTEXT = 3  # tokens of the longest context
WIDTH, LIMIT = 4, 64  # alternatives stored per context
# chance of a token behind a context of one, two, three tokens, of the row's own table and of the common one
PRIOR = (0.2, 0.15, 0.45, 0.35, 0.6, 0.5)
BESIDE = (0.3, 0.2)  # chance of the second and third best, given that those before them are wrong
CHANCES = (*PRIOR, *(chance for chance in BESIDE for _ in PRIOR))
UNLIKELY = 0.01  # a node less likely than this is not proposed


@dataclass(frozen=True)
class Node:
    """A token of a draft. parent: number of the node it follows, -1 for none; kind: of its chance, by rank."""

    parent: int
    token: int
    kind: int
    prob: float


@dataclass
class TokenRecyclingDrafter:
    """Drafts the chain of the target's best alternatives after contexts that were verified before.

    width: alternatives stored per context. A row has a table of its own, which begins with its text as far as it stands
    at its first draft; what the target ranked in any row goes into a common one as well. Contexts of two and three
    tokens go before single ones, the row's own before common ones. Drafts are one-hot. A table holds at most 2 * SPAN
    contexts.
    acceptance_model: given, a draft has acceptance probabilities, by how often such tokens were accepted before.
    branches: alternatives proposed beside the best of each place. shaped: beside those of a chain only, as many as
    the user said.
    """

    vocab_size: int
    width: int = WIDTH
    acceptance_model: AcceptanceModel | None = None
    branches: int = 0
    shaped: bool = False
    _guesses: WeakKeyDictionary[Row, tuple[int, list[Node]]] = field(default_factory=WeakKeyDictionary, repr=False)
    _own: WeakKeyDictionary[Row, FollowerTable] = field(default_factory=WeakKeyDictionary, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.width, bool) or not isinstance(self.width, int) or not 1 <= self.width <= LIMIT:
            raise UsageError(f"token_recycling width={self.width!r}; allowed: a whole number from 1 to {LIMIT}")
        self._common = FollowerTable(self.width)

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """For each row the likeliest followers, and what follows them; a draft ends where nothing is known."""
        drafts = [self._draft(row, length) if length else [] for row, length in zip(rows, lengths, strict=True)]
        known = None if self.acceptance_model is None else [[node.prob for node in nodes] for nodes in drafts]
        made = Draft.from_lists([[node.token for node in nodes] for nodes in drafts], sampler.device, known)
        if not self.branches:
            return made
        return replace(made, parents=tuple(tuple(node.parent for node in nodes) for nodes in drafts))

    def extend(
        self, row: Row, tokens: Sequence[int], length: int, acceptance_prob: float
    ) -> tuple[list[int], list[float]]:
        """Up to `length` tokens after a draft by another drafter, with acceptance probabilities; see `Extender`."""
        nodes = self._chain(row, [*row.tokens[-CONTEXT:], *tokens], length, acceptance_prob)
        probs = [] if self.acceptance_model is None else [node.prob for node in nodes]
        return [node.token for node in nodes], probs

    def observe(self, rows: Sequence[Row], draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        """Note the target's likeliest tokens at every verified position; see `Observer`. Waits for the device."""
        size = min(self.width, logits.shape[-1])
        top = logits.topk(size, dim=-1).indices
        told: list[list[int]] = torch.cat([verdict.accepted[:, None], draft.tokens, top.flatten(1)], dim=1).tolist()
        paths: list[Sequence[int]] = [range(draft.width)] * len(rows)
        if verdict.path is not None:
            paths = verdict.path.tolist()
        for i, (row, length, (accepted, *others)) in enumerate(zip(rows, draft.lengths, told, strict=True)):
            tokens, rankings = others[:length], others[draft.width :]
            parents = range(-1, length - 1) if draft.parents is None else draft.parents[i]
            texts = [row.tokens[-CONTEXT:]]  # of the root and of each node
            for parent, token in zip(parents, tokens, strict=True):
                texts.append([*texts[parent + 1], token][-CONTEXT:])
            own = self._own.get(row)
            tables = [self._common] if own is None else [self._common, own]
            # where a draft repeats itself, accepted tokens have the last word
            path = [0, *(1 + node for node in paths[i][:accepted])]
            for j in (*sorted({*range(length + 1)} - {*path}), *path):
                contexts = self._contexts(texts[j])
                for table in tables:
                    table.enter(contexts, rankings[j * size : (j + 1) * size])

    def forget(self) -> None:
        """Drop what was learned from requests; rows under way begin again with their text."""
        self._common = FollowerTable(self.width)
        self._own.clear()
        if self.acceptance_model is not None:
            self.acceptance_model.forget()

    def num_contexts(self) -> int:
        """How many contexts the common table holds."""
        return len(self._common)

    def _draft(self, row: Row, length: int) -> list[Node]:
        if self.acceptance_model is not None and row in self._guesses:
            self._learn(row, *self._guesses[row])
        text = row.tokens[-CONTEXT:]
        nodes = self._tree(row, text, length) if self.branches else self._chain(row, text, length)
        self._guesses[row] = len(row.tokens), nodes
        return nodes

    def _learn(self, row: Row, start: int, nodes: Sequence[Node]) -> None:
        """What became of the last draft: the alternatives of each place, in order, up to the one that came."""
        assert self.acceptance_model is not None
        at = -1
        for token in row.tokens[start:]:
            children = [i for i, node in enumerate(nodes) if node.parent == at]
            for child in children:
                node = nodes[child]
                self.acceptance_model.learn(row, [node.kind], [node.token], [token])
                if node.token == token:
                    break
            else:
                return
            at = child

    def _chain(self, row: Row, text: list[int], length: int, prob: float = 1.0) -> list[Node]:
        """Up to `length` tokens after a text: each the best; with an acceptance model as far as they are likely."""
        own, nodes = self._table(row), list[Node]()
        while len(nodes) < length:
            (best,) = self._followers(row, own, text, prob, 1) or (None,)
            if best is None or (self.acceptance_model is not None and best.prob < UNLIKELY):
                break
            nodes.append(replace(best, parent=len(nodes) - 1))
            text, prob = [*text[-CONTEXT + 1 :], best.token], best.prob
        return nodes

    def _tree(self, row: Row, text: list[int], length: int) -> list[Node]:
        """Up to `length` nodes, the likeliest first; none is likelier than its parent."""
        own, nodes, deepest = self._table(row), list[Node](), -(-length // (1 + self.branches))
        waiting: list[tuple[float, int, int, Node, list[int]]] = []  # by chance, then by age

        def expand(parent: int, text: list[int], prob: float, depth: int) -> None:
            for node in self._followers(row, own, text, prob, 1 + self.branches):
                place = len(nodes), len(waiting)
                entry = replace(node, parent=parent), [*text[-CONTEXT + 1 :], node.token]
                heappush(waiting, (-node.prob, depth, (place[0] << 8) + place[1], *entry))

        expand(-1, text, 1.0, 0)
        on_chain = {-1}
        while waiting and len(nodes) < length:
            _, depth, _, node, after = heappop(waiting)
            if node.prob < UNLIKELY:
                break
            nodes.append(node)
            leads = node.parent in on_chain and not any(one.parent == node.parent for one in nodes[:-1])
            if leads:
                on_chain.add(len(nodes) - 1)
            if not self.shaped or (leads and depth + 1 < deepest):
                expand(len(nodes) - 1, after, node.prob, depth + 1)
        return nodes

    def _followers(self, row: Row, own: FollowerTable, text: list[int], prob: float, count: int) -> list[Node]:
        """The best followers of a text that has this chance. Kinds: two for each length of context and rank."""
        contexts, found = self._contexts(text), list[Node]()
        for first, part in ((1, contexts[1:]), (0, contexts[:1])):
            for common, table in enumerate((own, self._common)):
                if (best := table.best(part, count)) is not None:
                    kind = 2 * (first + best[1]) + common
                    for rank, token in enumerate(best[0]):
                        ranked = kind + len(PRIOR) * min(rank, len(BESIDE))
                        chance = self._chance(row, ranked)
                        at_most = prob if not found else found[-1].prob
                        found.append(Node(-1, token, ranked, min(at_most, prob * chance)))
                        prob *= 1 - chance
                    return found
        return found

    def _chance(self, row: Row, kind: int) -> float:
        if self.acceptance_model is not None:
            return self.acceptance_model.chance(row, kind)
        return CHANCES[kind]

    def _table(self, row: Row) -> FollowerTable:
        """The row's own, which first reads as much of the text as it can hold."""
        table = self._own.get(row)
        if table is None:
            table = self._own[row] = FollowerTable(self.width)
            for end in range(max(1, len(row.tokens) - SPAN), len(row.tokens)):
                table.enter(self._contexts(row.tokens[max(0, end - CONTEXT) : end]), row.tokens[end : end + 1])
        return table

    def _contexts(self, text: Sequence[int]) -> list[int]:
        """The last 1, 2, ... CONTEXT tokens of a text, each as one number."""
        numbers, number = list[int](), 1  # the leading 1 tells contexts of different lengths apart
        for token in reversed(text[-CONTEXT:]):
            number = number * self.vocab_size + token
            numbers.append(number)
        return numbers


USAGE = "token_recycling[:WIDTH]"
TRAITS = Traits(samples=False, costs_time=False, branches=True, default_length=7)


def build(setup: Setup, argument: str) -> TokenRecyclingDrafter:
    """ "token_recycling" or "token_recycling:WIDTH", the alternatives stored per context."""
    if argument and not (argument.isdecimal() and 1 <= int(argument) <= LIMIT):
        raise UsageError(
            f"drafter='token_recycling:{argument}'; allowed: token_recycling, or token_recycling:WIDTH with 1 to "
            f"{LIMIT} alternatives"
        )
    learned = AcceptanceModel(CHANCES) if setup.acceptance_probs else None
    branches = setup.siblings if setup.shaped or not setup.siblings else len(BESIDE)
    return TokenRecyclingDrafter(setup.vocab_size, int(argument or WIDTH), learned, branches, setup.shaped)
