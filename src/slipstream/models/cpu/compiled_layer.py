"""A decoder layer in one call of `csrc/layer.c`, or in two around an attention that the kernels cannot compute.

The specification is `fused_layer.LayerOps`, operator by operator; every layer is compared with it before it is used.
"""

from __future__ import annotations

import math
from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from slipstream.models.cpu.c_structs import LANES, MAX_HEAD_SIZE, MAX_SHARED_HEADS, CacheStruct, LayerStruct, NormStruct
from slipstream.models.cpu.compressed_linear import CompressedLinear, KernelLinear
from slipstream.models.cpu.kernel_build import address, kernels
from slipstream.models.cpu.layer_calls import LayerCalls, LayerFunctions, linears_of, norms_of
from slipstream.models.cpu.quantised_linear import QuantisedLinear
from slipstream.models.fast_path_warnings import warn_slower
from slipstream.models.hf.fused_layer import AttentionSpec, LayerOps, RootMeanSquare, Rope
from slipstream.models.hf.ragged_attention import RaggedCache

Activation = tuple[float, float]  # slope and cubic term, see `struct layer`
SILU, GELU = (1.0, 0.0), (math.sqrt(8 / math.pi), 0.044715 * math.sqrt(8 / math.pi))
MANY = 1 << 40  # tokens
CLOSE = 0.01  # relative difference from one of these activations; its outputs are bfloat16


class CompiledOps:
    """What `LayerOps` computes, compiled; see `Ops`.

    shape_independent: whether whole layers are computed, and each token as if it were alone: any number of tokens, with
    weights of 12 bits. Known once a layer has been computed.
    """

    def __init__(self, ops: LayerOps, library: Any, activation: Activation) -> None:
        """ops: such that `recognise` gives this activation."""
        self._plain = ops  # the struct has only the addresses of the weights
        self.heads, self.key_heads = ops.heads, ops.key_heads
        self._norm_weights: list[Tensor] = []
        structs = [self._norm(norm) for norm in norms_of(ops)]
        linears = [_kernel(linear) for linear in linears_of(ops)]
        self._most_tokens = min(
            (linear.narrow for linear in linears_of(ops) if isinstance(linear, QuantisedLinear)), default=MANY
        )
        sizes = ops.qkv.in_features, ops.inner, ops.heads, ops.key_heads, ops.size
        weights = [linear.weights for linear in linears if linear is not None]
        layer = LayerStruct(*weights, *structs, *sizes, *activation)
        self._attends = (
            ops.size % 64 == 0 and ops.size <= MAX_HEAD_SIZE and ops.heads <= MAX_SHARED_HEADS * ops.key_heads
        )
        self._as_if_alone = self._attends and all(isinstance(linear, CompressedLinear) for linear in linears_of(ops))
        self.shape_independent = False
        parts, per_token = (library.project_qkv_rope, library.residual_mlp), library.scratch_per_token(byref(layer))
        functions = LayerFunctions(*parts, library.whole_layer, lambda tokens: tokens * per_token, CacheStruct)
        self._calls = LayerCalls(functions, layer, ops)

    def _norm(self, norm: RootMeanSquare | None) -> NormStruct:
        if norm is None:
            return NormStruct(None, 0.0, 0)
        weight, rounds_first = norm.weight
        self._norm_weights.append(weight)
        return NormStruct(address(weight), norm.eps, rounds_first)

    def project_qkv_rope(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """See `Ops.project_qkv_rope`."""
        few = self._are_few(hidden)
        return self._calls.project_qkv_rope(hidden, rope) if few else self._plain.project_qkv_rope(hidden, rope)

    def residual_mlp(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """See `Ops.residual_mlp`."""
        few = self._are_few(hidden)
        return self._calls.residual_mlp(hidden, attended) if few else self._plain.residual_mlp(hidden, attended)

    def whole_layer(self, hidden: Tensor, rope: Rope, cache: RaggedCache, spec: AttentionSpec) -> Tensor | None:
        """See `Ops.whole_layer`."""
        if not self._attends or not self._are_few(hidden):
            return None
        out = self._calls.whole_layer(hidden, rope, cache, spec)
        if out is not None:
            self.shape_independent = self._as_if_alone
        return out

    def _are_few(self, hidden: Tensor) -> bool:
        return hidden.shape[0] * hidden.shape[1] <= self._most_tokens


def compiled_ops(ops: LayerOps) -> CompiledOps | None:
    """The compiled form; None, with a warning, where the layer's weights are the kernels' but its form is not."""
    if any(_kernel(linear) is None for linear in linears_of(ops)):
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
    x = torch.linspace(-9, 9, 1001).to(torch.bfloat16)
    expected, exact = ops.act(x.clone()).float(), x.float()
    for slope, cubic in (SILU, GELU):
        computed = exact * torch.sigmoid(slope * exact + cubic * exact**3)
        if torch.allclose(computed, expected, rtol=CLOSE, atol=1e-4):
            return slope, cubic
    return f"the activation {type(ops.act).__name__} is neither SiLU nor GELU by its tanh formula"


def _kernel(linear: Any) -> KernelLinear | None:
    """The layer for few tokens, if our own kernels compute it."""
    few = linear.few if isinstance(linear, QuantisedLinear) else linear
    return few if isinstance(few, KernelLinear) else None
