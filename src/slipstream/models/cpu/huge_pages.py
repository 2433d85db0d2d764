"""Memory for weights in pages of 2 MB, if the system has them (Linux).

A forward reads all weights in order. With pages of 4 KB the processor translates an address every 4 KB, and loading a
gigabyte allocates a quarter of a million pages one by one. PyTorch is imported inside functions, so that a file can be
packed while it is imported.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 1 << 26  # bytes taken from the system at a time, so that parts smaller than a page share one
ALIGNED = 64  # bytes


class Memory(Protocol):
    """Hands out the memory of panels."""

    def take(self, size: int) -> memoryview:
        """[size] bytes, aligned to 64 bytes: zeros, or the panels themselves."""


class HugePages:
    """Allocates memory from chunks; a chunk is freed when none of its parts is in use."""

    def __init__(self) -> None:
        self._rest = memoryview(b"")

    def take(self, size: int) -> memoryview:
        """[size] zeros, aligned to 64 bytes; pages that are never written take no memory."""
        aligned_size = -(-size // ALIGNED) * ALIGNED
        if aligned_size > len(self._rest):
            self._rest = memoryview(_chunk(max(aligned_size, CHUNK)))
        memory, self._rest = self._rest[:size], self._rest[aligned_size:]
        return memory


class SmallPages:
    """PyTorch's own memory, for short-lived data."""

    def take(self, size: int) -> memoryview:
        """PyTorch aligns to 64 bytes."""
        import torch

        return torch.zeros(size, dtype=torch.uint8).numpy().data


class Filled:
    """The panels of one matrix, which exist already."""

    def __init__(self, panels: memoryview) -> None:
        self._panels = panels

    def take(self, size: int) -> memoryview:
        return self._panels[:size]


def address_in(memory: memoryview) -> int:
    """The address of the first byte of memory that can be written."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def as_tensor(memory: memoryview) -> Tensor:
    """The same memory as a tensor [size] uint8, which keeps it alive."""
    import torch

    return torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)


def _chunk(size: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(-1, size)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a Linux kernel without huge pages provides small ones, which work, too
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
