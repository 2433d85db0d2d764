"""Draft trees of the likeliest nodes, and memories kept apart by group of rows, for retrieval drafters.

Of all trees of a given size, the tree of the likeliest paths is expected to have the most tokens accepted, and
best-first search finds it (OPT-Tree, Wang et al. 2024, arXiv:2406.17276, section 3). What drafters learn from requests
is kept apart by `Row.group`, so that no caller can tell another's texts by its own speed. This module knows no drafter
and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from slipstream.core.rounds import RETRIEVAL, RowDraft
from slipstream.core.types import Draft, Row
from slipstream.draft_length.acceptance_model import AcceptanceModel

UNLIKELY = 0.01  # a path less likely than this is not followed
T = TypeVar("T")
MAX_GROUPS = 64  # remembered in addition to the default one; the least recently used is dropped


class Follower(NamedTuple):
    """A token that may come next."""

    token: int
    kind: int  # see `acceptance_model`
    prob: float  # that the path up to it is accepted
    place: Any  # where the lookup continues after this token


class Node(NamedTuple):
    """A token of a draft tree."""

    parent: int  # number of the node it follows, -1 for none
    token: int
    kind: int  # see `acceptance_model`; of an alternative, given that the tokens proposed before it are wrong
    prob: float  # that the path up to it is accepted


@dataclass(frozen=True)
class Alternatives:
    """Estimates how likely each of a place's candidates is to be accepted."""

    chance: Callable[[int], float]  # acceptance probability by kind, given that the candidates before it are wrong
    limit: int  # most candidates of a place
    kinds: int  # kinds of first choices; second choices have as many again, and so on up to `ranks`
    ranks: int

    def followers(self, candidates: Iterable[tuple[int, int, Any]], prob: float) -> Iterator[Follower]:
        """The tokens that may follow a path of probability `prob`. candidates: token, kind, place; best first."""
        least, rank = prob, 0
        for token, kind, place in islice(candidates, self.limit):
            kind += self.kinds * rank
            chance = self.chance(kind)
            least = min(least, prob * chance)
            yield Follower(token, kind, least, place)
            prob, rank = prob * (1 - chance), min(rank + 1, self.ranks - 1)
            if prob < 0.05:  # what remains for further candidates is not worth looking for
                return


def grown(
    followers: Callable[[Any, float], Iterator[Follower]], start: Any, length: int, deepest: int | None = None
) -> list[Node]:
    """The `length` likeliest nodes (at least 1) of all paths, likeliest first; none below UNLIKELY.

    followers(place, prob): the tokens that may follow a path of probability `prob` that ends at `place`, likeliest
    first and none likelier than the path; the iterator is read only as far as the tree needs. deepest: grow a chain of
    up to this many tokens with leaves next to it; by default every node may be followed.
    """
    nodes, waiting = list[Node](), list[tuple[Any, ...]]()  # a heap, by probability, then by age

    def push_next(siblings: Iterator[Follower], parent: int, depth: int, leads: bool) -> None:
        for follower in siblings:  # only the next one: the heap holds one of each place
            if follower.prob >= UNLIKELY:
                heappush(waiting, (-follower.prob, depth, len(nodes), not leads, follower, parent, siblings))
            break

    push_next(followers(start, 1.0), -1, 0, True)
    while waiting:
        _, depth, _, is_leaf, (token, kind, prob, place), parent, siblings = heappop(waiting)
        nodes.append(Node(parent, token, kind, prob))
        if len(nodes) == length:
            break
        push_next(siblings, parent, depth, False)
        if deepest is None or not (is_leaf or depth + 1 >= deepest):
            push_next(followers(place, prob), len(nodes) - 1, depth + 1, not is_leaf)
    return nodes


def draft_of(
    trees: Sequence[Sequence[Node]], lengths: Sequence[int], device: torch.device, *, has_probs: bool = True
) -> Draft:
    """A draft of one tree per row; without branches a chain.

    lengths: numbers of requested tokens. has_probs: the nodes' probabilities are estimates, not placeholders.
    """
    rows = tuple(
        RowDraft(RETRIEVAL if n else "", [node.prob for node in nodes] if has_probs else None)
        for nodes, n in zip(trees, lengths, strict=True)
    )
    branches = any(node.parent != index - 1 for nodes in trees for index, node in enumerate(nodes))
    parents = tuple(tuple(node.parent for node in nodes) for nodes in trees) if branches else None
    draft = Draft.from_lists([[node.token for node in nodes] for nodes in trees], device)
    return replace(draft, rows=rows, parents=parents)


def learn(acceptance_model: AcceptanceModel, row: Row, start: int, nodes: Sequence[Node]) -> None:
    """Compare a tree with the text from `start` on: at each place, learn from its tokens up to the right one.

    The text may be shorter or longer than the tree.
    """
    current = -1  # the node that the text has reached
    for actual in row.tokens[start:]:
        for number in range(current + 1, len(nodes)):
            parent, token, kind, _ = nodes[number]
            if parent == current:
                acceptance_model.learn(row, (kind,), (token,), (actual,))
                if token == actual:
                    break
        else:
            return
        current = number


class LearnedByGroup(Generic[T]):
    """One memory T for each group of rows, made on first use. "" is the default group, which is never dropped."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self.default = make()
        self._others: dict[str, T] = {}

    def of(self, group: str) -> T:
        if not group:
            return self.default
        memory = self._others.pop(group, None)
        if memory is None:
            memory = self._make()
            if len(self._others) >= MAX_GROUPS:
                del self._others[next(iter(self._others))]
        self._others[group] = memory  # now the most recently used
        return memory

    def forget_others(self) -> None:
        self._others.clear()
