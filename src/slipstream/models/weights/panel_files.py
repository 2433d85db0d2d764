"""Stores the packed matrices of a GGUF file in the cache folder, and maps them into memory.

A model that would take more than a third of the memory is packed once into such a file. Later starts read only what
they use, and the system can reclaim the memory at any time, so a model may be larger than the memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
import torch

from slipstream.durable_files import locked, replaced
from slipstream.errors import os_reason
from slipstream.models.cache_folder import PANELS, panels_folder
from slipstream.models.cpu.block_linear import BlockPart
from slipstream.models.cpu.huge_pages import SmallPages
from slipstream.models.cpu.structs import LANES, FilePieceStruct
from slipstream.models.cpu.thread_placement import free_thread
from slipstream.models.notices import TimeLeft, progress_bar
from slipstream.models.weights.gguf_file import PIECE, GGUFHeader, TensorEntry, ends_within, not_finite

log = logging.getLogger("slipstream")

SAMPLE = 4096  # bytes of each tensor, which distinguish files with equal headers
PROBE_INPUTS = 512
LARGEST_SHARE = 0.9  # of the free disk space


class MappedPanels:
    """The panels of a file, handed out in the order in which they were written."""

    def __init__(self, file: Path) -> None:
        with file.open("rb") as stream:
            pages = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        numbers = numpy.frombuffer(pages, numpy.uint8)
        memory: Any = (ctypes.c_uint8 * len(numbers)).from_address(numbers.ctypes.data)
        memory.owner = numbers  # keeps the mapping alive; ctypes hides from PyTorch that it is read-only
        self._rest = memoryview(memory)

    def take(self, size: int) -> memoryview:
        panels, self._rest = self._rest[:size], self._rest[size:]
        return panels


def mapped_panels(header: GGUFHeader, entries: Sequence[TensorEntry], library: Any) -> MappedPanels | None:
    """The panels of these matrices of a file, written first if needed.

    Returns None, with a warning, if the cache folder has no room or cannot be written.
    """
    source = _identity(header, entries)
    file = panels_folder() / f"{header.stem}-{source}-{_layout(entries, library)}{PANELS}"
    size = sum(entry.packed_size(library) for entry in entries)
    if not _is_whole(file, size):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = locked(file.with_suffix(".lock"), wait=True)
            assert lock is not None
            try:
                if not _is_whole(file, size):  # otherwise another process has just written it
                    _make_room(file, f"{header.stem}-{source}-", size)
                    _write(file, header, entries, library)
                    if _identity(header, entries) != source:
                        file.unlink()
                        raise header.wrong("it was changed while it was read", "a file that does not change")
            finally:
                lock.release()
        except OSError as error:
            log.warning(
                "%s takes %.1f GB, and its panels cannot be kept in %s: %s",
                *(header.file.name, size / 1e9, file.parent, os_reason(error)),
            )
            return None
    return MappedPanels(file)


def _is_whole(file: Path, size: int) -> bool:
    """True if a file has this size and the time that `_write` gave it, so that nothing has changed it since."""
    if not file.is_file():
        return False
    status = file.stat()
    return (status.st_size, int(status.st_mtime)) == (size, _mark_of(file))


def _mark_of(file: Path) -> int:
    """The modification time of a complete file, in seconds: made from its name."""
    return zlib.crc32(file.name.encode()) // 4  # before 2004, which no later change is


def _identity(header: GGUFHeader, entries: Sequence[TensorEntry]) -> str:
    """A digest of the header, the file's last change, and a sample of each matrix."""
    digest = hashlib.sha256(header.digest.encode())
    for part in header.parts:
        with part.open("rb", buffering=0) as stream:
            status = os.fstat(stream.fileno())
            digest.update(f"{status.st_size} {status.st_mtime_ns} ".encode())
            for entry in entries:
                if entry.file == part:
                    digest.update(entry.name.encode())
                    stream.seek(entry.start)
                    digest.update(stream.read(min(SAMPLE, entry.num_bytes)))
    return digest.hexdigest()[:16]


def _layout(entries: Sequence[TensorEntry], library: Any) -> str:
    """A digest of the layout that the kernels give panels of these matrices' types."""
    digest = hashlib.sha256()
    for block in sorted({entry.packed_block for entry in entries}, key=lambda block: block.code):
        row_bytes = PROBE_INPUTS // block.size * block.bytes
        rows = (numpy.arange(LANES * row_bytes) * 7919 >> 3).astype(numpy.uint8).reshape(LANES, row_bytes)

        def read(first: int, last: int, rows: Any = rows) -> Any:
            return rows[first:last]

        digest.update(BlockPart(block, (LANES, PROBE_INPUTS), read, library, SmallPages()).data.numpy().tobytes())
    return digest.hexdigest()[:8]


def _make_room(file: Path, prefix: str, size: int) -> None:
    """Remove incomplete and outdated files; raise OSError if a file of this size does not fit."""
    for other in file.parent.iterdir():
        name = other.name
        if name.startswith(f".{file.name}.") or (name.startswith(prefix) and name.endswith(PANELS)):
            other.unlink(missing_ok=True)
    free = shutil.disk_usage(file.parent).free
    if size > LARGEST_SHARE * free:
        raise OSError(f"{free / 1e9:.1f} GB of the disk are free")


def _write(file: Path, header: GGUFHeader, entries: Sequence[TensorEntry], library: Any) -> None:
    ends = list(accumulate(entry.packed_size(library) for entry in entries))
    pieces = [piece for entry, end in zip(entries, ends, strict=True) for piece in _pieces(entry, end, library)]
    name, size = header.file.name, ends[-1]
    message = f"packing {name!r} into {file} ({size / 1e9:.1f} GB, once) ..."
    with replaced(file) as partial, partial.open("wb", buffering=0) as output:
        output.truncate(size)
        sources = {part: part.open("rb", buffering=0) for part in header.parts}
        try:
            with progress_bar(f"packing {name!r} (once)", message, TimeLeft(), total=len(pieces)) as progress:

                def pack(piece: tuple[TensorEntry, ctypes.Structure, int, int]) -> None:
                    entry, struct, place, num_bytes = piece
                    panels = torch.zeros(num_bytes, dtype=torch.uint8)
                    struct.to, counter = panels.data_ptr(), ctypes.c_int64(0)
                    descriptor = sources[entry.file].fileno()
                    failed = library.pack_pieces(descriptor, ctypes.byref(struct), 1, ctypes.byref(counter), 1)
                    if failed >= 0:
                        raise not_finite(entry) if failed == 1 else ends_within(entry)  # 1: see `pack_pieces`
                    rest = panels.numpy().data
                    while rest:
                        count = os.pwrite(output.fileno(), rest, place)
                        rest, place = rest[count:], place + count
                    progress.advance(progress.task_ids[0])

                with ThreadPoolExecutor(torch.get_num_threads(), "packing", free_thread) as threads:
                    tasks = [threads.submit(pack, piece) for piece in pieces]
                    try:
                        for task in tasks:
                            task.result()
                    finally:
                        threads.shutdown(cancel_futures=True)
            os.utime(output.fileno(), times=(_mark_of(file),) * 2)
        finally:
            for source in sources.values():
                source.close()


def _pieces(entry: TensorEntry, end: int, library: Any) -> Iterator[tuple[TensorEntry, ctypes.Structure, int, int]]:
    """Pieces of a matrix's rows, with the position and size in bytes of their panels. end: of its last panel."""
    block, inputs = entry.packed_block, entry.matrix[1]
    panel_bytes, row_bytes = library.panel_bytes(block.code, inputs), block.row_bytes(inputs)
    start = end - entry.packed_size(library)
    for first, last in block.row_ranges(entry.matrix, PIECE):
        struct = FilePieceStruct(block.code, last - first, inputs, entry.start + first * row_bytes, None)
        yield entry, struct, start + first // LANES * panel_bytes, -(-(last - first) // LANES) * panel_bytes
