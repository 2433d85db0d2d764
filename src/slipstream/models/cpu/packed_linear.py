"""Linear layers for CPUs that lay out their weights once, not at every call: bfloat16 in 12 bits, or oneDNN's layout.

The specification of each is the `nn.Linear` it replaces. A forward of few tokens takes as long as reading the weights,
so reading a quarter less saves a quarter of the time. No weight changes: `csrc/compression.c` explains how. oneDNN's
packed layers use the operators of PyTorch's own CPU freezing, and read their weights at memory speed, too.

Without bfloat16 instructions and without Slipstream's own kernels, float32 copies of bfloat16 weights are packed: the
same weights, more precise sums, twice the memory. PyTorch's own bfloat16 products take several times as long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.cpu.kernel_libraries import address, kernels
from slipstream.models.cpu.processor import memory_bytes
from slipstream.models.cpu.structs import BLOCK, PANEL, QUAD, SPACE, TWELVE_BITS, LinearStruct
from slipstream.models.decoder.fused_linear import is_plain

WIDTH = 4  # tokens for which oneDNN's layout is chosen; it serves any number
SHARE = 0.5  # of the machine's memory that float32 copies of bfloat16 weights may take
WORTH = 1 / 64  # if more of a matrix's weights are exceptions, it is packed instead


class PackedLinear(nn.Module):
    """An `nn.Linear` that keeps its weight only in oneDNN's packed layout; plain if PyTorch has no oneDNN."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.bias, self._dtype = linear.bias, weight.dtype
        self._computed = torch.float32 if needs_float32(weight.dtype) else weight.dtype
        self._bias = None if self.bias is None else self.bias.detach().to(self._computed)
        self._plain = None if torch.backends.mkldnn.is_available() else weight
        if self._plain is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(self._computed), WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        if self._plain is not None:
            return nn.functional.linear(x, self._plain, self.bias)
        x = x.to(self._computed)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out.to(self._dtype)


def needs_float32(dtype: torch.dtype) -> bool:
    """True if weights of this type are packed as float32, because oneDNN has no kernels for them here."""
    return dtype == torch.bfloat16 and torch.backends.mkldnn.is_available() and not _has_bf16()


def _has_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # PyTorch has no public function for it


def unsupported(model: Any) -> str | None:
    """The reason a model cannot be packed; None if it can."""
    has_kernels = model.dtype == torch.bfloat16 and kernels() is not None  # nearly all weights are compressed
    if not torch.backends.mkldnn.is_available() and not has_kernels:
        return "this PyTorch has no oneDNN"
    if (reason := without_plain_weights(model)) is not None:
        return reason
    if model.dtype not in (torch.float32, torch.bfloat16):
        return f"packing needs bfloat16 or float32 weights, not {str(model.dtype).removeprefix('torch.')}"
    if needs_float32(model.dtype) and not has_kernels:
        copies = 4 * sum(module.weight.numel() for module in model.modules() if is_plain(module))
        memory = memory_bytes()
        if memory is not None and copies > SHARE * memory:
            return (
                "this processor has no bfloat16 instructions, and float32 copies of the weights would take "
                f"{copies / 1e9:.0f} of {memory / 1e9:.0f} GB of memory"
            )
    return None


def without_plain_weights(model: Any) -> str | None:
    """The reason a model has no linear layers with weights in the host's memory; None if it has some."""
    devices = {parameter.device.type for parameter in model.parameters()}
    if "meta" in devices:
        return "some of its weights are loaded only when they are needed"
    if devices != {"cpu"}:
        return "packing is for the CPU"
    if getattr(model, "is_quantized", False):
        return "the model is quantized"
    return None if any(is_plain(module) for module in model.modules()) else "the model has no nn.Linear"


def pack(
    model: nn.Module, convert: Callable[[nn.Linear], nn.Module] = PackedLinear, leave: Sequence[nn.Linear] = ()
) -> None:
    """Replace every `nn.Linear` of a model in place by `convert` of it, freeing each weight at once.

    The embedding keeps a weight that it shares; a copy of that is packed. leave: layers that stay plain.
    """
    kept = set(leave)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_plain(child) and child not in kept:
                setattr(parent, name, convert(child))


class KernelLinear(nn.Module):
    """A linear layer computed by the kernels' `multiply`. Subclasses provide its weights."""

    in_features: int
    out_features: int
    dtype = torch.bfloat16  # of its inputs and outputs

    def _set_weights(self, library: Any, format: int, arrays: tuple[Tensor | None, ...]) -> None:
        """format, arrays (data, tables, offsets, exceptions, bias): see `struct linear`."""
        self._arrays, self._multiply = arrays, library.multiply  # kept: the struct has only their addresses
        self.weights = LinearStruct(format, self.in_features, self.out_features, *map(address, arrays))

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
        self._multiply(ctypes.byref(self.weights), rows.data_ptr(), count, out.data_ptr(), space.data_ptr())
        return out


class CompressedLinear(KernelLinear):
    """An `nn.Linear` with bfloat16 weights in 12 bits each. A token's result does not depend on its neighbors."""

    def __init__(self, linear: nn.Linear, library: Any) -> None:
        """library: the result of `kernels`. in_features must be a multiple of 4."""
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = linear.weight.detach().contiguous()
        panels, blocks = -(-self.out_features // PANEL), -(-self.in_features // BLOCK)
        tables, counts = torch.empty(panels, 32, dtype=torch.uint8), torch.empty(panels * blocks, dtype=torch.int32)
        source = weight.data_ptr(), self.out_features, self.in_features
        library.choose_codes(*source, tables.data_ptr(), counts.data_ptr())
        offsets = torch.zeros(panels * blocks + 1, dtype=torch.int32)
        torch.cumsum(counts, 0, dtype=torch.int32, out=offsets[1:])
        self.exceptions = int(offsets[-1])
        if not self.is_worth_it:
            return
        data = torch.empty(panels, self.in_features // 4, QUAD, dtype=torch.uint8)
        exceptions = torch.empty(self.exceptions, dtype=torch.int32)
        library.compress_weights(*source, *map(address, (tables, offsets, data, exceptions)))
        bias = None if self.bias is None else self.bias.detach()
        self._set_weights(library, TWELVE_BITS, (data, tables, offsets, exceptions, bias))

    @property
    def is_worth_it(self) -> bool:
        """True if there are few exceptions; otherwise the layer has no weights and must not be used."""
        return self.exceptions <= WORTH * self.in_features * self.out_features


def compressed_or_packed(linear: nn.Linear) -> nn.Module:
    """The fastest replacement of a layer: compressed, or packed where compression is impossible or gains nothing."""
    if linear.weight.dtype == torch.bfloat16 and linear.in_features % 4 == 0 and linear.weight.device.type == "cpu":
        library = kernels()
        if library is not None:
            compressed = CompressedLinear(linear, library)
            if compressed.is_worth_it:
                return compressed
    return PackedLinear(linear)
