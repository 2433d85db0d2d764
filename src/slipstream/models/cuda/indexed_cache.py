"""What a captured forward needs of its KV cache: positions given by tensors, and few shapes.

The buckets: rows rounded up to a power of two, widths to one of `WIDTHS`, the attended length to few multiples of its
unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from slipstream.models.decoder.attention import Cut
from slipstream.models.decoder.cache import Layout, RaggedCache

WIDTHS = (1, 2, 4, 8, 16, 32)  # few: a capture takes as long as a hundred replays, and these as long as each other
MAX_TOKENS = 256  # rows times width of a bucket; beyond it the arithmetic hides the launches
SPARE = WIDTHS[-1]  # positions at the end of every slot where padding is written


@dataclass(frozen=True)
class Bucket:
    """Shape of a captured forward. attended: how many positions of the KV cache attention reads."""

    rows: int
    width: int
    attended: int


@dataclass(frozen=True)
class IndexedForward:
    """A forward of R rows of C tokens whose places tensors say, int64 on the cache's device.

    slots, starts: [R], where rows are cached and the position of each one's first token. positions, columns: [R, C], of
    the tokens, and where in its slot each is written. attended: how many positions of a slot are read at most. depths:
    [R, C] and visible: [R, C, C], of trees, as in `TreeTable.padded`; None for chains.
    """

    slots: Tensor
    starts: Tensor
    positions: Tensor
    columns: Tensor
    attended: int
    depths: Tensor | None = None
    visible: Tensor | None = None


class IndexedCache(RaggedCache):
    """A slot cache that can also be indexed by tensors, so that a captured graph writes wherever they say by then.

    forward: what the next forward is, if it is indexed.
    """

    forward: IndexedForward | None = None
    spare_positions = SPARE

    def index(self, forward: IndexedForward) -> None:
        """Make the next forward write the columns of the first R slots and read what it attends to of them."""
        self._slots, self._attended, self._span = slice(0, len(forward.slots)), forward.attended, None
        self._rows, self._columns = forward.slots[:, None], forward.columns
        self.tree = None
        self._cut([], None)
        self.forward = forward

    def _cut(self, cuts: list[Cut], layout: Layout | None) -> None:
        super()._cut(cuts, layout)
        self.forward = None

    @property
    def spare(self) -> int:
        """The first of the `SPARE` positions that are for padding."""
        return self.held[1] - SPARE

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
        if wide is None or rows < len(starts) or rows * wide > MAX_TOKENS or end > positions - SPARE:
            return None
        return Bucket(rows, wide, min(_round_units(-(-end // unit)) * unit, positions))


def _round_units(units: int) -> int:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, ...: few lengths, none more than half again as long as needed."""
    power = 1 << (units - 1).bit_length()
    return power * 3 // 4 if power >= 4 and units <= power * 3 // 4 else power
