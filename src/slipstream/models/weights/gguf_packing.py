"""Packs a GGUF file's matrices for the kernels in threads of their own, while other things are imported and read.

Importing PyTorch, and transformers for models that need it, takes seconds on one core and holds Python's lock. Packing
needs neither the lock, nor PyTorch, nor the model, except for the order of some rows.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from slipstream.checks import expanded
from slipstream.errors import SlipstreamError
from slipstream.models.cache_folder import panels_folder
from slipstream.models.cpu.huge_pages import Filled, HugePages, Memory, address_in
from slipstream.models.cpu.kernel_libraries import packing_kernels
from slipstream.models.cpu.processor import NoKernelsError, memory_bytes
from slipstream.models.cpu.structs import BY_NAME, LANES, FilePieceStruct
from slipstream.models.cpu.thread_placement import (
    first_processors,
    free_thread,
    physical_cores,
    share_of_time,
)
from slipstream.models.weights.gguf_architectures import Source, architecture_of
from slipstream.models.weights.gguf_file import (
    PIECE,
    GGUFHeader,
    TensorEntry,
    ends_within,
    not_finite,
    read_header,
)
from slipstream.models.weights.model_files import is_gguf

if TYPE_CHECKING:
    from slipstream.models.cpu.block_linear import BlockPart
    from slipstream.models.cpu.expert_store import ExpertStore

log = logging.getLogger("slipstream")

TABLE, LAYER_TABLE, OUTPUT = "token_embd.weight", "per_layer_token_embd.weight", "output.weight"
ROUTERS = "ffn_gate_inp.weight"  # read in full like vectors
EXPERTS = "_exps."
LARGE = 1 / 3  # of the memory: larger models are mapped from a file, which the system can evict
FILLED = 3 / 4  # of the memory: limit for weights that the system cannot evict
MOST_THREADS = 1 << 10  # a limit that the pool needs; `use_threads` starts as many as are wanted
_begun: dict[Path, PackedAhead] = {}  # by the model's first file, until a loader takes them over


class PackedAhead:
    """Packs a file's matrices in threads that start immediately. As a context manager it stops them at its end.

    A large model's panels are mapped from a file. If that is impossible, `store` keeps the experts in use in memory.
    """

    def __init__(self, header: GGUFHeader, library: Any, threads: int | None = None) -> None:
        """header: all its matrices must have types that the kernels support; threads: by default, as PyTorch's."""
        entries = []
        if os.name == "posix":  # the kernels read the file by pread
            entries = [entry for entry in header.tensors.values() if _is_packed(header, entry)]
        size, available = sum(entry.packed_size(library) for entry in entries), memory_bytes()
        is_large = available is not None and size > LARGE * available
        mapped = None
        self.store: ExpertStore | None = None
        if available is not None and is_large:
            from slipstream.models.weights.panel_files import mapped_panels

            mapped = mapped_panels(header, entries, library)
            if mapped is None:
                self.store = _expert_store(header, entries, library, available)
                entries = [entry for entry in entries if self.store is None or EXPERTS not in entry.name]
        if available is not None and size > available:
            log.warning(
                "%s takes %.1f GB, more than the %.1f GB of memory: it is read from the disk repeatedly, which is slow",
                *(header.file.name, size / 1e9, available / 1e9),
            )
        memory: Memory = mapped or HugePages()
        self._panels = {entry.name: memory.take(entry.packed_size(library)) for entry in entries}
        by_file = [[entry for entry in entries if entry.file == file and mapped is None] for file in header.parts]
        self._files = [_FilePieces(group, self._panels, library, is_large) for group in by_file if group]
        self.header, self._library, self._tasks = header, library, list[Future[None]]()
        self._threads = ThreadPoolExecutor(MOST_THREADS, "packing", free_thread)
        self.use_threads(threads)

    def use_threads(self, threads: int | None = None) -> None:
        """Pack with this many threads from now on, unless there are more already; by default, as PyTorch's."""
        if threads is None:
            import torch

            threads = torch.get_num_threads()
        if self._files:
            self._tasks += [self._threads.submit(self._pack) for _ in range(len(self._tasks), threads)]

    def _pack(self) -> None:
        for pieces in self._files:
            pieces.pack()

    def part(self, name: str) -> BlockPart | None:
        """The matrix of this name, after waiting until all are packed; None if it is not packed here."""
        from slipstream.models.cpu.block_linear import BlockPart

        for thread in self._tasks:
            thread.result()
        panels = self._panels.pop(name, None)
        if panels is None:
            return None
        entry = self.header.tensors[name]
        return BlockPart(entry.packed_block, entry.matrix, None, self._library, Filled(panels))

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

    def __init__(
        self, entries: Sequence[TensorEntry], panels: Mapping[str, memoryview], library: Any, drops: bool
    ) -> None:
        """drops: ask the system to drop its cached copy of the file, for which panels leave no memory."""
        self._library, self._drops = library, drops
        pieces = [piece for entry in entries for piece in _pieces(entry, panels[entry.name], library)]
        self._file, self._entries = entries[0].file, [entry for entry, _ in pieces]  # an entry for each piece
        self._pieces = (FilePieceStruct * len(pieces))(*(struct for _, struct in pieces))
        self._next = ctypes.c_int64(0)

    def pack(self) -> None:
        """Pack pieces until none is left; several threads share the work."""
        with self._file.open("rb", buffering=0) as stream:
            shared = self._pieces, len(self._pieces), ctypes.byref(self._next)
            failed = self._library.pack_pieces(stream.fileno(), *shared, self._drops)
        if failed < 0:
            return
        entry = self._entries[failed % len(self._pieces)]
        if failed >= len(self._pieces):
            raise not_finite(entry)
        if self._file.stat().st_size < entry.start + entry.num_bytes:
            raise ends_within(entry)
        raise SlipstreamError(f"model {str(self._file)!r}: tensor {entry.name!r} could not be read into memory")

    def stop(self) -> None:
        # no thread finds another piece
        self._next.value = len(self._pieces)


def _pieces(entry: TensorEntry, panels: memoryview, library: Any) -> Iterator[tuple[TensorEntry, ctypes.Structure]]:
    """Pieces of a matrix's rows, with the addresses of their panels."""
    block, (_, inputs) = entry.packed_block, entry.matrix
    address, panel_bytes = address_in(panels), library.panel_bytes(block.code, inputs)
    for first, last in block.row_ranges(entry.matrix, PIECE):
        start, target = entry.start + first * block.row_bytes(inputs), address + first // LANES * panel_bytes
        yield entry, FilePieceStruct(block.code, last - first, inputs, start, target)


def _is_packed(header: GGUFHeader, entry: TensorEntry) -> bool:
    is_matrix = len(entry.shape) in (2, 3) and 0 not in entry.shape
    if not is_matrix or entry.block is None or not entry.block.fits(entry.shape[-1]):
        return False
    sources = architecture_of(header).tensors.values()
    reordered = [name for source in sources if isinstance(source, Source) and source.order for name in source.names]
    if entry.name.endswith((ROUTERS, *(f".{name}.weight" for name in reordered))):
        return False
    return not stays_in_file(header, entry.name)


def _expert_store(
    header: GGUFHeader, entries: Sequence[TensorEntry], library: Any, available: int
) -> ExpertStore | None:
    """Memory for the experts in use, as much as is left; None without experts, or if all matrices fit."""
    from slipstream.models.cpu.expert_store import ExpertStore

    sizes = {entry.name: entry.packed_size(library) for entry in entries}
    experts = [entry for entry in entries if EXPERTS in entry.name]
    others, bytes_of_expert = sum(sizes.values()) - sum(sizes[entry.name] for entry in experts), dict[str, int]()
    for entry in experts:
        layer = entry.name.split(".")[1]
        bytes_of_expert[layer] = bytes_of_expert.get(layer, 0) + sizes[entry.name] // entry.shape[0]
    largest, count = max(bytes_of_expert.values(), default=0), max((entry.shape[0] for entry in experts), default=0)
    needed = others + largest * count
    if needed > FILLED * available:
        raise header.wrong(
            f"it takes {needed / 1e9:.1f} GB of memory at once, and its panels cannot be kept in {panels_folder()}",
            f"{FILLED * available / 1e9:.1f} GB, {FILLED:.0%} of the memory, or {sum(sizes.values()) / 1e9:.1f} GB of "
            "free space there (SLIPSTREAM_MODELS names another folder)",
        )
    if not experts:
        return None
    num_slots = min(int((FILLED * available - others) // largest), count * len(bytes_of_expert))
    return ExpertStore(header.parts, largest, num_slots)


def stays_in_file(header: GGUFHeader, name: str) -> bool:
    """True if a tensor is an embedding that is not also the output layer; its rows are read when needed."""
    return name == LAYER_TABLE or (name == TABLE and OUTPUT in header.tensors)


@contextmanager
def packing_begins(source: str) -> Iterator[None]:
    """Pack a GGUF file while PyTorch is imported in this block, for `begun` to go on with.

    It does nothing for a file that the kernels cannot compute with as it is, which the loader reports, for a large
    model, or on a machine with a GPU.
    """
    ahead = None
    if "torch" not in sys.modules and os.name == "posix" and is_gguf(source) and shutil.which("nvidia-smi") is None:
        with suppress(SlipstreamError, NoKernelsError, OSError):  # which the loader raises again
            ahead = _packed_ahead(read_header(expanded(source)))
    if ahead is None:
        yield
        return
    with ahead:
        _begun[ahead.header.file] = ahead
        try:
            yield
        finally:
            _begun.pop(ahead.header.file, None)


def begun(file: Path) -> PackedAhead | None:
    """The packing of this file that has begun; the caller takes it over."""
    return _begun.pop(file, None)


def _packed_ahead(header: GGUFHeader) -> PackedAhead | None:
    header.check_model()
    matrices = [entry for entry in header.tensors.values() if len(entry.shape) > 1]
    made = [
        source
        for source in architecture_of(header).tensors.values()
        if isinstance(source, Source) and source.change is not None and len(source.names) > 1
    ]
    kinds, available, library = {entry.block for entry in matrices}, memory_bytes(), packing_kernels()
    if made or None in kinds or kinds == {BY_NAME["BF16"]} or available is None:
        return None
    if sum(entry.packed_size(library) for entry in matrices) > LARGE * available:
        return None
    share, cores = share_of_time(), physical_cores(first_processors()) or os.cpu_count() or 1
    threads = cores if share is None else min(cores, int(share))
    return PackedAhead(header, library, max(1, threads - 1))  # one thread imports
