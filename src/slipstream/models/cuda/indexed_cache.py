"""What a captured forward needs of its KV cache: positions given by tensors, and few shapes.

The buckets: rows rounded up to a power of two, widths to one of `WIDTHS`, the attended length to few multiples of its
unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from slipstream.models.hf.ragged_attention import RaggedCache

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)
MAX_TOKENS = 256  # rows times width of a bucket; beyond it the arithmetic hides the launches
SPARE = WIDTHS[-1]  # positions at the end of every slot where padding is written


@dataclass(frozen=True)
class Bucket:
    """Shape of a captured forward. attended: how many positions of the KV cache attention reads."""

    rows: int
    width: int
    attended: int


class IndexedCache(RaggedCache):
    """A slot cache that can also be indexed by tensors, so that a captured graph writes wherever they say by then."""

    def index(self, rows: Tensor, columns: Tensor, attended: int) -> None:
        """Write positions columns[i] of slot rows[i], read `attended` positions of the first R slots.

        rows: [R, 1]; columns: [R, C]; both int64 on the cache's device.
        """
        self._slots, self._attended, self._span = slice(0, columns.shape[0]), attended, None
        self._rows, self._columns = rows, columns
        self._cut([], None)

    @property
    def spare(self) -> int:
        """The first of the `SPARE` positions that are for padding."""
        return self.shape[1] - SPARE

    @property
    def allocated(self) -> bool:
        """Whether a forward has run, so that keys and values have their place."""
        return any(layer.keys is not None for layer in self.layers)

    def bucket(self, starts: Sequence[int], width: int, end: int) -> Bucket | None:
        """The bucket of forwards of slots 0, 1, ... that write positions below `end`; None if there is none."""
        unit = self.attended_unit
        wide = next((w for w in WIDTHS if w >= width), None)
        slots, positions = self.shape
        rows = min(1 << (len(starts) - 1).bit_length(), slots)
        if wide is None or rows < len(starts) or rows * wide > MAX_TOKENS or end > self.spare:
            return None
        return Bucket(rows, wide, min(_round_units(-(-end // unit)) * unit, positions))


def _round_units(units: int) -> int:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, ...: few lengths, none more than half again as long as needed."""
    power = 1 << (units - 1).bit_length()
    return power * 3 // 4 if power >= 4 and units <= power * 3 // 4 else power
