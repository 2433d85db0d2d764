"""Attention over draft trees: each chain of a tree attends as a row of its own, whose keys are gathered along its path.

So a token gets the bits that it would get in a row without branches. Keys and values of branches are written behind
those of the main chain, and only the positions that differ are gathered from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from slipstream.core.trees import TreeSegment

NOWHERE = 1 << 62  # a position behind all others


@dataclass(frozen=True)
class TreeRows:
    """S rows, one per segment, over the slots of a KV cache.

    slots: [S], where each row's keys are, but for those at `positions` of `rows`, which stand at `places`; all [N].
    cells: row and column of each new token in the rectangle of all rows, [T] each. into: where each is written, slots
    and places, [T] each. forks: [T], the first position that a token sees at another place: at that of number `begins`,
    [T], of `paths`, and so on. reach: the first slot and place behind all that are written.
    """

    slots: Tensor
    rows: Tensor
    positions: Tensor
    places: Tensor
    cells: tuple[Tensor, Tensor]
    into: tuple[Tensor, Tensor]
    forks: Tensor
    begins: Tensor
    paths: Tensor
    reach: tuple[int, int]

    def gathered(self, cached: Tensor, length: int) -> Tensor:
        """[S, heads, length, size] of keys or values [slots, heads, positions, size]."""
        rows = cached[self.slots, :, :length]
        rows[self.rows, :, self.positions] = cached[self.slots[self.rows], :, self.places]
        return rows


def tree_rows(segments: Sequence[TreeSegment], total: int, device: torch.device) -> TreeRows:
    """The rows of a forward of `total` tokens; those after the last segment continue it."""
    counts = [segment.count for segment in segments]
    written = [*counts[:-1], total - sum(counts[:-1])]
    rows, positions, places = list[int](), list[int](), list[int]()
    forks, begins, paths = [NOWHERE] * len(segments), [0] * len(segments), list[int]()
    for row, (segment, count) in enumerate(zip(segments, written, strict=True)):
        if segment.place != segment.start:
            begin = segment.start - len(segment.detour)
            own = [*segment.detour, *range(segment.place, segment.place + segment.count)]
            rows += [row] * len(own)
            positions += range(begin, begin + len(own))
            places += own
            forks[row], begins[row] = begin, len(paths)
            paths += [*segment.detour, *range(segment.place, segment.place + count)]
    of = torch.repeat_interleave(torch.arange(len(segments)), torch.tensor(written))
    column = torch.arange(total) - torch.tensor([0, *accumulate(counts)][:-1])[of]
    place = torch.tensor([segment.place for segment in segments])[of] + column
    slots = torch.tensor([segment.slot for segment in segments])
    parts = slots, torch.tensor(rows, dtype=torch.int64), torch.tensor(positions), torch.tensor(places)
    own_slots, own_rows, at, of_place = (part.to(device=device, dtype=torch.int64) for part in parts)
    cells, into = (of.to(device), column.to(device)), (slots[of].to(device), place.to(device))
    forked = torch.tensor(forks)[of], torch.tensor(begins)[of], torch.tensor(paths, dtype=torch.int64)
    last = max(segment.place + count for segment, count in zip(segments, written, strict=True))
    reach = max(segment.slot for segment in segments) + 1, last
    return TreeRows(own_slots, own_rows, at, of_place, cells, into, *forked, reach)
