"""Memory for weights in pages of 2 MB, if the system has them (Linux).

A forward reads all weights in order. With pages of 4 KB the processor translates an address every 4 KB, and loading a
gigabyte allocates a quarter of a million pages one by one.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

CHUNK = 1 << 26  # bytes taken from the system at a time, so that parts smaller than a page share one
ALIGNED = 64  # bytes


class HugePages:
    """Allocates memory from chunks; a chunk is freed when none of its parts is in use."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """[size] uint8 zeros, aligned to 64 bytes."""
        aligned_size = -(-size // ALIGNED) * ALIGNED
        if aligned_size > len(self._rest):
            self._rest = _chunk(max(aligned_size, CHUNK))
        memory, self._rest = self._rest[:size], self._rest[aligned_size:]
        return memory


class SmallPages:
    """PyTorch's own memory, for short-lived data."""

    def take(self, size: int) -> Tensor:
        """PyTorch aligns to 64 bytes."""
        return torch.zeros(size, dtype=torch.uint8)


def _chunk(size: int) -> Tensor:
    """[size] aligned zeros; pages that are never written take no memory."""
    if sys.platform != "linux":
        memory = torch.zeros(size + ALIGNED, dtype=torch.uint8)
        start = -memory.data_ptr() % ALIGNED
        return memory[start : start + size]
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a Linux kernel without huge pages provides small ones, which work, too
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
