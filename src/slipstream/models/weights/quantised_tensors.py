"""A Hugging Face checkpoint of quantised weights, computed with as it is or unpacked, without its maker's library.

GPTQ, AWQ, compressed-tensors and torchao; `packed_matrices.py` reads their tensors. What a checkpoint leaves in
floating point (norms, embeddings, mostly the output layer) stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.models.cpu.block_linear import BlockPart
from slipstream.models.cpu.grouped_blocks import NotInBlocksError, number_format
from slipstream.models.hf.packed_matrices import PackedMatrices
from slipstream.models.weights.safetensors_files import FLOATS

WEIGHT = ".weight"


class CheckpointTensors:
    """The tensors of a checkpoint for `block_model.fill`."""

    def __init__(self, matrices: PackedMatrices) -> None:
        self._matrices, self._files = matrices, matrices.files

    def values(self, parameter: str, shape: tuple[int, ...]) -> Tensor:
        self._files.used.add(parameter)
        return self._files.tensor(parameter, shape, FLOATS).float()

    def part(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        module = parameter.removesuffix(WEIGHT)
        matrix = self._matrices.of(module, shape)
        if matrix is None:
            return self._numbers(parameter, shape, library)
        self._files.used.update(self._matrices.tensors_of(module))
        try:
            block, rows = matrix.in_blocks()
        except NotInBlocksError as error:
            raise NotInBlocksError(f"tensor {parameter!r} {error}") from error
        return BlockPart(block, shape, lambda first, last: rows[first:last], library)

    def table(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        return self.part(parameter, shape, library)

    def _numbers(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        """A matrix that was not quantised."""
        self._files.used.add(parameter)
        dtype = self._files.rows(parameter, shape, FLOATS, 0, 1).dtype
        try:
            block = number_format(dtype, shape[1])
        except NotInBlocksError as error:
            raise NotInBlocksError(f"tensor {parameter!r} {error}") from error

        def rows(first: int, last: int) -> Any:
            return self._files.rows(parameter, shape, FLOATS, first, last).contiguous().view(torch.uint8).numpy()

        return BlockPart(block, shape, rows, library)


def unpacked_weights(matrices: PackedMatrices, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of a checkpoint in floating point, by the names of the model's parameters."""
    files, weights = matrices.files, dict[str, Tensor]()
    packed_names = set[str]()
    for module, shape in matrices.modules().items():
        matrix = matrices.of(module, shape)
        if matrix is None:
            raise SlipstreamError(f"model {files.source!r}: layer {module!r} has no quantised weights")
        weights[f"{module}{WEIGHT}"] = matrix.values().to(dtype)
        packed_names.update(matrices.tensors_of(module))
    for name in files.shapes:
        if name not in packed_names:
            weights[name] = files.tensor(name, None, FLOATS).to(dtype)
    return weights
