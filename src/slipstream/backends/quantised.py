"""Draft models in 4 or 8 bits on CPU: a draft step reads a third or half of the bytes. Targets are never quantised.

A draft cannot change what is generated, only how much of it is accepted. Weights are rounded to the nearest step: 4
bits with a scale and an offset per 32 inputs, 8 bits with a scale per output. The specification of a quantised layer is
the `nn.Linear` it replaces.

The products are PyTorch's own CPU kernels for few tokens. For more than `NARROW` tokens, prompts above all, they are
slower than packed weights, so these are kept beside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.backends.packed import WIDTH, PackedLinear

BITS = ("int4", "int8")
GROUP = 32  # inputs that share a scale at 4 bits
NARROW = 8  # tokens up to which reading the weights takes longer than computing with them
SMALLEST = 10_000_000  # weights; a smaller model's fit in the processor's caches in any precision
_ROWS = 16384  # outputs quantised at a time, so that the intermediate integers stay small


class QuantisedLinear(nn.Module):
    """An `nn.Linear` for few tokens in 4 or 8 bits, and for many in packed form."""

    def __init__(self, linear: nn.Linear, bits: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = linear.weight.detach()
        self._is_int4 = bits == "int4"
        self._weight, self._scales = (_int4 if self._is_int4 else _int8)(weight)
        self._wide = PackedLinear(linear, 4 * NARROW)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        rows = x.flatten(0, -2)
        if rows.shape[0] > NARROW:
            wide: Tensor = self._wide(x)
            return wide
        if self._is_int4:
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._weight, GROUP, self._scales)
        else:
            out = torch.ops.aten._weight_int8pack_mm(rows, self._weight, self._scales)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)


def _int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Packed weights, and [in / GROUP, out, 2] scales and offsets: weight = (q - 8) * scale + offset, 0 <= q < 16."""
    packed, scales = [], []
    for rows in weight.split(_ROWS):
        groups = rows.float().view(len(rows), -1, GROUP)
        low, high = groups.amin(-1), groups.amax(-1)
        scale = ((high - low) / 15).clamp(min=torch.finfo(torch.bfloat16).tiny)
        steps = ((groups - low[..., None]) / scale[..., None]).round_().clamp_(0, 15)
        packed.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(steps.int().flatten(1), 1))
        scales.append(torch.stack([scale, low + 8 * scale], dim=-1))
    return torch.cat(packed), torch.cat(scales).transpose(0, 1).contiguous().to(weight.dtype)


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] int8 weights and [out] scales."""
    scale = weight.abs().amax(-1).float().clamp(min=torch.finfo(torch.bfloat16).tiny) / 127
    whole = [(rows.float() / part[:, None]).round_().to(torch.int8) for rows, part in _parts(weight, scale)]
    return torch.cat(whole), scale.to(weight.dtype)


def _parts(weight: Tensor, scale: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(weight.split(_ROWS), scale.split(_ROWS), strict=True))


def fits(linear: nn.Linear) -> bool:
    """Whether the kernels take a layer of this shape."""
    return linear.in_features % GROUP == 0 and linear.out_features % 16 == 0


def num_weights(model: nn.Module) -> int:
    """How many weights `quantise` would round."""
    return sum(m.weight.numel() for m in model.modules() if type(m) is nn.Linear and fits(m))


def quantise(model: Any, bits: str) -> None:
    """Replace every `nn.Linear` of a model in place: quantised where the kernels take its shape, else packed."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, rounded(child, bits))


def rounded(linear: nn.Linear, bits: str) -> nn.Module:
    """What `quantise` puts in a layer's place."""
    return QuantisedLinear(linear, bits) if fits(linear) else PackedLinear(linear, WIDTH)
