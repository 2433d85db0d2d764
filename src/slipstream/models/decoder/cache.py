"""Slot-addressed KV cache for Hugging Face models: rows, ragged rows and trees write at explicit slots and positions.

A rejected token is simply overwritten. Positions are reserved for a row's greatest possible length; memory is allocated
only as far as forwards have written, and doubles when they write further.

A ragged forward joins the tokens of several rows end to end, without padding. Except for attention, a layer treats each
token by itself, so its products see [1, T]. For attention, rows of few tokens are arranged in a rectangle, and longer
rows attend one by one. Where a row has fewer tokens than the rectangle has columns, the next rows' tokens fill the
columns; their results are dropped.

In a draft tree each chain attends as a row of its own, whose keys are gathered along its path, so a token gets the same
bits as in a row without branches. Keys and values of branches are written after those of the main chain, and only the
positions that differ are gathered from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.kv_slots import PROMPT_UNIT
from slipstream.core.trees import TreeSegment
from slipstream.errors import SlipstreamError
from slipstream.models.backend_capabilities import RowSegment
from slipstream.models.decoder.attention import LONG, ROWS, Block, Cut, Scores, attend, cut_mask
from slipstream.models.decoder.recurrence import RecurrentStates

NOWHERE = 1 << 62  # a position after all others
ATTENDED_UNIT = 256  # attention reads the cache up to the next multiple of this, unless calibration chose another
FIRST_POSITIONS = 512  # allocated per slot at first, if that many are reserved: most rows stay shorter
KEYS_AND_VALUES = ("cache", "past_key_values")  # transformers' argument: its new name, and the old one, still accepted
ROW, CALL = 3, 12  # fixed cost, in columns, of a row in the rectangle, and of a row that attends separately


@dataclass(frozen=True)
class TreeRows:
    """The rows of a forward over draft trees: one per segment, S in all, each reading one slot of a KV cache.

    A key's place in its slot is its position, except for N keys of branches: the key at position positions[n] of row
    rows[n] is stored at places[n]. From position forks[t] on, new token t of T sees the keys at places
    paths[begins[t]], paths[begins[t] + 1], ... of its slot.
    """

    slots: Tensor  # [S], the slot of each row
    rows: Tensor  # [N]
    positions: Tensor  # [N]
    places: Tensor  # [N]
    cells: tuple[Tensor, Tensor]  # row and column of each new token in the rectangle of all rows
    into: tuple[Tensor, Tensor]  # slot and place to which each new token is written
    forks: Tensor  # [T]
    begins: Tensor  # [T]
    paths: Tensor
    reach: tuple[int, int]  # the first slot and place after all that are written

    def gathered(self, cached: Tensor, length: int) -> Tensor:
        """[S, heads, length, size] of keys or values [slots, heads, positions, size]."""
        parts = self.slots, self.rows, self.positions, self.places
        slots, rows, positions, places = (part.to(cached.device) for part in parts)
        gathered = cached[slots, :, :length]
        gathered[rows, :, positions] = cached[slots[rows], :, places]
        return gathered


def tree_rows(segments: Sequence[TreeSegment], total: int, device: torch.device) -> TreeRows:
    """The rows of a forward of `total` tokens; those after the last segment continue it."""
    counts = [segment.count for segment in segments]
    written = [*counts[:-1], total - sum(counts[:-1])]
    branched, positions, places = list[int](), list[int](), list[int]()
    forks, begins, paths = [NOWHERE] * len(segments), [0] * len(segments), list[int]()
    for row, (segment, count) in enumerate(zip(segments, written, strict=True)):
        if segment.place != segment.start:
            begin = segment.start - len(segment.detour)
            detour_places = [*segment.detour, *range(segment.place, segment.place + segment.count)]
            branched += [row] * len(detour_places)
            positions += range(begin, begin + len(detour_places))
            places += detour_places
            forks[row], begins[row] = begin, len(paths)
            paths += [*segment.detour, *range(segment.place, segment.place + count)]
    row_parts = zip(segments, forks, begins, strict=True)
    row_table = torch.tensor([(segment.slot, segment.place, fork, begin) for segment, fork, begin in row_parts])
    rows, columns = _rows_and_columns(written)
    slots, first_places, fork, beginning = row_table[rows].T.contiguous()
    cells, into = (rows.to(device), columns.to(device)), (slots.to(device), (first_places + columns).to(device))
    moved, positions_of, places_of = torch.tensor([branched, positions, places], dtype=torch.int64).to(device)
    last = max(segment.place + count for segment, count in zip(segments, written, strict=True))
    reach = max(segment.slot for segment in segments) + 1, last
    row_slots = row_table[:, 0].to(device)
    path = torch.tensor(paths, dtype=torch.int64)
    return TreeRows(row_slots, moved, positions_of, places_of, cells, into, fork, beginning, path, reach)


def _rows_and_columns(counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The row and the column of each token, for rows of counts[0], counts[1], ... tokens."""
    row = np.repeat(np.arange(len(counts)), counts)
    column = np.arange(len(row)) - np.array([0, *accumulate(counts)])[row]
    return torch.from_numpy(row), torch.from_numpy(column)


class SlotLayer:
    """Keys and values of one attention layer: [slots, heads, positions, head size], written where the cache says."""

    is_sliding = False
    is_compileable = False

    def __init__(self) -> None:
        self.keys: Any = None  # a tensor once something was written
        self.values: Any = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Raises: only `SlotCache.update` knows where to write."""
        raise SlipstreamError("a slot layer is written through its cache")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Only informative, since the mask is always passed."""
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        """Unused, since positions are always passed."""
        return 0

    def get_max_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]


class SlotCache:
    """Slot-addressed KV cache of a model and its layer subsets.

    `place`, `place_ragged` and `place_tree` decide where the next forward writes. In a ragged forward, long rows attend
    one by one; a long prompt attends block by block.

    """

    states: RecurrentStates | None = None  # of recurrent layers, if there are any
    dtype: torch.dtype | None = None  # of keys and values; None for that of the layers
    spare_positions = 0  # allocated after every row
    sees_ahead = False  # tokens of the next forward see later ones, so its mask is not causal

    def __init__(self, num_layers: int) -> None:
        self.layers = [SlotLayer() for _ in range(num_layers)]
        # attention reads up to the first of `attended_lengths` that suffices, else to a multiple of `attended_unit`
        self.attended_unit = ATTENDED_UNIT
        self.attended_lengths: tuple[int, ...] = ()
        self.shape = self.held = (0, 0)  # slots and positions: reserved, and with allocated memory
        self.moves = 0  # grows whenever keys and values may have moved in memory
        self._slots = slice(0, 0)
        self._attended = 0
        self._reach = (0, 0)  # the first slot and position after all that the next forward writes
        self._span: slice | None = None
        self._rows = self._columns = self._written = torch.empty(0, dtype=torch.int64)
        self._destinations: tuple[Tensor, Tensor] | None = None
        self._cuts: list[Cut] = []
        self._blocks: dict[int, list[Block]] = {}
        self._rectangles: dict[int, Tensor] = {}
        self.tree: TreeRows | None = None  # the next forward's rows, if it is over draft trees
        self.layout: Layout | None = None  # the next forward's layout, if it is ragged
        self.prepared: Any = None  # shared by all compiled layers in the next forward
        self.hidden: dict[int, SlotLayer] = {}

    @property
    def _stored(self) -> list[Any]:
        """All data kept per position: keys and values, and hidden states, stored like the keys of one head."""
        return [*self.layers, *self.hidden.values()]

    @property
    def addresses(self) -> object:
        """Changes whenever memory of keys, values, hidden states or recurrent states may have moved."""
        return self.moves, len(self.hidden), 0 if self.states is None else self.states.moves

    def reserve(self, rows: int, length: int) -> None:
        """Reserve at least `rows` slots of `length` positions; existing content stays."""
        slots, positions = self.shape
        if rows > slots or length > positions or positions % self.attended_unit:
            longest = max(length, positions * 3 // 2) if length > positions else positions
            unit = lcm(self.attended_unit, ATTENDED_UNIT)  # whole units, so attended lengths fit
            self.shape = max(rows, slots), -(-longest // unit) * unit
            self.moves += 1
            if self.states is not None:
                self.states.reserve(self.shape[0])

    def hold(self, rows: int, length: int) -> None:
        """Allocate memory for at least `rows` slots of `length` positions, within what is reserved.

        Memory grows by doubling, so all copies together move less than twice the final size.
        """
        slots, positions = self.held
        if rows <= slots and length <= positions:
            return
        if rows > slots:
            slots = min(max(rows, 2 * slots), self.shape[0])
        if length > positions:
            needed = -(-length // ATTENDED_UNIT) * ATTENDED_UNIT  # kernels read 32 positions at a time
            positions = min(max(needed, 2 * positions, FIRST_POSITIONS), self.shape[1])
        if (slots, positions) == self.held:
            return
        self.moves += 1
        for layer in self._stored:
            if layer.keys is not None:
                layer.keys, layer.values = (enlarged(part, slots, positions) for part in (layer.keys, layer.values))
        self.held = slots, positions  # set last: if memory runs out, the next call tries again

    def release(self) -> None:
        """Free the memory of keys and values; their contents are lost."""
        for layer in self._stored:
            layer.keys = layer.values = None
        self.shape = self.held = (0, 0)
        self.moves += 1

    def store_as(self, dtype: torch.dtype | None) -> None:
        """Keep keys and values in this type from now on. If the type changes, the contents are lost."""
        if dtype != self.dtype:
            self.dtype = dtype
            self.release()

    def place(self, first_slot: int, starts: list[int], columns: Tensor, *, sees_ahead: bool = False) -> int:
        """Make the next forward write the positions columns[i] of slot first_slot + i, from starts[i] on.

        columns: [rows, width]. sees_ahead: tokens see later ones, where the mask allows it. Returns the attended
        length, at most the reserved positions.
        """
        width = columns.shape[1]
        attends_in_blocks = width >= LONG and self.attended_lengths and len(starts) == 1 and not sees_ahead
        self._begin([Cut(0, 0, 0, width, width, starts[0])] if attends_in_blocks else [])
        self.sees_ahead = sees_ahead
        self._slots, self._written = slice(first_slot, first_slot + len(starts)), columns
        self._span = slice(starts[0], starts[0] + width) if len(set(starts)) == 1 else None
        if self._span is None:
            self._rows = torch.arange(first_slot, first_slot + len(starts), device=columns.device)[:, None]
            self._columns = columns
        end = max(starts) + width
        return self._attend_up_to(end, self._slots.stop, end)

    def place_ragged(self, layout: Layout) -> int:
        """`place` for a ragged forward."""
        self._begin(layout.cuts, layout)
        self._slots, self._span, self._destinations = layout.rows, None, (layout.slots, layout.positions)
        self._rows, self._columns = layout.slots[None], layout.positions[None]
        return self._attend_up_to(layout.end, *layout.reach)

    def place_tree(self, tree: TreeRows, end: int, layout: Layout | None = None) -> int:
        """`place` for a forward over trees.

        end: the first position that no token attends to; layout: of the rows, if the forward is ragged.
        """
        self._begin([] if layout is None else layout.cuts, layout)
        self._destinations = None if layout is None else (tree.into[0], layout.positions)
        self.tree = tree
        return self._attend_up_to(end, *tree.reach)

    def _begin(self, cuts: list[Cut], layout: Layout | None = None) -> None:
        """Forget the previous forward."""
        self.sees_ahead = False
        self._cuts, self._blocks, self._rectangles, self.layout = cuts, {}, {}, layout
        self.tree = self._destinations = self.prepared = None

    def _attend_up_to(self, end: int, slots: int, positions: int) -> int:
        """The attended length of a forward over keys below `end` that writes below these slots and positions."""
        length = next((length for length in self.attended_lengths if length >= end), None)
        if length is None:
            length = -(-end // self.attended_unit) * self.attended_unit
        self._attended, self._reach = min(length, self.shape[1]), (slots, positions)
        self.hold(slots, max(self._attended, positions + self.spare_positions))
        return self._attended

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values [rows, heads, width, size] and return what attention reads."""
        keys, values = self.of_layer(layer_idx, key_states, value_states)
        return self._write(keys, key_states), self._write(values, value_states)

    def of_layer(self, layer_idx: int, keys: Tensor, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [slots, heads, positions, size].

        keys, values: [_, heads, _, size], examples for allocating them if needed; values None: of the keys' size.
        """
        layer = self.layers[layer_idx]
        if layer.keys is None:
            parts = keys, keys if values is None else values
            layer.keys, layer.values = (self._allocate(part, self.dtype) for part in parts)
        return layer.keys, layer.values

    def keep_hidden(self, layer_idx: int, entering: Tensor) -> None:
        """Write the hidden states [rows, width, size] that enter a layer in this forward."""
        self._put(self.hidden_store(layer_idx, entering), entering.unsqueeze(1))

    def hidden_store(self, layer_idx: int, like: Tensor) -> Tensor:
        """[slots, 1, positions, size]: the memory for the hidden states that enter a layer.

        like: [_, _, size], an example for allocating it if needed.
        """
        layer = self.hidden[layer_idx]
        if layer.keys is None:
            states = like.unsqueeze(1)
            layer.keys, layer.values = self._allocate(states), self._allocate(states[..., :0])
        return layer.keys

    def hidden_states(self, layers: Sequence[int], slot: int, start: int, stop: int) -> Tensor | None:
        """[stop - start, layers * size]: the hidden states that entered these layers; None before any forward."""
        kept = [keys for i in layers if (keys := self.hidden[i].keys) is not None]
        return torch.cat([keys[slot, 0, start:stop] for keys in kept], -1) if len(kept) == len(layers) else None

    def move(self, slot: int, places: Sequence[int], start: int) -> None:
        """Move the keys and values at these places of a slot to `start` and the following positions."""
        index = torch.tensor(places, dtype=torch.int64)
        for layer in self._stored:
            if layer.keys is not None:
                index = index.to(layer.keys.device)
                for cached in (layer.keys[slot], layer.values[slot]):
                    cached[:, start : start + len(places)] = cached.index_select(1, index)

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another in every layer."""
        self.hold(max(source, destination) + 1, length + self.spare_positions)
        for layer in self._stored:
            if layer.keys is not None:
                layer.keys[destination, :, :length] = layer.keys[source, :, :length]
                layer.values[destination, :, :length] = layer.values[source, :, :length]
        if self.states is not None:
            self.states.copy(source, destination, length)

    def destinations(self) -> tuple[Tensor, Tensor]:
        """Slots and positions [tokens] to which the next forward's tokens are written, row by row."""
        slots, positions = self._reach
        if slots > self.held[0] or positions > self.held[1]:
            raise SlipstreamError(f"slot {slots - 1}, position {positions - 1}; reserved: {self.shape}")
        if self._destinations is None:
            width = self._written.shape[1]
            each = [slot for slot in range(self._slots.start, self._slots.stop) for _ in range(width)]
            self._destinations = torch.tensor(each), self._written.flatten()
        return self._destinations

    def blocks(self, mask: Tensor) -> list[Block]:
        """The blocks in which this forward's attention is computed; none if it is computed at once."""
        if self._cuts and id(mask) not in self._blocks:
            self._blocks[id(mask)] = cut_mask(mask, self._cuts, self.attended_lengths)
        return self._blocks.get(id(mask), [])

    def rectangle(self, mask: Tensor) -> Tensor | None:
        """The mask of the rows that attend together in a ragged forward; None if there are no such rows."""
        if self.layout is None or self.layout.into is None:
            return None
        if id(mask) not in self._rectangles:
            self._rectangles[id(mask)] = rectangle_mask(mask, self.layout)
        return self._rectangles[id(mask)]

    def _write(self, cached: Tensor, states: Tensor) -> Tensor:
        self._put(cached, in_type(states, cached.dtype))
        if self.tree is not None:
            return self.tree.gathered(cached, self._attended).to(states.dtype)
        return cached[self._slots, :, : self._attended].to(states.dtype)

    def _put(self, cached: Tensor, states: Tensor) -> None:
        """Write states [rows, heads, width, size] where `place` or a variant of it decided."""
        if self.tree is not None:
            slots, places = (part.to(cached.device) for part in self.tree.into)
            ragged = states.shape[0] == 1 and states.shape[2] == len(places)
            rows, columns = (part.to(cached.device) for part in self.tree.cells)
            cached[slots, :, places] = states[0].transpose(0, 1) if ragged else states[rows, :, columns]
        elif self._span is not None:
            cached[self._slots, :, self._span] = states
        else:
            rows, columns = self._rows.to(cached.device), self._columns.to(cached.device)
            cached[rows, :, columns] = states.transpose(1, 2)

    def _allocate(self, states: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        # zeros, not empty: a masked position has weight 0, and 0 times NaN is NaN
        return states.new_zeros(self.held[0], states.shape[1], self.held[1], states.shape[3], dtype=dtype)


def in_type(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values in the type of a cache, converted as the kernels do.

    Finite numbers beyond the type's range become its largest number; infinities become NaN.
    """
    if states.dtype == dtype:
        return states
    largest = torch.finfo(dtype).max
    return (states.clamp(-largest, largest) + (states - states)).to(dtype)


def enlarged(cached: Tensor, slots: int, positions: int) -> Tensor:
    """Keys or values with at least this many slots and positions; new ones hold zeros."""
    old_slots, heads, old_positions, size = cached.shape
    slots, positions = max(slots, old_slots), max(positions, old_positions)
    if (slots, positions) == (old_slots, old_positions):
        return cached
    enlarged = cached.new_empty(slots, heads, positions, size)
    enlarged[:old_slots, :, :old_positions] = cached
    enlarged[:old_slots, :, old_positions:] = 0
    enlarged[old_slots:] = 0
    return enlarged


def given_cache(options: Mapping[str, Any]) -> Any:
    """The KV cache among the arguments of a forward; None if there is none."""
    return next((options[name] for name in KEYS_AND_VALUES if name in options), None)


@dataclass(frozen=True)
class Layout:
    """Where each of the T tokens of a ragged forward is cached, and how they attend."""

    slots: Tensor  # [T], where each token is cached
    positions: Tensor  # [T]
    rows: slice  # slots that attention reads
    queries: Tensor  # [1, C], positions of attention's columns: those of the rectangle, then those of `cuts`
    shape: tuple[int, int]  # B, W of the rectangle
    into: Tensor | None  # [B * W], the token in each cell of the rectangle; None without a rectangle
    out_of: Tensor | None  # [T], the cell of each token; None without a rectangle
    cuts: list[Cut]  # rows that attend one by one
    end: int  # the first position that no token attends to
    reach: tuple[int, int]  # the first slot and position after all that are written


def lay_out(segments: Sequence[RowSegment | TreeSegment], total: int, widths: Sequence[int] | None) -> Layout:
    """The layout of a forward of `total` tokens; those after the last segment continue it.

    widths: as in `RaggedForwards.forward_ragged`.
    """
    counts = [segment.count for segment in segments]
    first = [0, *accumulate(counts)][:-1]
    written = [*counts[:-1], total - first[-1]]
    starts = torch.tensor([segment.start for segment in segments])
    row, column = _rows_and_columns(written)
    slots, positions = torch.tensor([segment.slot for segment in segments])[row], starts[row] + column
    last = max(segment.start + count for segment, count in zip(segments, written, strict=True))
    reach = max(segment.slot for segment in segments) + 1, last
    if widths is None:
        cuts = _prompt_cuts(segments, first, total)
        end = max(cut.start + cut.width for cut in cuts)
        return Layout(slots, positions, slice(None), _query_positions(cuts), (0, 0), None, None, cuts, end, reach)
    width = _rectangle_width(counts, widths)
    cells = torch.tensor(first)[:, None] + torch.arange(width)
    cuts, mask_column = [], len(segments) * width
    for i, (segment, begin) in enumerate(zip(segments, first, strict=True)):
        if segment.count > width:
            cut_width = _padded_width(segment.count, widths)
            cuts.append(Cut(i, begin, mask_column, cut_width, segment.count, segment.start))
            mask_column += cut_width
    queries = torch.cat([(starts[:, None] + torch.arange(width)).flatten()[None], _query_positions(cuts)], 1)
    end = max(int(starts.max()) + width, *(cut.start + cut.width for cut in cuts), 0)
    out_of = row * width + column.clamp(max=width - 1)
    rows, shape = slice(segments[0].slot, segments[0].slot + len(segments)), (len(segments), width)
    into = cells.clamp(max=total - 1).flatten()
    return Layout(slots, positions, rows, queries, shape, into, out_of, cuts, end, reach)


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
    form: Scores,
) -> Tensor:
    """Attention in a ragged forward: first the rectangle, whose mask is `mask`, then the longer rows' blocks.

    query: [1, heads, T, D]; returns the same shape.
    """
    assert layout.into is not None and layout.out_of is not None
    cells = query[0].transpose(0, 1).index_select(0, layout.into)
    table = cells.unflatten(0, layout.shape).transpose(1, 2)
    out = attend(table, key, value, mask, form).transpose(1, 2).flatten(0, 1).index_select(0, layout.out_of)
    for block in blocks:
        cache_row, length = slice(block.row, block.row + 1), block.mask.shape[3]
        columns = query.narrow(2, block.token, min(block.width, query.shape[2] - block.token))
        columns = pad(columns, (0, 0, 0, block.width - columns.shape[2]))
        keys, values = key[cache_row, :, :length], value[cache_row, :, :length]
        attended = attend(columns, keys, values, block.mask, form)
        out[block.token : block.token + block.count] = attended[0, :, : block.count].transpose(0, 1)
    return out.transpose(0, 1)[None]


def _prompt_cuts(segments: Sequence[RowSegment | TreeSegment], first: Sequence[int], total: int) -> list[Cut]:
    """A cut for each segment, as wide as if it were read alone, and one for the padding at the end, if any."""
    cuts: list[Cut] = []
    for segment, begin, end in zip(segments, first, [*first[1:], total], strict=True):
        width = min(-(-segment.count // PROMPT_UNIT) * PROMPT_UNIT, total - begin)
        cuts.append(Cut(segment.slot, begin, _next_column(cuts), width, min(end - begin, width), segment.start))
        if end - begin > width:
            rest = end - begin - width
            cuts.append(Cut(segment.slot, begin + width, _next_column(cuts), rest, rest, segment.start + width))
    return cuts


def _next_column(cuts: Sequence[Cut]) -> int:
    """The first column of the mask after these cuts."""
    return cuts[-1].column + cuts[-1].width if cuts else 0


def _query_positions(cuts: Sequence[Cut]) -> Tensor:
    return torch.cat([torch.arange(0), *(cut.start + torch.arange(cut.width) for cut in cuts)])[None]


def _rectangle_width(counts: Sequence[int], widths: Sequence[int]) -> int:
    """The cheapest width of the rectangle; longer rows attend separately."""

    def cost(width: int) -> int:
        return len(counts) * (ROW + width) + sum(CALL + count for count in counts if count > width)

    return min(sorted({_padded_width(count, widths) for count in counts}), key=cost)


def _padded_width(count: int, widths: Sequence[int]) -> int:
    return next((width for width in widths if width >= count), count)
