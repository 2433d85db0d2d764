"""Converts matrices of quantized checkpoints to rows of blocks for the kernels, without changing a weight.

A weight is (code - zero) * scale, or (code - 8) * scale + minimum; a group of inputs shares scale, zero and minimum. If
a block type of GGUF holds exactly that, it is used; otherwise INT4 or INT4_MINIMA, whose groups store their scales
first, then one byte per code. INT4: a float16 scale, an offset of one signed byte and an unused byte; a weight is scale
* (code - 8 + offset). INT4_MINIMA: a float32 scale and a float32 minimum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.models.cpu.structs import BY_NAME, INPUTS, KINDS, BlockFormat

Q4_0, Q8_0 = BY_NAME["Q4_0"], BY_NAME["Q8_0"]
NUMBERS = {torch.bfloat16: BY_NAME["BF16"], torch.float16: BY_NAME["F16"], torch.float32: BY_NAME["F32"]}
CENTER = {2: 2, 4: 8, 8: 128}  # by bits: the zero point of symmetric codes
SPARE_BITS = 0xF  # lowest bits of a float32 scale; if they are 0, its product with a 4-bit number is exact


class NotInBlocksError(Exception):
    """The kernels cannot multiply by a file's weights without unpacking them; the message is the reason."""

    def __init__(self, reason: str, rounds: bool = True) -> None:
        """rounds: False if unpacking to bfloat16 changes no weight."""
        super().__init__(reason)
        self.rounds = rounds


@dataclass(frozen=True)
class GroupedMatrix:
    """Weights [outputs, inputs] as codes."""

    bits: int  # up to 8
    codes: Tensor  # [outputs, inputs] uint8
    scales: Tensor  # [outputs, groups] float32
    zeros: Tensor  # [outputs, groups] int32
    minima: Tensor | None  # [outputs, groups] float32
    group: int  # inputs that share a scale
    owners: Tensor | None = None  # [inputs], the group of each input; None if groups are successive inputs

    def values(self) -> Tensor:
        """[outputs, inputs] float32: the weights, rounded at most once."""
        owners = torch.arange(self.codes.shape[1]) // self.group if self.owners is None else self.owners
        values = (self.codes.int() - self.zeros[:, owners]).float() * self.scales[:, owners]
        return values if self.minima is None else values + self.minima[:, owners]

    def in_blocks(self) -> tuple[BlockFormat, Any]:
        """The block type that holds exactly these weights, and the rows [outputs, bytes] in it, a numpy array.

        Raises `NotInBlocksError` if there is none.
        """
        inputs = self.codes.shape[1]
        if self.owners is not None:
            raise NotInBlocksError(
                "has groups of inputs that are not successive (act-order); computed with: groups of successive inputs"
            )
        if inputs % INPUTS or self.group % INPUTS:
            raise NotInBlocksError(
                f"has {inputs} inputs in groups of {self.group}; computed with: multiples of {INPUTS}"
            )
        if self.bits not in CENTER:
            raise NotInBlocksError(f"has {self.bits} bits; computed with: {', '.join(map(str, CENTER))} bits")
        matrix = self._divided()
        fits_float16 = matrix.minima is None and torch.equal(matrix.scales.half().float(), matrix.scales)
        centered = bool((matrix.zeros == CENTER[self.bits]).all())
        if self.bits == 8:
            if not (fits_float16 and centered):
                what = "scales beyond float16" if centered else "zero points other than 128"
                raise NotInBlocksError(f"has 8 bits and {what}; computed with: symmetric 8 bits, 4 and 2 bits")
            return Q8_0, matrix._spread(INPUTS).q8_0()
        if not fits_float16:
            return matrix._int4_minima()
        if centered and self.bits == 4 and matrix.group == INPUTS:
            return Q4_0, matrix._q4_0()
        return grouped_format("INT4", matrix.group), matrix.int4()

    def q8_0(self) -> Any:
        """[outputs, bytes]: rows of `Q8_0`, for 8 bits, centered zero points and scales that are float16 numbers."""
        return self._rows(self.scales.half(), (self.codes ^ 0x80).unflatten(1, (-1, INPUTS)))

    def int4(self) -> Any:
        """[outputs, bytes]: rows of `grouped_format("INT4", group)`, for scales that are float16 numbers."""
        offsets = (8 - self.zeros).to(torch.int8)
        heads = torch.cat([_bytes(self.scales.half()), _bytes(torch.stack([offsets, offsets * 0], -1))], -1)
        return self._rows(heads, self.codes.unflatten(1, (-1, self.group)))

    def _divided(self) -> GroupedMatrix:
        """This matrix in groups of equal size; its own last group in a row may be shorter."""
        inputs = self.codes.shape[1]
        return self if inputs % self.group == 0 else self._spread(INPUTS)

    def _spread(self, group: int) -> GroupedMatrix:
        """This matrix in smaller groups."""
        if group == self.group:
            return self
        owner = torch.arange(0, self.codes.shape[1], group) // self.group
        minima = None if self.minima is None else self.minima[:, owner]
        return replace(self, scales=self.scales[:, owner], zeros=self.zeros[:, owner], minima=minima, group=group)

    def _q4_0(self) -> Any:
        codes = self.codes.unflatten(1, (-1, 2, 16))
        return self._rows(self.scales.half(), codes[:, :, 0] | codes[:, :, 1] << 4)

    def _int4_minima(self) -> tuple[BlockFormat, Any]:
        minima = self.scales * (8 - self.zeros).float() if self.minima is None else self.minima
        spare = not bool((self.scales.view(torch.int32) & SPARE_BITS).any())
        centered = bool((self.zeros == 8).all())
        is_exact = spare or centered if self.minima is None else spare and centered
        if not is_exact:
            raise NotInBlocksError("has scales of more than 20 significant bits; computed with: 20 and less")
        heads = torch.cat([_bytes(self.scales), _bytes(minima)], -1)
        return grouped_format("INT4_MINIMA", self.group), self._rows(heads, self.codes.unflatten(1, (-1, self.group)))

    def _rows(self, heads: Tensor, codes: Tensor) -> Any:
        """[outputs, bytes]: each group's head, then its codes [outputs, groups, bytes]."""
        return torch.cat([_bytes(heads), codes], -1).flatten(1).numpy()


def grouped_format(kind: str, group: int) -> BlockFormat:
    """The block format of 4-bit codes in groups of this size. kind: "INT4" or "INT4_MINIMA"."""
    of_group = BY_NAME[kind]
    return BlockFormat(f"int4 group {group}", of_group.code + KINDS * group, -1, group, of_group.bytes + group)


def number_format(dtype: torch.dtype, inputs: int) -> BlockFormat:
    """The block format of a matrix in floating point. Raises `NotInBlocksError` if the kernels do not take it."""
    if dtype not in NUMBERS or inputs % INPUTS:
        what = f"is of type {str(dtype).removeprefix('torch.')}" if dtype not in NUMBERS else f"has {inputs} inputs"
        raise NotInBlocksError(f"{what}; computed with: bfloat16, float16 and float32, multiples of {INPUTS} inputs")
    return NUMBERS[dtype]


def _bytes(numbers: Tensor) -> Tensor:
    """[..., groups, bytes] uint8 of [..., groups] numbers, or of [..., groups, n] bytes."""
    if numbers.dtype in (torch.uint8, torch.int8) and numbers.dim() == 3:
        return numbers.view(torch.uint8)
    return numbers.contiguous().unsqueeze(-1).view(torch.uint8)
