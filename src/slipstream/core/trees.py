"""Draft trees: nodes that share a beginning are verified in one forward, each after its own path.

The nodes of a row are numbered chain by chain, the first children of the first children first, and cached in that
order after the committed tokens: the main chain at its own positions, the branches after it. Accepted nodes that are
not stored at their positions are moved there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from slipstream.core.rounds import chain_end, num_consecutive
from slipstream.core.types import Draft
from slipstream.errors import UsageError


@dataclass(frozen=True)
class TreeSegment:
    """Tokens of a row that follow each other."""

    slot: int
    start: int  # position of the first one
    count: int
    place: int  # its keys and values are written from here on: from `start`, or after the row's other tokens
    detour: tuple[int, ...] = ()  # places of the positions just before `start` that are not stored where they belong


@runtime_checkable
class TreeForwards(Protocol):
    """Optional capability of a backend: tokens of a row that follow different paths share a forward."""

    @property
    def branching(self) -> bool: ...  # it works for this model on this device

    @property
    def flat(self) -> bool: ...  # layers take all tokens side by side, and attention alone tells them apart

    def forward_tree(self, tokens: Tensor, segments: Sequence[TreeSegment], *, widths: Sequence[int] | None) -> Tensor:
        """One forward of tokens [T]: those of each segment in turn, then padding, which counts to the last segment.

        A segment attends to its row up to its start, along its `detour`, and to itself, with the bits that it would get
        as a row of its own. widths: see `RaggedForwards` in models. Returns logits [T, V].
        """

    def move(self, slot: int, places: Sequence[int], start: int) -> None:
        """Move the keys and values at these places of a slot to `start` and the positions that follow."""


def arranged(draft: Draft) -> Draft:
    """The tree with its nodes in chain order; one without branches becomes a chain.

    A node's first child continues its chain. Nodes that the root does not reach are dropped.
    """
    assert draft.parents is not None
    orders = [_order(parents[:length]) for parents, length in zip(draft.parents, draft.lengths, strict=True)]
    parents = list[tuple[int, ...]]()
    for old, order in zip(draft.parents, orders, strict=True):
        new_number = {node: number for number, node in enumerate(order)} | {-1: -1}
        parents.append(tuple(new_number[old[node]] for node in order))
    branching = any(chain_end(row) < len(row) for row in parents)
    return replace(_selected(draft, orders), parents=tuple(parents) if branching else None)


def main_chain(draft: Draft) -> Draft:
    """The main chain of an arranged tree, as a draft."""
    return draft if draft.parents is None else _selected(draft, [range(n) for n in chain_lengths(draft)])


def chain_lengths(draft: Draft) -> tuple[int, ...]:
    """Number of nodes in the main chain of each row's arranged draft."""
    if draft.parents is None:
        return draft.lengths
    return tuple(map(chain_end, draft.parents))


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root to this one, itself included."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def segments_of(slot: int, start: int, base: int, parents: Sequence[int]) -> list[TreeSegment]:
    """The segments of a row's tree. The first begins with positions `start` to `base` - 1, which the cache lacks."""
    end = chain_end(parents)
    segments = [TreeSegment(slot, start, base - start + end, start)]
    begins = [node for node in range(end, len(parents)) if node == end or parents[node] != node - 1]
    for begin, stop in pairwise([*begins, len(parents)]):
        path = path_to(parents, parents[begin])
        detour = tuple(base + node for node in path[num_consecutive(path) :])
        segments.append(TreeSegment(slot, base + len(path), stop - begin, base + begin, detour))
    return segments


def check_parents(draft: Draft, drafter: str) -> None:
    """Raise UsageError unless every row's parents form a tree of one-hot tokens."""
    for parents, length in zip(draft.parents or (), draft.lengths, strict=True):
        is_in_range = len(parents) == length and all(
            type(parent) is int and -1 <= parent < length for parent in parents
        )
        if not is_in_range or len(_order(parents)) != length:  # nodes of a circle are not reached
            raise UsageError(
                f"drafter {drafter} returned parents={list(parents)!r} for {length} tokens; allowed: for each token "
                "the number of the one it follows, -1 for the committed text, and no circles"
            )
    if draft.probs is not None:
        raise UsageError(f"drafter {drafter} returned a tree with probs; allowed: trees of one-hot drafts (probs=None)")


def match_tree(choice: Tensor, draft: Draft) -> tuple[Tensor, Tensor, Tensor]:
    """Sample and match: walk from the root to the child that the target chose, while there is one.

    choice: [B, K + 1], the target's choice after the root and after each node of an arranged tree. Exact for any tree,
    as for a chain: every committed token is the target's choice at its position. Returns how many nodes are accepted
    [B], the target's choice after them [B], and the nodes [B, K].
    """
    assert draft.parents is not None
    # the walk is on the host: the commit waits for the device anyway, where each level would take several kernels
    table = torch.cat([choice, draft.tokens], 1).tolist()
    lines = []
    for line, parents in zip(table, draft.parents, strict=True):
        node, path = -1, list[int]()
        for child, parent in enumerate(parents):  # children come after their parents
            if parent == node and line[draft.width + 1 + child] == line[node + 1]:
                node = child
                path.append(child)
        lines.append([len(path), line[node + 1], *path, *[-1] * (draft.width - len(path))])
    walked = torch.tensor(lines).to(choice.device, non_blocking=True)
    return walked[:, 0], walked[:, 1], walked[:, 2:]


def _order(parents: Sequence[int]) -> list[int]:
    """Nodes from the root on: each chain to its end by first children, then what branches off, earliest first."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order, waiting = list[int](), children.get(-1, [])[::-1]
    while waiting:
        chain = [waiting.pop()]
        while chain:
            order += chain
            first, others = children.get(chain[0], [])[:1], children.get(chain[0], [])[1:]
            waiting += others[::-1]
            chain = first
    return order


def _selected(draft: Draft, orders: Sequence[Sequence[int]]) -> Draft:
    """The draft reduced to these tokens of each row, in this order."""
    lengths = tuple(map(len, orders))
    width = max(lengths, default=0)
    index = torch.tensor([[*order, *[0] * (width - len(order))] for order in orders], dtype=torch.int64)
    tokens = draft.tokens.gather(1, index.reshape(len(orders), width).to(draft.tokens.device, non_blocking=True))
    rows = tuple(replace(row, acceptance_probs=None) for row in draft.rows)
    return replace(draft, tokens=tokens, lengths=lengths, parents=None, rows=rows)
