"""Draft models in 4 or 8 bits on CPU: a draft step reads a third or half of the bytes. Targets are never quantised.

A draft cannot change what is generated, only how much of it is accepted. Weights are rounded to the nearest step: 4
bits with a scale and an offset per 32 inputs, 8 bits with a scale per output. The specification of a quantised layer is
the `nn.Linear` it replaces.

Few tokens are multiplied by Slipstream's own kernel at 4 bits where it is available (`csrc/int4.c`), else by
PyTorch's. For more tokens, mainly batches and prompts, a second copy of the weights is faster: products of 8-bit
integers where the processor has instructions for them (VNNI), else packed weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from slipstream.models.cpu.huge_pages import HugePages, SmallPages
from slipstream.models.cpu.kernel_libraries import kernels
from slipstream.models.cpu.packed_linear import WIDTH, KernelLinear, PackedLinear
from slipstream.models.cpu.processor import processor
from slipstream.models.cpu.structs import GROUP, PANEL, RECORD

ROWS = 4096  # outputs laid out at a time, so that the copies stay small
MOST, MOST_BY_TILES = 16, 64  # tokens up to which these products are the fastest, without and with AMX
WORDS = 512  # bytes of codes in a record; scales and offsets follow
BITS = ("int4", "int8")
NARROW = 4, 8  # tokens up to which PyTorch's kernel for few is the fastest, beside integers and beside packed weights
SMALLEST = 10_000_000  # weights; a smaller model's fit in the processor's caches in any precision
ZERO, LARGEST = 128, 126  # what stands for 0 in an unsigned byte; the largest value, less one for a rounded step
_ROWS = 16384  # outputs quantised at a time, so that the intermediate integers stay small


class Int4Linear(KernelLinear):
    """An `nn.Linear` whose weights are 4-bit steps with a bfloat16 scale and offset per group of inputs."""

    def __init__(
        self, codes: Tensor, steps: Tensor, bias: Tensor | None, library: Any, memory: HugePages | None = None
    ) -> None:
        """codes: uint8 [out, in], 0 to 15; steps: [out, in / 32, 2], scale and offset: code * scale + offset.

        bias: bfloat16 or None. out_features and in_features must be multiples of 16 and 32. memory: for the weights.
        """
        super().__init__()
        self.out_features, self.in_features = codes.shape
        panels, groups = -(-self.out_features // PANEL), self.in_features // GROUP
        data = (memory or SmallPages()).zeros(panels * groups * RECORD).view(panels, groups, RECORD)
        for i in range(0, len(codes), ROWS):
            data[i // PANEL : (i + ROWS) // PANEL] = _records(codes[i : i + ROWS], steps[i : i + ROWS])
        self._set_weights(library, 4, (data, None, None, None, None if bias is None else bias.detach()))
        self.most = MOST_BY_TILES if hasattr(library, "multiply_int4_by_tiles") else MOST
        self._records = data

    def rows(self, outputs: Tensor) -> Tensor:
        """[N, in] bfloat16: the rounded weights of some outputs [N], read back from the records."""
        panel, within = outputs // PANEL, outputs % PANEL
        words = self._records[..., :WORDS].unflatten(2, (8, 16, 2, 2))  # quad, o, i, byte; as `_records` has them
        panel_words = words[panel, :, :, within % 16].permute(0, 1, 2, 4, 3)  # ..., byte (the pair), i
        codes = torch.where((within < 16).view(-1, 1, 1, 1, 1), panel_words & 15, panel_words >> 4).flatten(2)
        factors = self._records[..., WORDS:].view(torch.bfloat16).unflatten(2, (2, PANEL))[panel, :, :, within].float()
        return (codes * factors[..., :1] + factors[..., 1:]).flatten(1).to(torch.bfloat16)


def _records(codes: Tensor, steps: Tensor) -> Tensor:
    """Data as int4.c reads it: [panels, groups, RECORD]."""
    rest, groups = -len(codes) % PANEL, steps.shape[1]
    codes, steps = pad(codes, (0, 0, 0, rest)), pad(steps, (0, 0, 0, 0, 0, rest)).to(torch.bfloat16)
    # output = side * 16 + o and input = group * 32 + quad * 4 + pair * 2 + i, as int4.c has them
    cells = codes.view(-1, 2, 16, groups, 8, 2, 2).permute(0, 3, 4, 2, 6, 5, 1).flatten(5)  # ..., [o, i, pair and side]
    low, high = cells[..., 0] | cells[..., 1] << 4, cells[..., 2] | cells[..., 3] << 4
    words = torch.stack([low, high], -1).flatten(2)
    factors = steps.view(-1, PANEL, groups, 2).permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2)
    return torch.cat([words, factors], 2)


class IntegerLinear(nn.Module):
    """An `nn.Linear` as products of 8-bit integers: weights have a scale per output, inputs one per token."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scales = _int8(linear.weight.detach())
        self.out_features, self.bias, self._dtype = linear.out_features, linear.bias, linear.weight.dtype
        self._scales, self._zeros = scales.float(), torch.zeros(len(weight), dtype=torch.int64)
        self._packed = torch.ops.onednn.qlinear_prepack(weight, None)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, in_features] -> [tokens, out_features]."""
        steps = x.abs().amax(-1, keepdim=True).mul_(1 / LARGEST).clamp_(min=torch.finfo(torch.bfloat16).tiny)
        integers = (x.float() / steps).add_(ZERO + 0.5).to(torch.uint8)  # to the nearest, as no sum is negative
        out: Tensor = torch.ops.onednn.qlinear_pointwise(
            integers, 1.0, ZERO, self._packed, self._scales, self._zeros, None, 1.0, 0, self._dtype, "none", [], ""
        )
        out *= steps
        if self.bias is not None:
            out += self.bias
        return out


class QuantisedLinear(nn.Module):
    """An `nn.Linear` for few tokens in 4 or 8 bits, and beside it for many."""

    def __init__(self, linear: nn.Linear, bits: str, memory: HugePages | None = None) -> None:
        """memory: for the weights of few tokens."""
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.few = _few(linear, bits, memory)
        integers = multiplies_integers()
        self.narrow = self.few.most if isinstance(self.few, Int4Linear) else NARROW[0] if integers else NARROW[1]
        self._wide = IntegerLinear(linear) if integers else PackedLinear(linear, 4 * self.narrow)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        rows = x.flatten(0, -2)
        if rows.shape[0] > self.narrow:
            wide: Tensor = self._wide(rows)
            return wide.view(*x.shape[:-1], self.out_features)
        few: Tensor = self.few(rows)
        return few.view(*x.shape[:-1], self.out_features)


class FewLinear(nn.Module):
    """An `nn.Linear` in 4 or 8 bits by PyTorch's kernels for few tokens."""

    def __init__(self, linear: nn.Linear, bits: str) -> None:
        super().__init__()
        self.bias, self._is_int4, weight = linear.bias, bits == "int4", linear.weight.detach()
        if self._is_int4:
            codes, steps = _int4(weight)
            packed = [torch.ops.aten._convert_weight_to_int4pack_for_cpu(c.int(), 1) for c in codes.split(_ROWS)]
            low = steps[..., 1] + 8 * steps[..., 0]  # PyTorch's codes count from -8
            self._weight = torch.cat(packed)
            self._scales = torch.stack([steps[..., 0], low], -1).transpose(0, 1).contiguous().to(weight.dtype)
        else:
            self._weight, self._scales = _int8(weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, in_features] -> [tokens, out_features]."""
        if self._is_int4:
            out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), self._weight, GROUP, self._scales)
        else:
            out = torch.ops.aten._weight_int8pack_mm(x.contiguous(), self._weight, self._scales)
        if self.bias is not None:
            out += self.bias
        return out


def _few(linear: nn.Linear, bits: str, memory: HugePages | None = None) -> nn.Module:
    """The layer for few tokens: by our own kernels where they can be had and take it."""
    library = kernels() if bits == "int4" and linear.weight.dtype == torch.bfloat16 else None
    if library is None:
        return FewLinear(linear, bits)
    return Int4Linear(*_int4(linear.weight.detach()), linear.bias, library, memory)


def _int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] uint8 codes and [out, in / GROUP, 2] float32 scales and offsets: weight = code * scale + offset."""
    all_codes, all_steps = [], []
    for rows in weight.split(_ROWS):
        groups = rows.float().view(len(rows), -1, GROUP)
        low, high = groups.amin(-1), groups.amax(-1)
        scale = ((high - low) / 15).clamp(min=torch.finfo(torch.bfloat16).tiny)
        codes = ((groups - low[..., None]) / scale[..., None]).round_().clamp_(0, 15)
        all_codes.append(codes.to(torch.uint8).flatten(1))
        all_steps.append(torch.stack([scale, low], -1))
    return torch.cat(all_codes), torch.cat(all_steps)


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] int8 weights and [out] scales."""
    scale = weight.abs().amax(-1).float().clamp(min=torch.finfo(torch.bfloat16).tiny) / 127
    rounded_rows = [(rows.float() / part[:, None]).round_().to(torch.int8) for rows, part in _parts(weight, scale)]
    return torch.cat(rounded_rows), scale.to(weight.dtype)


def _parts(weight: Tensor, scale: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(weight.split(_ROWS), scale.split(_ROWS), strict=True))


def multiplies_integers() -> bool:
    """Whether products of 8-bit integers are faster here than those of the weights' own precision."""
    kernels = torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_pointwise")
    return kernels and torch.cpu._is_vnni_supported()  # no public way to ask


def fits(linear: nn.Linear) -> bool:
    """Whether the kernels take a layer of this shape."""
    return linear.in_features % GROUP == 0 and linear.out_features % 16 == 0


def is_faster(dtype: torch.dtype) -> bool:
    """Whether few tokens go through quantised weights faster than through packed ones of this type.

    Without AVX-512, PyTorch's kernels multiply float32 inputs number by number, many times slower than packed weights.
    """
    return dtype == torch.bfloat16 or "avx512f" in processor().flags


def num_weights(model: nn.Module) -> int:
    """How many weights of a model would be rounded."""
    return sum(m.weight.numel() for m in model.modules() if type(m) is nn.Linear and fits(m))


def rounded(linear: nn.Linear, bits: str, memory: HugePages | None = None) -> nn.Module:
    """What replaces a layer: its quantised form where the kernels take its shape, else its packed one.

    memory: for its weights; the layers of a model had better share one.
    """
    return QuantisedLinear(linear, bits, memory) if fits(linear) else PackedLinear(linear, WIDTH)
