"""Draft trees of a given number of nodes, grown where they are likeliest to be accepted.

Of all trees of so many nodes, the one of the likeliest paths is expected to have the most tokens accepted, and
best-first search finds it (OPT-Tree, Wang et al. 2024, arXiv:2406.17276, section 3). What drafters learn from requests
is kept apart by `Row.group`, so that no caller sees another's texts in its speed. This module knows no drafter and no
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from slipstream.core.types import Draft, Row
from slipstream.draft_length.acceptance_model import AcceptanceModel

UNLIKELY = 0.01  # a path less likely than this is not followed
LEFT = 0.05  # where less is left of the probability of a path, no further token for its next place is looked for
T = TypeVar("T")
RETRIEVAL = "retrieval"  # the source of drafts that were looked up
MOST = 64  # groups remembered besides the default one; the one that was not asked for longest goes


class Follower(NamedTuple):
    """A token that may come next. kind: of its chance; prob: of the path with it; place: where that path then ends."""

    token: int
    kind: int
    prob: float
    place: Any


class Node(NamedTuple):
    """A token of a draft. parent: number of the node it follows, -1 for none; kind: of its chance; prob: of its path.

    The chance of a token is given that those proposed before it for the same place are wrong.
    """

    parent: int
    token: int
    kind: int
    prob: float


@dataclass(frozen=True)
class Alternatives:
    """How likely the tokens are that a drafter knows for the same place.

    chance: of a token by its kind, given that those before it are wrong. most: tokens of a place. kinds: how many there
    are of first choices; as many follow for each further rank, up to `ranks`.
    """

    chance: Callable[[int], float]
    most: int
    kinds: int
    ranks: int = 2

    def followers(self, known: Iterable[tuple[int, int, Any]], prob: float) -> Iterator[Follower]:
        """The tokens of a place whose path is so likely. known: token, kind as a first choice and place, best first."""
        at_most, rank = prob, 0
        for token, kind, place in islice(known, self.most):
            kind += self.kinds * rank
            own = self.chance(kind)
            at_most = min(at_most, prob * own)
            yield Follower(token, kind, at_most, place)
            prob, rank = prob * (1 - own), min(rank + 1, self.ranks - 1)
            if prob < LEFT:
                return


def grown(
    followers: Callable[[Any, float], Iterator[Follower]],
    start: Any,
    length: int,
    deepest: int | None = None,
) -> list[Node]:
    """Up to `length` nodes, at least one wanted, the likeliest first, none less likely than UNLIKELY.

    followers(place, prob): what may follow at a place whose path is so likely; none may be likelier than the path or
    than the one before it. It is read as far as the tree needs. deepest: a chain of up to so many tokens and leaves
    beside it; by default every node may be followed.
    """
    nodes, waiting = list[Node](), list[tuple[Any, ...]]()  # by probability, then by age

    def wait(siblings: Iterator[Follower], parent: int, depth: int, leads: bool) -> None:
        for one in siblings:  # the next alone
            if one.prob >= UNLIKELY:
                heappush(waiting, (-one.prob, depth, len(nodes), not leads, one, parent, siblings))
            break

    wait(followers(start, 1.0), -1, 0, True)
    while waiting:
        _, depth, _, beside, (token, kind, prob, place), parent, siblings = heappop(waiting)
        nodes.append(Node(parent, token, kind, prob))
        if len(nodes) == length:
            break
        wait(siblings, parent, depth, False)
        if deepest is None or not (beside or depth + 1 >= deepest):
            wait(followers(place, prob), len(nodes) - 1, depth + 1, not beside)
    return nodes


def draft_of(
    trees: Sequence[Sequence[Node]], lengths: Sequence[int], device: torch.device, *, told: bool = True
) -> Draft:
    """A draft of one tree per row, with acceptance probabilities if `told`; without branches a chain.

    lengths: how many tokens each row was asked for.
    """
    probs = [[node.prob for node in nodes] for nodes in trees] if told else None
    made = Draft.from_lists([[node.token for node in nodes] for nodes in trees], device, probs)
    rows = tuple(replace(row, source=RETRIEVAL if n else "") for row, n in zip(made.records, lengths, strict=True))
    made = replace(made, rows=rows)
    if all(node.parent == at - 1 for nodes in trees for at, node in enumerate(nodes)):
        return made
    return replace(made, parents=tuple(tuple(node.parent for node in nodes) for nodes in trees))


def learn(acceptance_model: AcceptanceModel, row: Row, start: int, nodes: Sequence[Node]) -> None:
    """Take in what became of a tree that stood at `start`: at each place its tokens up to the one that came.

    The text may be shorter or longer than the tree.
    """
    at = -1
    for came in row.tokens[start:]:
        for number in range(at + 1, len(nodes)):
            parent, token, kind, _ = nodes[number]
            if parent == at:
                acceptance_model.learn(row, (kind,), (token,), (came,))
                if token == came:
                    break
        else:
            return
        at = number


class LearnedByGroup(Generic[T]):
    """One T for each group of rows, made when it is first asked for. "" is the default group, which always stays."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self.default = make()
        self._others: dict[str, T] = {}

    def of(self, group: str) -> T:
        """What belongs to a group."""
        if not group:
            return self.default
        found = self._others.pop(group, None)
        if found is None:
            found = self._make()
            if len(self._others) >= MOST:
                del self._others[next(iter(self._others))]
        self._others[group] = found
        return found

    def __iter__(self) -> Iterator[T]:
        return iter([self.default, *self._others.values()])

    def forget_others(self) -> None:
        """Drop all but the default group's."""
        self._others.clear()
