"""Weights that are quantised while they are loaded, which makes another model than the one in the files.

int8: 32 inputs share a float16 scale, the largest magnitude over 127 (GGUF's Q8_0). int4: 32 inputs share a float16
scale and a zero point, the range between their extremes, or the share of it with the least squared error.
docs/quantised.md says what else was tried. Embeddings and output layers keep 8 bits, as in GGUF files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor

from slipstream.models.cpu.block_linear import BlockPart
from slipstream.models.cpu.grouped_blocks import Q8_0, GroupedMatrix, NotInBlocksError, grouped_format
from slipstream.models.cpu.structs import INPUTS, BlockFormat
from slipstream.models.weights.safetensors_files import FLOATS, CheckpointFiles

INT4 = grouped_format("INT4", INPUTS)
LARGEST_SCALE, SMALLEST_SCALE = 65504.0, 2.0**-24  # of float16
SHARES = tuple(0.72 + 0.04 * step for step in range(9))  # of the range of a group's weights
AT_A_TIME = 1 << 16  # weights that are rounded together


def rounded(weight: Tensor, bits: int) -> GroupedMatrix:
    """Weights [outputs, inputs] float32 as codes of 4 or 8 bits, 32 inputs a group."""
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
    """The squared error of each group in 4 bits; in place, since it is computed for every share."""
    scale, zero = scales.unsqueeze(-1), zeros.unsqueeze(-1)
    met = (groups * (1 / scale)).add_(zero).round_().clamp_(0, 15).sub_(zero).mul_(scale).sub_(groups)
    return met.square_().sum(-1)


def _half(scales: Tensor) -> Tensor:
    """Scales as float16 has them, none of them 0."""
    return scales.clamp(SMALLEST_SCALE, LARGEST_SCALE).half().float()


def _matrix(bits: int, codes: Tensor, scales: Tensor, zeros: Tensor) -> GroupedMatrix:
    return GroupedMatrix(bits, codes.flatten(1).to(torch.uint8), scales, zeros.int(), None, INPUTS)


class RoundedTensors:
    """The tensors of an ordinary checkpoint for `block_model.fill`, its matrices quantised."""

    def __init__(self, files: CheckpointFiles, quantise: str, wide: set[str]) -> None:
        """quantise: "int4" or "int8"; wide: parameters that always get 8 bits."""
        self._files, self._quantise, self._wide = files, quantise, wide

    def values(self, parameter: str, shape: tuple[int, ...]) -> Tensor:
        self._files.used.add(parameter)
        return self._files.tensor(parameter, shape, FLOATS).float()

    def part(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        self._files.used.add(parameter)
        block, bits = self._block(parameter)
        if shape[1] % INPUTS:
            raise NotInBlocksError(f"tensor {parameter!r} has {shape[1]} inputs; allowed: multiples of {INPUTS}")

        def rows(first: int, last: int) -> Any:
            pieces = self._rounded(parameter, shape, bits, first, last)
            return numpy.concatenate([piece.q8_0() if bits == 8 else piece.int4() for piece in pieces])

        return BlockPart(block, shape, rows, library)

    def table(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        return self.part(parameter, shape, library)

    def unpacked(self, parameter: str, shape: tuple[int, int]) -> Tensor:
        """[outputs, inputs] float32: the numbers that a quantised matrix stands for."""
        pieces = self._rounded(parameter, shape, self._block(parameter)[1], 0, shape[0])
        return torch.cat([piece.values() for piece in pieces])

    def _block(self, parameter: str) -> tuple[BlockFormat, int]:
        return (Q8_0, 8) if self._quantise == "int8" or parameter in self._wide else (INT4, 4)

    def _rounded(
        self, parameter: str, shape: tuple[int, int], bits: int, first: int, last: int
    ) -> Iterator[GroupedMatrix]:
        """Rows of a matrix, as many at a time as fit a core's memory."""
        weight = self._files.rows(parameter, shape, FLOATS, first, last)
        for rows in weight.split(max(AT_A_TIME // shape[1], 1)):
            yield rounded(rows.float(), bits)
