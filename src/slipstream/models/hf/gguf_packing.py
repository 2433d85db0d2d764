"""The matrices of a GGUF file, read and packed by threads of their own while transformers is imported.

Importing takes seconds, on one core and in Python. Packing asks nothing of Python, and of the model nothing but the
order of some rows, which are left out here.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from math import prod
from types import TracebackType
from typing import Any, cast

import torch

from slipstream.errors import SlipstreamError
from slipstream.models.cpu.block_linear import BlockPart
from slipstream.models.cpu.block_structs import FilePieceStruct
from slipstream.models.cpu.huge_pages import HugePages
from slipstream.models.hf.gguf_header import GGUFHeader, TensorEntry
from slipstream.models.hf.gguf_rows import ends_within

TABLE, OUTPUT = "token_embd.weight", "output.weight"
REORDERED = ("attn_q.weight", "attn_k.weight")  # whose rows stand in another order in some models
PIECE = 1 << 22  # bytes of the file that a thread takes at a time


class PackedAhead:
    """Packs, from when it is made. As a context it stops what nobody asked for when it is left."""

    def __init__(self, header: GGUFHeader, library: Any) -> None:
        """header: one whose matrices are all of types that the kernels take."""
        entries = [] if os.name != "posix" else [one for one in header.tensors.values() if _is_packed(header, one)]
        memory = HugePages()
        self._parts: dict[str, BlockPart] = {}
        for entry in entries:
            assert entry.block is not None
            self._parts[entry.name] = BlockPart(entry.block, cast(Any, entry.shape), None, library, memory)
        pieces = [(entry, first, last) for entry in entries for first, last in self._parts[entry.name].steps(PIECE)]
        self._of = [entry for entry, _, _ in pieces]
        self._pieces = (FilePieceStruct * len(pieces))(*(self._piece(*piece) for piece in pieces))
        self._header, self._library, self._next = header, library, ctypes.c_int64(0)
        threads = max(1, torch.get_num_threads()) if pieces else 0
        self._threads = ThreadPoolExecutor(threads or 1, "packing")
        self._at_work = [self._threads.submit(self._pack) for _ in range(threads)]

    def _piece(self, entry: TensorEntry, first: int, last: int) -> FilePieceStruct:
        part = self._parts[entry.name]
        start = entry.start + first * part.row_bytes
        return FilePieceStruct(part.block.code, last - first, part.inputs, start, part.from_row(first))

    def _pack(self) -> None:
        pack = self._library.pack_pieces
        with self._header.file.open("rb", buffering=0) as stream:
            count = ctypes.c_int64(len(self._pieces))
            failed = pack(ctypes.c_int32(stream.fileno()), self._pieces, count, ctypes.byref(self._next))
        if failed < 0:
            return
        entry = self._of[failed]
        if self._header.file.stat().st_size < entry.start + prod(entry.shape[:-1]) * (entry.row_bytes or 0):
            raise ends_within(self._header.file, entry)
        raise SlipstreamError(f"model {str(self._header.file)!r}: tensor {entry.name!r} could not be read into memory")

    def part(self, name: str) -> BlockPart | None:
        """The matrix of this name, once all are packed; None if it is not among those packed here."""
        for thread in self._at_work:
            thread.result()
        return self._parts.pop(name, None)

    def __enter__(self) -> PackedAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._next.value = len(self._pieces)
        self._threads.shutdown()


def _is_packed(header: GGUFHeader, entry: TensorEntry) -> bool:
    whole = len(entry.shape) == 2 and 0 not in entry.shape
    return whole and not entry.name.endswith(REORDERED) and not stays_in_file(header, entry.name)


def stays_in_file(header: GGUFHeader, name: str) -> bool:
    """Whether a tensor is the table of the tokens, and not their output layer too: its rows are read when needed."""
    return name == TABLE and OUTPUT in header.tensors
