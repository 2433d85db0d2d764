"""Slot-addressed KV cache for Hugging Face models, written at explicit slots and positions.

A rejected token is simply written over. Room is reserved for the longest texts that rows may become; memory is taken
for what forwards have reached, and doubles as they reach further.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from slipstream.errors import SlipstreamError
from slipstream.models.hf.recurrent.states import RecurrentStates
from slipstream.models.hf.tree_attention import TreeRows

ATTENDED_UNIT = 256  # attention reads the cache up to the next multiple of this, unless calibration found another
FIRST_POSITIONS = 512  # of every slot, at least, where as many are reserved: most texts end before


class SlotLayer(CacheLayerMixin):
    """Keys and values of one attention layer: [slots, heads, positions, head size], written where the cache says."""

    is_sliding = False
    is_compileable = False

    def __init__(self) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: `SlotCache.reserve` allocates."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """`SlotCache.update` writes; a layer on its own does not know where."""
        raise SlipstreamError("a slot layer is written through its cache")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask is always given, so this is informative only."""
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        """Positions are always given, so no length is implied."""
        return 0

    def get_max_length(self) -> int:
        """Number of positions."""
        return 0 if self.keys is None else self.keys.shape[2]

    get_max_cache_shape = get_max_length


class SlotCache(Cache):
    """Slot-addressed KV cache of a model and its layer subsets. `place` says where the next forward writes.

    attended_unit, attended_lengths: attention reads the first of the lengths that is enough, else a multiple of the
    unit. tree: what the next forward is over, if over draft trees. shape: slots and positions reserved; held: those
    that keys and values have memory for. moves: how often what forwards refer to by address may have moved. states:
    those of recurrent layers, if there are any. spare_positions: held behind every text.
    """

    states: RecurrentStates | None = None
    spare_positions = 0

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[SlotLayer() for _ in range(num_layers)])
        self.attended_unit = ATTENDED_UNIT
        self.attended_lengths: tuple[int, ...] = ()
        self.shape = self.held = (0, 0)
        self.moves = 0
        self._slots = slice(0, 0)
        self._attended = 0
        self._span: slice | None = None
        self._rows = self._columns = torch.empty(0, dtype=torch.int64)
        self.tree: TreeRows | None = None

    def reserve(self, rows: int, length: int) -> None:
        """Allow `rows` slots of `length` positions at least; existing content stays."""
        slots, positions = self.shape
        if rows > slots or length > positions or positions % self.attended_unit:
            longest = max(length, positions * 3 // 2) if length > positions else positions
            unit = lcm(self.attended_unit, ATTENDED_UNIT)  # whole units: attention never reads less for want of room
            self.shape = max(rows, slots), -(-longest // unit) * unit
            self.moves += 1
            if self.states is not None:
                self.states.reserve(self.shape[0])

    def hold(self, rows: int, length: int) -> None:
        """Have memory for `rows` slots of `length` positions, as far as they are reserved.

        What is held doubles, so that all copies together move less than twice what is held in the end.
        """
        slots, positions = self.held
        if rows <= slots and length <= positions:
            return
        if rows > slots:
            slots = min(max(rows, 2 * slots), self.shape[0])
        if length > positions:
            positions = min(max(length, 2 * positions, FIRST_POSITIONS), self.shape[1])
        if (slots, positions) == self.held:
            return
        self.moves += 1
        for layer in self.layers:
            if layer.keys is not None:
                layer.keys, layer.values = (_enlarged(part, slots, positions) for part in (layer.keys, layer.values))
        self.held = slots, positions  # only now: growth that failed for lack of memory is tried again

    def release(self) -> None:
        """Give the memory of keys and values back; nothing that was written is read again."""
        for layer in self.layers:
            layer.keys = layer.values = None
        self.shape = self.held = (0, 0)
        self.moves += 1

    def place(self, first_slot: int, starts: list[int], columns: Tensor) -> int:
        """Make the next forward write the positions columns[i] of slot first_slot + i, from starts[i] on.

        columns: [rows, width]. Returns the attended length, at most the positions reserved.
        """
        width = columns.shape[1]
        self.tree = None
        self._slots = slice(first_slot, first_slot + len(starts))
        self._span = slice(starts[0], starts[0] + width) if len(set(starts)) == 1 else None
        if self._span is None:
            self._rows = torch.arange(first_slot, first_slot + len(starts), device=columns.device)[:, None]
            self._columns = columns
        end = max(starts) + width
        return self._attend_up_to(end, self._slots.stop, end)

    def place_tree(self, tree: TreeRows, end: int) -> int:
        """The same for a forward over a tree; `end` is that of the positions attended to."""
        self.tree = tree
        return self._attend_up_to(end, *tree.reach)

    def _attend_up_to(self, end: int, slots: int, positions: int) -> int:
        """The attended length of a forward over keys below `end` that writes below these slots and positions."""
        enough = next((length for length in self.attended_lengths if length >= end), None)
        if enough is None:
            enough = -(-end // self.attended_unit) * self.attended_unit
        self._attended = min(enough, self.shape[1])
        self.hold(slots, max(self._attended, positions + self.spare_positions))
        return self._attended

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values [rows, heads, width, size] and return what attention reads."""
        layer = self.layers[layer_idx]
        if layer.keys is None:
            layer.keys, layer.values = self._allocate(key_states), self._allocate(value_states)
        return self._write(layer.keys, key_states), self._write(layer.values, value_states)

    def move(self, slot: int, places: Sequence[int], start: int) -> None:
        """What stands at these places of a slot is to stand from `start` on."""
        for layer in self.layers:
            if layer.keys is not None:
                for cached in (layer.keys, layer.values):
                    cached[slot, :, start : start + len(places)] = cached[slot, :, list(places)]

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another in every layer."""
        self.hold(max(source, destination) + 1, length + self.spare_positions)
        for layer in self.layers:
            if layer.keys is not None:
                layer.keys[destination, :, :length] = layer.keys[source, :, :length]
                layer.values[destination, :, :length] = layer.values[source, :, :length]
        if self.states is not None:
            self.states.copy(source, destination, length)

    def _write(self, cached: Tensor, states: Tensor) -> Tensor:
        if self.tree is not None:
            slots, places = self.tree.into
            ragged = states.shape[0] == 1 and states.shape[2] == len(places)
            rows, columns = self.tree.cells
            cached[slots, :, places] = states[0].transpose(0, 1) if ragged else states[rows, :, columns]
            return self.tree.gathered(cached, self._attended)
        if self._span is not None:
            cached[self._slots, :, self._span] = states
        else:
            rows, columns = self._rows.to(cached.device), self._columns.to(cached.device)
            cached[rows, :, columns] = states.transpose(1, 2)
        return cached[self._slots, :, : self._attended]

    def _allocate(self, states: Tensor) -> Tensor:
        # zeros, not empty: a masked position still enters a product with weight 0, and 0 times NaN is NaN
        return states.new_zeros(self.held[0], states.shape[1], self.held[1], states.shape[3])


def _enlarged(cached: Tensor, slots: int, positions: int) -> Tensor:
    """The same keys or values with at least so many slots and positions; zeros are written where nothing is copied."""
    old_slots, heads, old_positions, size = cached.shape
    slots, positions = max(slots, old_slots), max(positions, old_positions)
    if (slots, positions) == (old_slots, old_positions):
        return cached
    enlarged = cached.new_empty(slots, heads, positions, size)
    enlarged[:old_slots, :, :old_positions] = cached
    enlarged[:old_slots, :, old_positions:] = 0
    enlarged[old_slots:] = 0
    return enlarged
