"""Weights that are quantized while a model is loaded, and the layers that multiply by them.

int8: 32 inputs share a float16 scale, their largest magnitude / 127 (GGUF's Q8_0). int4: 32 inputs share a float16
scale and a zero point, which cover the range of the weights, or the fraction of it with the least squared error.

A draft model's layers are quantized one by one: drafts never change the output, only how many tokens are accepted. A
draft step then reads a third or half of the bytes. A target is quantized as a whole (`RoundedTensors`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from slipstream.models.cpu.block_experts import (
    ExpertArithmetic,
    ModuleTensors,
    expert_blocks,
    experts_of,
    numbers_part,
    replace_experts,
)
from slipstream.models.cpu.block_linear import BlockPart, block_linears
from slipstream.models.cpu.grouped_blocks import Q8_0, GroupedMatrix, NotInBlocksError, grouped_format
from slipstream.models.cpu.huge_pages import HugePages
from slipstream.models.cpu.kernel_libraries import kernels
from slipstream.models.cpu.latent_heads import (
    LatentStacks,
    latent_heads,
    replace_latent,
    stacks_of_weight,
)
from slipstream.models.cpu.packed_linear import KernelLinear, compressed_or_packed
from slipstream.models.cpu.structs import INPUTS, BlockFormat
from slipstream.models.decoder.plan import LatentPlan
from slipstream.models.notices import warn_slower

BITS = {"int4": 4, "int8": 8}
FORMATS: dict[int, BlockFormat] = {4: grouped_format("INT4", INPUTS), 8: Q8_0}  # by bits
SMALLEST = 10_000_000  # weights; smaller models fit in the processor's caches in any precision
LARGEST_SCALE, SMALLEST_SCALE = 65504.0, 2.0**-24  # of float16
SHARES = tuple(0.72 + 0.04 * step for step in range(9))  # of the range of a group's weights
AT_A_TIME = 1 << 18  # weights rounded together, as many as fit in the caches


class QuantizedLinear(KernelLinear):
    """An `nn.Linear` of a draft model in 4 or 8 bits. A token's result does not depend on its neighbors.

    The specification is the product with `rows`, after rounding activations as `block_linear` describes.
    """

    def __init__(self, linear: nn.Linear, bits: str, library: Any, memory: HugePages | None = None) -> None:
        """bits: a key of `BITS`; library: the result of `kernels`; memory: for the weights, see `BlockPart`."""
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = linear.weight.detach()
        self.dtype = weight.dtype
        self.part = quantized_part(weight, library, bits, memory)
        bias = None if self.bias is None else self.bias.detach().to(torch.bfloat16)
        self._set_weights(library, self.part.block.code, (self.part.data, None, None, None, bias))

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features], computed from bfloat16 numbers."""
        return super().forward(x.to(torch.bfloat16)).to(self.dtype)

    def rows(self, outputs: Tensor) -> Tensor:
        """[N, in_features]: the rounded weights of some outputs [N]."""
        return self.part.rows(outputs).to(self.dtype)


def quantized_part(weight: Tensor, library: Any, bits: str, memory: HugePages | None = None) -> BlockPart:
    """A matrix [outputs, inputs] in 4 or 8 bits, for the kernels; see `QuantizedLinear`."""
    outputs, inputs = weight.shape

    def rows(first: int, last: int) -> Any:
        return rows_of_blocks(weight[first:last], BITS[bits])

    return BlockPart(FORMATS[BITS[bits]], (outputs, inputs), rows, library, memory)


def quantized(linear: nn.Linear, bits: str, memory: HugePages | None = None) -> nn.Module:
    """The replacement of a layer: quantized if the kernels support its shape, else packed."""
    library = kernels()
    if library is None or not fits(linear):
        return compressed_or_packed(linear)
    return QuantizedLinear(linear, bits, library, memory)


def convert_experts(model: Any, convert: Callable[[nn.Linear], nn.Module] | None = None) -> None:
    """Replace a mixture's expert blocks by the kernels' if they can compute all of them.

    convert: the function that replaces linear layers; experts are quantized as it does, or keep their weights.
    """
    library = kernels() if expert_blocks(model) else None
    if library is None or getattr(model, "is_quantized", False):
        return
    pack = _packing(convert)
    try:
        replace_experts(model, lambda block, name: ModuleTensors(block, name, pack), ExpertArithmetic("int8", library))
    except NotInBlocksError as error:
        warn_slower(f"{type(model).__name__} keeps transformers' experts: {error}")


def convert_latent(model: Any, convert: Callable[[nn.Linear], nn.Module]) -> None:
    """Give a model's latent attention the matrices of its heads if its layers will be compiled.

    convert: see `convert_experts`.
    """
    library = kernels() if model.dtype in (torch.bfloat16, torch.float16) else None
    if library is not None:
        pack = _packing(convert)

        def stacks(_: str, layer: nn.Linear, plan: LatentPlan) -> LatentStacks:
            return stacks_of_weight(layer.weight.detach(), plan, lambda part: pack(part, library))

        replace_latent(model, stacks, "int8")


def _packing(convert: Callable[[nn.Linear], nn.Module] | None) -> Callable[[Tensor, Any], BlockPart]:
    """A function that packs a matrix into panels, quantized as `convert` quantizes layers."""
    memory = HugePages()

    def pack(weight: Tensor, library: Any) -> BlockPart:
        if isinstance(convert, partial):
            return quantized_part(weight, library, convert.keywords["bits"], memory)
        return numbers_part(weight, library, memory)

    return pack


def formats_of(model: nn.Module) -> str:
    """The formats of a model's quantized layers, in one word; empty if there are none."""
    return "+".join(
        sorted({module.part.block.name for module in model.modules() if isinstance(module, QuantizedLinear)})
    )


def arithmetic_of(model: nn.Module) -> str:
    """The block types and activations that a model computes with, for display; empty if there are none."""
    linears = block_linears(model)
    formats = {part.block.name for linear in linears for part in linear.parts}
    formats.update(name for experts in experts_of(model) for name in experts.formats)
    formats.update(name for heads in latent_heads(model) for name in heads.formats)
    return f"{'+'.join(sorted(formats))} blocks, {linears[0].activations} activations" if linears else ""


def fits(linear: nn.Linear) -> bool:
    """True if the kernels support a layer of this shape."""
    return linear.in_features % INPUTS == 0


def num_weights(model: nn.Module) -> int:
    """The number of weights that quantization would round."""
    return sum(m.weight.numel() for m in model.modules() if type(m) is nn.Linear and fits(m))


def rounded_activations(model: nn.Module) -> str | None:
    """The rounding of a model's activations, a key of `ACTIVATIONS` in block_linear.py; None if there is none."""
    rounding = [linear.activations for linear in block_linears(model) if linear.activations != "float32"]
    rounding += [experts.activations for experts in experts_of(model) if experts.rounds_activations]
    if rounding:
        return rounding[0]
    return "int8" if any(isinstance(module, QuantizedLinear) for module in model.modules()) else None


def rows_of_blocks(weight: Tensor, bits: int) -> Any:
    """Weights [outputs, inputs] as rows of `FORMATS[bits]`, a numpy array [outputs, bytes]."""
    return numpy.concatenate([piece.q8_0() if bits == 8 else piece.int4() for piece in pieces(weight, bits)])


def pieces(weight: Tensor, bits: int) -> Iterator[GroupedMatrix]:
    """Weights [outputs, inputs], rounded a few rows at a time."""
    for rows in weight.split(max(AT_A_TIME // weight.shape[1], 1)):
        yield rounded(rows.float(), bits)


def rounded(weight: Tensor, bits: int) -> GroupedMatrix:
    """Weights [outputs, inputs] float32 as codes of 4 or 8 bits, in groups of 32 inputs."""
    groups = weight.unflatten(1, (-1, INPUTS))
    if bits == 8:
        scales = _half(groups.abs().amax(-1) / 127)
        zeros = torch.full_like(scales, 128)
        return _matrix(8, _codes(groups, scales, zeros, 1, 255), scales, zeros)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    best = torch.full_like(low, torch.inf)
    scales, zeros = torch.ones_like(low), torch.zeros_like(low)
    for share in SHARES:
        scale = _half((high - low) * (share / 15))
        zero = (-low * share / scale).round().clamp(0, 15)
        error = _error(groups, scale, zero)
        better = error < best
        best = torch.where(better, error, best)
        scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)
    return _matrix(4, _codes(groups, scales, zeros, 0, 15), scales, zeros)


def _codes(groups: Tensor, scales: Tensor, zeros: Tensor, smallest: int, largest: int) -> Tensor:
    return (groups / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(smallest, largest)


def _error(groups: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The squared error of each group in 4 bits; computed in place, since it runs for every share."""
    scale, zero = scales.unsqueeze(-1), zeros.unsqueeze(-1)
    error = (groups * (1 / scale)).add_(zero).round_().clamp_(0, 15).sub_(zero).mul_(scale).sub_(groups)
    return error.square_().sum(-1)


def _half(scales: Tensor) -> Tensor:
    """Scales rounded to float16 numbers, none of them to 0, in float32."""
    return scales.clamp(SMALLEST_SCALE, LARGEST_SCALE).half().float()


def _matrix(bits: int, codes: Tensor, scales: Tensor, zeros: Tensor) -> GroupedMatrix:
    return GroupedMatrix(bits, codes.flatten(1).to(torch.uint8), scales, zeros.int(), None, INPUTS)
