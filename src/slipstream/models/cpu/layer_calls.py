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
from slipstream.models.decoder.cache import RaggedCache
from slipstream.models.decoder.fused_layer import AttentionSpec, LayerOps, RootMeanSquare, Rope

MANY = 1 << 40  # tokens


@dataclass(frozen=True)
class LayerFunctions:
    """The functions of one library.

    project: (layer, hidden, tokens, cosines, sines, out, scratch), from hidden states to queries, keys and values.
    feed_forward: (layer, hidden, attended, tokens, out, scratch). whole: (layer, cache, hidden, tokens, cosines, sines,
    out, scratch). all_layers: (stacked layers, count, cache, hidden, tokens, rotations, scratch). normalise: (norm, x,
    tokens, size, out). cache: the struct of `whole`'s cache.
    """

    project: Any
    feed_forward: Any
    whole: Any
    all_layers: Any
    normalise: Any
    cache: type[ctypes.Structure]

    @classmethod
    def of(cls, library: Any, cache: type[ctypes.Structure]) -> LayerFunctions:
        """Those of `csrc/layer_steps.h`."""
        taken = {  # pointers and numbers
            "project": ("project_qkv_rope", "ppnpppp"),
            "feed_forward": ("residual_mlp", "pppnpp"),
            "whole": ("whole_layer", "pppnpppp"),
            "all_layers": ("all_layers", "pnppnpp"),
            "normalise": ("normalise_tokens", "ppnnp"),
        }
        functions = {part: getattr(library, name) for part, (name, _) in taken.items()}
        for part, (_, kinds) in taken.items():
            functions[part].argtypes = [ctypes.c_void_p if kind == "p" else ctypes.c_int64 for kind in kinds]
        return cls(**functions, cache=cache)


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
        self.heads, self.key_heads, self.size = ops.heads, ops.key_heads, ops.size
        self.functions, self._layer, self.this = functions, layer, ctypes.addressof(layer)
        self._alone, self.shape_independent = alone, False

    @abstractmethod
    def scratch(self, tokens: int) -> int:
        """How many numbers of scratch space the functions need."""

    @abstractmethod
    def takes(self, hidden: Tensor) -> bool:
        """Whether whole layers are computed for these hidden states [B, W, H]."""

    @abstractmethod
    def norm(self, norm: RootMeanSquare | None) -> ctypes.Structure:
        """The struct of a norm, valid as long as this object."""

    def project_qkv_rope(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """See `Ops.project_qkv_rope`."""
        batch, width = hidden.shape[:2]
        out = hidden.new_empty(batch, width, self.heads + 2 * self.key_heads, self.size)
        rows, tokens, scratch = self._inputs(hidden)
        cosines, sines = rotation(rope, hidden, self.size)
        pointers = [part.data_ptr() for part in (cosines, sines, out, scratch)]
        self.functions.project(self.this, rows.data_ptr(), tokens, *pointers)
        heads = out.transpose(1, 2)
        both = self.heads + self.key_heads
        return heads[:, :both], heads[:, both:]

    def residual_mlp(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """See `Ops.residual_mlp`."""
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        rows, tokens, scratch = self._inputs(hidden)
        given = attended.contiguous()
        pointers = out.data_ptr(), scratch.data_ptr()
        self.functions.feed_forward(self.this, rows.data_ptr(), given.data_ptr(), tokens, *pointers)
        return out

    def whole_layer(self, hidden: Tensor, rope: Rope, cache: RaggedCache, spec: AttentionSpec) -> Tensor | None:
        """See `Ops.whole_layer`."""
        if not self.takes(hidden):
            return None
        keys, values = self.cached(cache, spec, hidden)
        if keys.dtype != hidden.dtype:
            return None
        ready = self.prepared(cache, hidden)
        rows = hidden.contiguous()
        tokens = rows.numel() // rows.shape[-1]
        memory, (cosines, sines) = ready.struct, ready.rope(rope, hidden, self.size)
        memory.keys, memory.values, memory.length = keys.data_ptr(), values.data_ptr(), keys.shape[2]
        memory.window, memory.scaling = spec.window or 0, spec.scaling
        out, scratch = torch.empty_like(rows), ready.space(self.scratch(tokens))
        pointers = cosines.data_ptr(), sines.data_ptr(), out.data_ptr(), scratch.data_ptr()
        self.functions.whole(self.this, ctypes.addressof(memory), rows.data_ptr(), tokens, *pointers)
        self.shape_independent = self._alone
        return out

    def cached(self, cache: RaggedCache, spec: AttentionSpec, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, allocated in the type of the hidden states if there are none."""
        return cache.of_layer(spec.index, hidden.new_empty(0, self.key_heads, 0, self.size))

    def prepared(self, cache: RaggedCache, hidden: Tensor) -> PreparedForward:
        """What all layers of the next forward share."""
        ready: PreparedForward | None = cache.prepared
        if ready is None or type(ready.struct) is not self.functions.cache:
            ready = cache.prepared = self._prepare(cache, hidden)
        return ready

    def _prepare(self, cache: RaggedCache, hidden: Tensor) -> PreparedForward:
        slots, positions = cache.destinations()
        where: tuple[Tensor, ...] = (slots, positions, positions)
        if cache.tree is not None:
            where = slots, positions, cache.tree.into[1], cache.tree.forks, cache.tree.begins, cache.tree.paths
        names = ("slots", "positions", "places", "forks", "begins", "paths")
        struct = self.functions.cache(**dict(zip(names, map(address, where), strict=False)))
        return PreparedForward(struct, where, hidden.new_empty(0))

    def _inputs(self, hidden: Tensor) -> tuple[Tensor, int, Tensor]:
        """Hidden states one after the other, how many they are, and scratch space."""
        rows = hidden.contiguous()
        tokens = rows.numel() // rows.shape[-1]
        return rows, tokens, rows.new_empty(self.scratch(tokens))
