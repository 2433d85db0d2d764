"""Ragged forwards: the tokens of several rows one after the other, as many of each as there are, without padding.

Everything in a layer but attention treats each token alone, so its products see [1, T]. For attention, rows of few
tokens are laid out as a rectangle and longer rows attend one by one. Where a row has fewer tokens than the rectangle
has columns, the tokens that follow it, which belong to other rows, fill them; their results are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.interfaces import RowSegment
from slipstream.core.kv_slots import PROMPT_UNIT
from slipstream.errors import SlipstreamError
from slipstream.models.hf.grouped_attention import LONG, ROWS, Block, Cut, attend, cut_mask
from slipstream.models.hf.kv_cache import SlotCache
from slipstream.models.hf.tree_attention import TreeRows

ROW, CALL = 3, 12  # fixed cost, in columns, of a row of the rectangle and of attention for a row on its own


@dataclass(frozen=True)
class Layout:
    """Where each of T tokens goes.

    slots, positions: [T], in the KV cache; rows: the slots that attention reads. queries: [1, C], the positions of all
    its columns: first those of a rectangle of `shape` (B, W), then those of `cuts`, the rows that attend one by one.
    into: [B * W], the token of each column of the rectangle; out_of: [T], the column of each token; None without one.
    end: the end of the positions attended to. reach: the first slot and position behind all that are written.
    """

    slots: Tensor
    positions: Tensor
    rows: slice
    queries: Tensor
    shape: tuple[int, int]
    into: Tensor | None
    out_of: Tensor | None
    cuts: list[Cut]
    end: int
    reach: tuple[int, int]


def lay_out(segments: Sequence[RowSegment], total: int, widths: Sequence[int] | None) -> Layout:
    """The layout of a forward of `total` tokens; those after the last segment continue it.

    widths: as in `RaggedForwards.forward_ragged`.
    """
    counts = [segment.count for segment in segments]
    first = [0, *accumulate(counts)][:-1]
    written = [*counts[:-1], total - first[-1]]
    starts = torch.tensor([segment.start for segment in segments])
    row = torch.repeat_interleave(torch.arange(len(segments)), torch.tensor(written))
    column = torch.arange(total) - torch.tensor(first)[row]
    slots, positions = torch.tensor([segment.slot for segment in segments])[row], starts[row] + column
    last = max(segment.start + count for segment, count in zip(segments, written, strict=True))
    reach = max(segment.slot for segment in segments) + 1, last
    if widths is None:
        cuts = _prompts(segments, first, total)
        end = max(cut.start + cut.width for cut in cuts)
        return Layout(slots, positions, slice(None), _queries(cuts), (0, 0), None, None, cuts, end, reach)
    width = _width(counts, widths)
    cells = torch.tensor(first)[:, None] + torch.arange(width)
    cuts, at = [], len(segments) * width
    for i, (segment, begin) in enumerate(zip(segments, first, strict=True)):
        if segment.count > width:
            wide = _next(segment.count, widths)
            cuts.append(Cut(i, begin, at, wide, segment.count, segment.start))
            at += wide
    queries = torch.cat([(starts[:, None] + torch.arange(width)).flatten()[None], _queries(cuts)], 1)
    end = max(int(starts.max()) + width, *(cut.start + cut.width for cut in cuts), 0)
    out_of = row * width + column.clamp(max=width - 1)
    rows, shape = slice(segments[0].slot, segments[0].slot + len(segments)), (len(segments), width)
    into = cells.clamp(max=total - 1).flatten()
    return Layout(slots, positions, rows, queries, shape, into, out_of, cuts, end, reach)


class RaggedCache(SlotCache):
    """A slot cache for attention in parts: ragged forwards row by row, long forwards block by block.

    prepared: what compiled layers keep from one layer of the next forward to another.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.layout: Layout | None = None  # of the next forward, if it is ragged
        self._cuts: list[Cut] = []
        self._blocks: dict[int, list[Block]] = {}
        self._rectangles: dict[int, Tensor] = {}
        self._written = torch.empty(0, dtype=torch.int64)
        self._destinations: tuple[Tensor, Tensor] | None = None
        self.prepared: Any = None

    def place(self, first_slot: int, starts: list[int], columns: Tensor) -> int:
        """See `SlotCache.place`."""
        width = columns.shape[1]
        long = width >= LONG and self.attended_lengths and len(starts) == 1
        self._cut([Cut(0, 0, 0, width, width, starts[0])] if long else [], None)
        self._destinations, self._written = None, columns
        return super().place(first_slot, starts, columns)

    def place_ragged(self, layout: Layout) -> int:
        """The same for a ragged forward."""
        self._cut(layout.cuts, layout)
        self.tree = None
        self._slots, self._span, self._destinations = layout.rows, None, (layout.slots, layout.positions)
        self._rows, self._columns = layout.slots[None], layout.positions[None]
        return self._attend_up_to(layout.end, *layout.reach)

    def place_tree(self, tree: TreeRows, end: int, layout: Layout | None = None) -> int:
        """The same for a forward over a tree. layout: of its rows, if it is ragged."""
        self._cut([] if layout is None else layout.cuts, layout)
        self._destinations = None if layout is None else (tree.into[0], layout.positions)
        return super().place_tree(tree, end)

    def of_layer(self, layer_idx: int, states: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [slots, heads, positions, size]; allocated like states [_, heads, _, size]."""
        layer = self.layers[layer_idx]
        if layer.keys is None:
            layer.keys, layer.values = self._allocate(states), self._allocate(states)
        return layer.keys, layer.values

    def destinations(self) -> tuple[Tensor, Tensor]:
        """Slots and positions [tokens] to which the next forward's tokens are written, row by row."""
        if self._destinations is None:
            slots = torch.arange(self._slots.start, self._slots.stop).repeat_interleave(self._written.shape[1])
            self._destinations = slots, self._written.flatten()
        slots, positions = self._destinations
        written = positions if self.tree is None else self.tree.into[1]
        if int(slots.max()) >= self.held[0] or int(written.max()) >= self.held[1]:
            raise SlipstreamError(f"slot {int(slots.max())}, position {int(written.max())}; reserved: {self.shape}")
        return self._destinations

    def blocks(self, mask: Tensor) -> list[Block]:
        """The blocks a forward's attention is cut into, from its grouped mask; none if it is computed at once."""
        if self._cuts and id(mask) not in self._blocks:
            self._blocks[id(mask)] = cut_mask(mask, self._cuts, self.attended_lengths)
        return self._blocks.get(id(mask), [])

    def rectangle(self, mask: Tensor) -> Tensor | None:
        """The mask of the rows that attend together in a ragged forward; None if there are none."""
        if self.layout is None or self.layout.into is None:
            return None
        if id(mask) not in self._rectangles:
            self._rectangles[id(mask)] = rectangle_mask(mask, self.layout)
        return self._rectangles[id(mask)]

    def _cut(self, cuts: list[Cut], layout: Layout | None) -> None:
        self._cuts, self._blocks, self._rectangles, self.layout, self.prepared = cuts, {}, {}, layout, None


def rectangle_mask(mask: Tensor, layout: Layout) -> Tensor:
    """The rectangle's mask [B, 1, rows, length] out of the mask [1, 1, rows, length] of all columns."""
    rows, width = layout.shape
    columns, length = layout.queries.shape[1], mask.shape[3]
    repeats = mask.shape[2] // columns
    table = mask[0, 0, : repeats * columns].view(repeats, columns, length)[:, : rows * width]
    segment = table.unflatten(1, (rows, width)).transpose(0, 1).flatten(1, 2)[:, None]
    return pad(segment, (0, 0, 0, -segment.shape[2] % ROWS))


def attend_ragged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    blocks: Sequence[Block],
    layout: Layout,
    scaling: float | None,
) -> Tensor:
    """Attention of the rectangle, with this mask, and of the longer rows' blocks. [1, heads, T, D] -> the same."""
    assert layout.into is not None and layout.out_of is not None
    cells = query[0].transpose(0, 1).index_select(0, layout.into)
    table = cells.unflatten(0, layout.shape).transpose(1, 2)
    out = attend(table, key, value, mask, scaling).transpose(1, 2).flatten(0, 1).index_select(0, layout.out_of)
    for block in blocks:
        own, length = slice(block.row, block.row + 1), block.mask.shape[3]
        columns = query.narrow(2, block.token, min(block.width, query.shape[2] - block.token))
        columns = pad(columns, (0, 0, 0, block.width - columns.shape[2]))
        attended = attend(columns, key[own, :, :length], value[own, :, :length], block.mask, scaling)
        out[block.token : block.token + block.count] = attended[0, :, : block.count].transpose(0, 1)
    return out.transpose(0, 1)[None]


def _prompts(segments: Sequence[RowSegment], first: Sequence[int], total: int) -> list[Cut]:
    """A cut for each segment, as wide as if it were read alone, and one for the padding that is left."""
    cuts: list[Cut] = []
    for segment, begin, end in zip(segments, first, [*first[1:], total], strict=True):
        wide = min(-(-segment.count // PROMPT_UNIT) * PROMPT_UNIT, total - begin)
        cuts.append(Cut(segment.slot, begin, _end(cuts), wide, min(end - begin, wide), segment.start))
        if end - begin > wide:
            rest = end - begin - wide
            cuts.append(Cut(segment.slot, begin + wide, _end(cuts), rest, rest, segment.start + wide))
    return cuts


def _end(cuts: Sequence[Cut]) -> int:
    """The first column of the mask after these cuts."""
    return cuts[-1].column + cuts[-1].width if cuts else 0


def _queries(cuts: Sequence[Cut]) -> Tensor:
    return torch.cat([torch.arange(0), *(cut.start + torch.arange(cut.width) for cut in cuts)])[None]


def _width(counts: Sequence[int], widths: Sequence[int]) -> int:
    """The width of the rectangle: a longer row attends on its own where that is cheaper than more columns for all."""

    def cost(width: int) -> int:
        return len(counts) * (ROW + width) + sum(CALL + count for count in counts if count > width)

    return min(sorted({_next(count, widths) for count in counts}), key=cost)


def _next(count: int, widths: Sequence[int]) -> int:
    return next((width for width in widths if width >= count), count)
