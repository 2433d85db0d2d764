"""Computes exactly what an acceptance rule emits, without sampling, and compares it with the target's distribution.

A rule is a function of distributions, so an invented target and an invented drafter over a few tokens suffice: every
draft that the drafter can make, every number of tokens that the rule may keep and every next token are added up. The
drafts form a tree; at most of its levels the drafter has one choice, at a few it has several, so that a tree of any
depth has few leaves. Some branches end early, which makes a batch of unequal lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.acceptance import Distributions, Rule, RuleFunction
from slipstream.core.rng import WarpOptions
from slipstream.core.types import Draft
from slipstream.sampling.warpers import Warp

TOLERANCE = 1e-4  # of a conditional probability; float32 is wrong by about 1e-6, the smallest fault here by 1e-2
VOCAB, BRANCHES = 5, 3  # tokens of the invented target, and of them those that the drafter proposes where it branches
OPTIONS = {
    "temperature 1": WarpOptions(1.0),
    "temperature 1.5, top_k 3": WarpOptions(1.5, top_k=3),
    "temperature 0.7, top_p 0.9": WarpOptions(0.7, top_p=0.9),
    "temperature 1.2, min_p 0.1": WarpOptions(1.2, min_p=0.1),
    "greedy": WarpOptions(0.0),
    "temperature 0.6": WarpOptions(0.6),
    "temperature 1.5": WarpOptions(1.5),
    "temperature 0.8, top_k 4, top_p 0.95, min_p 0.02": WarpOptions(0.8, top_k=4, top_p=0.95, min_p=0.02),
}
NUM_WIDE = 5  # of these are tried on logits of the target's vocabulary size as well
ALL_OPTIONS_TO = 8  # drafts up to this length are tried under all options, longer ones under some in turn
FIXED = 3
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """The drafts, sampling options and batch on which a rule is tried."""

    length: int
    options: str
    one_hot: bool  # the draft is a fixed one, and the rule must be exact for each draft alone
    batch: int = 0  # drafts that the rule sees at once; 0 for all
    vocab_size: int = VOCAB  # size of the logits; all tokens but VOCAB are practically impossible

    def __str__(self) -> str:
        kind = "fixed drafts" if self.one_hot else "sampled drafts"
        batch = f", {self.batch} at once" if self.batch else ""
        return f"{kind} of up to {self.length} tokens, {self.options}{batch}"


def cases(longest: int, vocab_size: int) -> Iterator[Case]:
    """Drafts of every length up to `longest`, the longest one under all options."""
    names = list(OPTIONS)
    for length in range(1, longest + 1):
        is_full = length <= ALL_OPTIONS_TO or length == longest
        chosen = names if is_full else [names[(length + step) % len(names)] for step in (0, 5)]
        for (number, name), one_hot in product(enumerate(chosen), (False, True)):
            yield Case(length, name, one_hot)
            if is_full:
                yield Case(length, name, one_hot, batch=1 + (number + length) % 4)
            if length == min(3, longest) and number < NUM_WIDE:
                yield Case(length, name, one_hot, 4, vocab_size)


def first_fault(rule: Rule, longest: int, vocab_size: int) -> tuple[Case, float] | None:
    """The first case in which the rule's distribution is not the target's, and its error; None if there is none."""
    assert rule.distributions is not None
    errors = ((case, error_of(rule.distributions, case)) for case in cases(longest, vocab_size))
    return next(((case, error) for case, error in errors if not error <= TOLERANCE), None)  # NaN is a fault as well


def error_of(rule: RuleFunction, case: Case) -> float:
    """The largest error of a conditional distribution at any depth; infinite if an impossible token is emitted."""
    tree = _Tree(case)
    drafts = tree.drafts
    if case.one_hot:  # the first is as long as allowed, the last ones are shorter
        drafts = [*drafts[:FIXED], *drafts[FIXED:][-FIXED:]]
    size = case.batch or len(drafts)
    batches = [drafts[start : start + size] for start in range(0, len(drafts), size)]
    emitted = [row for batch in batches for row in _emitted(rule, tree, batch)]
    return max(tree.error([row]) for row in emitted) if case.one_hot else tree.error(emitted)


class _Emitted(NamedTuple):
    """The distributions that a rule returns for one draft."""

    path: list[int]  # its nodes from the root on
    weight: float  # the probability with which the drafter makes it; 1 for a fixed one
    keep: Array  # [L + 1]
    following: Array  # [L + 1, VOCAB]


class _Tree:
    """All drafts of a case. Node 0 is the committed text; each other node is a draft token that follows its parent."""

    def __init__(self, case: Case) -> None:
        self.case, self.length = case, case.length
        self._rng = np.random.default_rng(1000 * case.length + list(OPTIONS).index(case.options))
        middle = 1 + int(self._rng.integers(max(1, case.length - 2)))
        self._branching = {0, middle, case.length - 1}
        self.parent, self.token = [-1], [-1]
        self.drafts, self.weights = list[list[int]](), dict[int, float]()  # weights by the last node
        nodes = list[tuple[Array, Array]]()
        self._grow(0, [0], case.length, 1.0, nodes)
        self._children = np.zeros((len(self.parent), VOCAB), dtype=np.int64)  # 0 where there is none
        self._children[self.parent[1:], self.token[1:]] = np.arange(1, len(self.parent))
        self.ids = torch.linspace(0, case.vocab_size - 1, VOCAB).long()
        scores, self.q = torch.tensor(np.array(nodes), dtype=torch.float32).unbind(1)
        self.scores = scores
        options = OPTIONS[case.options]
        if options.temperature:
            self.p = Warp(options, scores.device)(scores)
        else:
            self.p = torch.nn.functional.one_hot(scores.argmax(-1), VOCAB).float()
        self.exact = self.p.double().numpy()
        self.exact /= self.exact.sum(-1, keepdims=True)

    def _grow(self, node: int, path: list[int], end: int, weight: float, nodes: list[tuple[Array, Array]]) -> None:
        """Add what the drafter may propose after a node, up to depth `end`. nodes: scores and q of each."""
        depth, branching = len(path) - 1, len(path) - 1 in self._branching
        scores, order = self._rng.normal(size=VOCAB) * 1.3, self._rng.permutation(VOCAB)
        if not branching:  # likely enough that the end of the draft is reached
            scores[order[0]] = scores.max() + np.log(max(9.0, self.length))
        likely = np.exp(self._rng.normal(size=BRANCHES)) if branching else np.ones(1)
        q = np.zeros(VOCAB)
        q[order[: len(likely)]] = likely / likely.sum()
        nodes.append((scores, q))
        if depth >= end:
            self.drafts.append(path)
            self.weights[node] = 1.0 if self.case.one_hot else weight
            return
        for branch, token in enumerate(order[: len(likely)]):
            child = len(self.parent)
            self.parent.append(node)
            self.token.append(int(token))
            shorter = end if branch == 0 or depth > 0 else (depth + 1, (end + 1) // 2)[branch - 1]
            self._grow(child, [*path, child], max(shorter, depth + 1), weight * q[token], nodes)

    def table(self, batch: Sequence[Sequence[int]], values: Tensor, columns: int, padding: float) -> Tensor:
        """[B, columns, vocab_size] the values [nodes, VOCAB] of each draft's nodes."""
        table = torch.full((len(batch), columns, self.case.vocab_size), padding)
        for row, path in enumerate(batch):
            nodes = path[:columns]
            table[row, : len(nodes)].index_copy_(-1, self.ids, values[nodes])
        return table

    def draft(self, batch: Sequence[Sequence[int]]) -> Draft:
        """These drafts; what pads the shorter ones must not count."""
        lengths = tuple(len(path) - 1 for path in batch)
        width = max(lengths)
        tokens = torch.zeros(len(batch), width, dtype=torch.int64)
        for row, path in enumerate(batch):
            tokens[row, : len(path) - 1] = self.ids[[self.token[node] for node in path[1:]]]
        if self.case.one_hot:
            return Draft(tokens, lengths)
        q = self.table(batch, self.q, width, 0.0)
        for row, length in enumerate(lengths):
            q[row, length:] = 1 / self.case.vocab_size
        return Draft(tokens, lengths, q)

    def error(self, emitted: Sequence[_Emitted]) -> float:
        ended = np.zeros((len(self.parent), VOCAB))  # mass of rounds that end with this token after the node
        alive = np.zeros(len(self.parent))  # mass of rounds that accept the node
        for row in emitted:
            if not (np.isfinite(row.keep).all() and (row.keep >= 0).all() and row.keep.sum() > 0):
                return float("inf")
            keep = row.weight * row.keep / row.keep.sum()
            ended[row.path] += keep[:, None] * row.following
            alive[row.path] += keep[::-1].cumsum()[::-1]
        children = self._children
        reached = sorted({node for row in emitted for node in row.path})  # parents first
        continued, target = np.zeros(len(self.parent)), np.ones(len(self.parent))
        worst = 0.0
        for node in reached:
            p = self.exact[node]
            closed = continued[node] * p + ended[node]  # ended before: the target itself continues the text
            mass = closed + np.where(children[node] > 0, alive[children[node]], 0.0)
            if (mass[p == 0] > 0).any():
                return float("inf")
            worst = max(worst, float(abs(mass / target[node] - p).max()) if target[node] > 0 else 0.0)
            for token in np.flatnonzero(children[node]):
                continued[children[node, token]] = closed[token]
                target[children[node, token]] = target[node] * p[token]
        return worst


def _emitted(rule: RuleFunction, tree: _Tree, batch: Sequence[list[int]]) -> Iterator[_Emitted]:
    """The rule's result for a batch of drafts, read as `accept` reads it."""
    draft = tree.draft(batch)
    columns = draft.width + 1
    p, scores = tree.table(batch, tree.p, columns, 0.0), tree.table(batch, tree.scores, columns, -60.0)
    result: Distributions = rule(p, scores, draft)
    keep = result.keep.double().clone()
    following = [
        result.next_token(torch.full((len(batch),), count).minimum(draft.lengths_on_device[:, 0])).double()
        for count in range(draft.width + 1)
    ]
    for row, (path, length) in enumerate(zip(batch, draft.lengths, strict=True)):
        keep[row, length] += keep[row, length + 1 :].sum()
        table = torch.stack([distributions[row] for distributions in islice(following, length + 1)])
        table = table / table.sum(-1, keepdim=True).clamp(min=1e-300)
        yield _Emitted(path, tree.weights[path[-1]], keep[row, : length + 1].numpy(), table[:, tree.ids].numpy())
