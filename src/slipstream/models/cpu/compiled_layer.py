"""A decoder layer in one call of `csrc/layer.c`, or in two around an attention that the kernels cannot compute."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from slipstream.models.cpu.bfloat16_kernels import kernels
from slipstream.models.cpu.c_structs import LANES, MAX_HEAD_SIZE, MAX_SHARED_HEADS, CacheStruct, LayerStruct, NormStruct
from slipstream.models.cpu.compressed_linear import CompressedLinear, KernelLinear
from slipstream.models.cpu.kernel_build import address
from slipstream.models.cpu.layer_calls import MANY, LayerCalls, LayerFunctions
from slipstream.models.cpu.quantised_linear import QuantisedLinear
from slipstream.models.decoder.fused_layer import Activation, LayerOps, RootMeanSquare, Rope, recognise_activation
from slipstream.models.fast_path_warnings import warn_slower


class CompiledOps(LayerCalls):
    """See `LayerCalls`; bfloat16. Each token is computed as if it were alone where the weights have 12 bits."""

    def __init__(self, ops: LayerOps, library: Any, activation: Activation) -> None:
        """ops: such that `recognise` gives this activation."""
        self._plain = ops  # the struct has only the addresses of the weights
        head_norms = ops.head_norms or (None, None)
        norms = (ops.before_attention, *head_norms, ops.after_attention)
        self._norm_weights: list[Tensor] = []
        structs = [self.norm(norm) for norm in (*norms, ops.before_feed_forward, ops.after_feed_forward)]
        linears = [_kernel(linear) for linear in _linears(ops)]
        self._most_tokens = min(
            (linear.narrow for linear in _linears(ops) if isinstance(linear, QuantisedLinear)), default=MANY
        )
        sizes = ops.qkv.in_features, ops.inner, ops.heads, ops.key_heads, ops.size
        weights = [linear.weights for linear in linears if linear is not None]
        layer = LayerStruct(*weights, *structs, *sizes, *activation)
        attends = ops.size % 64 == 0 and ops.size <= MAX_HEAD_SIZE and ops.heads <= MAX_SHARED_HEADS * ops.key_heads
        self._most_attended = self._most_tokens if attends else 0
        self._scratch_per_token: int = library.scratch_per_token(ctypes.byref(layer))
        alone = all(isinstance(linear, CompressedLinear) for linear in _linears(ops))
        super().__init__(ops, LayerFunctions.of(library, CacheStruct), layer, alone=alone)

    def norm(self, norm: RootMeanSquare | None) -> NormStruct:
        """See `LayerCalls.norm`."""
        if norm is None:
            return NormStruct(None, 0.0, 0)
        weight, rounds_first = norm.weight
        self._norm_weights.append(weight)
        return NormStruct(address(weight), norm.eps, rounds_first)

    def scratch(self, tokens: int) -> int:
        """See `LayerCalls.scratch`."""
        return tokens * self._scratch_per_token

    def takes(self, hidden: Tensor) -> bool:
        """See `LayerCalls.takes`."""
        return hidden.shape[0] * hidden.shape[1] <= self._most_attended

    def project_qkv_rope(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """See `Ops.project_qkv_rope`."""
        if hidden.shape[0] * hidden.shape[1] > self._most_tokens:
            return self._plain.project_qkv_rope(hidden, rope)
        return super().project_qkv_rope(hidden, rope)

    def residual_mlp(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """See `Ops.residual_mlp`."""
        if hidden.shape[0] * hidden.shape[1] > self._most_tokens:
            return self._plain.residual_mlp(hidden, attended)
        return super().residual_mlp(hidden, attended)


def compiled_ops(ops: LayerOps) -> CompiledOps | None:
    """The compiled form; None, with a warning, where the layer's weights are the kernels' but its form is not."""
    if any(_kernel(linear) is None for linear in _linears(ops)):
        return None  # its weights are not the kernels', which was said when they were packed
    library = kernels()
    if library is None:
        return None
    activation = recognise(ops)
    if isinstance(activation, str):
        warn_slower(f"layers are not compiled: {activation}")
        return None
    return CompiledOps(ops, library, activation)


def recognise(ops: LayerOps) -> Activation | str:
    """The slope and cubic term of the activation if the kernels can compute this layer, else why they cannot."""
    sizes = {"hidden states": ops.qkv.in_features, "the feed-forward part": ops.inner}
    if odd := [name for name, size in sizes.items() if size % LANES]:
        return f"{sizes[odd[0]]} numbers in {odd[0]}, no multiple of {LANES}"
    if ops.size % (2 * LANES):
        return f"{ops.size} numbers in a head, no multiple of {2 * LANES}"
    return recognise_activation(ops.act)


def _linears(ops: LayerOps) -> tuple[Any, Any, Any, Any]:
    return ops.qkv, ops.out, ops.gate_up, ops.down


def _kernel(linear: Any) -> KernelLinear | None:
    """The layer for few tokens, if our own kernels compute it."""
    few = linear.few if isinstance(linear, QuantisedLinear) else linear
    return few if isinstance(few, KernelLinear) else None
