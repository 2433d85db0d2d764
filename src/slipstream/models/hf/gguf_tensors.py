"""The tensors of a GGUF file under the names, and in the order of rows, that a Hugging Face model has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.models.cpu.block_linear import BlockPart, Table, fits_blocks
from slipstream.models.cpu.grouped_blocks import NotInBlocksError
from slipstream.models.cpu.huge_pages import HugePages
from slipstream.models.cpu.structs import FORMATS, BlockFormat
from slipstream.models.hf.gguf_header import FLOATS, GGUFHeader, TensorEntry
from slipstream.models.hf.gguf_packing import PackedAhead, stays_in_file
from slipstream.models.hf.gguf_rope import FACTORS
from slipstream.models.hf.gguf_rows import RowReader, RowsOfFile
from slipstream.models.hf.weights import extra_bias, warn_of_unused

SUPPORTED = ", ".join(block.name for block in FORMATS)


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of the file. order: the file's row of each of the model's rows; None: the same order."""

    entry: TensorEntry
    order: Any = None


def check_kind(entry: TensorEntry) -> BlockFormat:
    """The block type of a matrix. Raises `NotInBlocksError` for one that the kernels do not compute with."""
    if entry.block is None or not fits_blocks(entry.shape[-1], entry.block):
        raise NotInBlocksError(f"tensor {entry.name!r} is of type {entry.kind_name}; computed with: {SUPPORTED}")
    return entry.block


class GGUFTensors:
    """What a model's parameters are in a file.

    transformers' readers say which tensor a parameter is and how it differs.
    """

    def __init__(self, header: GGUFHeader, model: Any, ahead: PackedAhead) -> None:
        """model: the model of this file's configuration, on any device; ahead: of this file's matrices."""
        from transformers import modeling_gguf_pytorch_utils as reader

        self.header, architecture = header, header.architecture
        self._settings = model.config.to_dict()
        kind = reader.TENSOR_PROCESSORS.get(architecture, reader.TensorProcessor)
        self._processor = kind(config=self._settings)
        try:
            self._names = _names(reader, model, self._processor)
        except NotImplementedError as error:
            raise NotInBlocksError(str(error)) from error
        self._ahead, self._reader, self._memory = ahead, RowReader(), HugePages()
        self._used = {FACTORS}

    def of(self, parameter: str) -> NamedTensor | None:
        """The tensor of a parameter; None if the file has none. Raises `NotInBlocksError` if it differs in more than
        the order of its rows."""
        entry = self.header.tensors.get(self._names.get(parameter, ""))
        if entry is None:
            return None
        self._used.add(entry.name)
        shape = (entry.shape[0], 2) if len(entry.shape) == 2 else (entry.shape[0],)
        if len(entry.shape) > 2:
            raise NotInBlocksError(f"tensor {entry.name!r} has {len(entry.shape)} dimensions; computed with: 1 and 2")
        numbers = numpy.arange(float(numpy.prod(shape))).reshape(shape)
        changed = self._processed(entry, numbers.copy())
        if changed.shape != shape:
            raise NotInBlocksError(
                f"tensor {entry.name!r} is {list(shape)} in the file and {list(changed.shape)} in the model; "
                "computed with: the same shape"
            )
        if (changed == numbers).all():
            return NamedTensor(entry)
        if len(shape) == 1:
            return NamedTensor(entry)  # `values` processes what it reads
        order = (changed[:, 0] / 2).astype(numpy.int64)
        if sorted(order) != list(range(shape[0])) or (changed != numbers[order]).any():
            raise NotInBlocksError(f"tensor {entry.name!r} has other numbers in the model; computed with: the file's")
        return NamedTensor(entry, order)

    def _processed(self, entry: TensorEntry, numbers: Any) -> Any:
        """What transformers makes of a tensor."""
        given = {"tensor_key_mapping": {}, "parsed_parameters": {"config": self._settings, "tensors": {}}}
        result = self._processor.process(weights=numbers, name=entry.name, **given)
        if result.name != entry.name or result.weights is None:
            raise NotInBlocksError(f"tensor {entry.name!r} is several of the model's; computed with: one each")
        return result.weights

    def values(self, parameter: str, shape: tuple[int, ...]) -> Tensor:
        """A parameter [shape] in float32, from a tensor of floating point numbers or of blocks."""
        named = self.of(parameter)
        if named is None:
            raise self._missing(parameter)
        entry = named.entry
        self.check_shape(entry, shape)
        if entry.kind not in FLOATS:
            raise NotInBlocksError(
                f"tensor {entry.name!r} is of type {entry.kind_name}, a vector or a table; "
                "computed with: F32, F16, BF16"
            )
        count = int(numpy.prod(entry.shape))
        with entry.file.open("rb") as stream:
            stream.seek(entry.start)
            raw = bytearray(stream.read(count * FLOATS[entry.kind][1]))
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[entry.kind_name]
        numbers = torch.frombuffer(raw, dtype=dtype).float().view(entry.shape).numpy()
        return torch.from_numpy(numpy.ascontiguousarray(self._processed(entry, numbers), dtype=numpy.float32))

    def _missing(self, parameter: str) -> SlipstreamError:
        name = self._names.get(parameter)
        sought = f"{name!r}, which is {parameter!r}" if name else f"for {parameter!r}"
        return SlipstreamError(f"model {str(self.header.file)!r} has no tensor {sought} of the architecture")

    def check_shape(self, entry: TensorEntry, shape: tuple[int, ...]) -> None:
        """Refuse a tensor of another shape than the configuration says."""
        if entry.shape != shape:
            raise SlipstreamError(
                f"model {str(self.header.file)!r}: tensor {entry.name!r} is {list(entry.shape)}; "
                f"allowed: {list(shape)}, by the file's own configuration"
            )

    def check_unused(self) -> None:
        """Refuse a file with biases that the model would leave out; other tensors are named in the log."""
        left = sorted(self.header.tensors.keys() - self._used)
        for name in left:
            if name.endswith(".bias") and f"{name.removesuffix('.bias')}.weight" in self._used:
                raise extra_bias(str(self.header.file), name)
        warn_of_unused(str(self.header.file), left)

    def part(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        """A matrix of the file [shape] for the kernels."""
        named = self._matrix(parameter, shape)
        packed = self._ahead.part(named.entry.name) if named.order is None else None
        return packed or self._reader.part(named.entry, library, self._memory, named.order)

    def table(self, parameter: str, shape: tuple[int, int], library: Any) -> Table:
        """A matrix of the file [shape] of which single rows are needed."""
        named = self._matrix(parameter, shape)
        if named.order is None and stays_in_file(self.header, named.entry.name):
            return RowsOfFile(named.entry, library)
        return self.part(parameter, shape, library)

    def _matrix(self, parameter: str, shape: tuple[int, int]) -> NamedTensor:
        named = self.of(parameter)
        if named is None:
            raise self._missing(parameter)
        self.check_shape(named.entry, shape)
        check_kind(named.entry)
        return named


@dataclass(frozen=True)
class _TopLevel:
    """What transformers' reader asks of a model, without the parts of its parts: for each it makes all names anew."""

    module: Any
    depth: int

    @property
    def config(self) -> Any:
        return self.module.config

    def state_dict(self) -> Any:
        return self.module.state_dict()

    def named_children(self) -> list[tuple[str, _TopLevel]]:
        return [(name, _TopLevel(child, self.depth - 1)) for name, child in self.module.named_children() if self.depth]


def _names(reader: Any, model: Any, processor: Any) -> dict[str, str]:
    """The file's tensor for each of the model's parameters that has one."""
    for given in (_TopLevel(model, 1), model):
        names = {theirs: ours for ours, theirs in reader.get_gguf_hf_weights_map(given, processor).items()}
        if names.keys() >= model.state_dict().keys():
            break
    return names
