"""The tensors of a GGUF file, with a Hugging Face model's names and order of rows."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Lock
from types import SimpleNamespace
from typing import Any, cast
from weakref import finalize

import numpy
import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.models.cpu.block_experts import ExpertStacks, Stack
from slipstream.models.cpu.block_linear import BlockPart, Table
from slipstream.models.cpu.grouped_blocks import NotInBlocksError
from slipstream.models.cpu.huge_pages import HugePages, SmallPages, as_tensor
from slipstream.models.cpu.kernel_libraries import address, block_kernels
from slipstream.models.cpu.latent_heads import LatentStacks, latent_of, stacks_of_part
from slipstream.models.cpu.processor import NoKernelsError
from slipstream.models.cpu.structs import TYPES, BlockFormat, PartStruct
from slipstream.models.decoder.plan import ExpertsPlan, LatentPlan
from slipstream.models.weights.gguf_architectures import (
    Order,
    Source,
    architecture_of,
    settings_of,
    source_of,
)
from slipstream.models.weights.gguf_file import INSTALL, GGUFHeader, TensorEntry, ends_within, not_finite
from slipstream.models.weights.gguf_metadata import FACTORS, LONG_FACTORS, SHORT_FACTORS
from slipstream.models.weights.gguf_packing import PackedAhead, stays_in_file
from slipstream.models.weights.unused_tensors import refuse_unused

log = logging.getLogger("slipstream")

UNPACKED = 1 << 24  # numbers that are unpacked at a time
SUPPORTED = ", ".join(block.name for block in TYPES if block.number >= 0)


def check_single(header: GGUFHeader) -> None:
    """Raise `NotInBlocksError` before packing if a matrix must be computed from several tensors."""
    config = SimpleNamespace(**settings_of(header))
    for parameter, source in architecture_of(header).tensors.items():
        is_made = isinstance(source, Source) and len(source.names) > 1 and source.change and "experts" not in parameter
        if is_made and latent_of(config, f".{parameter}") is None:
            raise _made_from(parameter, cast(Source, source).names)


def _made_from(parameter: str, tensors: Sequence[str]) -> NotInBlocksError:
    return NotInBlocksError(f"{parameter} is made from {' and '.join(tensors)}; computed with: one tensor as it is")


class RowReader:
    """Reads rows of matrices, or of stacked matrices, into memory that the next call overwrites. Not thread-safe."""

    def __init__(self) -> None:
        self._space = bytearray()

    def rows(self, entry: TensorEntry, first: int, last: int) -> Any:
        """[last - first, bytes] uint8."""
        row_bytes = entry.num_bytes // entry.matrix[0]
        size = (last - first) * row_bytes
        if len(self._space) < size:
            self._space = bytearray(size)
        with entry.file.open("rb", buffering=0) as stream:
            stream.seek(entry.start + first * row_bytes)
            filled = stream.readinto(memoryview(self._space)[:size])
        if filled != size:
            raise ends_within(entry)
        return numpy.frombuffer(self._space, numpy.uint8, size).reshape(last - first, row_bytes)

    def part(self, entry: TensorEntry, library: Any, memory: HugePages, order: Any) -> BlockPart:
        """A matrix of the file for the kernels. order: for each row, its row in the file; None: the same order."""
        ordered = None if order is None else self.rows(entry, 0, entry.shape[0])[order]

        def read(first: int, last: int) -> Any:
            return self.rows(entry, first, last) if ordered is None else ordered[first:last]

        block, (outputs, inputs) = entry.block, entry.shape
        assert block is not None
        part = BlockPart(block, (outputs, inputs), read, library, memory)
        if not part.is_finite:
            raise not_finite(entry)
        return part


@dataclass(frozen=True)
class StoredRows:
    """Rows of a matrix as they are in a file."""

    name: str
    block: BlockFormat
    inputs: int
    rows: Any  # [outputs, bytes] uint8


class RowsOfFile:
    """A table that stays in the file, since each forward needs only a few of its rows. Thread-safe.

    The file stays open while this object lives, so replacing it on the disk does no harm.
    """

    def __init__(self, entry: TensorEntry, library: Any, scale: Tensor | None = None) -> None:
        """scale: multiplies all weights, see `BlockPart.scale`."""
        self.outputs, self.inputs = entry.shape
        self._entry, self._library, self._scale = entry, library, scale
        self._block, self._row_bytes = check_kind(entry), cast(int, entry.row_bytes)
        self._stream, self._lock = entry.file.open("rb", buffering=0), Lock()
        finalize(self, self._stream.close)

    def rows(self, outputs: Tensor) -> Tensor:
        row_numbers, size, library = outputs.tolist(), self._row_bytes, self._library
        if row_numbers and not (min(row_numbers) >= 0 and max(row_numbers) < self.outputs):
            raise IndexError(f"rows from {min(row_numbers)} to {max(row_numbers)}; allowed: 0 to {self.outputs - 1}")
        rows, count = list[bytes](), len(row_numbers)
        with self._lock:
            for row in row_numbers:
                self._stream.seek(self._entry.start + row * size)
                rows.append(self._stream.read(size))
        if any(len(row) < size for row in rows):
            raise ends_within(self._entry)
        panels = as_tensor(SmallPages().take(self._block.panels_size((count, self.inputs), library)))
        if not library.pack_panels(self._block.code, b"".join(rows), count, self.inputs, address(panels), 1):
            raise not_finite(self._entry)
        part = PartStruct(self._block.code, count, address(panels), address(self._scale))
        out, places = torch.empty(count, self.inputs), torch.arange(count)
        library.unpack_rows(ctypes.byref(part), self.inputs, address(places), count, address(out))
        return out


def check_kind(entry: TensorEntry) -> BlockFormat:
    """The block type of a matrix. Raises `NotInBlocksError` for types that the kernels do not compute with."""
    if entry.block is None:
        raise NotInBlocksError(f"tensor {entry.name!r} is of type {entry.kind_name}; computed with: {SUPPORTED}")
    return entry.block


class GGUFTensors:
    """A model's parameters by name, from the tensors of a file; `gguf_architectures` maps the names."""

    def __init__(self, header: GGUFHeader, ahead: PackedAhead | None = None) -> None:
        """ahead: of this file's matrices."""
        self.header, self._settings, self._architecture = header, settings_of(header), architecture_of(header)
        self._ahead, self._reader, self._memory = ahead, RowReader(), HugePages()
        self._used = {FACTORS, LONG_FACTORS, SHORT_FACTORS}

    def tensors(self, parameter: str) -> list[TensorEntry]:
        """The tensors whose concatenated rows are those of a parameter, or of each expert of a parameter
        [experts, outputs, inputs]: gate before up, in the file's order of rows."""
        source = self._source(parameter)
        names = source.names
        if source.fused in self.header.tensors:
            names = (source.fused,)
        for name in names:
            if name not in self.header.tensors:
                raise SlipstreamError(
                    f"model {str(self.header.file)!r} has no tensor {name!r} for the model's {parameter!r}; allowed: "
                    "a file with all tensors of its architecture"
                )
            self._used.add(name)
        return [self.header.tensors[name] for name in names]

    def _source(self, parameter: str) -> Source:
        source = source_of(self._architecture, parameter)
        if source is None:
            what = f"no tensor of architecture {self.header.architecture!r} is known for the model's {parameter!r}"
            raise self.header.wrong(what, "settings whose parameters are known")
        return source

    def _order(self, order: Order | None, count: int) -> Any:
        """The index in the file of each of the model's rows or columns; None for the same order."""
        if order is None:
            return None
        try:
            places = order(self._settings, count)
        except ValueError as error:
            raise self.header.wrong(f"a tensor has {count} rows", "whole heads, by the file's metadata") from error
        return None if (places == numpy.arange(count)).all() else places

    def values(self, parameter: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A parameter [shape] in floating point, from tensors of any types."""
        source, entries = self._source(parameter), self.tensors(parameter)
        numbers = []
        for entry in entries:
            scale = self._scale(entry)
            tensor = self._numbers(entry, dtype if source.change is None and scale is None else torch.float32)
            numbers.append(tensor if scale is None else tensor * scale.view(-1, *[1] * (tensor.dim() - 1)))
        try:
            if source.change is not None:
                joined = source.change(*numbers)
            else:
                joined = numbers[0] if len(numbers) == 1 else torch.cat(numbers, max(numbers[0].dim() - 2, 0))
        except (RuntimeError, ValueError, IndexError) as error:
            shapes = " and ".join(f"{entry.name!r} {list(entry.shape)}" for entry in entries)
            raise self.header.wrong(f"tensors {shapes} do not fit together", f"{list(shape)} in all") from error
        ones = [size for size in joined.shape if size != 1]
        if ones != [size for size in shape if size != 1]:
            self.check_shape(entries[0], shape, tuple(joined.shape))
        joined = joined.reshape(shape)  # files leave out dimensions of 1, or add them
        for order, dimension in ((source.order, 0), (source.columns, 1)):
            places = None if order is None else self._order(order, shape[dimension])
            if places is not None:
                joined = joined.index_select(dimension, torch.from_numpy(places))
        return joined.to(dtype).contiguous()

    def _numbers(self, entry: TensorEntry, dtype: torch.dtype) -> Tensor:
        """A whole tensor, unpacked a few rows at a time."""
        rows, columns = entry.matrix
        matrix = replace(entry, shape=entry.matrix)
        numbers, step = torch.empty(matrix.shape, dtype=dtype), max(1, UNPACKED // max(columns, 1))
        for first in range(0, rows, step):
            piece = unpacked_rows(matrix, self._reader.rows(matrix, first, min(first + step, rows)))
            if not bool(torch.isfinite(piece).all()):
                raise not_finite(entry)
            numbers[first : first + step] = piece
        return numbers.view(entry.shape)

    def _scale(self, entry: TensorEntry) -> Tensor | None:
        """The factor of a matrix [1], or of each expert [experts]; None if the file has none."""
        name = f"{entry.name.removesuffix('.weight')}.scale"
        scale = self.header.tensors.get(name)
        # in some architectures this name is a parameter
        if scale is None or len(entry.shape) < 2 or name.split(".", 2)[-1] in self._architecture.tensors.values():
            return None
        self._used.add(name)
        self.check_shape(scale, (entry.shape[0] if len(entry.shape) == 3 else 1,))
        return self._numbers(scale, torch.float32)

    def check_shape(self, entry: TensorEntry, shape: tuple[int, ...], joined: tuple[int, ...] | None = None) -> None:
        """Refuse a tensor whose shape contradicts the configuration. joined: the shape with all its parts, if any."""
        if (joined or entry.shape) != shape:
            what = f"tensor {entry.name!r} is {list(joined or entry.shape)}"
            raise self.header.wrong(what, f"{list(shape)}, by the file's own configuration")

    def check_unused(self) -> None:
        """Refuse a file whose tensors the model does not use."""
        layers, shared = self._settings["num_hidden_layers"], self._settings.get("num_kv_shared_layers", 0)
        # layers that reuse others' keys and values may have unused tensors for their own
        ignored = [rf"^blk\.{layer}\.attn_(?:k|v|k_norm)\." for layer in range(layers - shared, layers)]
        refuse_unused(str(self.header.file), self.header.tensors.keys() - self._used, ignored)

    def part(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        """A matrix of the file [shape] that is a single tensor."""
        (part,) = self.parts(parameter, shape, library)
        return part

    def parts(self, parameter: str, shape: tuple[int, int], library: Any) -> list[BlockPart]:
        """A matrix of the file [shape] for the kernels."""
        entries, order, columns = self._matrix(parameter, shape)
        parts = []
        for entry in entries:
            packed = self._packed(entry) if order is None else None
            part = packed or self._reader.part(entry, library, self._memory, order)
            part.scale = self._scale(entry)
            part.inputs_from = None if columns is None else torch.from_numpy(numpy.argsort(columns))
            parts.append(part)
        return parts

    def stored(self, parameter: str, shape: tuple[int, ...]) -> list[StoredRows]:
        """A matrix of the file [shape] as it is, in the model's order of rows, in parts whose rows are concatenated."""
        entries, order, columns = self._matrix(parameter, cast(tuple[int, int], shape))
        parts = []
        for entry in entries:
            if columns is not None or self._scale(entry) is not None:
                raise NotInBlocksError(f"tensor {entry.name!r} has columns in another order, or a scale")
            block, rows = check_kind(entry), self._reader.rows(entry, 0, entry.shape[0])
            rows = rows.copy() if order is None else rows[order]
            parts.append(StoredRows(entry.name, block, entry.shape[1], rows))
        return parts

    def _packed(self, entry: TensorEntry) -> BlockPart | None:
        """The matrix that was packed ahead, if it was."""
        return None if self._ahead is None else self._ahead.part(entry.name)

    def table(self, parameter: str, shape: tuple[int, int], library: Any) -> Table:
        """A matrix of the file [shape] for looking up rows."""
        entries, order, _ = self._matrix(parameter, shape)
        if order is None and stays_in_file(self.header, entries[0].name):
            return RowsOfFile(entries[0], library, self._scale(entries[0]))
        return self.part(parameter, shape, library)

    def experts(self, block: str, plan: ExpertsPlan, library: Any) -> ExpertStacks:
        """The matrices and biases of a block's experts as the file has them, whatever their order in the model."""
        store = None if self._ahead is None else self._ahead.store

        def stacks(parameter: str, outputs: int, inputs: int, matrices: int) -> list[Stack]:
            entries = self.tensors(f"{block}.experts.{parameter}")
            has_bias = source_of(self._architecture, f"{block}.experts.{parameter}_bias") is not None
            biases = self.tensors(f"{block}.experts.{parameter}_bias") if has_bias else [None] * len(entries)
            rows, result = matrices * outputs // len(entries), list[Stack]()
            for entry, bias_entry in zip(entries, biases, strict=True):
                self.check_shape(entry, (plan.count, rows, inputs))
                kind, row_bytes = check_kind(entry), cast(int, entry.row_bytes)
                part = self._packed(entry)
                if part is None and store is None:
                    part = self._reader.part(replace(entry, shape=entry.matrix), library, self._memory, None)
                bias, scales = None, self._scale(entry)
                if bias_entry is not None:
                    self.check_shape(bias_entry, (plan.count, rows))
                    bias = self._numbers(bias_entry, torch.float32)
                for first in range(0, rows, outputs):
                    part_bias = None if bias is None else bias[:, first : first + outputs].contiguous()
                    if part is not None:
                        stack = Stack.rows_of(part, plan.count, first, outputs, part_bias)
                    else:
                        assert store is not None
                        in_file = store.rows(entry.file, entry.start + first * row_bytes, rows * row_bytes)
                        stack = Stack(kind, [0] * plan.count, [], part_bias, in_file)
                    result.append(replace(stack, scales=scales))
            return result

        gate, up = stacks("gate_up_proj", plan.inner, plan.hidden, 2)
        (down,) = stacks("down_proj", plan.hidden, plan.inner, 1)
        return ExpertStacks(gate, up, down, store)

    def latent(self, parameter: str, plan: LatentPlan, library: Any) -> LatentStacks:
        """The matrices of latent attention's heads; older files, like the model, have them in one tensor."""
        entries = self.tensors(parameter)
        heads, rank, plain, values = plan.count, plan.rank, plan.plain, plan.values
        shapes = [plan.shape] if len(entries) == 1 else [(heads, rank, plain), (heads, values, rank)]
        parts, scales = list[BlockPart](), list[Tensor | None]()
        for entry, shape in zip(entries, shapes, strict=True):
            self.check_shape(entry, shape)
            if not check_kind(entry).fits(shape[-1]):
                raise NotInBlocksError(f"tensor {entry.name!r} has rows of {shape[-1]} numbers, not whole blocks")
            matrix = replace(entry, shape=entry.matrix)
            parts.append(self._packed(entry) or self._reader.part(matrix, library, self._memory, None))
            scales.append(self._scale(entry))
        if len(parts) == 1:
            parts[0].scale = scales[0]
            return stacks_of_part(parts[0], plan)
        keys, of_values = (
            replace(Stack.rows_of(part, heads, 0, outputs), scales=scale)
            for part, outputs, scale in zip(parts, (rank, values), scales, strict=True)
        )
        return keys, of_values

    def _matrix(self, parameter: str, shape: tuple[int, int]) -> tuple[list[TensorEntry], Any, Any]:
        """The tensors whose rows form a matrix, and for each of its rows and columns the one in the file.

        None for the same order. Raises `NotInBlocksError` if its weights must be computed from the tensors.
        """
        source, entries = self._source(parameter), self.tensors(parameter)
        rows = shape[0] // len(entries)
        if source.change is not None or (len(entries) > 1 and source.order is not None):
            raise _made_from(parameter, [entry.name for entry in entries])
        for entry in entries:
            self.check_shape(entry, (rows, shape[1]))
            if not check_kind(entry).fits(shape[1]):
                raise NotInBlocksError(
                    f"tensor {entry.name!r} has rows of {shape[1]} numbers; computed with: multiples of 32"
                )
        return entries, self._order(source.order, shape[0]), self._order(source.columns, shape[1])


def unpacked_rows(entry: TensorEntry, rows: Any) -> Tensor:
    """[rows, inputs] float32: some rows of a matrix, unpacked from [rows, bytes]."""
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(entry.kind_name)
    if dtype is not None:
        return torch.from_numpy(rows.copy()).view(dtype).float()
    shape = len(rows), entry.shape[-1]
    if entry.block is not None and entry.block.fits(entry.shape[-1]):
        with suppress(NoKernelsError):
            part = BlockPart(entry.block, shape, lambda first, last: rows[first:last], block_kernels(), SmallPages())
            return part.rows(torch.arange(len(rows)))
    return _unpacked_by_gguf(entry, rows)


def _unpacked_by_gguf(entry: TensorEntry, rows: Any) -> Tensor:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        numbers = dequantize(rows, GGMLQuantizationType(entry.kind))
    except (ImportError, ValueError, NotImplementedError) as error:
        what = f"model {str(entry.file)!r}: tensor {entry.name!r} of type {entry.kind_name} cannot be unpacked"
        how = INSTALL if isinstance(error, ImportError) else f"{SUPPORTED}, or others that the gguf package unpacks"
        raise SlipstreamError(f"{what}; allowed: {how}") from error
    return torch.from_numpy(numpy.ascontiguousarray(numbers, dtype=numpy.float32))
