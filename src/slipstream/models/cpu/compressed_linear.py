"""Linear layers whose bfloat16 weights take 12 bits each, without loss.

A forward of few tokens takes as long as reading its weights, so a quarter less to read is a quarter less time. No
weight changes: `csrc/compression.c` says how. The specification of a compressed layer is the `nn.Linear` it replaces.
"""

from __future__ import annotations

import ctypes
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.cpu.bfloat16_kernels import kernels
from slipstream.models.cpu.c_structs import BLOCK, PANEL, QUAD, SPACE, LinearStruct
from slipstream.models.cpu.kernel_build import address
from slipstream.models.cpu.packed_linear import packed

WORTH = 1 / 64  # share of exceptions above which a weight is packed instead


class KernelLinear(nn.Module):
    """A linear layer computed by `multiply` of the kernels. Subclasses make its weights."""

    in_features: int
    out_features: int

    def _set_weights(self, library: Any, bits: int, arrays: tuple[Tensor | None, ...]) -> None:
        """arrays: data, tables, offsets, exceptions and bias of `struct linear`."""
        self._arrays, self._multiply = arrays, library.multiply  # the struct has only their addresses
        self.weights = LinearStruct(bits, self.in_features, self.out_features, *map(address, arrays))

    def first(self, outputs: int) -> KernelLinear:
        """The layer of the first `outputs` outputs, over the same weights."""
        part = copy(self)
        part.out_features, part.weights = outputs, LinearStruct.from_buffer_copy(self.weights)
        part.weights.outputs = outputs
        return part

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] bfloat16 -> [..., out_features]."""
        if x.dtype != torch.bfloat16 or x.shape[-1] != self.in_features:
            raise ValueError(f"x: {x.dtype} [..., {x.shape[-1]}]; allowed: bfloat16 [..., {self.in_features}]")
        rows = x.contiguous()
        out = rows.new_empty(*x.shape[:-1], self.out_features)
        count = rows.numel() // self.in_features
        space = rows.new_empty(-(-self.in_features // BLOCK) * count * BLOCK * SPACE)
        weights = ctypes.byref(self.weights)
        self._multiply(weights, _pointer(rows), ctypes.c_int64(count), _pointer(out), _pointer(space))
        return out


class CompressedLinear(KernelLinear):
    """An `nn.Linear` of bfloat16 weights in 12 bits each. A token's result does not depend on its neighbours."""

    def __init__(self, linear: nn.Linear, library: Any) -> None:
        """library: what `kernels` returns. in_features must be a multiple of 4."""
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = linear.weight.detach().contiguous()
        panels, blocks = -(-self.out_features // PANEL), -(-self.in_features // BLOCK)
        tables, counts = torch.empty(panels, 32, dtype=torch.uint8), torch.empty(panels * blocks, dtype=torch.int32)
        source = _pointer(weight), ctypes.c_int64(self.out_features), ctypes.c_int64(self.in_features)
        library.choose_codes(*source, _pointer(tables), _pointer(counts))
        offsets = torch.zeros(panels * blocks + 1, dtype=torch.int32)
        torch.cumsum(counts, 0, dtype=torch.int32, out=offsets[1:])
        self.exceptions = int(offsets[-1])
        if not self.is_worth_it:
            return
        data = torch.empty(panels, self.in_features // 4, QUAD, dtype=torch.uint8)
        exceptions = torch.empty(self.exceptions, dtype=torch.int32)
        library.compress_weights(*source, *map(_pointer, (tables, offsets, data, exceptions)))
        bias = None if self.bias is None else self.bias.detach()
        self._set_weights(library, 12, (data, tables, offsets, exceptions, bias))

    @property
    def is_worth_it(self) -> bool:
        """Whether exceptions are few."""
        return self.exceptions <= WORTH * self.in_features * self.out_features


def compressed_or_packed(linear: nn.Linear) -> nn.Module:
    """A layer in the form that is fastest here: compressed, or packed where compression is impossible or no gain."""
    if linear.weight.dtype == torch.bfloat16 and linear.in_features % 4 == 0 and linear.weight.device.type == "cpu":
        library = kernels()
        if library is not None:
            compressed = CompressedLinear(linear, library)
            if compressed.is_worth_it:
                return compressed
    return packed(linear)


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(address(tensor))
