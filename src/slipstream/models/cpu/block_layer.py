"""A decoder layer over a GGUF file's blocks in one call of `csrc/blocks/float_layer.c`, in float32."""

from __future__ import annotations

import ctypes

from torch import Tensor

from slipstream.models.cpu.block_linear import BlockLinear
from slipstream.models.cpu.block_structs import (
    LARGEST_HEAD,
    MOST_REPEATS,
    FloatCacheStruct,
    FloatLayerStruct,
    FloatNormStruct,
)
from slipstream.models.cpu.compiled_layer import recognise
from slipstream.models.cpu.kernel_build import address
from slipstream.models.cpu.layer_calls import LayerCalls, LayerFunctions
from slipstream.models.decoder.fused_layer import Activation, LayerOps, RootMeanSquare
from slipstream.models.fast_path_warnings import warn_slower


class BlockLayerOps(LayerCalls):
    """See `LayerCalls`; float32, each token as if it were alone."""

    def __init__(self, ops: LayerOps, activation: Activation) -> None:
        """ops: such that `recognise` gives this activation, over `BlockLinear`s."""
        linears: tuple[BlockLinear, ...] = (ops.qkv, ops.out, ops.gate_up, ops.down)  # type: ignore[assignment]
        self._linears, self._library = linears, linears[0].parts[0].library
        self._norm_weights: list[Tensor] = []
        norms = (ops.before_attention, *(ops.head_norms or (None, None)), ops.after_attention)
        structs = [self.norm(norm) for norm in (*norms, ops.before_feed_forward, ops.after_feed_forward)]
        sizes = ops.qkv.in_features, ops.inner, ops.heads, ops.key_heads, ops.size, linears[0].planes
        layer = FloatLayerStruct(*(linear.weights for linear in linears), *structs, *sizes, *activation)
        self._attends = ops.size <= LARGEST_HEAD and ops.heads <= MOST_REPEATS * ops.key_heads
        super().__init__(ops, LayerFunctions.of(self._library, FloatCacheStruct), layer, alone=True)

    def norm(self, norm: RootMeanSquare | None) -> FloatNormStruct:
        """See `LayerCalls.norm`."""
        if norm is None:
            return FloatNormStruct(None, 0.0)
        self._norm_weights.append(norm.weight[0])
        return FloatNormStruct(address(self._norm_weights[-1]), norm.eps)

    def scratch(self, tokens: int) -> int:
        """See `LayerCalls.scratch`."""
        needed: int = self._library.float_scratch(ctypes.byref(self._layer), ctypes.c_int64(tokens))
        return needed

    def takes(self, hidden: Tensor) -> bool:
        """See `LayerCalls.takes`."""
        return self._attends


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
