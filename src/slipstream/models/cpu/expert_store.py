"""Keeps some experts of a mixture in memory, where not all of them fit.

The kernels pack an expert from its file when a forward needs it, in place of the least recently used one
(`claim_slots` in csrc/blocks/experts.c). Packing always gives the same panels, so results do not change.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from weakref import finalize

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.models.cpu.huge_pages import HugePages, as_tensor
from slipstream.models.cpu.kernel_libraries import address
from slipstream.models.cpu.structs import (
    ExpertRowsStruct,
    ExpertSlotStruct,
    ExpertStoreStruct,
    StoredExpertsStruct,
)


class ExpertStore:
    """Memory for some experts of a model. Its files stay open as long as this object lives."""

    def __init__(self, files: Sequence[Path], slot_bytes: int, num_slots: int) -> None:
        """slot_bytes: of the largest expert; num_slots: at least as many as a layer has experts."""
        streams = {file: file.open("rb", buffering=0) for file in files}
        self._files = {file: stream.fileno() for file, stream in streams.items()}
        for stream in streams.values():
            finalize(self, stream.close)
        self._memory = as_tensor(HugePages().take(slot_bytes * num_slots))
        self._slots = (ExpertSlotStruct * num_slots)()
        slots = ctypes.addressof(self._slots)
        self.struct = ExpertStoreStruct(address(self._memory), slots, slot_bytes, num_slots)
        self._layers: list[tuple[ctypes.Structure, Tensor]] = []  # kept: the slots have only their addresses

    def rows(self, file: Path, start: int, step: int) -> ctypes.Structure:
        """Locates a matrix of each of a layer's experts. start: first byte of the first one; step: bytes per expert."""
        return ExpertRowsStruct(self._files[file], start, step)

    def layer(self, experts: int, *rows: ctypes.Structure) -> ctypes.Structure:
        """Register a layer's experts, none of them in memory yet. rows: of gate, up and down."""
        places = torch.full((experts,), -1, dtype=torch.int64)
        struct = StoredExpertsStruct(ctypes.addressof(self.struct), address(places), *rows)
        self._layers.append((struct, places))
        return struct

    def check(self) -> None:
        """Raise `SlipstreamError` if experts could not be read or are not finite: they made all later results NaN."""
        if self.struct.failed:
            names = " or ".join(repr(str(file)) for file in self._files)
            reason = "could not be read when they were needed; the file must not change while it is in use"
            if self.struct.failed == 2:
                reason = "hold numbers that are not finite; allowed: finite numbers"
            raise SlipstreamError(f"model {names}: experts {reason}")
