"""Linear layers whose bfloat16 weights are kept in 12 bits each, exactly, for processors with AVX-512 and bfloat16.

A forward of few tokens takes as long as reading its weights, so a quarter less to read is a quarter less time. No
weight changes: `compressed.c` says how. The specification of a compressed layer is the `nn.Linear` it replaces.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.backends.native import kernels
from slipstream.backends.packed import packed

PANEL, BLOCK, QUAD = 32, 128, 192  # outputs, inputs and bytes, as in compressed.c
WORTH = 1 / 64  # share of exceptions above which a weight is packed instead


class CompressedLinear(nn.Module):
    """An `nn.Linear` of bfloat16 weights in 12 bits each. The same bits for a token whatever tokens are beside it."""

    def __init__(self, linear: nn.Linear, library: Any) -> None:
        """library: what `kernels` returns. in_features must be a multiple of 4."""
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = linear.weight.detach().contiguous()
        panels, blocks = -(-self.out_features // PANEL), -(-self.in_features // BLOCK)
        sizes = ctypes.c_long(self.out_features), ctypes.c_long(self.in_features)
        self._tables = torch.empty(panels, 32, dtype=torch.uint8)
        counts = torch.empty(panels * blocks, dtype=torch.int32)
        library.survey(_address(weight), *sizes, _address(self._tables), _address(counts))
        self._offsets = torch.zeros(panels * blocks + 1, dtype=torch.int32)
        torch.cumsum(counts, 0, dtype=torch.int32, out=self._offsets[1:])
        self.exceptions = int(self._offsets[-1])
        self._whole = torch.empty(self.exceptions, dtype=torch.int32)
        if not self.is_worth_it:
            return
        self._data = torch.empty(panels, self.in_features // 4, QUAD, dtype=torch.uint8)
        kept = self._data, self._tables, self._offsets, self._whole
        library.fold(_address(weight), *sizes, *map(_address, (kept[1], kept[2], kept[0], kept[3])))
        bias = None if self.bias is None else self.bias.detach()
        self._multiply, self._sizes = library.multiply, (sizes[1], sizes[0])
        self._addresses = (*map(_address, kept), None if bias is None else _address(bias))

    @property
    def is_worth_it(self) -> bool:
        """Whether exceptions are few."""
        return self.exceptions <= WORTH * self.in_features * self.out_features

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] bfloat16 -> [..., out_features]."""
        if x.dtype != torch.bfloat16 or x.shape[-1] != self.in_features:
            raise ValueError(f"x: {x.dtype} [..., {x.shape[-1]}]; allowed: bfloat16 [..., {self.in_features}]")
        rows = x.contiguous()
        out = rows.new_empty(*x.shape[:-1], self.out_features)
        count = rows.numel() // self.in_features
        space = rows.new_empty(-(-self.in_features // BLOCK) * count * BLOCK)
        self._multiply(
            _address(rows), ctypes.c_long(count), *self._sizes, *self._addresses, _address(out), _address(space)
        )
        return out


def stored(linear: nn.Linear) -> nn.Module:
    """A layer in the form that is the fastest here: compressed, or packed where it cannot be or would gain nothing."""
    if linear.weight.dtype == torch.bfloat16 and linear.in_features % 4 == 0 and linear.weight.device.type == "cpu":
        library = kernels()
        if library is not None:
            made = CompressedLinear(linear, library)
            if made.is_worth_it:
                return made
    return packed(linear)


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
