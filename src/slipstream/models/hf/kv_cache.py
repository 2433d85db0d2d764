"""Slot-addressed key-value memory for Hugging Face models: preallocated, written where it is told.

Slot and position are given explicitly, so a rejected token is simply written over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from slipstream.errors import SlipstreamError

ATTENDED_UNIT = 256  # attention reads the memory up to the next multiple of this, unless calibration found another


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
    """Slot-addressed memory of a model. `place` says where the next forward writes and how far it reads."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[SlotLayer() for _ in range(num_layers)])
        self._shape = (0, 0)
        self._slots = slice(0, 0)
        self._view = 0
        self._span: slice | None = None
        self._rows = self._columns = torch.empty(0, dtype=torch.int64)

    def reserve(self, rows: int, length: int) -> None:
        """Hold at least `rows` slots of `length` positions; existing content stays."""
        length = -(-length // ATTENDED_UNIT) * ATTENDED_UNIT
        if rows > self._shape[0] or length > self._shape[1]:
            grown = (
                max(self._shape[1] * 3 // 2 // ATTENDED_UNIT * ATTENDED_UNIT, length)
                if length > self._shape[1]
                else self._shape[1]
            )
            self._shape = max(rows, self._shape[0]), grown
            for layer in self.layers:
                if layer.keys is not None:
                    layer.keys, layer.values = self._resized(layer.keys), self._resized(layer.values)

    def place(self, first_slot: int, starts: list[int], columns: Tensor, unit: int, reads: Sequence[int] = ()) -> int:
        """Aim the next forward: row i writes the positions columns[i] of slot first_slot + i, from starts[i] on.

        columns: [rows, width]. Returns the number of positions attention will see: the first of `reads`, ascending,
        that is enough, else a multiple of `unit`, if there is room for it.
        """
        width = columns.shape[1]
        self._slots = slice(first_slot, first_slot + len(starts))
        self._span = slice(starts[0], starts[0] + width) if len(set(starts)) == 1 else None
        if self._span is None:
            self._rows = torch.arange(first_slot, first_slot + len(starts), device=columns.device)[:, None]
            self._columns = columns
        return self._look(max(starts) + width, unit, reads)

    def _look(self, end: int, unit: int, reads: Sequence[int]) -> int:
        self._view = min(next((read for read in reads if read >= end), -(-end // unit) * unit), self._shape[1])
        return self._view

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values [rows, heads, width, size] and return the views attention reads."""
        layer = self.layers[layer_idx]
        if layer.keys is None:
            layer.keys, layer.values = self._allocate(key_states), self._allocate(value_states)
        return self._write(layer.keys, key_states), self._write(layer.values, value_states)

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another in every layer."""
        for layer in self.layers:
            if layer.keys is not None:
                layer.keys[destination, :, :length] = layer.keys[source, :, :length]
                layer.values[destination, :, :length] = layer.values[source, :, :length]

    def _write(self, memory: Tensor, states: Tensor) -> Tensor:
        if self._span is not None:
            memory[self._slots, :, self._span] = states
        else:
            rows, columns = self._rows.to(memory.device), self._columns.to(memory.device)
            memory[rows, :, columns] = states.transpose(1, 2)
        return memory[self._slots, :, : self._view]

    def _allocate(self, states: Tensor) -> Tensor:
        # zeros, not empty: a masked position still enters a product with weight 0, and 0 times NaN is NaN
        return states.new_zeros(self._shape[0], states.shape[1], self._shape[1], states.shape[3])

    def _resized(self, memory: Tensor) -> Tensor:
        grown = memory.new_zeros(self._shape[0], memory.shape[1], self._shape[1], memory.shape[3])
        grown[: memory.shape[0], :, : memory.shape[2]] = memory
        return grown
