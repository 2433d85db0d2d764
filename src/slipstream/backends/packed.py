"""Pre-packed linear layers for CPU: the weight in the layout oneDNN's kernels want, once, instead of at every call.

These are the operators PyTorch's own CPU freezing uses. A forward of a few tokens then reads its weights at memory
speed. The specification of a packed layer is the `nn.Linear` it replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 4  # tokens for whose number the layout is chosen


class PackedLinear(nn.Module):
    """An `nn.Linear` whose weight is kept in packed form only."""

    def __init__(self, linear: nn.Linear, width: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # the layout is chosen for inputs of about `width` tokens and serves any number
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


def unsupported(model: Any) -> str | None:
    """Why a model cannot be packed, or None if it can."""
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch has no oneDNN"
    if next(model.parameters()).device.type != "cpu":
        return "packing is for CPU"
    if model.dtype not in (torch.float32, torch.bfloat16):
        return f"packing needs bfloat16 or float32 weights, not {str(model.dtype).removeprefix('torch.')}"
    if getattr(model, "is_quantized", False):
        return "the model is quantised"
    if not any(type(module) is nn.Linear for module in model.modules()):
        return "the model has no nn.Linear"
    return None


def packed(linear: nn.Linear) -> nn.Module:
    """What `pack` puts in a layer's place if not told otherwise."""
    return PackedLinear(linear, WIDTH)


def pack(model: nn.Module, keep: Callable[[nn.Linear], nn.Module] = packed) -> None:
    """Replace every `nn.Linear` of a model in place by what `keep` makes of it, freeing each weight at once.

    A weight shared with an embedding stays for the embedding and is packed as a copy.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, keep(child))
