"""Packed linear layers for CPU: the weight is put into the layout of oneDNN's kernels once instead of at every call.

These are the operators PyTorch's own CPU freezing uses. A forward of a few tokens then reads its weights at memory
speed. The specification of a packed layer is the `nn.Linear` it replaces.

Without bfloat16 instructions and without Slipstream's own kernels, packed float32 copies of bfloat16 weights are
multiplied: the same weights and sums of higher precision, at twice the memory. PyTorch's own bfloat16 products take
several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.cpu.bfloat16_kernels import kernels
from slipstream.models.cpu.processor import memory_bytes
from slipstream.models.decoder.fused_linear import is_plain

WIDTH = 4  # tokens for whose number the layout is chosen
SHARE = 0.5  # of the machine's memory that float32 copies of bfloat16 weights may take


class PackedLinear(nn.Module):
    """An `nn.Linear` whose weight exists in packed form only; as it was where PyTorch has no oneDNN."""

    def __init__(self, linear: nn.Linear, width: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.bias, self._dtype = linear.bias, weight.dtype
        self._computed = torch.float32 if needs_float32(weight.dtype) else weight.dtype
        self._bias = None if self.bias is None else self.bias.detach().to(self._computed)
        # the layout is chosen for inputs of about `width` tokens and serves any number
        self._plain = None if torch.backends.mkldnn.is_available() else weight
        if self._plain is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(self._computed), width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        if self._plain is not None:
            return nn.functional.linear(x, self._plain, self.bias)
        x = x.to(self._computed)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out.to(self._dtype)


def needs_float32(dtype: torch.dtype) -> bool:
    """Whether weights of this type are packed as float32, because oneDNN has no kernels for them here."""
    return dtype == torch.bfloat16 and torch.backends.mkldnn.is_available() and not _has_bf16()


def _has_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # there is no public way to ask


def unsupported(model: Any) -> str | None:
    """Why a model cannot be packed, or None if it can."""
    own = model.dtype == torch.bfloat16 and kernels() is not None  # nearly all weights are compressed
    if not torch.backends.mkldnn.is_available() and not own:
        return "this PyTorch has no oneDNN"
    devices = {parameter.device.type for parameter in model.parameters()}
    if "meta" in devices:
        return "some of its weights are brought from elsewhere when they are needed"
    if devices != {"cpu"}:
        return "packing is for CPU"
    if model.dtype not in (torch.float32, torch.bfloat16):
        return f"packing needs bfloat16 or float32 weights, not {str(model.dtype).removeprefix('torch.')}"
    if getattr(model, "is_quantized", False):
        return "the model is quantised"
    linears = [module for module in model.modules() if is_plain(module)]
    if not linears:
        return "the model has no nn.Linear"
    if needs_float32(model.dtype) and not own:
        copies = 4 * sum(linear.weight.numel() for linear in linears)
        memory = memory_bytes()
        if memory is not None and copies > SHARE * memory:
            return (
                "this processor has no bfloat16 instructions, and float32 copies of the weights would take "
                f"{copies / 1e9:.0f} of {memory / 1e9:.0f} GB of memory"
            )
    return None


def packed(linear: nn.Linear) -> nn.Module:
    """The layer, packed for few tokens."""
    return PackedLinear(linear, WIDTH)


def pack(model: nn.Module, convert: Callable[[nn.Linear], nn.Module] = packed, leave: Sequence[nn.Linear] = ()) -> None:
    """Replace every `nn.Linear` of a model in place by what `convert` makes of it, freeing each weight at once.

    A weight shared with an embedding stays for the embedding and is packed as a copy. leave: layers that stay.
    """
    kept = set(leave)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_plain(child) and child not in kept:
                setattr(parent, name, convert(child))
