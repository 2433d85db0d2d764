"""Draft trees for a captured forward: the tokens of a row side by side, and which of them each one follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from slipstream.core.trees import TreeSegment
from slipstream.models.cuda.indexed_cache import MAX_TOKENS, WIDTHS, Bucket


@dataclass(frozen=True)
class TreeTable:
    """Rows of a forward over trees, a row's tokens in the order in which they stand in its slot.

    starts: the position of each row's first token, and its place; depths: how far each token's position is behind it;
    follows: the tokens of the row that each one sees, itself included.
    """

    slots: list[int]
    starts: list[int]
    depths: list[list[int]]
    follows: list[list[list[int]]]

    @property
    def counts(self) -> list[int]:
        """How many tokens each row has."""
        return list(map(len, self.depths))

    def cells(self) -> tuple[Tensor, Tensor]:
        """Row and column of each token, [T] each."""
        cells = [(row, column) for row, count in enumerate(self.counts) for column in range(count)]
        rows, columns = zip(*cells, strict=True)
        return torch.tensor(rows), torch.tensor(columns)

    def padded(self, rows: int, width: int) -> tuple[Tensor, Tensor]:
        """Depths [rows, width] and whom tokens see [rows, width, width]; padding sees its row's first token."""
        depths = torch.zeros(rows, width, dtype=torch.int64)
        visible = torch.zeros(rows, width, width, dtype=torch.bool)
        visible[:, :, 0] = True
        for row, (own, seen) in enumerate(zip(self.depths, self.follows, strict=True)):
            depths[row, : len(own)] = torch.tensor(own)
            at = [(column, other) for column, them in enumerate(seen) for other in them]
            columns, others = zip(*at, strict=True)
            visible[row, columns, others] = True
        return depths, visible


class TreeBuffers:
    """What the graphs of forwards over trees read of a `TreeTable`, for R rows of C columns of a bucket."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._depths = torch.zeros(MAX_TOKENS, dtype=torch.int64, device=device)
        self._visible = torch.zeros(MAX_TOKENS * WIDTHS[-1], dtype=torch.bool, device=device)

    def of(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Depths [R, C], and which tokens each one sees [R, C, C]."""
        rows, width = bucket.rows, bucket.width
        visible = self._visible[: rows * width * width].view(rows, width, width)
        return self._depths[: rows * width].view(rows, width), visible

    def fill(self, bucket: Bucket, table: TreeTable) -> None:
        """Put a forward's trees where the graphs read them."""
        for buffer, values in zip(self.of(bucket), table.padded(bucket.rows, bucket.width), strict=True):
            buffer.copy_(pinned(values, self._device), non_blocking=True)

    def places(self, bucket: Bucket, starts: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Positions of the tokens [R, C] and of what stands at the places `keys` [S], [R, S], and who sees what of it.

        starts: [R], of the rows. The last is [R, C, S].
        """
        depths, own_visible = self.of(bucket)
        behind = keys - starts[:, None]
        at, own = behind.clamp(0, bucket.width - 1), (behind >= 0) & (behind < bucket.width)
        visible = own_visible.gather(2, at[:, None].expand(-1, bucket.width, -1))
        visible = torch.where(own[:, None], visible, behind[:, None] < 0)
        return starts[:, None] + depths, torch.where(own, starts[:, None] + depths.gather(1, at), keys), visible


def pinned(values: Tensor, device: torch.device) -> Tensor:
    """Values of the host that a GPU can fetch while the host goes on; the allocator keeps them until then."""
    return values.pin_memory() if device.type == "cuda" else values


def tree_table(segments: Sequence[TreeSegment]) -> TreeTable:
    """The table of a forward; segments of a row follow each other, the one that begins it first."""
    table = TreeTable([], [], [], [])
    for slot, group in groupby(segments, lambda segment: segment.slot):
        own = list(group)
        first = own[0].start
        depths, follows = list[int](), list[list[int]]()
        for segment in own:
            on_chain = segment.start - len(segment.detour) - first  # of the main chain, what the segment follows
            path = [*range(on_chain), *(place - first for place in segment.detour)]
            for column in range(segment.count):
                path.append(segment.place - first + column)
                depths.append(segment.start - first + column)
                follows.append(list(path))
        table.slots.append(slot)
        table.starts.append(first)
        table.depths.append(depths)
        table.follows.append(follows)
    return table
