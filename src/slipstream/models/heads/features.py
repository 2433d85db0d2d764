"""Tracks the positions of a head's cache that were computed from the target's features; others are recomputed later.

Most others are drafted tokens, which the target has not read yet. Row i of a batch has slot i in the target's KV cache
and in the head's. The feature at a head's position s is the target's at position s - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from slipstream.core.kv_slots import SlotState
from slipstream.errors import UsageError
from slipstream.models.backend_capabilities import HiddenStates
from slipstream.models.loaded import Loaded


def model_for(draft: str, target: Loaded) -> Any:
    """The module that a target's backend runs. draft: the head's name, for messages.

    Raises `UsageError` for a target whose hidden states cannot be read.
    """
    model = getattr(target.backend, "model", None)
    if model is None or not isinstance(target.backend, HiddenStates):
        raise UsageError(
            f"{draft} does not work with target {target.name!r}, whose hidden states cannot be read; "
            "allowed: models that run on Slipstream's own KV cache"
        )
    return model


class FeatureReader:
    """Shared by the backends of all heads.

    feature_layers: the target's layers whose inputs are the features. target: keeps the features; target_slots: how far
    it has read each slot; `attach` sets both. num_right: for each slot, the number of first rows that were computed
    from the target's features.
    """

    def __init__(self, feature_layers: Sequence[int]) -> None:
        self.feature_layers = tuple(feature_layers)
        self.target: HiddenStates | None = None
        self.target_slots: Sequence[SlotState] = ()
        self.num_right: list[int] = []

    def attach(self, target: HiddenStates, slots: Sequence[SlotState]) -> None:
        """Draft for this target from now on. slots: the target's."""
        target.keep_hidden_states(self.feature_layers)
        self.target, self.target_slots = target, slots

    def grow(self, rows: int) -> None:
        self.num_right += [0] * (rows - len(self.num_right))

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first positions of one slot to another; subclasses also copy their caches."""
        self.num_right[destination] = min(self.num_right[source], length)

    def num_read(self, slot: int) -> int:
        """The number of positions that the target has read in a slot."""
        return self.target_slots[slot].base if slot < len(self.target_slots) else 0

    def num_known(self, slot: int, start: int, width: int) -> int:
        """The number of rows, of `width` from `start` on, that have the target's features."""
        return min(max(0, self.num_read(slot) - (start - 1)), width)

    def note_right(self, slot: int, start: int, width: int) -> None:
        """Note that these rows were computed, from the target's features where those are known."""
        if start <= self.num_right[slot]:
            self.num_right[slot] = start + self.num_known(slot, start, width)

    def features(self, slot: int, start: int, num_known: int) -> Tensor | None:
        """The features [num_known, H] of rows from `start` on, one row less if `start` is 0; None if there are none."""
        first, end = max(0, start - 1), start - 1 + num_known
        if end <= first or self.target is None:
            return None
        return self.target.hidden_states(self.feature_layers, slot, first, end)
