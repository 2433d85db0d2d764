"""Memory for the experts of a mixture that are in use, where there is too little for all of them.

The kernels pack an expert from its file when a forward first needs it; the expert that was used least recently makes
room (`claim_slots` in csrc/blocks/experts.c). Panels are the same whenever they are packed, so results are, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from weakref import finalize

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.models.cpu.huge_pages import HugePages
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
        self._memory = HugePages().take(slot_bytes * num_slots)
        self._slots = (ExpertSlotStruct * num_slots)()
        slots = ctypes.addressof(self._slots)
        self.struct = ExpertStoreStruct(address(self._memory), slots, slot_bytes, num_slots)
        self._layers: list[tuple[ctypes.Structure, Tensor]] = []  # the slots have their addresses

    def rows(self, file: Path, start: int, step: int) -> ctypes.Structure:
        """Where a matrix of a layer's experts is. start: the first byte of the first expert's; step: bytes to the
        next."""
        return ExpertRowsStruct(self._files[file], start, step)

    def layer(self, experts: int, *rows: ctypes.Structure) -> ctypes.Structure:
        """The experts of a layer, of which none is in memory yet. rows: of gate, up and down."""
        places = torch.full((experts,), -1, dtype=torch.int64)
        struct = StoredExpertsStruct(ctypes.addressof(self.struct), address(places), *rows)
        self._layers.append((struct, places))
        return struct

    def check(self) -> None:
        """Raise `SlipstreamError` if experts could not be read or are not finite: later numbers are NaN."""
        if self.struct.failed:
            names = " or ".join(repr(str(file)) for file in self._files)
            reason = "could not be read while they were needed; the file must stay as it is"
            if self.struct.failed == 2:
                reason = "hold numbers that are not finite; allowed: finite numbers"
            raise SlipstreamError(f"model {names}: experts {reason}")
