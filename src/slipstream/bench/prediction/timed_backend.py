"""A model with a clock around its forwards, and of its capabilities those that decide how rows are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from torch import Tensor

from slipstream.core.interfaces import Backend, Checkpoints, RaggedForwards, RowSegment
from slipstream.models.layouts.unpadded_layout import UnpaddedForwards


class TimedBackend:
    """Awaits each forward whose logits are asked for and notes its seconds."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.vocab_size, self.max_length, self.device = inner.vocab_size, inner.max_length, inner.device
        self.last = 0.0

    @property
    def attended_unit(self) -> int:
        """See `Backend`."""
        return self._inner.attended_unit

    @attended_unit.setter
    def attended_unit(self, value: int) -> None:
        self._inner.attended_unit = value

    def reserve(self, rows: int, length: int) -> None:
        """See `Backend.reserve`."""
        self._inner.reserve(rows, length)

    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        """See `Backend.forward`."""
        begun = perf_counter()
        out = self._inner.forward(tokens, starts, first_slot=first_slot, logits=logits)
        if logits:
            self._note(out, begun)
        return out

    def copy(self, source: int, destination: int, length: int) -> None:
        """See `Backend.copy`."""
        self._inner.copy(source, destination, length)

    def _note(self, out: Tensor, begun: float) -> None:
        if self.device.type != "cpu":
            out.flatten()[-1].item()  # waits for the device
        self.last = perf_counter() - begun


class TimedStates(TimedBackend):
    """The same of a model with `Checkpoints`."""

    def __init__(self, inner: Backend) -> None:
        assert isinstance(inner, Checkpoints)
        super().__init__(inner)
        self._states = inner

    def checkpoint(self, slot: int, limit: int) -> int:
        """See `Checkpoints.checkpoint`."""
        return self._states.checkpoint(slot, limit)

    def settle(self, slot: int, position: int) -> None:
        """See `Checkpoints.settle`."""
        self._states.settle(slot, position)


class TimedRows(TimedStates):
    """The same of a model with `UnpaddedForwards`."""

    ragged = True

    def __init__(self, inner: Backend) -> None:
        assert isinstance(inner, UnpaddedForwards) and isinstance(inner, RaggedForwards)
        super().__init__(inner)
        self._rows = inner
        self.reads_on, self.rounds_alike = inner.reads_on, inner.rounds_alike

    def forward_ragged(
        self,
        tokens: Tensor,
        segments: Sequence[RowSegment],
        *,
        widths: Sequence[int] | None,
        columns: Tensor | None = None,
    ) -> Tensor:
        """See `RaggedForwards.forward_ragged`."""
        begun = perf_counter()
        out = self._rows.forward_ragged(tokens, segments, widths=widths, columns=columns)
        self._note(out, begun)
        return out


def timed(backend: Backend) -> TimedBackend:
    """A model with a clock."""
    if isinstance(backend, UnpaddedForwards):
        return TimedRows(backend)
    return TimedStates(backend) if isinstance(backend, Checkpoints) else TimedBackend(backend)
