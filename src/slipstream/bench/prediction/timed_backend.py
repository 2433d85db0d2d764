"""A model with a clock around its forwards, and of its capabilities those that decide how rows are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Literal

from torch import Tensor

from slipstream.core.interfaces import AttendedLengths, Backend, Checkpoints, RaggedForwards, RowSegment
from slipstream.core.trees import TreeForwards, TreeSegment
from slipstream.models.layouts.unpadded_layout import UnpaddedForwards

Kind = Literal["padded", "ragged", "tree"]


class TimedBackend:
    """Awaits each forward whose logits are asked for and notes its seconds, and of which kind it was."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.vocab_size, self.max_length, self.device = inner.vocab_size, inner.max_length, inner.device
        self.last, self.kind, self.tokens = 0.0, "padded", 0

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
            self._note(out, begun, "padded", tokens.numel())
        return out

    def copy(self, source: int, destination: int, length: int) -> None:
        """See `Backend.copy`."""
        self._inner.copy(source, destination, length)

    def _note(self, out: Tensor, begun: float, kind: Kind, tokens: int) -> None:
        if self.device.type != "cpu":
            out.flatten()[-1].item()  # waits for the device
        self.last, self.kind, self.tokens = perf_counter() - begun, kind, tokens


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


class TimedRagged(TimedStates):
    """The same of a model with `RaggedForwards`."""

    def __init__(self, inner: Backend) -> None:
        assert isinstance(inner, RaggedForwards)
        super().__init__(inner)
        self._rows = inner
        self.ragged = inner.ragged

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
        self._note(out, begun, "ragged", len(tokens))
        return out


class TimedRows(TimedRagged):
    """The same of a model with `UnpaddedForwards`."""

    def __init__(self, inner: Backend) -> None:
        assert isinstance(inner, UnpaddedForwards)
        super().__init__(inner)
        self.reads_on, self.rounds_alike = inner.reads_on, inner.rounds_alike


class TimedTrees(TimedBackend):
    """The same of a model with `TreeForwards`."""

    def __init__(self, inner: Backend) -> None:
        assert isinstance(inner, TreeForwards)
        super().__init__(inner)
        self._trees = inner

    @property
    def branching(self) -> bool:
        """See `TreeForwards.branching`."""
        return self._trees.branching

    @property
    def flat(self) -> bool:
        """See `TreeForwards.flat`."""
        return self._trees.flat

    def forward_tree(self, tokens: Tensor, segments: Sequence[TreeSegment], *, widths: Sequence[int] | None) -> Tensor:
        """See `TreeForwards.forward_tree`."""
        begun = perf_counter()
        out = self._trees.forward_tree(tokens, segments, widths=widths)
        self._note(out, begun, "tree", len(tokens))
        return out

    def move(self, slot: int, places: Sequence[int], start: int) -> None:
        """See `TreeForwards.move`."""
        self._trees.move(slot, places, start)


class TimedModel(TimedRagged, TimedTrees):
    """The same of a model that has all of these but `UnpaddedForwards`, and `AttendedLengths`."""

    def __init__(self, inner: Backend) -> None:
        assert isinstance(inner, AttendedLengths)
        super().__init__(inner)
        self._lengths = inner

    @property
    def attended_lengths(self) -> tuple[int, ...]:
        """See `AttendedLengths`."""
        return self._lengths.attended_lengths

    @attended_lengths.setter
    def attended_lengths(self, value: tuple[int, ...]) -> None:
        self._lengths.attended_lengths = value

    def attended_length_agrees(self, widths: Sequence[int], length: int, whole: int) -> bool:
        """See `AttendedLengths.attended_length_agrees`."""
        return self._lengths.attended_length_agrees(widths, length, whole)


def timed(backend: Backend) -> TimedBackend:
    """A model with a clock."""
    if isinstance(backend, UnpaddedForwards):
        return TimedRows(backend)
    if isinstance(backend, TreeForwards):
        whole = isinstance(backend, RaggedForwards) and isinstance(backend, Checkpoints)
        return TimedModel(backend) if whole else TimedTrees(backend)
    return TimedStates(backend) if isinstance(backend, Checkpoints) else TimedBackend(backend)
