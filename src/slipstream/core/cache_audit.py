"""Debug mode (SLIPSTREAM_DEBUG=1): the token ids cached in each slot, compared with committed tokens at every use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.core.cache_state import SlotState


class CacheAudit:
    """The token ids cached in each slot."""

    def __init__(self, slot_states: Sequence[SlotState]) -> None:
        self._slot_states = slot_states
        self._ids: dict[int, list[int]] = {}

    def write(self, slot: int, start: int, tokens: list[int]) -> None:
        """Tokens are about to be written to a slot from `start` on: those before must be its row's committed ones."""
        cached = self._ids.setdefault(slot, [])
        if len(cached) < start:
            raise SlipstreamError(f"KV cache: slot {slot} holds {len(cached)} tokens, written at {start}")
        slot_state = self._slot_states[slot]
        true = slot_state.row.tokens if slot_state.row is not None else []
        upto = min(start, len(true))
        if cached[:upto] != true[:upto]:
            at = next(i for i in range(upto) if cached[i] != true[i])
            raise SlipstreamError(
                f"KV cache: slot {slot} position {at} holds token {cached[at]}, committed is {true[at]}"
            )
        self._ids[slot] = cached[:start] + tokens

    def move(self, slot: int, places: Sequence[int], start: int) -> None:
        """What stands at these places of a slot is moved to `start` and the positions that follow."""
        cached = self._ids[slot]
        self._ids[slot] = cached[:start] + [cached[place] for place in places]

    def copy(self, source: int, destination: int, length: int) -> None:
        """The first `length` tokens of one slot are copied to another."""
        self._ids[destination] = self._ids.get(source, [])[:length]
