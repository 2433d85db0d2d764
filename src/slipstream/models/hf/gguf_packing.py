"""The matrices of a GGUF file, read and packed by threads of their own while transformers is imported.

Importing takes seconds, on one core and in Python. Packing asks nothing of Python, and of the model nothing but the
order of some rows, which are left out here.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, cast

import torch

from slipstream.errors import SlipstreamError
from slipstream.models.cpu.block_linear import BlockPart
from slipstream.models.cpu.huge_pages import HugePages
from slipstream.models.cpu.structs import FilePieceStruct
from slipstream.models.hf.gguf_header import GGUFHeader, TensorEntry, ends_within

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
        by_file = [[entry for entry in entries if entry.file == file] for file in header.parts]
        self._files = [_FilePieces(group, self._parts) for group in by_file if group]
        self._library = library
        threads = max(1, torch.get_num_threads()) if self._files else 0
        self._threads = ThreadPoolExecutor(threads or 1, "packing")
        self._at_work = [self._threads.submit(self._pack) for _ in range(threads)]

    def _pack(self) -> None:
        for pieces in self._files:
            pieces.pack(self._library)

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
        for pieces in self._files:
            pieces.stop()
        self._threads.shutdown()


class _FilePieces:
    """What is packed of one file, in pieces that threads take in turn."""

    def __init__(self, entries: list[TensorEntry], parts: dict[str, BlockPart]) -> None:
        ranges = [(entry, *rows) for entry in entries for rows in parts[entry.name].steps(PIECE)]
        self._file, self._of = entries[0].file, [entry for entry, _, _ in ranges]
        structs = (_piece(entry, parts[entry.name], first, last) for entry, first, last in ranges)
        self._pieces, self._next = (FilePieceStruct * len(ranges))(*structs), ctypes.c_int64(0)

    def pack(self, library: Any) -> None:
        """Pack pieces until all are taken; several threads share the work."""
        with self._file.open("rb", buffering=0) as stream:
            count = ctypes.c_int64(len(self._pieces))
            failed = library.pack_pieces(ctypes.c_int32(stream.fileno()), self._pieces, count, ctypes.byref(self._next))
        if failed < 0:
            return
        entry = self._of[failed]
        if self._file.stat().st_size < entry.start + entry.num_bytes:
            raise ends_within(entry)
        raise SlipstreamError(f"model {str(self._file)!r}: tensor {entry.name!r} could not be read into memory")

    def stop(self) -> None:
        """Let nobody take another piece."""
        self._next.value = len(self._pieces)


def _piece(entry: TensorEntry, part: BlockPart, first: int, last: int) -> FilePieceStruct:
    start = entry.start + first * part.row_bytes
    return FilePieceStruct(part.block.code, last - first, part.inputs, start, part.from_row(first))


def _is_packed(header: GGUFHeader, entry: TensorEntry) -> bool:
    whole = len(entry.shape) == 2 and 0 not in entry.shape
    return whole and not entry.name.endswith(REORDERED) and not stays_in_file(header, entry.name)


def stays_in_file(header: GGUFHeader, name: str) -> bool:
    """Whether a tensor is the table of the tokens, and not their output layer too: its rows are read when needed."""
    return name == TABLE and OUTPUT in header.tensors
