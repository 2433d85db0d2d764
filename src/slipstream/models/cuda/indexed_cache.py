"""A KV cache for captured forwards, which take positions from tensors and have few shapes.

Shapes are rounded up to buckets: rows to a power of two, widths to one of `WIDTHS`, the attended length to one of few
multiples of its unit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from slipstream.core.trees import TreeSegment
from slipstream.models.decoder.attention import Cut
from slipstream.models.decoder.cache import Layout
from slipstream.models.hf.interfaces import ModelCache

WIDTHS = (1, 2, 4, 8, 16, 32)  # few, since a capture takes as long as 100 replays, and wider replays take hardly longer
TURNS = 4  # of pinned memory, so that the host may prepare so many forwards ahead of the GPU
SPARE = WIDTHS[-1]  # positions at the end of every slot where padding is written


@dataclass(frozen=True)
class Bucket:
    """Shape of a captured forward. attended: how many positions of the KV cache attention reads."""

    rows: int
    width: int
    attended: int


@dataclass(frozen=True)
class IndexedForward:
    """A forward of R rows of C tokens whose places are in tensors, int64 on the cache's device."""

    slots: Tensor  # [R], of each row
    starts: Tensor  # [R], position of each row's first token
    positions: Tensor  # [R, C], of each token
    columns: Tensor  # [R, C], the place in its slot to which each token is written
    attended: int  # positions of a slot that are read, at most
    ancestors: Tensor | None = None  # [R, C, C], of trees, as in `TreeTable.padded`; None for chains


class IndexedCache(ModelCache):
    """A slot cache that can also be indexed by tensors, so that a replayed graph writes where they currently point.

    forward: the next forward, if it is indexed.
    """

    forward: IndexedForward | None = None
    spare_positions = SPARE

    def index(self, forward: IndexedForward) -> None:
        """Make the next forward write its columns to its slots, and read R slots up to its attended length."""
        self._slots, self._attended, self._span = slice(0, len(forward.slots)), forward.attended, None
        self._rows, self._columns = forward.slots[:, None], forward.columns
        self._begin([])
        self.forward = forward

    def _begin(self, cuts: list[Cut], layout: Layout | None = None) -> None:
        super()._begin(cuts, layout)
        self.forward = None

    @property
    def spare(self) -> int:
        """The first of the `SPARE` positions, which take padding."""
        return self.held[1] - SPARE

    @property
    def allocated(self) -> bool:
        """True if a forward has run, so that keys and values have memory."""
        return any(layer.keys is not None for layer in self.layers)

    def bucket(self, starts: Sequence[int], width: int, end: int) -> Bucket | None:
        """The bucket of forwards of slots 0, 1, ... that write positions below `end`; None if there is none."""
        unit = self.attended_unit
        wide = next((w for w in WIDTHS if w >= width), None)
        slots, positions = self.shape
        rows = min(1 << (len(starts) - 1).bit_length(), slots)
        if wide is None or rows < len(starts) or end > positions - SPARE:
            return None
        return Bucket(rows, wide, min(_round_units(-(-end // unit)) * unit, positions))


def _round_units(units: int) -> int:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, ...: few lengths, none more than half again as long as needed."""
    power = 1 << (units - 1).bit_length()
    return power * 3 // 4 if power >= 4 and units <= power * 3 // 4 else power


@dataclass(frozen=True)
class TreeTable:
    """The rows of a forward over trees; a row's tokens are in the order in which they are stored in its slot."""

    slots: list[int]
    starts: list[int]  # position of each row's first token, which is also that token's place
    depths: list[list[int]]  # each token's position, counted from its row's start
    follows: list[list[list[int]]]  # for each token, the tokens of its row that it sees, by position; itself last

    @property
    def counts(self) -> list[int]:
        """The number of tokens of each row."""
        return list(map(len, self.depths))

    def cells(self) -> tuple[Tensor, Tensor]:
        """Row and column of each token, [T] each."""
        cells = [(row, column) for row, count in enumerate(self.counts) for column in range(count)]
        rows, columns = zip(*cells, strict=True)
        return torch.tensor(rows), torch.tensor(columns)

    def padded(self, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Depths [rows, width]; whether a token sees another [rows, width, width]; and what it sees at each depth.

        The last is also [rows, width, width]: entry [r, t, d] is the token at depth d on the path that ends with token
        t. Padding sees its row's first token.
        """
        depths = torch.zeros(rows, width, dtype=torch.int64)
        ancestors = torch.zeros(rows, width, width, dtype=torch.int64)
        visible = torch.zeros(rows, width, width, dtype=torch.bool)
        visible[:, :, 0] = True
        for row, (row_depths, seen) in enumerate(zip(self.depths, self.follows, strict=True)):
            depths[row, : len(row_depths)] = torch.tensor(row_depths)
            for column, path in enumerate(seen):
                visible[row, column, path] = True
                ancestors[row, column, : len(path)] = torch.tensor(path)
        return depths, visible, ancestors


class Buffer:
    """A tensor at a fixed place on the device, as graphs need it, filled by the host without waiting for the device."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros(*shape, dtype=dtype, device=device)
        self._turns: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        if device.type == "cuda":
            pinned = [torch.empty(*shape, dtype=dtype, pin_memory=True) for _ in range(TURNS)]
            self._turns.extend((memory, torch.cuda.Event()) for memory in pinned)

    def fill(self, values: Tensor) -> None:
        """Copy values from the host to the device."""
        if not self._turns:
            self.values.copy_(values)
            return
        memory, is_copied = self._turns[0]
        self._turns.rotate(-1)
        is_copied.synchronize()  # the copy of `TURNS` forwards ago
        memory.copy_(values)
        self.values.copy_(memory, non_blocking=True)
        is_copied.record()


class BucketBuffers:
    """The inputs of the graphs of R rows of C columns. Those of trees have the shapes of `TreeTable.padded`."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.rows, self.width, self._device = rows, width, device
        self.tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self.table = Buffer((rows, 2), torch.int64, device)  # first position and number of real columns of each row

    @cached_property
    def tree(self) -> tuple[Buffer, Buffer, Buffer]:
        """Depths, whether a token sees another, and what it sees at each depth."""
        rows, width, indices = self.rows, self.width, torch.int64
        shapes = ((rows, width), indices), ((rows, width, width), torch.bool), ((rows, width, width), indices)
        depths, visible, ancestors = (Buffer(shape, dtype, self._device) for shape, dtype in shapes)
        return depths, visible, ancestors

    def fill(self, tokens: Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Copy a forward's input [B, W]; further rows have no real column."""
        rows, width = tokens.shape
        padding = [0] * (self.rows - rows)
        self.table.fill(torch.tensor([[*starts, *padding], [*counts, *padding]]).T)
        self.tokens[:rows, :width].copy_(tokens)

    def fill_tree(self, table: TreeTable) -> None:
        """Copy a forward's trees."""
        for buffer, values in zip(self.tree, table.padded(self.rows, self.width), strict=True):
            buffer.fill(values)

    def places(self, starts: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The positions [R, S] of the tokens at places `keys` [S], and which tokens see them, [R, C, S].

        starts: [R], the position of each row's first token.
        """
        depths, own_visible, _ = (buffer.values for buffer in self.tree)
        behind = keys - starts[:, None]
        token, is_own_token = behind.clamp(0, self.width - 1), (behind >= 0) & (behind < self.width)
        visible = own_visible.gather(2, token[:, None].expand(-1, self.width, -1))
        visible = torch.where(is_own_token[:, None], visible, behind[:, None] < 0)
        return torch.where(is_own_token, starts[:, None] + depths.gather(1, token), keys), visible


def tree_table(segments: Sequence[TreeSegment]) -> TreeTable:
    """The table of a forward. The segments of a row must be adjacent, its first segment first."""
    table = TreeTable([], [], [], [])
    for slot, group in groupby(segments, lambda segment: segment.slot):
        row_segments = list(group)
        first = row_segments[0].start
        depths, follows = list[int](), list[list[int]]()
        for segment in row_segments:
            num_on_chain = segment.start - len(segment.detour) - first  # tokens of the main chain before the segment
            path = [*range(num_on_chain), *(place - first for place in segment.detour)]
            for column in range(segment.count):
                path.append(segment.place - first + column)
                depths.append(segment.start - first + column)
                follows.append(list(path))
        table.slots.append(slot)
        table.starts.append(first)
        table.depths.append(depths)
        table.follows.append(follows)
    return table
