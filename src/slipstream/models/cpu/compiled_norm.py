"""RMSNorm by the kernels, for draft heads.

PyTorch needs eight operators for it; in a short step their calls take longer than the arithmetic.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from slipstream.models.cpu.kernel_libraries import address, kernels
from slipstream.models.cpu.structs import LANES, NormStruct


class CompiledNorm:
    """RMSNorm over the last dimension of bfloat16 numbers."""

    def __init__(self, weight: Tensor, eps: float, library: Any) -> None:
        self._weight, self._library = weight.float().contiguous(), library  # kept: the struct has only its address
        self._struct = NormStruct(address(self._weight), eps=eps)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size] -> the same, in bfloat16."""
        rows, size = x.to(torch.bfloat16).contiguous(), len(self._weight)
        out = torch.empty_like(rows)
        pointers = address(rows), rows.numel() // size, size, address(out)
        self._library.normalize_tokens(ctypes.addressof(self._struct), *pointers)
        return out


def compiled_norm(weight: Tensor, eps: float) -> CompiledNorm | None:
    """A compiled norm with this weight [size]; None if the kernels do not support its type or size."""
    fits = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and len(weight) % LANES == 0
    library = kernels() if fits else None
    return None if library is None else CompiledNorm(weight, eps, library)
