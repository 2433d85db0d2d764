"""Heads of DFlash (arXiv 2602.06036): several decoder layers fill in a block of mask tokens in one forward.

A block is the newest token, followed by mask tokens for those to come; within it every row sees all others, or in some
heads only earlier ones. Tokens before the block enter every layer as keys and values: the target's features of each
position are projected once, and each layer projects the result to its keys and values. DSpark and DFlash 2 add a chain,
which corrects the scores of a place by the tokens drafted before it; DFlash 2 also mixes each row with earlier rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, pad, silu

from slipstream.models.decoder.cache import enlarged
from slipstream.models.heads.features import FeatureReader
from slipstream.models.heads.head_backend import UNIT
from slipstream.models.heads.network import HeadConfig, HeadLayers, Linear, all_scores, grouped_attention


class Chain(Protocol):
    """Corrects the scores of a place once the tokens before it are known."""

    def __call__(self, scores: Tensor, outputs: Tensor, before: Tensor) -> Tensor:
        """Corrected scores [B, V] of the last of K places. scores: [B, V], the block's own.

        outputs: [B, K, H], of the block's places; before: [B, K], the token before each place.
        """


@dataclass(frozen=True)
class MarkovChain:
    """DSpark (arXiv 2607.05147): adds to the scores of a place a product of rank R with the token before it."""

    tokens: Tensor  # [V, R], of the token before
    add: Linear  # from R to scores
    gate: Linear | None = None  # with a bias, if the head type is "gated"
    joint: Linear | None = None  # with a bias, if the head type is "rnn"
    token_ids: Tensor | None = None  # of the tokens that `add` scores; None for the whole vocabulary

    def __call__(self, scores: Tensor, outputs: Tensor, before: Tensor) -> Tensor:
        added = self.add(self._state(outputs, before)).to(scores.dtype)
        if self.token_ids is None:
            return scores + added[:, : scores.shape[1]]
        return scores.index_add(1, self.token_ids, added)

    def _state(self, outputs: Tensor, before: Tensor) -> Tensor:
        if self.joint is not None:
            return self._recurrent_state(self.joint, outputs, before)
        token = embedding(before[:, -1], self.tokens)
        if self.gate is None:
            return token
        return torch.sigmoid(self.gate(torch.cat([outputs[:, -1], token], -1))) * token

    def _recurrent_state(self, joint: Linear, outputs: Tensor, before: Tensor) -> Tensor:
        """The recurrence's output at the last place. Blocks are short, so it always starts at the first place."""
        tokens = embedding(before, self.tokens)
        state = output = torch.zeros_like(tokens[:, 0])
        for place in range(before.shape[1]):
            joined = joint(torch.cat([state, tokens[:, place], outputs[:, place]], -1))
            gate, candidate, output = joined.chunk(3, -1)
            gate = gate.sigmoid()
            state = gate * state + (1 - gate) * candidate.tanh()
        return output.tanh()


@dataclass(frozen=True)
class Confidence:
    """DSpark's estimate of the probability that a drafted token is accepted if those before it are.

    weight: [1, H + R] with tokens [V, R], a `MarkovChain`'s; [1, H] without. bias: [1].
    """

    weight: Tensor
    bias: Tensor
    tokens: Tensor | None

    def __call__(self, outputs: Tensor, before: Tensor) -> Tensor:
        """[B] probabilities. outputs: [B, H] of the place; before: [B] the token before it."""
        parts = [outputs] if self.tokens is None else [outputs, embedding(before, self.tokens).to(outputs.dtype)]
        return linear(torch.cat(parts, -1), self.weight, self.bias)[:, 0].float().sigmoid()


@dataclass(frozen=True)
class CandidateChain:
    """DFlash 2: keeps the `count` likeliest tokens of a place, and adds to each a score for its fit with the token
    before.

    before, after: [V, R], of the token before and of the token itself; project: from outputs to R.
    """

    before: Tensor
    after: Tensor
    project: Linear
    count: int

    def __call__(self, scores: Tensor, outputs: Tensor, before: Tensor) -> Tensor:
        best, candidates = scores.topk(self.count)
        expected = embedding(before[:, -1], self.before) * self.project(outputs[:, -1])
        fit = (expected[:, None] * embedding(candidates, self.after)).sum(-1)
        return torch.full_like(scores, float("-inf")).scatter(1, candidates, best + fit.to(scores.dtype))


@dataclass(frozen=True)
class LocalMix:
    """Mixes each row with earlier rows; DFlash 2 does so before and after a layer's attention and its MLP.

    base: [2, taps, H], the shares of a row and of earlier rows, for before and after. project: from a row to changes of
    these shares, [2 * taps * groups], one number for each group of neighboring columns.
    """

    base: Tensor
    project: Linear

    def shares(self, x: Tensor) -> Tensor:
        """[2, B, W, taps, H] the shares before and after, for inputs x [B, W, H]."""
        of_groups = self.project(x).unflatten(-1, (2, self.base.shape[1], -1))
        added = of_groups.repeat_interleave(self.base.shape[2] // of_groups.shape[-1], -1)
        return (self.base + added).permute(2, 0, 1, 3, 4)


def mixed(x: Tensor, shares: Tensor) -> Tensor:
    """[B, W, H], each row of a block mixed with earlier rows, by their shares [B, W, taps, H]."""
    shifted = [pad(x, (0, 0, tap, 0))[:, : x.shape[1]] for tap in range(shares.shape[2])]
    return (torch.stack(shifted, 2) * shares).sum(2)


@dataclass(frozen=True)
class DFlashLayer:
    """A decoder layer's products and norms. key_value and gate_up are joint.

    window: number of positions before the block that it sees; None for all. is_causal: a row of the block sees only
    earlier rows.
    """

    query: Linear
    key_value: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    block_norm: Tensor
    query_norm: Tensor
    key_norm: Tensor
    middle_norm: Tensor
    window: int | None = None
    is_causal: bool = False
    attention_mix: LocalMix | None = None
    mlp_mix: LocalMix | None = None


@dataclass(frozen=True)
class DFlashWeights:
    """All weights of a head. embed, and in some heads lm_head, are the target's.

    chain: None if places are drafted independently; confidence: None if the head does not estimate acceptance.
    """

    fc: Linear
    feature_norm: Tensor
    layers: Sequence[DFlashLayer]
    final_norm: Tensor
    embed: Callable[[Tensor], Tensor]
    lm_head: Linear
    chain: Chain | None = None
    confidence: Confidence | None = None


class DFlashNetwork(HeadLayers):
    """A head's forward. B rows, W tokens of a block, H hidden size, K key heads of all layers, D their size."""

    def __init__(self, config: HeadConfig, weights: DFlashWeights) -> None:
        super().__init__(config, weights.final_norm)
        self.weights = weights

    def context(self, features: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Keys and values [K, N, D] of positions from `start` on, from features [N, layers * target's hidden size]."""
        entered = self._norm(self.weights.fc(features.to(self.dtype)), self.weights.feature_norm)
        positions = torch.arange(start, start + len(features), device=self.device)[None]
        pairs = [self._key_value(layer, entered[None], positions) for layer in self.weights.layers]
        return torch.cat([key[0] for key, _ in pairs]), torch.cat([value[0] for _, value in pairs])

    def block(self, tokens: Tensor, positions: Tensor, keys: Tensor, values: Tensor, distance: Tensor) -> Tensor:
        """[B, W, H] normed outputs of a block of tokens [B, W] at positions [B, W].

        keys, values: [B, K, L, D], of the text before it. distance: [B, L], from each position to the block: 1 for the
        last token of the text, 0 or less where there is no text.
        """
        hidden, count = self.weights.embed(tokens).to(self.dtype), self.config.num_key_heads
        kinds = {(layer.window, layer.is_causal) for layer in self.weights.layers}
        masks = {kind: _mask(*kind, distance, tokens.shape[1]) for kind in kinds}
        for number, layer in enumerate(self.weights.layers):
            normed, of_layer = self._norm(hidden, layer.block_norm), slice(number * count, (number + 1) * count)
            shares = None if layer.attention_mix is None else layer.attention_mix.shares(normed)
            normed = normed if shares is None else mixed(normed, shares[0])
            query = self._norm_and_rotate(self._split(layer.query(normed)), layer.query_norm, positions)
            key, value = self._key_value(layer, normed, positions)
            key, value = torch.cat([keys[:, of_layer], key], 2), torch.cat([values[:, of_layer], value], 2)
            attended = grouped_attention(query, key, value, masks[layer.window, layer.is_causal])
            added = layer.out(attended.transpose(1, 2).flatten(2))
            hidden = hidden + (added if shares is None else mixed(added, shares[1]))
            normed = self._norm(hidden, layer.middle_norm)
            shares = None if layer.mlp_mix is None else layer.mlp_mix.shares(normed)
            gate, up = layer.gate_up(normed if shares is None else mixed(normed, shares[0])).chunk(2, -1)
            added = layer.down(silu(gate) * up)
            hidden = hidden + (added if shares is None else mixed(added, shares[1]))
        return self._norm(hidden, self.weights.final_norm)

    def _key_value(self, layer: DFlashLayer, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self._split(layer.key_value(x)).chunk(2, 1)
        return self._norm_and_rotate(key, layer.key_norm, positions), value

    def _split(self, x: Tensor) -> Tensor:
        """[B, heads, W, D] of [B, W, heads * D]."""
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _norm_and_rotate(self, x: Tensor, norm: Tensor, positions: Tensor) -> Tensor:
        places = positions.clamp(max=self.config.max_length - 1)  # a block may reach beyond the context's end
        return self._rotate(self._norm(x, norm), places)


def _mask(window: int | None, is_causal: bool, distance: Tensor, width: int) -> Tensor:
    """[B, W, L + W], True where a row of a block sees a position of the text or another row."""
    seen = distance > 0 if window is None else (distance > 0) & (distance <= window)
    within = torch.ones(width, width, dtype=torch.bool, device=distance.device)
    within = within.tril() if is_causal else within
    return torch.cat([seen[:, None].expand(-1, width, -1), within.expand(len(distance), -1, -1)], 2)


class DFlashBackend(FeatureReader):
    """Drafts a block per forward, after the text that the target has read.

    The cache holds only keys and values of the target's features, never a block's, so a slot is valid as far as the
    target has read it. mask_token, block_size, first_place: see `ParallelDrafts`.
    """

    attended_unit = 1

    def __init__(self, network: DFlashNetwork, mask_token: int, block_size: int, first_place: int = 1) -> None:
        config = network.config
        super().__init__(config.layers)
        self.network, self.vocab_size, self.max_length = network, config.vocab_size, config.max_length
        self.device, self.mask_token, self.block_size = network.device, mask_token, block_size
        self.first_place = first_place
        heads = len(network.weights.layers) * config.num_key_heads
        self._keys = torch.zeros(0, heads, 0, config.head_dim, dtype=network.dtype, device=self.device)
        self._values = self._keys
        self._outputs = torch.zeros(0, 1, block_size, config.hidden_size, dtype=network.dtype, device=self.device)
        self._token_ids = None if config.token_ids is None else config.token_ids.to(self.device)

    def reserve(self, rows: int, length: int) -> None:
        slots, _, positions, _ = self._keys.shape
        if rows > slots or length > positions:
            slots, positions = max(rows, slots), -(-max(length, positions) // UNIT) * UNIT
            self._keys, self._values = (enlarged(part, slots, positions) for part in (self._keys, self._values))
            self._outputs = enlarged(self._outputs, slots, self.block_size)
        self.grow(slots)

    def copy(self, source: int, destination: int, length: int) -> None:
        super().copy(source, destination, length)
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
        distance = torch.tensor(read, device=self.device)[:, None] - torch.arange(longest, device=self.device)
        keys, values = self._keys[slots, :, :longest], self._values[slots, :, :longest]
        outputs = self.network.block(tokens.gather(1, columns), positions, keys, values, distance)
        weights = self.network.weights
        if weights.chain is not None or weights.confidence is not None:
            self._outputs[slots, 0, : outputs.shape[1]] = outputs
        scores = all_scores(weights.lm_head(outputs), self._token_ids, self.vocab_size)
        out = scores.new_zeros(len(starts), width, self.vocab_size)
        return out.scatter(1, columns[..., None].expand_as(scores), scores)

    @torch.inference_mode()
    def chained(self, scores: Tensor, newest: Sequence[int], draft: Tensor) -> Tensor:
        chain = self.network.weights.chain
        if chain is None:
            return scores
        before = self._before(newest, draft)
        return chain(scores[:, 0], self._outputs[: len(newest), 0, : before.shape[1]], before)[:, None]

    @torch.inference_mode()
    def acceptance(self, newest: Sequence[int], draft: Tensor) -> Tensor | None:
        confidence = self.network.weights.confidence
        if confidence is None:
            return None
        before = self._before(newest, draft)
        return confidence(self._outputs[: len(newest), 0, before.shape[1] - 1], before[:, -1])

    def _before(self, newest: Sequence[int], draft: Tensor) -> Tensor:
        """[B, places], the token before each place of a block, up to the place of the draft's next token."""
        first = torch.tensor(newest, device=self.device)[:, None]
        return torch.cat([first.expand(-1, 1 + self.first_place), draft.to(self.device)], 1)

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
