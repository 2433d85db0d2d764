"""The tensors of an ordinary checkpoint, quantised while they are loaded, which makes another model of it.

Embeddings and output layers keep 8 bits, as in GGUF files. `quantised_linear.py` says how weights are rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.models.cpu.block_linear import BlockPart
from slipstream.models.cpu.grouped_blocks import NotInBlocksError
from slipstream.models.cpu.quantised_linear import BITS, FORMATS, pieces, rows_of_blocks
from slipstream.models.cpu.structs import INPUTS
from slipstream.models.weights.safetensors_files import FLOATS, CheckpointFiles


class RoundedTensors:
    """The tensors of an ordinary checkpoint for `block_model.fill`, its matrices quantised."""

    def __init__(self, files: CheckpointFiles, quantise: str, wide: set[str]) -> None:
        """quantise: "int4" or "int8"; wide: parameters that always get 8 bits."""
        self._files, self._bits, self._wide = files, BITS[quantise], wide

    def values(self, parameter: str, shape: tuple[int, ...]) -> Tensor:
        self._files.used.add(parameter)
        return self._files.tensor(parameter, shape, FLOATS).float()

    def part(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        self._files.used.add(parameter)
        bits = self._bits_of(parameter)
        if shape[1] % INPUTS:
            raise NotInBlocksError(f"tensor {parameter!r} has {shape[1]} inputs; allowed: multiples of {INPUTS}")

        def rows(first: int, last: int) -> Any:
            return rows_of_blocks(self._files.rows(parameter, shape, FLOATS, first, last), bits)

        return BlockPart(FORMATS[bits], shape, rows, library)

    def table(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        return self.part(parameter, shape, library)

    def unpacked(self, parameter: str, shape: tuple[int, int]) -> Tensor:
        """[outputs, inputs] float32: the numbers that a quantised matrix stands for."""
        weight = self._files.rows(parameter, shape, FLOATS)
        return torch.cat([piece.values() for piece in pieces(weight, self._bits_of(parameter))])

    def _bits_of(self, parameter: str) -> int:
        return 8 if parameter in self._wide else self._bits
