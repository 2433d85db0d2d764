"""How long a round is expected to take: its rows propose drafts of different sizes, and share one forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import ceil, floor
from typing import Any

import numpy as np

from slipstream.bench.prediction.accepted_lengths import Acceptance
from slipstream.bench.prediction.costs import Costs

Pad = Callable[[int], int]  # tokens per row -> width of the forward that takes them
LEAST = 1e-12  # a probability that is left out


def expected_milliseconds(costs: Costs, known: Acceptance, levels: int, batch: float, pad: Pad | None) -> float:
    """Of a round in which each of `batch` rows asks for drafts of so many tokens, of trees so many levels.

    Rows propose independently. batch may be a mean, between the whole numbers beside it. pad: another padding of
    widths than the one the costs know of; rows are padded then.
    """
    if levels == 0:
        return costs.plain(batch, costs.pad(1, batch) if pad is None else pad(1))
    low = floor(batch)
    whole = [(low, 1.0 - (batch - low)), (low + 1, batch - low)]
    return sum(share * _milliseconds(costs, known, levels, rows, pad) for rows, share in whole if share > 0)


def taken_by(costs: Costs, known: Acceptance, levels: int, batch: int) -> Acceptance:
    """The drafts that are verified: main chains, where a whole tree of each row fits no allowed shape."""
    nodes = ceil(round(batch * known.num_nodes(levels), 9))
    return known if not known.branches or costs.takes_tree(batch, nodes) else known.main_chain


def _milliseconds(costs: Costs, known: Acceptance, levels: int, batch: int, pad: Pad | None) -> float:
    known, total = taken_by(costs, known, levels, batch), 0.0
    sizes = tuple(known.nodes[:levels])
    for longest, first, shares in _drafts(known.proposed[:levels], sizes, batch):
        drafted = range(first, first + len(shares))
        if pad is None:
            verifying = verifying_milliseconds(costs, known, batch, longest, drafted)
        else:
            verifying = np.full(len(shares), costs.plain(batch, pad(longest + 1)))
        total += float(shares @ verifying) + float(shares.sum()) * costs.drafting(batch, longest)
    return total + costs.move * batch * sum(known.branched[:levels])


def verifying_milliseconds(costs: Costs, known: Acceptance, batch: int, longest: int, drafted: Sequence[int]) -> Any:
    """[len(drafted)] milliseconds of rounds but for drafting, by the draft tokens of all rows."""
    if known.branches and longest:
        return costs.verifying_trees(batch, drafted)
    return costs.verifying(batch, longest, drafted)


@lru_cache(maxsize=4096)
def _drafts(proposed: tuple[float, ...], nodes: tuple[float, ...], batch: int) -> list[tuple[int, int, Any]]:
    """What `batch` rows draft: (longest, first, shares), shares[i] the probability of `longest` levels at the most and
    first + i draft tokens in all.
    """
    before, found = np.zeros(1), []
    reaches = (1.0, *proposed, 0.0)
    row = np.zeros(1)
    for longest in range(len(proposed) + 1):
        chance = reaches[longest] - reaches[longest + 1]
        if chance <= 0:
            continue
        row = _added(row, _of_size(sum(nodes[:longest]) if nodes else longest, chance))
        all_rows = _power(row, batch)
        shares = all_rows - _added(np.zeros(len(all_rows)), before)
        known = np.flatnonzero(shares > LEAST)
        if len(known):
            found.append((longest, int(known[0]), shares[known[0] : known[-1] + 1]))
        before = all_rows
    return found


def _of_size(nodes: float, chance: float) -> Any:
    """A row of `nodes` draft tokens on average, which are a whole number in each round."""
    nodes = round(nodes, 9)
    low = floor(nodes)
    found = np.zeros(low + 2)
    found[low : low + 2] = chance * (1 - (nodes - low)), chance * (nodes - low)
    return found


def _added(one: Any, other: Any) -> Any:
    size = max(len(one), len(other))
    return np.pad(one, (0, size - len(one))) + np.pad(other, (0, size - len(other)))


def _power(row: Any, batch: int) -> Any:
    """The distribution of the sum over `batch` rows, by squaring."""
    found = np.ones(1)
    while batch:
        found = np.convolve(found, row) if batch & 1 else found
        batch >>= 1
        row = np.convolve(row, row) if batch else row
    return found
