"""Calls of a compiled decoder layer: `csrc/layer.c` and `csrc/blocks/float_layer.c` take their arguments alike."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.models.cpu.kernel_build import address
from slipstream.models.hf.fused_layer import AttentionSpec, LayerOps, RootMeanSquare, Rope
from slipstream.models.hf.ragged_attention import RaggedCache


@dataclass(frozen=True)
class LayerFunctions:
    """The compiled functions for one kind of weights.

    project, feed_forward, whole: see `Ops`. scratch: numbers of memory that they need for so many tokens. cache: the
    struct that tells `whole` where keys and values are.
    """

    project: Any
    feed_forward: Any
    whole: Any
    scratch: Callable[[int], int]
    cache: type[ctypes.Structure]


class LayerCalls:
    """What `Ops` computes, by compiled functions. layer: the struct they take, which lives as long as this object."""

    def __init__(self, functions: LayerFunctions, layer: ctypes.Structure, ops: LayerOps) -> None:
        self._functions, self._layer = functions, ctypes.byref(layer)
        self._heads, self._key_heads, self._size = ops.heads, ops.key_heads, ops.size

    def project_qkv_rope(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """See `Ops.project_qkv_rope`."""
        both = self._heads + self._key_heads
        out = hidden.new_empty(*hidden.shape[:2], both + self._key_heads, self._size)
        self._call(self._functions.project, hidden, (*self._rope(hidden, rope), out))
        heads = out.transpose(1, 2)
        return heads[:, :both], heads[:, both:]

    def residual_mlp(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """See `Ops.residual_mlp`."""
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        self._call(self._functions.feed_forward, hidden, (out,), attended.contiguous())
        return out

    def whole_layer(self, hidden: Tensor, rope: Rope, cache: RaggedCache, spec: AttentionSpec) -> Tensor | None:
        """See `Ops.whole_layer`; None if keys and values are of another type."""
        keys, values = cache.of_layer(spec.index, hidden.new_empty(0, self._key_heads, 0, self._size))
        if keys.dtype != hidden.dtype:
            return None
        slots, positions = cache.destinations()
        tree = cache.tree
        where = [address(slots), address(positions), address(positions), None, None, None]
        if tree is not None:
            where[2:] = map(address, (tree.into[1], tree.forks, tree.begins, tree.paths))
        numbers = address(keys), address(values), keys.shape[2], spec.window or 0, spec.scaling
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        cached = self._functions.cache(*numbers, *where)
        self._call(self._functions.whole, hidden, (*self._rope(hidden, rope), out), cached=cached)
        return out

    def _rope(self, hidden: Tensor, rope: Rope) -> list[Tensor]:
        return [part.to(hidden.dtype).expand(*hidden.shape[:2], self._size).contiguous() for part in rope]

    def _call(
        self,
        function: Any,
        hidden: Tensor,
        others: Sequence[Tensor],
        attended: Tensor | None = None,
        cached: ctypes.Structure | None = None,
    ) -> None:
        """Call a function: the layer, the cache, hidden states, attention's output, tokens, others, scratch.

        What is None is left out.
        """
        rows = hidden.contiguous()
        tokens = rows.numel() // rows.shape[-1]
        scratch = rows.new_empty(self._functions.scratch(tokens))
        first = [] if cached is None else [ctypes.byref(cached)]
        inputs = [rows] if attended is None else [rows, attended]
        before, after = ([ctypes.c_void_p(x.data_ptr()) for x in some] for some in (inputs, (*others, scratch)))
        function(self._layer, *first, *before, ctypes.c_int64(tokens), *after)


def norms_of(ops: LayerOps) -> list[RootMeanSquare | None]:
    """The norms of a layer in the order of the structs; None where it has none."""
    around_attention = ops.before_attention, *(ops.head_norms or (None, None)), ops.after_attention
    return [*around_attention, ops.before_feed_forward, ops.after_feed_forward]


def linears_of(ops: LayerOps) -> tuple[Any, Any, Any, Any]:
    """The linear layers of a layer in the order of the structs."""
    return ops.qkv, ops.out, ops.gate_up, ops.down
