"""A decoder layer over a GGUF file's blocks in one call of `csrc/blocks/float_layer.c`, in float32.

As `compiled_layer.py`, whose specification it shares: `fused_layer.LayerOps`, operator by operator.
"""

from __future__ import annotations

from ctypes import byref, c_int64

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
from slipstream.models.cpu.layer_calls import LayerCalls, LayerFunctions, linears_of, norms_of
from slipstream.models.fast_path_warnings import warn_slower
from slipstream.models.hf.fused_layer import AttentionSpec, LayerOps, RootMeanSquare, Rope
from slipstream.models.hf.ragged_attention import RaggedCache


class BlockLayerOps:
    """What `LayerOps` computes, compiled; see `Ops`. shape_independent: known once a layer has been computed."""

    def __init__(self, ops: LayerOps, activation: Activation) -> None:
        """ops: such that `recognise` gives this activation, over `BlockLinear`s."""
        linears: tuple[BlockLinear, ...] = linears_of(ops)
        self._linears, library = linears, linears[0].parts[0].library
        self.heads, self.key_heads = ops.heads, ops.key_heads
        self._norm_weights: list[Tensor] = []
        structs = [self._norm(norm) for norm in norms_of(ops)]
        sizes = ops.qkv.in_features, ops.inner, ops.heads, ops.key_heads, ops.size, linears[0].planes
        layer = FloatLayerStruct(*(linear.weights for linear in linears), *structs, *sizes, *activation)
        self._attends = ops.size <= LARGEST_HEAD and ops.heads <= MOST_REPEATS * ops.key_heads
        self.shape_independent = False

        def scratch(tokens: int) -> int:
            return int(library.float_scratch(byref(layer), c_int64(tokens)))

        parts = library.project_heads, library.feed_forward, library.whole_float_layer
        self._calls = LayerCalls(LayerFunctions(*parts, scratch, FloatCacheStruct), layer, ops)

    def _norm(self, norm: RootMeanSquare | None) -> FloatNormStruct:
        if norm is None:
            return FloatNormStruct(None, 0.0)
        self._norm_weights.append(norm.weight[0])
        return FloatNormStruct(address(self._norm_weights[-1]), norm.eps)

    def project_qkv_rope(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """See `Ops.project_qkv_rope`."""
        return self._calls.project_qkv_rope(hidden, rope)

    def residual_mlp(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """See `Ops.residual_mlp`."""
        return self._calls.residual_mlp(hidden, attended)

    def whole_layer(self, hidden: Tensor, rope: Rope, cache: RaggedCache, spec: AttentionSpec) -> Tensor | None:
        """See `Ops.whole_layer`."""
        out = self._calls.whole_layer(hidden, rope, cache, spec) if self._attends else None
        if out is not None:
            self.shape_independent = True
        return out


def is_of_blocks(ops: LayerOps) -> bool:
    """Whether all weights of a layer are a file's blocks."""
    return all(isinstance(linear, BlockLinear) for linear in linears_of(ops))


def block_layer_ops(ops: LayerOps) -> BlockLayerOps | None:
    """The compiled form of a layer of blocks; None, with a warning, where its form is not the kernels'."""
    activation = recognise(ops)
    if isinstance(activation, str):
        warn_slower(f"layers are not compiled: {activation}")
        return None
    return BlockLayerOps(ops, activation)
