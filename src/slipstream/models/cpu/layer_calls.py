"""Calls of the compiled functions of a decoder layer. What all layers of a forward share is prepared once.

The specification is `fused_layer.LayerOps`, operator by operator; every layer is compared with it before it is used.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.models.cpu.kernel_build import address
from slipstream.models.hf.fused_layer import AttentionSpec, LayerOps, Rope
from slipstream.models.hf.ragged_attention import RaggedCache

MANY = 1 << 40  # tokens


@dataclass(frozen=True)
class LayerFunctions:
    """The functions of one library.

    project: (layer, hidden, tokens, cosines, sines, out, scratch), from hidden states to queries, keys and values.
    feed_forward: (layer, hidden, attended, tokens, out, scratch). whole: (layer, cache, hidden, tokens, cosines, sines,
    out, scratch). cache: the struct of `whole`'s cache.
    """

    project: Any
    feed_forward: Any
    whole: Any
    cache: type[ctypes.Structure]

    def __post_init__(self) -> None:
        for function, before, after in ((self.project, 2, 4), (self.feed_forward, 3, 2), (self.whole, 3, 4)):
            function.argtypes = (*[ctypes.c_void_p] * before, ctypes.c_int64, *[ctypes.c_void_p] * after)


@dataclass
class PreparedForward:
    """What all layers of a forward share: where its tokens are cached, its rotations and its scratch space.

    held: tensors whose addresses the struct has.
    """

    struct: ctypes.Structure
    held: tuple[Tensor, ...]
    scratch: Tensor
    rotations: dict[int, tuple[Rope, Rope]] = field(default_factory=dict)

    def rope(self, rope: Rope, hidden: Tensor, size: int) -> Rope:
        """Cosines and sines [tokens, size] in the type of the hidden states."""
        known = self.rotations.get(id(rope[1]))
        if known is None:
            known = self.rotations[id(rope[1])] = rope, rotation(rope, hidden, size)  # the key's tensor stays alive
        return known[1]

    def space(self, size: int) -> Tensor:
        """Scratch space of at least `size` numbers."""
        if len(self.scratch) < size:
            self.scratch = self.scratch.new_empty(size)
        return self.scratch


def rotation(rope: Rope, hidden: Tensor, size: int) -> Rope:
    """Cosines and sines [B, W, size], one for each of the hidden states [B, W, H], in their type."""
    cosines, sines = (part.to(hidden.dtype).expand(*hidden.shape[:2], size).contiguous() for part in rope)
    return cosines, sines


class LayerCalls(ABC):
    """What `LayerOps` computes, compiled; see `Ops`.

    shape_independent: whether whole layers are computed, and each token as if it were alone. Known once a layer has
    been computed.
    """

    def __init__(self, ops: LayerOps, functions: LayerFunctions, layer: ctypes.Structure, *, alone: bool) -> None:
        """layer: the struct of the layer that the functions read. alone: what `shape_independent` becomes."""
        self.heads, self.key_heads, self._size = ops.heads, ops.key_heads, ops.size
        self._functions, self._layer, self._this = functions, layer, ctypes.addressof(layer)
        self._alone, self.shape_independent = alone, False

    @abstractmethod
    def _scratch(self, tokens: int) -> int:
        """How many numbers of scratch space the functions need."""

    @abstractmethod
    def _takes(self, hidden: Tensor) -> bool:
        """Whether whole layers are computed for these hidden states [B, W, H]."""

    def project_qkv_rope(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """See `Ops.project_qkv_rope`."""
        batch, width = hidden.shape[:2]
        out = hidden.new_empty(batch, width, self.heads + 2 * self.key_heads, self._size)
        rows, tokens, scratch = self._inputs(hidden)
        cosines, sines = rotation(rope, hidden, self._size)
        pointers = [part.data_ptr() for part in (cosines, sines, out, scratch)]
        self._functions.project(self._this, rows.data_ptr(), tokens, *pointers)
        heads = out.transpose(1, 2)
        both = self.heads + self.key_heads
        return heads[:, :both], heads[:, both:]

    def residual_mlp(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """See `Ops.residual_mlp`."""
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        rows, tokens, scratch = self._inputs(hidden)
        given = attended.contiguous()
        pointers = out.data_ptr(), scratch.data_ptr()
        self._functions.feed_forward(self._this, rows.data_ptr(), given.data_ptr(), tokens, *pointers)
        return out

    def whole_layer(self, hidden: Tensor, rope: Rope, cache: RaggedCache, spec: AttentionSpec) -> Tensor | None:
        """See `Ops.whole_layer`."""
        if not self._takes(hidden):
            return None
        layer = cache.layers[spec.index]
        if layer.keys is None:
            cache.of_layer(spec.index, hidden.new_empty(0, self.key_heads, 0, self._size))
        keys, values = layer.keys, layer.values
        if keys.dtype != hidden.dtype:
            return None
        ready = cache.prepared
        if ready is None or type(ready.struct) is not self._functions.cache:
            ready = cache.prepared = self._prepare(cache, hidden)
        rows = hidden.contiguous()
        tokens = rows.numel() // rows.shape[-1]
        memory, (cosines, sines) = ready.struct, ready.rope(rope, hidden, self._size)
        memory.keys, memory.values, memory.length = keys.data_ptr(), values.data_ptr(), keys.shape[2]
        memory.window, memory.scaling = spec.window or 0, spec.scaling
        out, scratch = torch.empty_like(rows), ready.space(self._scratch(tokens))
        pointers = cosines.data_ptr(), sines.data_ptr(), out.data_ptr(), scratch.data_ptr()
        self._functions.whole(self._this, ctypes.addressof(memory), rows.data_ptr(), tokens, *pointers)
        self.shape_independent = self._alone
        return out

    def _prepare(self, cache: RaggedCache, hidden: Tensor) -> PreparedForward:
        slots, positions = cache.destinations()
        where: tuple[Tensor, ...] = (slots, positions, positions)
        if cache.tree is not None:
            where = slots, positions, cache.tree.into[1], cache.tree.forks, cache.tree.begins, cache.tree.paths
        names = ("slots", "positions", "places", "forks", "begins", "paths")
        struct = self._functions.cache(**dict(zip(names, map(address, where), strict=False)))
        return PreparedForward(struct, where, hidden.new_empty(0))

    def _inputs(self, hidden: Tensor) -> tuple[Tensor, int, Tensor]:
        """Hidden states one after the other, how many they are, and scratch space."""
        rows = hidden.contiguous()
        tokens = rows.numel() // rows.shape[-1]
        return rows, tokens, rows.new_empty(self._scratch(tokens))
