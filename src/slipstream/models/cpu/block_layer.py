"""A decoder layer over a GGUF file's blocks in one call of `csrc/blocks/float_layer.c`, in float32.

As `compiled_layer.py`, whose specification it shares: `fused_layer.LayerOps`, operator by operator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.models.cpu.block_linear import BlockLinear
from slipstream.models.cpu.block_structs import (
    LARGEST_HEAD,
    MOST_REPEATS,
    FloatCacheStruct,
    FloatLayerStruct,
    FloatNormStruct,
)
from slipstream.models.cpu.compiled_layer import Activation, recognise
from slipstream.models.cpu.kernel_build import address
from slipstream.models.fast_path_warnings import warn_slower
from slipstream.models.hf.fused_layer import AttentionSpec, LayerOps, RootMeanSquare, Rope
from slipstream.models.hf.ragged_attention import RaggedCache


class BlockLayerOps:
    """What `LayerOps` computes, compiled; see `Ops`. shape_independent: known once a layer has been computed."""

    def __init__(self, ops: LayerOps, activation: Activation) -> None:
        """ops: such that `recognise` gives this activation, over `BlockLinear`s."""
        linears: tuple[BlockLinear, ...] = (ops.qkv, ops.out, ops.gate_up, ops.down)  # type: ignore[assignment]
        self._linears, self._library = linears, linears[0].parts[0].library
        self.heads, self.key_heads, self._size = ops.heads, ops.key_heads, ops.size
        self._norm_weights: list[Tensor] = []
        norms = (ops.before_attention, *(ops.head_norms or (None, None)), ops.after_attention)
        structs = [self._norm(norm) for norm in (*norms, ops.before_feed_forward, ops.after_feed_forward)]
        sizes = ops.qkv.in_features, ops.inner, self.heads, self.key_heads, self._size, linears[0].planes
        self._layer = FloatLayerStruct(*(linear.weights for linear in linears), *structs, *sizes, *activation)
        self._attends = self._size <= LARGEST_HEAD and self.heads <= MOST_REPEATS * self.key_heads
        self.shape_independent = False

    def _norm(self, norm: RootMeanSquare | None) -> FloatNormStruct:
        if norm is None:
            return FloatNormStruct(None, 0.0)
        self._norm_weights.append(norm.weight[0])
        return FloatNormStruct(address(self._norm_weights[-1]), norm.eps)

    def project_qkv_rope(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """See `Ops.project_qkv_rope`."""
        batch, width = hidden.shape[:2]
        out = hidden.new_empty(batch, width, self.heads + 2 * self.key_heads, self._size)
        self._call(self._library.project_qkv_rope, hidden, (*self._rope(hidden, rope), out))
        heads = out.transpose(1, 2)
        both = self.heads + self.key_heads
        return heads[:, :both], heads[:, both:]

    def residual_mlp(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """See `Ops.residual_mlp`."""
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        self._call(self._library.residual_mlp, hidden, (out,), attended.contiguous())
        return out

    def whole_layer(self, hidden: Tensor, rope: Rope, cache: RaggedCache, spec: AttentionSpec) -> Tensor | None:
        """See `Ops.whole_layer`."""
        keys, values = cache.of_layer(spec.index, hidden.new_empty(0, self.key_heads, 0, self._size))
        if not self._attends or keys.dtype != hidden.dtype:
            return None
        slots, positions = cache.destinations()
        tree = cache.tree
        where = [address(slots), address(positions), address(positions), None, None, None]
        if tree is not None:
            where[2:] = map(address, (tree.into[1], tree.forks, tree.begins, tree.paths))
        numbers = address(keys), address(values), keys.shape[2], spec.window or 0, spec.scaling
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        cached = FloatCacheStruct(*numbers, *where)
        self._call(self._library.whole_layer, hidden, (*self._rope(hidden, rope), out), cached=cached)
        self.shape_independent = True
        return out

    def _rope(self, hidden: Tensor, rope: Rope) -> list[Tensor]:
        return [part.to(hidden.dtype).expand(*hidden.shape[:2], self._size).contiguous() for part in rope]

    def _call(
        self,
        function: Any,
        hidden: Tensor,
        others: Sequence[Tensor],
        attended: Tensor | None = None,
        cached: FloatCacheStruct | None = None,
    ) -> None:
        """See `CompiledOps._call`."""
        rows, this = hidden.contiguous(), ctypes.byref(self._layer)
        tokens = ctypes.c_int64(rows.numel() // rows.shape[-1])
        scratch = rows.new_empty(self._library.float_scratch(this, tokens))
        first = [] if cached is None else [ctypes.byref(cached)]
        inputs = [rows] if attended is None else [rows, attended]
        before, after = ([ctypes.c_void_p(x.data_ptr()) for x in some] for some in (inputs, (*others, scratch)))
        function(this, *first, *before, tokens, *after)


def is_of_blocks(ops: LayerOps) -> bool:
    """Whether all weights of a layer are a file's blocks."""
    return all(isinstance(linear, BlockLinear) for linear in (ops.qkv, ops.out, ops.gate_up, ops.down))


def block_layer_ops(ops: LayerOps) -> BlockLayerOps | None:
    """The compiled form of a layer of blocks; None, with a warning, where its form is not the kernels'."""
    activation = recognise(ops)
    if isinstance(activation, str):
        warn_slower(f"layers are not compiled: {activation}")
        return None
    return BlockLayerOps(ops, activation)
