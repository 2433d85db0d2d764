"""The tensors of a GGUF file, with the names and the order of rows that a Hugging Face model gives them.

Matrices are packed for the kernels, by threads of their own while transformers is imported: importing takes seconds on
one core and holds Python's lock. Packing needs neither the lock nor the model, except for the order of some rows.
"""

from __future__ import annotations

import ctypes
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock
from types import TracebackType
from typing import Any, cast
from weakref import finalize

import numpy
import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.models.cpu.block_experts import ExpertSizes, ExpertStacks, Stack
from slipstream.models.cpu.block_linear import BlockPart, Table, fits_blocks
from slipstream.models.cpu.grouped_blocks import NotInBlocksError
from slipstream.models.cpu.huge_pages import HugePages, SmallPages
from slipstream.models.cpu.structs import FORMATS, BlockFormat, FilePieceStruct
from slipstream.models.weights.gguf_configuration import FACTORS
from slipstream.models.weights.gguf_file import FLOATS, GGUFHeader, TensorEntry, ends_within
from slipstream.models.weights.unused_tensors import refuse_unused

TABLE, OUTPUT = "token_embd.weight", "output.weight"
REORDERED = ("attn_q.weight", "attn_k.weight")  # whose rows are in another order in some models
PIECE = 1 << 22  # bytes of the file that a thread takes at a time
SUPPORTED = ", ".join(block.name for block in FORMATS)


class PackedAhead:
    """Packs a file's matrices in threads that start at once. As a context manager it stops them at its end."""

    def __init__(self, header: GGUFHeader, library: Any) -> None:
        """header: all its matrices must be of types that the kernels take."""
        entries = [entry for entry in header.tensors.values() if _is_packed(header, entry)]
        if os.name != "posix":  # the kernels read the file by pread
            entries = []
        memory = HugePages()
        self._parts: dict[str, BlockPart] = {}
        for entry in entries:
            assert entry.block is not None
            shape = math.prod(entry.shape[:-1]), entry.shape[-1]  # experts follow each other
            self._parts[entry.name] = BlockPart(entry.block, shape, None, library, memory)
        by_file = [[entry for entry in entries if entry.file == file] for file in header.parts]
        self._files = [_FilePieces(group, self._parts) for group in by_file if group]
        self._library = library
        threads = max(1, torch.get_num_threads()) if self._files else 0
        self._threads = ThreadPoolExecutor(threads or 1, "packing")
        self._tasks = [self._threads.submit(self._pack) for _ in range(threads)]

    def _pack(self) -> None:
        for pieces in self._files:
            pieces.pack(self._library)

    def part(self, name: str) -> BlockPart | None:
        """The matrix of this name, after waiting until all are packed; None if it is not packed here."""
        for thread in self._tasks:
            thread.result()
        return self._parts.pop(name, None)

    def __enter__(self) -> PackedAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pieces in self._files:
            pieces.stop()
        self._threads.shutdown()


class _FilePieces:
    """The matrices of one file that are packed, in pieces that threads take in turn."""

    def __init__(self, entries: list[TensorEntry], parts: dict[str, BlockPart]) -> None:
        ranges = [(entry, *rows) for entry in entries for rows in parts[entry.name].steps(PIECE)]
        self._file, self._entries = entries[0].file, [entry for entry, _, _ in ranges]  # an entry for each piece
        structs = (_piece(entry, parts[entry.name], first, last) for entry, first, last in ranges)
        self._pieces, self._next = (FilePieceStruct * len(ranges))(*structs), ctypes.c_int64(0)

    def pack(self, library: Any) -> None:
        """Pack pieces until all are taken; several threads share the work."""
        with self._file.open("rb", buffering=0) as stream:
            failed = library.pack_pieces(stream.fileno(), self._pieces, len(self._pieces), ctypes.byref(self._next))
        if failed < 0:
            return
        entry = self._entries[failed]
        if self._file.stat().st_size < entry.start + entry.num_bytes:
            raise ends_within(entry)
        raise SlipstreamError(f"model {str(self._file)!r}: tensor {entry.name!r} could not be read into memory")

    def stop(self) -> None:
        # no thread finds another piece
        self._next.value = len(self._pieces)


def _piece(entry: TensorEntry, part: BlockPart, first: int, last: int) -> FilePieceStruct:
    start = entry.start + first * part.row_bytes
    return FilePieceStruct(part.block.code, last - first, part.inputs, start, part.from_row(first))


def _is_packed(header: GGUFHeader, entry: TensorEntry) -> bool:
    is_matrix = len(entry.shape) in (2, 3) and 0 not in entry.shape and not is_of_router(entry)
    return is_matrix and not entry.name.endswith(REORDERED) and not stays_in_file(header, entry.name)


def is_of_router(entry: TensorEntry) -> bool:
    """True for a router, which chooses experts: it is no matrix for `check_kind`."""
    return "ffn_gate_inp" in entry.name


def stays_in_file(header: GGUFHeader, name: str) -> bool:
    """True if a tensor is an embedding that is not the output layer too, of which rows are read when needed."""
    return name == TABLE and OUTPUT in header.tensors


class RowReader:
    """Reads rows into memory that the next call overwrites. Not thread-safe."""

    def __init__(self) -> None:
        self._space = bytearray()

    def rows(self, entry: TensorEntry, first: int, last: int) -> Any:
        """[last - first, bytes] uint8."""
        row_bytes = cast(int, entry.row_bytes)
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
        """A matrix of the file for the kernels. order: the file's row of each of its rows; None: the same order."""
        ordered = None if order is None else self.rows(entry, 0, entry.shape[0])[order]

        def read(first: int, last: int) -> Any:
            return self.rows(entry, first, last) if ordered is None else ordered[first:last]

        block, (outputs, inputs) = entry.block, entry.shape
        assert block is not None
        return BlockPart(block, (outputs, inputs), read, library, memory)


class RowsOfFile:
    """A table that stays in the file, as each forward needs a few rows of it only. Thread-safe.

    The file stays open as long as this object lives, so replacing the file on disk does no harm.
    """

    def __init__(self, entry: TensorEntry, library: Any) -> None:
        self.outputs, self.inputs = entry.shape
        self._entry, self._library = entry, library
        self._stream, self._lock = entry.file.open("rb", buffering=0), Lock()
        finalize(self, self._stream.close)

    def rows(self, outputs: Tensor) -> Tensor:
        block, row_numbers = self._entry.block, outputs.tolist()
        assert block is not None
        if row_numbers and not (min(row_numbers) >= 0 and max(row_numbers) < self.outputs):
            raise IndexError(f"rows from {min(row_numbers)} to {max(row_numbers)}; allowed: 0 to {self.outputs - 1}")
        row_bytes = cast(int, self._entry.row_bytes)
        read = bytearray(len(row_numbers) * row_bytes)
        target = memoryview(read)
        with self._lock:
            for index, row in enumerate(row_numbers):
                self._stream.seek(self._entry.start + row * row_bytes)
                if self._stream.readinto(target[index * row_bytes : (index + 1) * row_bytes]) != row_bytes:
                    raise ends_within(self._entry)
        rows = numpy.frombuffer(read, numpy.uint8).reshape(len(row_numbers), row_bytes)
        shape = len(row_numbers), self.inputs
        packed = BlockPart(block, shape, lambda first, last: rows[first:last], self._library, SmallPages())
        return packed.rows(torch.arange(len(row_numbers)))


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of the file. order: the file's row of each of the model's rows; None: the same order."""

    entry: TensorEntry
    order: Any = None


def check_kind(entry: TensorEntry) -> BlockFormat:
    """The block type of a matrix. Raises `NotInBlocksError` for types that the kernels do not compute with."""
    if entry.block is None or not fits_blocks(entry.shape[-1], entry.block):
        raise NotInBlocksError(f"tensor {entry.name!r} is of type {entry.kind_name}; computed with: {SUPPORTED}")
    return entry.block


class GGUFTensors:
    """A model's parameters, by name, from the tensors of a file.

    transformers' reader knows which tensor a parameter is, and how it changes the tensor's numbers.
    """

    def __init__(self, header: GGUFHeader, model: Any, ahead: PackedAhead) -> None:
        """model: the model of this file's configuration, on any device; ahead: of this file's matrices."""
        self.header = header
        self._settings = model.config.to_dict()
        try:
            self._processor, self._names = tensor_names(header, model)
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
        # numbers that are all different show whether the reader changes more than the order of the rows
        numbers = numpy.arange(float(numpy.prod(shape))).reshape(shape)
        changed = self._processed(entry, numbers.copy())
        if changed.shape not in (shape, (1, *shape)):  # a vector may become a matrix of one row
            raise NotInBlocksError(
                f"tensor {entry.name!r} is {list(shape)} in the file and {list(changed.shape)} in the model; "
                "computed with: the same shape"
            )
        if len(shape) == 1 or (changed == numbers).all():  # a vector's numbers are processed when `values` reads them
            return NamedTensor(entry)
        order = (changed[:, 0] / 2).astype(numpy.int64)
        if sorted(order) != list(range(shape[0])) or (changed != numbers[order]).any():
            raise NotInBlocksError(f"tensor {entry.name!r} has other numbers in the model; computed with: the file's")
        return NamedTensor(entry, order)

    def _processed(self, entry: TensorEntry, numbers: Any) -> Any:
        """A tensor's numbers as transformers changes them when it reads a file."""
        extra = {"tensor_key_mapping": {}, "parsed_parameters": {"config": self._settings, "tensors": {}}}
        result = self._processor.process(weights=numbers, name=entry.name, **extra)
        if result.name != entry.name or result.weights is None:
            raise NotInBlocksError(f"tensor {entry.name!r} becomes several of the model's; computed with: one each")
        return result.weights

    def values(self, parameter: str, shape: tuple[int, ...]) -> Tensor:
        """A parameter [shape] in float32, from a tensor of floating point numbers."""
        named = self.of(parameter)
        if named is None:
            raise self._missing(parameter)
        entry = named.entry
        self.check_shape(entry, shape[1:] if shape[0] == 1 and len(entry.shape) == 1 else shape)
        if entry.kind not in FLOATS:
            raise NotInBlocksError(
                f"tensor {entry.name!r} of type {entry.kind_name} is not for a product; computed with: F32, F16, BF16"
            )
        count = int(numpy.prod(entry.shape))
        with entry.file.open("rb") as stream:
            stream.seek(entry.start)
            raw = bytearray(stream.read(count * FLOATS[entry.kind][1]))
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[entry.kind_name]
        numbers = torch.frombuffer(raw, dtype=dtype).float().view(entry.shape).numpy()
        if not numpy.isfinite(numbers).all():
            raise SlipstreamError(
                f"model {str(self.header.file)!r}: tensor {entry.name!r} holds numbers that are not finite; allowed: "
                "finite numbers"
            )
        return torch.from_numpy(numpy.ascontiguousarray(self._processed(entry, numbers), dtype=numpy.float32))

    def _missing(self, parameter: str) -> SlipstreamError:
        name = self._names.get(parameter)
        tensor = f"tensor {name!r}" if name else "tensor"
        return SlipstreamError(f"model {str(self.header.file)!r} has no {tensor} for the model's {parameter!r}")

    def check_shape(self, entry: TensorEntry, shape: tuple[int, ...]) -> None:
        """Refuse a tensor of another shape than the configuration says."""
        if entry.shape != shape:
            raise SlipstreamError(
                f"model {str(self.header.file)!r}: tensor {entry.name!r} is {list(entry.shape)}; "
                f"allowed: {list(shape)}, by the file's own configuration"
            )

    def check_unused(self) -> None:
        """Refuse a file whose tensors the model does not use."""
        refuse_unused(str(self.header.file), self.header.tensors.keys() - self._used)

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

    def experts(self, block: str, sizes: ExpertSizes, library: Any) -> ExpertStacks:
        layer = next(part for part in block.split(".") if part.isdigit())
        count, inner, hidden = sizes.experts, sizes.inner, sizes.hidden

        def part(name: str, outputs: int, inputs: int) -> BlockPart:
            entry = self.header.tensors.get(f"blk.{layer}.{name}.weight")
            if entry is None:
                raise SlipstreamError(f"model {str(self.header.file)!r} has no tensor 'blk.{layer}.{name}.weight'")
            self._used.add(entry.name)
            self.check_shape(entry, (count, outputs, inputs))
            check_kind(entry)
            rows = replace(entry, shape=(count * outputs, inputs))
            return self._ahead.part(entry.name) or self._reader.part(rows, library, self._memory, None)

        down = Stack.rows_of(part("ffn_down_exps", hidden, inner), count, 0, hidden)
        if f"blk.{layer}.ffn_gate_up_exps.weight" in self.header.tensors:
            both = part("ffn_gate_up_exps", 2 * inner, hidden)
            gate, up = (Stack.rows_of(both, count, first, inner) for first in (0, inner))
        else:
            gate, up = (
                Stack.rows_of(part(f"ffn_{name}_exps", inner, hidden), count, 0, inner) for name in ("gate", "up")
            )
        return ExpertStacks(gate, up, down)

    def _matrix(self, parameter: str, shape: tuple[int, int]) -> NamedTensor:
        named = self.of(parameter)
        if named is None:
            raise self._missing(parameter)
        self.check_shape(named.entry, shape)
        check_kind(named.entry)
        return named


@dataclass(frozen=True)
class _TopLevel:
    """A model cut off at a depth for transformers' reader, which would map all parameters again at each level."""

    module: Any
    depth: int

    @property
    def config(self) -> Any:
        return self.module.config

    def state_dict(self) -> Any:
        return self.module.state_dict()

    def named_children(self) -> list[tuple[str, _TopLevel]]:
        return [(name, _TopLevel(child, self.depth - 1)) for name, child in self.module.named_children() if self.depth]


def tensor_names(header: GGUFHeader, model: Any) -> tuple[Any, dict[str, str]]:
    """What changes tensors in transformers' reader, and the file's tensor for each parameter of a model that has one.

    The whole model is mapped only if need be.
    """
    from transformers import modeling_gguf_pytorch_utils as reader

    kind = reader.TENSOR_PROCESSORS.get(header.architecture, reader.TensorProcessor)
    processor = kind(config=model.config.to_dict())
    for view in (_TopLevel(model, 1), model):
        names = {tensor: parameter for parameter, tensor in reader.get_gguf_hf_weights_map(view, processor).items()}
        if names.keys() >= model.state_dict().keys():
            break
    return processor, names
