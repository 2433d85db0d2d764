"""A decoder layer in one call of `kernels/layer.c`, or in two around an attention that the kernels do not take.

The specification is `lean.Parts`, operator by operator, with which each layer is compared before it is used.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.models.cpu.compressed_linear import NativeLinear, Weights
from slipstream.models.cpu.kernel_build import address, kernels
from slipstream.models.cpu.quantised_linear import QuantisedLinear
from slipstream.models.hf.fused_layer import Parts, RootMeanSquare, Spot
from slipstream.models.hf.ragged_attention import RaggedSlots

LANES = 16  # numbers that the kernels take at a time
SILU, GELU = (1.0, 0.0), (math.sqrt(8 / math.pi), 0.044715 * math.sqrt(8 / math.pi))  # slope and cubic, see layer.c
MANY = 1 << 40  # tokens
LARGEST, HEADS = 256, 64  # size of a head, and query heads that share a key head, in attention.c
CLOSE = 0.01  # of an activation to one of these; its outputs are bfloat16


class Norm(ctypes.Structure):
    """`struct norm` of layer.c."""

    _fields_ = [("weight", ctypes.c_void_p), ("eps", ctypes.c_float), ("rounds_first", ctypes.c_int)]


class Layer(ctypes.Structure):
    """`struct layer` of layer.c."""

    _fields_ = [
        *((name, Weights) for name in ("qkv", "out", "gate_up", "down")),
        *((name, Norm) for name in ("before_attention", "queries", "keys", "after_attention")),
        *((name, Norm) for name in ("before_feed_forward", "after_feed_forward")),
        *((name, ctypes.c_long) for name in ("hidden", "inner", "heads", "key_heads", "size")),
        *((name, ctypes.c_float) for name in ("slope", "cubic")),
    ]


class Memory(ctypes.Structure):
    """`struct memory` of attention.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_long) for name in ("length", "window")),
        ("scaling", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("slots", "positions")),
    ]


class NativeParts:
    """What `Parts` computes, compiled."""

    def __init__(self, parts: Parts, library: Any, activation: tuple[float, float]) -> None:
        """parts: such that `fits` gives this activation."""
        self._parts, self._library = parts, library  # holds the weights
        self.heads, self.key_heads, self._size = parts.heads, parts.key_heads, parts.size
        head_norms = parts.head_norms or (None, None)
        norms = (parts.before_attention, *head_norms, parts.after_attention)
        self._weights: list[Tensor] = []
        kept = [self._norm(norm) for norm in (*norms, parts.before_feed_forward, parts.after_feed_forward)]
        linears = [_kernel(linear) for linear in _linears(parts)]
        self._most = min(
            (linear.narrow for linear in _linears(parts) if isinstance(linear, QuantisedLinear)), default=MANY
        )
        sizes = parts.qkv.in_features, parts.inner, self.heads, self.key_heads, self._size
        self._layer = Layer(*(linear.weights for linear in linears if linear is not None), *kept, *sizes, *activation)
        self._attends = self._size % 64 == 0 and self._size <= LARGEST and self.heads <= HEADS * self.key_heads
        self._this, self._space = ctypes.byref(self._layer), library.space_for(ctypes.byref(self._layer))

    def _norm(self, norm: RootMeanSquare | None) -> Norm:
        if norm is None:
            return Norm(None, 0.0, 0)
        weight, rounds_first = norm.weight
        self._weights.append(weight)
        return Norm(address(weight), norm.eps, rounds_first)

    def enter(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See `Parts.enter`."""
        batch, width = hidden.shape[:2]
        if batch * width > self._most:
            return self._parts.enter(hidden, cos, sin)
        out = hidden.new_empty(batch, width, self.heads + 2 * self.key_heads, self._size)
        self._call(self._library.enter, hidden, (*self._turns(hidden, cos, sin), out))
        heads = out.transpose(1, 2)
        both = self.heads + self.key_heads
        return heads[:, :both], heads[:, both:]

    def leave(self, hidden: Tensor, found: Tensor) -> Tensor:
        """See `Parts.leave`."""
        if hidden.shape[0] * hidden.shape[1] > self._most:
            return self._parts.leave(hidden, found)
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        self._call(self._library.leave, hidden, (out,), found.contiguous())
        return out

    def through(self, hidden: Tensor, turns: tuple[Tensor, Tensor], cache: RaggedSlots, spot: Spot) -> Tensor | None:
        """See `Parts.through`."""
        if not self._attends or hidden.shape[0] * hidden.shape[1] > self._most:
            return None
        keys, values = cache.memory(spot.index, hidden.new_empty(0, self.key_heads, 0, self._size))
        if keys.dtype != hidden.dtype:
            return None
        slots, positions = cache.places()
        where = address(slots), address(positions)
        memory = Memory(address(keys), address(values), keys.shape[2], spot.window or 0, spot.scaling, *where)
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        self._call(self._library.through, hidden, (*self._turns(hidden, *turns), out), memory=memory)
        return out

    def _turns(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        return [turn.to(hidden.dtype).expand(*hidden.shape[:2], self._size).contiguous() for turn in (cos, sin)]

    def _call(
        self,
        function: Any,
        hidden: Tensor,
        behind: Sequence[Tensor],
        found: Tensor | None = None,
        memory: Memory | None = None,
    ) -> None:
        """Call a function of layer.c: the layer, the memory, hidden states, what attention found, their number, ..."""
        rows = hidden.contiguous()
        tokens = rows.numel() // rows.shape[-1]
        space = rows.new_empty(tokens * self._space)
        first = [] if memory is None else [ctypes.byref(memory)]
        given = [rows] if found is None else [rows, found]
        before, last = ([ctypes.c_void_p(x.data_ptr()) for x in some] for some in (given, (*behind, space)))
        function(self._this, *first, *before, ctypes.c_long(tokens), *last)


def native_parts(parts: Parts) -> NativeParts | None:
    """The compiled form, or None where there is none for these parts."""
    library, activation = kernels(), fits(parts)
    return None if library is None or activation is None else NativeParts(parts, library, activation)


def fits(parts: Parts) -> tuple[float, float] | None:
    """The slope and cubic term of the activation if the kernels can compute this layer, else None."""
    if any(_kernel(linear) is None for linear in _linears(parts)):
        return None
    if parts.qkv.in_features % LANES or parts.inner % LANES or parts.size % (2 * LANES):
        return None
    x = torch.linspace(-9, 9, 1001).to(torch.bfloat16)
    expected, exact = parts.act(x.clone()).float(), x.float()
    for slope, cubic in (SILU, GELU):
        found = exact * torch.sigmoid(slope * exact + cubic * exact**3)
        if torch.allclose(found, expected, rtol=CLOSE, atol=1e-4):
            return slope, cubic
    return None


def _linears(parts: Parts) -> tuple[Any, Any, Any, Any]:
    return parts.qkv, parts.out, parts.gate_up, parts.down


def _kernel(linear: Any) -> NativeLinear | None:
    """The layer for few tokens, if our own kernels compute it."""
    few = linear.few if isinstance(linear, QuantisedLinear) else linear
    return few if isinstance(few, NativeLinear) else None
