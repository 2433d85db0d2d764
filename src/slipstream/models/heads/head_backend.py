"""A draft head as a `Backend`, so that it has slots, reads prompts and drafts as a draft model does.

While drafting, rows are computed from the head's own outputs. Once the target's features are known, they are computed
again: `HeadSession` counts them as not cached. Keeping them would lower acceptance.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.models.decoder.cache import enlarged
from slipstream.models.heads.features import FeatureReader
from slipstream.models.heads.network import HeadNetwork, Network, grouped_attention

if TYPE_CHECKING:
    from slipstream.models.heads.compiled_layer import CompiledLayer

UNIT = 256  # positions by which a slot's memory grows
READ_AHEAD = 32  # positions that kernels may read beyond the last one


class HeadBackend(FeatureReader):
    """Drafts one token per forward. A head's row 0 has no feature; no other row attends to it."""

    attended_unit = 1

    def __init__(self, network: Network, mask_token: int | None = None, mask_feature: Tensor | None = None) -> None:
        """mask_token, mask_feature: for P-EAGLE (arXiv 2602.01469), which drafts all tokens in one forward. The token
        replaces future tokens; the feature [layers * target's hidden size] replaces missing features.
        """
        config = network.config
        super().__init__(config.layers)
        self.network, self.vocab_size, self.max_length = network, config.vocab_size, config.max_length
        self.device, self.mask_token = network.device, mask_token
        self._mask_entered = None if mask_feature is None else network.enter(mask_feature)
        self._keys = self._values = self._empty(len(config.windows) * config.num_key_heads, config.head_dim)
        self._outputs = self._empty(1, config.hidden_size)
        self._compiled: CompiledLayer | None = None
        if isinstance(network, HeadNetwork):
            from slipstream.models.heads.compiled_layer import compiled_layer  # it imports transformers

            self._compiled = compiled_layer(network)
        self.token_ids = None if config.token_ids is None else config.token_ids.to(self.device)

    def reserve(self, rows: int, length: int) -> None:
        slots, _, positions, _ = self._keys.shape
        needed = length + READ_AHEAD
        if rows > slots or needed > positions:
            slots, positions = max(rows, slots), -(-max(needed, positions) // UNIT) * UNIT
            self._keys, self._values, self._outputs = (
                enlarged(part, slots, positions) for part in (self._keys, self._values, self._outputs)
            )
        self.grow(slots)

    def copy(self, source: int, destination: int, length: int) -> None:
        super().copy(source, destination, length)
        for part in (self._keys, self._values, self._outputs):
            part[destination, :, :length] = part[source, :, :length]

    @torch.inference_mode()
    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        batch, width = tokens.shape
        entered_rows = [self._entered(first_slot + i, start, width) for i, start in enumerate(starts)]
        entered = entered_rows[0][None] if batch == 1 else torch.stack(entered_rows)
        place = _Place(first_slot, starts, width)
        if self._compiled is not None:
            outputs = self._run_compiled_layer(self._compiled, place, tokens, entered)
        else:
            positions = place.positions(self.device)
            clamped = positions.clamp(max=self.max_length - 1)  # padding may reach beyond the context's end
            outputs = self.network.layer(
                tokens, entered, clamped, partial(self._attend, place, positions, itertools.count())
            )
        for row, start in enumerate(starts):
            if start == 0:
                outputs[row, 0] = 0  # position 0 has no feature, so all tokens are equally likely
        place.write(self._outputs, self.network.returned(outputs)[:, None])
        if not logits:
            return outputs.new_empty(0)
        drafted = self.network.draft_logits(outputs)
        return drafted if self.token_ids is not None else drafted[..., : self.vocab_size]

    def _run_compiled_layer(self, compiled: CompiledLayer, place: _Place, tokens: Tensor, entered: Tensor) -> Tensor:
        residual, heads = compiled.network.project(tokens, entered)
        positions = [position for start in place.starts for position in range(start, start + place.width)]
        slots = [place.first_slot + i for i in range(len(place.starts)) for _ in range(place.width)]
        places = [position - 1 for position in positions]  # position 0, which no other row may see, gets place -1
        where = torch.tensor([slots, [max(0, i) for i in places], places])
        last = self.max_length - 1
        if len(place.starts) == 1 and positions[-1] <= last:
            rope = compiled.rope[:, positions[0] : positions[-1] + 1]
        else:
            rope = compiled.rope[:, torch.tensor(positions).clamp_(max=last)]
        return compiled(residual, heads, rope, where, self._keys[:, :, 1:], self._values[:, :, 1:])

    def _attend(
        self, place: _Place, positions: Tensor, layers: Iterator[int], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Write keys and values of the next layer, and attend to those of positions 1 to each token's own."""
        layer, heads = next(layers), key.shape[1]
        of_layer = slice(layer * heads, (layer + 1) * heads)
        all_keys, all_values = self._keys[:, of_layer], self._values[:, of_layer]
        place.write(all_keys, key)
        place.write(all_values, value)
        end, window = place.end, self.network.config.windows[layer]
        first = min(1 if window is None else max(1, min(place.starts) + 1 - window), end - 1)
        keys, values = all_keys[place.slots, :, first:end], all_values[place.slots, :, first:end]
        if place.width == 1 and place.starts_alike:
            return grouped_attention(query, keys, values, None)
        places, last = torch.arange(first, end, device=query.device), positions[..., None].clamp(min=first)
        seen = places <= last if window is None else (places <= last) & (places > last - window)
        return grouped_attention(query, keys, values, seen)

    def _entered(self, slot: int, start: int, width: int) -> Tensor:
        """[width, H], for each position the feature of the one before it, or else the head's output there."""
        num_known, before = self.num_known(slot, start, width), start - 1
        self.note_right(slot, start, width)
        features = self.features(slot, start, num_known)
        if features is None:
            num_known = int(start == 0)  # row 0 needs no feature
        entered = [] if features is None else [self.network.enter(features)]
        if start == 0:
            entered.insert(0, self._outputs.new_zeros(1, self._outputs.shape[3]))
        if num_known < width:
            returned = self._outputs[slot, 0, before + num_known : before + width]
            entered.append(returned if self._mask_entered is None else self._mask_entered.expand_as(returned))
        return entered[0] if len(entered) == 1 else torch.cat(entered)

    def _empty(self, heads: int, size: int) -> Tensor:
        return torch.zeros(0, heads, 0, size, dtype=self.network.dtype, device=self.device)


class _Place:
    """Where a forward writes: `width` positions from `starts` on, in the slots first_slot, first_slot + 1, ..."""

    def __init__(self, first_slot: int, starts: list[int], width: int) -> None:
        self.first_slot, self.starts, self.width = first_slot, starts, width
        self.slots = slice(first_slot, first_slot + len(starts))
        self.starts_alike = len(set(starts)) == 1
        self.end = max(starts) + width

    def positions(self, device: torch.device) -> Tensor:
        """[B, W] of each row's tokens."""
        return torch.tensor(self.starts, device=device)[:, None] + torch.arange(self.width, device=device)

    def write(self, cached: Tensor, states: Tensor) -> None:
        """States [B, heads, W, size] into cached [slots, heads, positions, size]."""
        if self.starts_alike:
            cached[self.slots, :, self.end - self.width : self.end] = states
        else:
            slots = torch.arange(self.slots.start, self.slots.stop, device=cached.device)[:, None]
            cached[slots, :, self.positions(cached.device)] = states.transpose(1, 2)


class HeadSession(Session):
    """A session that recomputes rows whose features were not the target's; most of them are drafted tokens."""

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        self._drop_wrong()
        return super().score(rows, draft, lengths, keep)

    def keep_drafts(self, lengths: Sequence[int]) -> None:
        super().keep_drafts([0] * len(lengths))
        self._drop_wrong()

    def _drop_wrong(self) -> None:
        backend = self.backend
        assert isinstance(backend, FeatureReader)
        for slot, (state, count) in enumerate(zip(self.slot_states, backend.num_right, strict=False)):
            if state.base > count and backend.num_read(slot) >= count:  # the head read the text before the target did
                state.base = state.written = count
