"""Multi-token-prediction layers (DeepSeek-V3, arXiv 2412.19437, section 2.2), which come with a target, as a head.

A layer's row s holds token x_s and a hidden state of position s - 1, and predicts x_{s+1}. The first layer is given the
target's last hidden state, after the final norm; each further layer is given what the one before it returned, and
drafts one token more. Beyond that the last layer is given what it returned itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.decoder.attention import STATEFUL, MaskBuilder
from slipstream.models.decoder.cache import KEYS_AND_VALUES, RaggedCache, SlotLayer
from slipstream.models.heads.features import FeatureReader

RETURNED = 0  # the number under which a layer's cache keeps what the layer has returned


@dataclass(frozen=True)
class TargetParts:
    """What MTP layers share with their target. norm: the final one."""

    embed: nn.Module
    norm: nn.Module
    lm_head: nn.Module
    num_layers: int
    vocab_size: int
    max_length: int
    device: torch.device


class MtpLayer:
    """One MTP layer, as transformers' own decoder of a single layer, on slots of its own KV cache."""

    def __init__(
        self, decoder: Any, token_norm: nn.Module, hidden_norm: nn.Module, project: nn.Module, *, hidden_first: bool
    ) -> None:
        """decoder: with this layer and the norm of what it returns. project: from a token and a hidden state, normed.

        hidden_first: the hidden state comes before the token there.
        """
        self.decoder, self.token_norm, self.hidden_norm, self.project = decoder, token_norm, hidden_norm, project
        self.hidden_first = hidden_first
        self.cache = RaggedCache(1)
        self.cache.hidden[RETURNED] = SlotLayer()
        self.cache.attended_unit = 1
        accepted = inspect.signature(decoder.forward).parameters
        self._cache_name = next(name for name in KEYS_AND_VALUES if name in accepted)
        self._masks = MaskBuilder(decoder)
        self._kinds = tuple(getattr(decoder.config, "layer_types", None) or ())

    def forward(self, embedded: Tensor, entering: Tensor, positions: Tensor, keys: Tensor, first: int) -> Tensor:
        """[B, W, H] of tokens and hidden states [B, W, H] at positions [B, W], where the cache was told to write.

        keys: positions [S] that attention reads; those before `first` have no row that was given a hidden state.
        """
        joined = [self.token_norm(embedded), self.hidden_norm(entering)]
        inputs = self.project(torch.cat(joined[::-1] if self.hidden_first else joined, -1))
        is_row = (keys >= first) | (keys == positions[..., None])  # a row that saw no key at all would be NaN
        masks: Any = self._masks.build(positions, keys, is_row[:, None])
        if self._kinds:  # decoders of several kinds of layers look masks up by kind
            masks = {**dict.fromkeys(STATEFUL), **dict.fromkeys(self._kinds, masks)}
        cache: dict[str, Any] = {self._cache_name: self.cache}
        out = self.decoder(
            inputs_embeds=inputs, attention_mask=masks, position_ids=positions, use_cache=True, **cache
        ).last_hidden_state
        self.cache.keep_hidden(RETURNED, out)
        returned: Tensor = out
        return returned

    def returned(self, slots: Tensor, positions: Tensor) -> Tensor | None:
        """[B, W, H] what it has returned at positions [B, W] of slots [B, 1]; None before its first forward."""
        kept = self.cache.hidden[RETURNED].keys
        return None if kept is None else kept[slots, 0, positions.clamp(0, kept.shape[2] - 1)]


class MtpBackend(FeatureReader):
    """See `Backend`. Row s of layer k, counted from 0, has a hidden state from s = k + 1 on; earlier rows are not read.

    The depth of a row is 0 where the target's feature is known, and grows by one with each drafted token after it. In a
    row of depth d layer d predicts, or the last one; the layers before it are not needed any more.
    """

    attended_unit = 1

    def __init__(self, layers: Sequence[MtpLayer], target: TargetParts) -> None:
        super().__init__([target.num_layers])
        self.layers, self.parts = layers, target
        self.vocab_size, self.max_length, self.device = target.vocab_size, target.max_length, target.device

    def reserve(self, rows: int, length: int) -> None:
        for layer in self.layers:
            layer.cache.reserve(rows, length)
        self.num_right += [0] * (rows - len(self.num_right))

    def copy(self, source: int, destination: int, length: int) -> None:
        self.num_right[destination] = min(self.num_right[source], length)
        for layer in self.layers:
            layer.cache.copy(source, destination, length)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        width, slots = tokens.shape[1], range(first_slot, first_slot + len(starts))
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)
        read = torch.tensor([self.num_read(slot) for slot in slots], device=self.device)
        depth = (positions - read[:, None]).clamp(min=0)
        embedded, last = self.parts.embed(tokens), len(self.layers) - 1
        first = min(last, *(max(0, start - self.num_read(slot)) for slot, start in zip(slots, starts, strict=True)))
        returned = list[Tensor]()
        for number in range(first, last + 1):
            layer = self.layers[number]
            keys = torch.arange(layer.cache.place(first_slot, starts, positions), device=self.device)
            entering = self._entering(number, slots, positions, depth, embedded)
            turned = positions.clamp(max=self.max_length - 1)  # padding may reach beyond the context's end
            returned.append(layer.forward(embedded, entering, turned, keys, number + 1))
        for slot, start in zip(slots, starts, strict=True):
            self.note_right(slot, start, width)
        if not logits:
            return embedded.new_empty(0)
        chosen = (depth.clamp(first, last) - first)[None, ..., None].expand(1, *embedded.shape)
        out: Tensor = self.parts.lm_head(torch.stack(returned).gather(0, chosen)[0])
        return out

    def _entering(self, number: int, slots: range, positions: Tensor, depth: Tensor, like: Tensor) -> Tensor:
        """[B, W, H] the hidden states that a layer is given in the rows at these positions."""
        where = torch.tensor(slots, device=self.device)[:, None]
        own = self.layers[number].returned(where, positions - 1)
        if number == 0:
            entering = self._features(slots, positions, like)
        else:
            before = self.layers[number - 1].returned(where, positions - 1)
            entering = torch.zeros_like(like) if before is None else before
        return entering if own is None else torch.where((depth > number)[..., None], own, entering)

    def _features(self, slots: range, positions: Tensor, like: Tensor) -> Tensor:
        """[B, W, H] the target's last hidden states at the positions before these, as far as it has read."""
        entering = torch.zeros_like(like)
        for i, slot in enumerate(slots):
            start = int(positions[i, 0])
            known = self.num_known(slot, start, positions.shape[1])
            features = self.features(slot, start, known)
            if features is not None:
                entering[i, known - len(features) : known] = self.parts.norm(features.to(like.dtype))
        return entering
