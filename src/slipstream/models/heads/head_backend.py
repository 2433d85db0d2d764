"""A draft head as a `Backend`, so that it has slots, reads prompts and drafts as a draft model does.

Row i of a batch has slot i in the target's KV cache and in the head's, so the features of a slot's positions are found
where the target has kept them. Rows that a draft made from the head's own outputs are computed again with the target's
features once these are known: `HeadSession` counts them as not cached. Leaving them costs acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream.core.kv_slots import SlotState
from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.models.backend_capabilities import HiddenStates
from slipstream.models.heads.compiled_layer import CompiledLayer, compiled_layer
from slipstream.models.heads.network import HeadNetwork, grouped_attention

UNIT = 256  # positions by which a slot's memory grows


class HeadBackend:
    """See `Backend`. A head's row 0 has no feature; no other row attends to it.

    target: keeps the features; target_slots: what is cached of the target in each slot. Both come with `attach`.
    """

    attended_unit = 1

    def __init__(self, network: HeadNetwork) -> None:
        config = network.config
        self.network, self.vocab_size, self.max_length = network, config.vocab_size, config.max_length
        self.device = network.device
        self.target: HiddenStates | None = None
        self.target_slots: Sequence[SlotState] = ()
        self._keys = self._values = self._empty(config.num_key_heads, config.head_dim)
        self._outputs = self._empty(1, config.hidden_size)
        self.num_right: list[int] = []  # positions of each slot, from its first on, that had the target's features
        self._compiled = compiled_layer(network)
        self._token_ids = None if config.token_ids is None else config.token_ids.to(self.device)

    def attach(self, target: HiddenStates, slots: Sequence[SlotState]) -> None:
        """Draft for this target, whose slots these are."""
        target.keep_hidden_states(self.network.config.layers)
        self.target, self.target_slots = target, slots

    def reserve(self, rows: int, length: int) -> None:
        slots, _, positions, _ = self._keys.shape
        if rows > slots or length > positions:
            slots, positions = max(rows, slots), -(-max(length, positions) // UNIT) * UNIT
            self._keys, self._values, self._outputs = (
                _enlarged(part, slots, positions) for part in (self._keys, self._values, self._outputs)
            )

        self.num_right += [0] * (slots - len(self.num_right))

    def copy(self, source: int, destination: int, length: int) -> None:
        self.num_right[destination] = min(self.num_right[source], length)
        for part in (self._keys, self._values, self._outputs):
            part[destination, :, :length] = part[source, :, :length]

    @torch.inference_mode()
    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        batch, width = tokens.shape
        entered = [self._entered(first_slot + i, start, width) for i, start in enumerate(starts)]
        residual, heads = self.network.project(tokens, entered[0][None] if batch == 1 else torch.stack(entered))
        place = _Place(first_slot, starts, width)
        if self._compiled is not None and batch * width <= self._compiled.most_tokens:
            outputs = self._finish_compiled(self._compiled, place, residual, heads)
        else:
            positions = place.positions(self.device)
            turned = positions.clamp(max=self.max_length - 1)  # padding may reach beyond the context's end
            attend = partial(self._attend, place, positions)
            outputs = self.network.finish(residual, heads, turned, attend)
        for row, start in enumerate(starts):
            if start == 0:
                outputs[row, 0] = 0  # it has no feature
        place.write(self._outputs, self.network.returned(outputs)[:, None])
        return self._logits(outputs) if logits else outputs.new_empty(0)

    def _finish_compiled(self, compiled: CompiledLayer, place: _Place, residual: Tensor, heads: Tensor) -> Tensor:
        positions = [position for start in place.starts for position in range(start, start + place.width)]
        slots = [place.first_slot + i for i in range(len(place.starts)) for _ in range(place.width)]
        places = [position - 1 for position in positions]  # behind that of position 0, which no other row sees
        where = torch.tensor([slots, [max(0, i) for i in places], places])
        last = self.max_length - 1
        if len(place.starts) == 1 and positions[-1] <= last:
            rope = self.network.rope[:, positions[0] : positions[-1] + 1]
        else:
            rope = self.network.rope[:, torch.tensor(positions).clamp_(max=last)]
        return compiled(residual, heads, rope, where, self._keys[:, :, 1:], self._values[:, :, 1:])

    def _attend(self, place: _Place, positions: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write keys and values, and attend to those of positions 1 to each token's own."""
        place.write(self._keys, key)
        place.write(self._values, value)
        end = place.end
        first = min(1, end - 1)
        keys, values = self._keys[place.slots, :, first:end], self._values[place.slots, :, first:end]
        if place.width == 1 and place.starts_alike:
            return grouped_attention(query, keys, values, None)
        seen = torch.arange(first, end, device=query.device) <= positions[..., None].clamp(min=first)
        return grouped_attention(query, keys, values, seen)

    def _entered(self, slot: int, start: int, width: int) -> Tensor:
        """[width, H]: for each position of a slot the feature of the one before it, or else the head's own output."""
        before = start - 1
        known = min(max(0, self.num_read(slot) - before), width)
        if start <= self.num_right[slot]:
            self.num_right[slot] = start + known
        features, first = None, max(0, before)
        if before + known > first and self.target is not None:
            features = self.target.hidden_states(self.network.config.layers, slot, first, before + known)
        if features is None:
            known = first - before
        entered = [] if features is None else [self.network.enter(features)]
        if start == 0:
            entered.insert(0, self._outputs.new_zeros(1, self._outputs.shape[3]))
        if known < width:
            entered.append(self._outputs[slot, 0, before + known : before + width])
        return entered[0] if len(entered) == 1 else torch.cat(entered)

    def num_read(self, slot: int) -> int:
        """How many of a slot's positions the target has read."""
        return self.target_slots[slot].base if slot < len(self.target_slots) else 0

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
    """Where a forward writes: rows of a width in slots first_slot, first_slot + 1, ... from `starts` on."""

    def __init__(self, first_slot: int, starts: list[int], width: int) -> None:
        self.first_slot, self.starts, self.width = first_slot, starts, width
        self.slots = slice(first_slot, first_slot + len(starts))
        self.starts_alike = len(set(starts)) == 1
        self.end = max(starts) + width

    def positions(self, device: torch.device) -> Tensor:
        """[B, W]"""
        return torch.tensor(self.starts, device=device)[:, None] + torch.arange(self.width, device=device)

    def write(self, cached: Tensor, states: Tensor) -> None:
        """States [B, heads, W, size] into cached [slots, heads, positions, size]."""
        if self.starts_alike:
            cached[self.slots, :, self.end - self.width : self.end] = states
        else:
            slots = torch.arange(self.slots.start, self.slots.stop, device=cached.device)[:, None]
            cached[slots, :, self.positions(cached.device)] = states.transpose(1, 2)


class HeadSession(Session):
    """A session that computes rows again whose features were not the target's, those of drafts above all."""

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        self._drop_wrong()
        return super().score(rows, draft, lengths, keep)

    def keep_drafts(self, lengths: Sequence[int]) -> None:
        super().keep_drafts([0] * len(lengths))
        self._drop_wrong()

    def _drop_wrong(self) -> None:
        backend = self.backend
        assert isinstance(backend, HeadBackend)
        for slot, (state, count) in enumerate(zip(self.slot_states, backend.num_right, strict=False)):
            if state.base > count and backend.num_read(slot) >= count:  # the text was read before the target read it
                state.base = state.written = count


def _enlarged(cached: Tensor, slots: int, positions: int) -> Tensor:
    larger = cached.new_zeros(slots, cached.shape[1], positions, cached.shape[3])
    larger[: cached.shape[0], :, : cached.shape[2]] = cached
    return larger
