"""A draft head as a `Backend`, so that it has slots, reads prompts and drafts as a draft model does.

Rows that a draft made from the head's own outputs are computed again with the target's features once these are known:
`HeadSession` counts them as not cached. Leaving them costs acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.models.heads.features import FeatureReader
from slipstream.models.heads.network import Network, grouped_attention

UNIT = 256  # positions by which a slot's memory grows


class HeadBackend(FeatureReader):
    """See `Backend`. A head's row 0 has no feature; no other row attends to it."""

    attended_unit = 1

    def __init__(self, network: Network) -> None:
        config = network.config
        super().__init__(config.layers)
        self.network, self.vocab_size, self.max_length = network, config.vocab_size, config.max_length
        self.device = network.device
        self._keys = self._values = self._empty(config.num_key_heads, config.head_dim)
        self._outputs = self._empty(1, config.hidden_size)
        self._token_ids = None if config.token_ids is None else config.token_ids.to(self.device)

    def reserve(self, rows: int, length: int) -> None:
        slots, _, positions, _ = self._keys.shape
        if rows > slots or length > positions:
            slots, positions = max(rows, slots), -(-max(length, positions) // UNIT) * UNIT
            self._keys, self._values, self._outputs = (
                enlarged(part, slots, positions) for part in (self._keys, self._values, self._outputs)
            )

        self.num_right += [0] * (slots - len(self.num_right))

    def copy(self, source: int, destination: int, length: int) -> None:
        self.num_right[destination] = min(self.num_right[source], length)
        for part in (self._keys, self._values, self._outputs):
            part[destination, :, :length] = part[source, :, :length]

    @torch.inference_mode()
    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        width = tokens.shape[1]
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)
        entered = torch.stack([self._entered(first_slot + i, start, width) for i, start in enumerate(starts)])
        place = _Place(first_slot, starts, positions)
        turned = positions.clamp(max=self.max_length - 1)  # padding may reach beyond the context's end
        outputs = self.network.layer(tokens, entered, turned, partial(self._attend, place))
        place.write(self._outputs, self.network.returned(outputs)[:, None])
        return self._logits(outputs) if logits else outputs.new_empty(0)

    def _attend(self, place: _Place, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write keys and values, and attend to those of positions 1 to each token's own."""
        place.write(self._keys, key)
        place.write(self._values, value)
        end = place.end
        first = min(1, end - 1)
        keys, values = self._keys[place.slots, :, first:end], self._values[place.slots, :, first:end]
        if query.shape[2] == 1 and place.starts_alike:
            return grouped_attention(query, keys, values, None)
        seen = torch.arange(first, end, device=query.device) <= place.positions[..., None].clamp(min=first)
        return grouped_attention(query, keys, values, seen)

    def _entered(self, slot: int, start: int, width: int) -> Tensor:
        """[width, H]: for each position of a slot the feature of the one before it, or else the head's own output."""
        known = self.num_known(slot, start, width)
        self.note_right(slot, start, width)
        before = start - 1
        own = self._outputs[slot, 0, max(0, before) : before + width]
        own = own if start else torch.cat([own.new_zeros(1, own.shape[1]), own])
        features = self.features(slot, start, known)
        if features is None:
            return own
        return torch.cat([own[: known - len(features)], self.network.enter(features), own[known:]])

    def _logits(self, outputs: Tensor) -> Tensor:
        """[B, W, V]; tokens that the head cannot propose are impossible."""
        drafted = self.network.draft_logits(outputs)
        if self._token_ids is None:
            return drafted
        logits = drafted.new_full((*drafted.shape[:-1], self.vocab_size), float("-inf"))
        logits[..., self._token_ids] = drafted
        return logits

    def _empty(self, heads: int, size: int) -> Tensor:
        return torch.zeros(0, heads, 0, size, dtype=self.network.dtype, device=self.device)


class _Place:
    """Where a forward writes: rows of a width in slots first_slot, first_slot + 1, ... at positions [B, W]."""

    def __init__(self, first_slot: int, starts: list[int], positions: Tensor) -> None:
        self.slots, self.positions = slice(first_slot, first_slot + len(starts)), positions
        self.starts_alike = len(set(starts)) == 1
        self.end = max(starts) + positions.shape[1]

    def write(self, cached: Tensor, states: Tensor) -> None:
        """States [B, heads, W, size] into cached [slots, heads, positions, size]."""
        if self.starts_alike:
            cached[self.slots, :, self.end - states.shape[2] : self.end] = states
        else:
            slots = torch.arange(self.slots.start, self.slots.stop, device=cached.device)[:, None]
            cached[slots, :, self.positions] = states.transpose(1, 2)


class HeadSession(Session):
    """A session that computes rows again whose features were not the target's, those of drafts above all."""

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        self._drop_wrong()
        return super().score(rows, draft, lengths, keep)

    def keep_drafts(self, lengths: Sequence[int]) -> None:
        super().keep_drafts([0] * len(lengths))
        self._drop_wrong()

    def _drop_wrong(self) -> None:
        assert isinstance(self.backend, FeatureReader)
        for state, count in zip(self.slot_states, self.backend.num_right, strict=False):
            if state.base > count:  # a text was read before the target had read it
                state.base = state.written = count


def enlarged(cached: Tensor, slots: int, positions: int) -> Tensor:
    """A head's cache [slots, heads, positions, size] with more room."""
    larger = cached.new_zeros(slots, cached.shape[1], positions, cached.shape[3])
    larger[: cached.shape[0], :, : cached.shape[2]] = cached
    return larger
