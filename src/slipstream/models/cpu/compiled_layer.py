"""A decoder layer in one call of `csrc/layer.c`, or in two around an attention that the kernels cannot compute.

The specification is `fused_layer.LayerOps`, operator by operator; every layer is compared with it before it is used.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.models.cpu.bfloat16_kernels import kernels
from slipstream.models.cpu.c_structs import LANES, MAX_HEAD_SIZE, MAX_SHARED_HEADS, CacheStruct, LayerStruct, NormStruct
from slipstream.models.cpu.compressed_linear import CompressedLinear, KernelLinear
from slipstream.models.cpu.kernel_build import address
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
        self._plain, self._library = ops, library  # the struct has only the addresses of the weights
        self.heads, self.key_heads, self._size = ops.heads, ops.key_heads, ops.size
        head_norms = ops.head_norms or (None, None)
        norms = (ops.before_attention, *head_norms, ops.after_attention)
        self._norm_weights: list[Tensor] = []
        structs = [self._norm(norm) for norm in (*norms, ops.before_feed_forward, ops.after_feed_forward)]
        linears = [_kernel(linear) for linear in _linears(ops)]
        self._most_tokens = min(
            (linear.narrow for linear in _linears(ops) if isinstance(linear, QuantisedLinear)), default=MANY
        )
        sizes = ops.qkv.in_features, ops.inner, self.heads, self.key_heads, self._size
        weights = [linear.weights for linear in linears if linear is not None]
        self._layer = LayerStruct(*weights, *structs, *sizes, *activation)
        self._attends = (
            self._size % 64 == 0 and self._size <= MAX_HEAD_SIZE and self.heads <= MAX_SHARED_HEADS * self.key_heads
        )
        self._as_if_alone = self._attends and all(isinstance(linear, CompressedLinear) for linear in _linears(ops))
        self.shape_independent = False
        self._this, self._scratch = ctypes.byref(self._layer), library.scratch_per_token(ctypes.byref(self._layer))

    def _norm(self, norm: RootMeanSquare | None) -> NormStruct:
        if norm is None:
            return NormStruct(None, 0.0, 0)
        weight, rounds_first = norm.weight
        self._norm_weights.append(weight)
        return NormStruct(address(weight), norm.eps, rounds_first)

    def project_qkv_rope(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """See `Ops.project_qkv_rope`."""
        batch, width = hidden.shape[:2]
        if batch * width > self._most_tokens:
            return self._plain.project_qkv_rope(hidden, rope)
        out = hidden.new_empty(batch, width, self.heads + 2 * self.key_heads, self._size)
        self._call(self._library.project_qkv_rope, hidden, (*self._rope(hidden, rope), out))
        heads = out.transpose(1, 2)
        both = self.heads + self.key_heads
        return heads[:, :both], heads[:, both:]

    def residual_mlp(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """See `Ops.residual_mlp`."""
        if hidden.shape[0] * hidden.shape[1] > self._most_tokens:
            return self._plain.residual_mlp(hidden, attended)
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        self._call(self._library.residual_mlp, hidden, (out,), attended.contiguous())
        return out

    def whole_layer(self, hidden: Tensor, rope: Rope, cache: RaggedCache, spec: AttentionSpec) -> Tensor | None:
        """See `Ops.whole_layer`."""
        if not self._attends or hidden.shape[0] * hidden.shape[1] > self._most_tokens:
            return None
        keys, values = cache.of_layer(spec.index, hidden.new_empty(0, self.key_heads, 0, self._size))
        if keys.dtype != hidden.dtype:
            return None
        slots, positions = cache.destinations()
        tree = cache.tree
        where = [address(slots), address(positions), address(positions), None, None, None]
        if tree is not None:
            where[2:] = map(address, (tree.into[1], tree.forks, tree.begins, tree.paths))
        cached = CacheStruct(address(keys), address(values), keys.shape[2], spec.window or 0, spec.scaling, *where)
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        self._call(self._library.whole_layer, hidden, (*self._rope(hidden, rope), out), cached=cached)
        self.shape_independent = self._as_if_alone
        return out

    def _rope(self, hidden: Tensor, rope: Rope) -> list[Tensor]:
        return [part.to(hidden.dtype).expand(*hidden.shape[:2], self._size).contiguous() for part in rope]

    def _call(
        self,
        function: Any,
        hidden: Tensor,
        others: Sequence[Tensor],
        attended: Tensor | None = None,
        cached: CacheStruct | None = None,
    ) -> None:
        """Call a function of layer.c: the layer, the cache, hidden states, attention's output, tokens, others, scratch.

        What is None is left out.
        """
        rows = hidden.contiguous()
        tokens = rows.numel() // rows.shape[-1]
        scratch = rows.new_empty(tokens * self._scratch)
        first = [] if cached is None else [ctypes.byref(cached)]
        inputs = [rows] if attended is None else [rows, attended]
        before, after = ([ctypes.c_void_p(x.data_ptr()) for x in some] for some in (inputs, (*others, scratch)))
        function(self._this, *first, *before, ctypes.c_int64(tokens), *after)


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
    x = torch.linspace(-9, 9, 1001).to(torch.bfloat16)
    expected, exact = ops.act(x.clone()).float(), x.float()
    for slope, cubic in (SILU, GELU):
        computed = exact * torch.sigmoid(slope * exact + cubic * exact**3)
        if torch.allclose(computed, expected, rtol=CLOSE, atol=1e-4):
            return slope, cubic
    return f"the activation {type(ops.act).__name__} is neither SiLU nor GELU by its tanh formula"


def _linears(ops: LayerOps) -> tuple[Any, Any, Any, Any]:
    return ops.qkv, ops.out, ops.gate_up, ops.down


def _kernel(linear: Any) -> KernelLinear | None:
    """The layer for few tokens, if our own kernels compute it."""
    few = linear.few if isinstance(linear, QuantisedLinear) else linear
    return few if isinstance(few, KernelLinear) else None
