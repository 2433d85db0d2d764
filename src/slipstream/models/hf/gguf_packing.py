"""The matrices of a GGUF file, packed in a thread of their own while transformers is imported.

Importing takes seconds on one core and asks nothing of the file; packing asks nothing of the model, but for the order
of some rows.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from slipstream.models.cpu.block_linear import BlockPart
from slipstream.models.cpu.huge_pages import HugePages
from slipstream.models.hf.gguf_header import GGUFHeader
from slipstream.models.hf.gguf_rows import RowReader

TABLE, OUTPUT = "token_embd.weight", "output.weight"
REORDERED = ("attn_q.weight", "attn_k.weight")  # whose rows stand in another order in some models


class PackedAhead:
    """Packs, from when it is made. As a context it stops what nobody asked for when it is left."""

    def __init__(self, header: GGUFHeader, library: Any) -> None:
        """header: one whose matrices are all of types that the kernels take."""
        self._reader, self._memory, self._library = RowReader(header.file), HugePages(), library
        self._thread = ThreadPoolExecutor(1, "packing")
        self._parts = dict[str, Future[BlockPart]]()
        for name, entry in header.tensors.items():
            if len(entry.shape) == 2 and not name.endswith(REORDERED) and not stays_in_file(header, name):
                self._parts[name] = self._thread.submit(self._reader.part, entry, library, self._memory)

    def part(self, name: str) -> BlockPart | None:
        """The matrix of this name, once it is packed; None if it is not among those packed here."""
        future = self._parts.pop(name, None)
        return None if future is None else future.result()

    def __enter__(self) -> PackedAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=True)


def stays_in_file(header: GGUFHeader, name: str) -> bool:
    """Whether a tensor is the table of the tokens, and not their output layer too: its rows are read when needed."""
    return name == TABLE and OUTPUT in header.tensors
