"""Rows of a GGUF file's tensors, as the file has them."""

from __future__ import annotations

from threading import Lock
from typing import Any, cast
from weakref import finalize

import numpy
import torch
from torch import Tensor

from slipstream.models.cpu.block_linear import BlockPart, Memory
from slipstream.models.cpu.huge_pages import SmallPages
from slipstream.models.hf.gguf_header import TensorEntry, ends_within


class RowReader:
    """Reads rows into memory that the next reading overwrites; for one thread."""

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

    def part(self, entry: TensorEntry, library: Any, memory: Memory | None = None, order: Any = None) -> BlockPart:
        """A matrix of the file for the kernels. order: the file's row of each of its rows; None: the same order."""
        ordered = None if order is None else self.rows(entry, 0, entry.shape[0])[order]

        def read(first: int, last: int) -> Any:
            return self.rows(entry, first, last) if ordered is None else ordered[first:last]

        block, (outputs, inputs) = entry.block, entry.shape
        assert block is not None
        return BlockPart(block, (outputs, inputs), read, library, memory)


class RowsOfFile:
    """A table that stays in the file, of which each forward needs a few rows; for any thread.

    The file is open as long as this object lives, so that another one may take its name.
    """

    def __init__(self, entry: TensorEntry, library: Any) -> None:
        self.outputs, self.inputs = entry.shape
        self._entry, self._library = entry, library
        self._stream, self._lock = entry.file.open("rb", buffering=0), Lock()
        finalize(self, self._stream.close)

    def rows(self, outputs: Tensor) -> Tensor:
        """See `BlockPart.rows`."""
        block, wanted = self._entry.block, outputs.tolist()
        assert block is not None
        if wanted and not (min(wanted) >= 0 and max(wanted) < self.outputs):
            raise IndexError(f"rows from {min(wanted)} to {max(wanted)}; allowed: 0 to {self.outputs - 1}")
        row_bytes = cast(int, self._entry.row_bytes)
        read = bytearray(len(wanted) * row_bytes)
        to = memoryview(read)
        with self._lock:
            for at, row in enumerate(wanted):
                self._stream.seek(self._entry.start + row * row_bytes)
                if self._stream.readinto(to[at * row_bytes : (at + 1) * row_bytes]) != row_bytes:
                    raise ends_within(self._entry)
        rows = numpy.frombuffer(read, numpy.uint8).reshape(len(wanted), row_bytes)
        shape = len(wanted), self.inputs
        packed = BlockPart(block, shape, lambda first, last: rows[first:last], self._library, SmallPages())
        return packed.rows(torch.arange(len(wanted)))
