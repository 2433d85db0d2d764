"""Heads of DFlash (arXiv 2602.06036): several decoder layers fill in a block of mask tokens in one forward.

A block is the newest token and masks in place of the tokens to come; within it every row sees every other. What the
target made of the text before it enters as keys and values of every layer: the features of a position, projected once,
are read by each layer's own projections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from slipstream.models.heads.features import FeatureReader
from slipstream.models.heads.head_backend import UNIT, enlarged
from slipstream.models.heads.network import HeadConfig, Linear, grouped_attention, rotated, rotations


@dataclass(frozen=True)
class DFlashLayer:
    """A decoder layer's products and norms. key_value and gate_up are joint."""

    query: Linear
    key_value: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    block_norm: Tensor
    query_norm: Tensor
    key_norm: Tensor
    middle_norm: Tensor


@dataclass(frozen=True)
class DFlashWeights:
    """All of a head. embed, and perhaps lm_head: the target's."""

    fc: Linear
    feature_norm: Tensor
    layers: Sequence[DFlashLayer]
    final_norm: Tensor
    embed: Callable[[Tensor], Tensor]
    lm_head: Linear


class DFlashNetwork:
    """A head's forward. B rows, W tokens of a block, H hidden size, K key heads of all layers, D their size."""

    def __init__(self, config: HeadConfig, weights: DFlashWeights) -> None:
        self.config, self.weights = config, weights
        self.dtype, self.device = weights.final_norm.dtype, weights.final_norm.device
        self._cosines, self._sines = rotations(config, self.dtype, self.device)

    def context(self, features: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """[K, N, D] keys and values of positions from `start` on, of features [N, layers * target's hidden size]."""
        entered = self._norm(self.weights.fc(features.to(self.dtype)), self.weights.feature_norm)
        positions = torch.arange(start, start + len(features), device=self.device)[None]
        pairs = [self._key_value(layer, entered[None], positions) for layer in self.weights.layers]
        return torch.cat([key[0] for key, _ in pairs]), torch.cat([value[0] for _, value in pairs])

    def block(self, tokens: Tensor, positions: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        """[B, W, H] normed outputs of a block of tokens [B, W] at positions [B, W].

        keys, values: [B, K, L, D] of the text before it; seen: [B, L], true where they are of a row's text.
        """
        hidden, count = self.weights.embed(tokens).to(self.dtype), self.config.num_key_heads
        mask = torch.cat([seen, seen.new_ones(tokens.shape)], 1)[:, None].expand(-1, tokens.shape[1], -1)
        for number, layer in enumerate(self.weights.layers):
            normed, of_layer = self._norm(hidden, layer.block_norm), slice(number * count, (number + 1) * count)
            query = self._turned(self._split(layer.query(normed)), layer.query_norm, positions)
            key, value = self._key_value(layer, normed, positions)
            key, value = torch.cat([keys[:, of_layer], key], 2), torch.cat([values[:, of_layer], value], 2)
            attended = grouped_attention(query, key, value, mask)
            hidden = hidden + layer.out(attended.transpose(1, 2).flatten(2))
            gate, up = layer.gate_up(self._norm(hidden, layer.middle_norm)).chunk(2, -1)
            hidden = hidden + layer.down(silu(gate) * up)
        return self._norm(hidden, self.weights.final_norm)

    def _key_value(self, layer: DFlashLayer, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self._split(layer.key_value(x)).chunk(2, 1)
        return self._turned(key, layer.key_norm, positions), value

    def _split(self, x: Tensor) -> Tensor:
        """[B, heads, W, D] of [B, W, heads * D]."""
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _turned(self, x: Tensor, norm: Tensor, positions: Tensor) -> Tensor:
        places = positions.clamp(max=self.config.max_length - 1)  # a block may reach beyond the context's end
        return rotated(self._norm(x, norm), self._cosines[places][:, None], self._sines[places][:, None])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, (x.shape[-1],), weight, self.config.eps)


class DFlashBackend(FeatureReader):
    """See `Backend`. Positions that the target has read are its features; those from there on are the block.

    The cache holds nothing of blocks, so what is not yet right of a slot begins where the target has not been.
    mask_token, block_size: see `ParallelDrafts`.
    """

    attended_unit = 1

    def __init__(self, network: DFlashNetwork, mask_token: int, block_size: int) -> None:
        config = network.config
        super().__init__(config.layers)
        self.network, self.vocab_size, self.max_length = network, config.vocab_size, config.max_length
        self.device, self.mask_token, self.block_size = network.device, mask_token, block_size
        heads = len(network.weights.layers) * config.num_key_heads
        self._keys = torch.zeros(0, heads, 0, config.head_dim, dtype=network.dtype, device=self.device)
        self._values = self._keys
        self._token_ids = None if config.token_ids is None else config.token_ids.to(self.device)

    def reserve(self, rows: int, length: int) -> None:
        slots, _, positions, _ = self._keys.shape
        if rows > slots or length > positions:
            slots, positions = max(rows, slots), -(-max(length, positions) // UNIT) * UNIT
            self._keys, self._values = (enlarged(part, slots, positions) for part in (self._keys, self._values))
        self.num_right += [0] * (slots - len(self.num_right))

    def copy(self, source: int, destination: int, length: int) -> None:
        self.num_right[destination] = min(self.num_right[source], length)
        for part in (self._keys, self._values):
            part[destination, :, :length] = part[source, :, :length]

    @torch.inference_mode()
    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        width = tokens.shape[1]
        for slot, start in enumerate(starts, first_slot):
            self._read(slot, start, start + width)
        if not logits:
            return torch.empty(0, dtype=self.network.dtype, device=self.device)
        read = [self.num_right[slot] for slot in range(first_slot, first_slot + len(starts))]
        begins = torch.tensor(
            [max(0, count - start) for count, start in zip(read, starts, strict=True)], device=self.device
        )
        columns = begins[:, None] + torch.arange(min(self.block_size, width), device=self.device)
        columns = columns.clamp(max=width - 1)
        positions = torch.tensor(starts, device=self.device)[:, None] + columns
        longest, slots = max(read), slice(first_slot, first_slot + len(starts))
        seen = torch.arange(longest, device=self.device) < torch.tensor(read, device=self.device)[:, None]
        keys, values = self._keys[slots, :, :longest], self._values[slots, :, :longest]
        outputs = self.network.block(tokens.gather(1, columns), positions, keys, values, seen)
        scores = self._logits(outputs)
        out = scores.new_zeros(len(starts), width, self.vocab_size)
        return out.scatter(1, columns[..., None].expand_as(scores), scores)

    def _read(self, slot: int, start: int, stop: int) -> None:
        """Write keys and values of the positions of a slot that the target has read."""
        stop = min(stop, self.num_read(slot))
        features = None
        if stop > start and self.target is not None:
            features = self.target.hidden_states(self.feature_layers, slot, start, stop)
        if features is not None:
            self._keys[slot, :, start:stop], self._values[slot, :, start:stop] = self.network.context(features, start)
        if start <= self.num_right[slot]:
            self.num_right[slot] = start if features is None else stop

    def _logits(self, outputs: Tensor) -> Tensor:
        """[B, W, V]; tokens that the head cannot propose are impossible."""
        drafted = self.network.weights.lm_head(outputs)
        if self._token_ids is None:
            return drafted[..., : self.vocab_size]
        logits = drafted.new_full((*drafted.shape[:-1], self.vocab_size), float("-inf"))
        logits[..., self._token_ids] = drafted
        return logits
