"""A Hugging Face model as `generate` runs it: its own cache, its own masks and positions, one row at a time.

Models run this way if their state cannot be written at explicit positions: unknown recurrent layers, compressed or
relative attention, other classes of caches, or none. The model's cache object is one opaque state, which exists only
where a forward ended; continuing from an earlier position starts from a copy kept there.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from slipstream.models.backend_capabilities import RowSegment
from slipstream.models.decoder.attention import unmasked_window
from slipstream.models.decoder.cache import KEYS_AND_VALUES
from slipstream.models.hf.prepared_inputs import BUCKETS, NAMES, cache_name, input_device, prepared_name, vocab_size_of
from slipstream.models.hf.rotations_by_length import rotate_by_length
from slipstream.models.hf.thresholds import longest_text

CACHE_NAMES = (*NAMES, "state", "mems", BUCKETS)  # of `forward`'s arguments
NEWEST, MAX_STATES = 10, 16  # states kept per row: always the newest 10, at most 16 in all


@dataclass
class State:
    """The state from which a forward continues. cache: the model's own, if any; in_modules: see `ModuleState`."""

    cache: Any
    in_modules: list[Tensor]

    def duplicate(self) -> State:
        """A copy that a forward may change; layers that replace their tensors instead of changing them share these."""
        cache = self.cache
        if type(cache) is not DynamicCache:  # subclasses keep more than layers
            return State(deepcopy(cache), self.in_modules)
        changed = copy(cache)
        changed.layers = [_duplicate(layer) for layer in cache.layers]
        return State(changed, self.in_modules)

    def take_keys(self, position: int, later: State) -> None:
        """Replace keys and values by views of a later state's, which begin with the same ones; saves memory."""
        if type(self.cache) is DynamicCache and type(later.cache) is DynamicCache:
            for layer, later_layer in zip(self.cache.layers, later.cache.layers, strict=True):
                if type(layer) is DynamicLayer and layer.keys is not None and layer.keys.shape[-2] == position:
                    layer.keys = later_layer.keys[..., :position, :]
                    layer.values = later_layer.values[..., :position, :]


def _duplicate(layer: Any) -> Any:
    if type(layer) is DynamicLayer:
        return copy(layer)
    if type(layer) is not LinearAttentionLayer:
        return deepcopy(layer)
    changed = copy(layer)
    for name, values in vars(layer).items():
        if isinstance(values, dict):  # by number of the state
            copied = {i: value.clone() if isinstance(value, Tensor) else value for i, value in values.items()}
            setattr(changed, name, copied)
    return changed


class ModuleState:
    """Tensors that a model's modules keep between forwards as attributes, instead of in a cache."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[tuple[nn.Module, str], Tensor | None] = dict(self._attributes())
        self._places: list[tuple[nn.Module, str]] = []

    def note_changed(self) -> None:
        """Note the attributes that the first forward has changed."""
        after = self._attributes()
        self._places = [place for place, value in after.items() if value is not self._before.get(place)]
        self._before = {place: self._before.get(place) for place in self._places}

    def restore(self, tensors: Sequence[Tensor] | None) -> None:
        """Restore saved tensors; None restores those from before the first forward."""
        for i, (module, name) in enumerate(self._places):
            setattr(module, name, self._before[module, name] if tensors is None else tensors[i].clone())

    def saved(self) -> list[Tensor]:
        """Copies of the modules' current tensors."""
        return [getattr(module, name).clone() for module, name in self._places]

    def _attributes(self) -> dict[tuple[nn.Module, str], Tensor]:
        items = ((module, name, value) for module in self._model.modules() for name, value in vars(module).items())
        return {(module, name): value for module, name, value in items if isinstance(value, Tensor)}


class OwnCaches:
    """The states of every row: position -> the state from which the model's `forward` continues there."""

    def __init__(self) -> None:
        self._states: list[dict[int, State]] = []

    def reserve(self, rows: int) -> None:
        """Hold at least `rows` slots."""
        self._states.extend({} for _ in range(rows - len(self._states)))

    def last(self, slot: int, limit: int) -> int:
        """The last position, at most `limit`, that has a state; 0 always has one."""
        return max((position for position in self._states[slot] if position <= limit), default=0)

    def at(self, slot: int, position: int) -> State | None:
        """A copy of the state at a position, for a forward to change; None at 0. Drops the states after `position`."""
        states = self._states[slot]
        for later in [other for other in states if other > position]:
            del states[later]
        return states[position].duplicate() if position else None

    def put(self, slot: int, position: int, state: State) -> None:
        """Keep a state; if there are too many, drop the one that leaves the smallest gap."""
        states = self._states[slot]
        for earlier, other in states.items():
            other.take_keys(earlier, state)
        states[position] = state
        while len(states) > MAX_STATES:
            del states[_dispensable(sorted(states))]

    def add_noise(self, slot: int, position: int) -> None:
        """Add fixed noise to the recurrent part of a state, so that a trial notices if the state is ignored."""
        generator = torch.Generator().manual_seed(17)
        for layer in getattr(self._states[slot][position].cache, "layers", []):
            for state in getattr(layer, "recurrent_states", {}).values():
                if state is not None:
                    state += torch.randn(state.shape, generator=generator).to(state)

    def copy(self, source: int, destination: int, length: int) -> None:
        """Give a slot another one's states up to `length`. Kept states never change, so both slots share them."""
        self._states[destination] = {
            position: state for position, state in self._states[source].items() if position <= length
        }


def _dispensable(positions: Sequence[int]) -> int:
    """The position, not among the newest, whose loss leaves the smallest gap."""
    older = range(len(positions) - NEWEST)
    gaps = {i: positions[i + 1] - (positions[i - 1] if i else 0) for i in older}
    return positions[min(gaps, key=lambda i: gaps[i])]


class OwnCacheBackend:
    """Runs a model on its own caches. Optional capabilities: `UnpaddedForwards`, `RaggedForwards`.

    Tokens after a state are fed one at a time unless `takes_several_tokens`, which `state_trials` sets.
    """

    attended_unit = 1
    ragged = True

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        config = model.config.get_text_config(decoder=True)
        self.device = input_device(model)
        # a longer draft would make the model read a short text as a long one
        longest = rotate_by_length(model) or unmasked_window(model)
        self.max_length: int = longest or longest_text(config) or 1 << 20
        self.takes_several_tokens, self.rounds_like_one_token = True, model.dtype in (torch.float32, torch.float64)
        self._accepts = inspect.signature(model.forward).parameters
        self._cache_name = cache_name(model, CACHE_NAMES)
        self._has_dynamic_cache = self._cache_name in KEYS_AND_VALUES and model._supports_default_dynamic_cache()
        self.module_state = ModuleState(model)
        self.caches = OwnCaches()
        self._ids: list[list[int]] = []
        self.vocab_size = vocab_size_of(model)

    def reserve(self, rows: int, length: int) -> None:
        """Create slots; their states need no reservation."""
        self.caches.reserve(rows)
        self._ids.extend([] for _ in range(rows - len(self._ids)))

    def checkpoint(self, slot: int, limit: int) -> int:
        return self.caches.last(slot, limit)

    def mark_final(self, slot: int, position: int) -> None:
        """Nothing to do: states are kept where forwards end."""

    @torch.inference_mode()
    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        """Treats every column as a token, including padding."""
        rows = [self._feed(first_slot + i, start, tokens[i].tolist(), logits) for i, start in enumerate(starts)]
        return torch.stack(rows) if logits else torch.empty(0, device=self.device)

    @torch.inference_mode()
    def forward_ragged(
        self,
        tokens: Tensor,
        segments: Sequence[RowSegment],
        *,
        widths: Sequence[int] | None,
        columns: Tensor | None = None,
    ) -> Tensor:
        parts = tokens.tolist()
        logits_of_rows, begin = [], 0
        for segment in segments:
            logits_of_rows.append(self._feed(segment.slot, segment.start, parts[begin : begin + segment.count], True))
            begin += segment.count
        logits = torch.cat(logits_of_rows)
        return logits if columns is None else logits[columns.to(self.device)]

    def copy(self, source: int, destination: int, length: int) -> None:
        self.caches.copy(source, destination, length)
        self._ids[destination] = self._ids[source][:length]

    def _feed(self, slot: int, start: int, ids: list[int], logits: bool) -> Tensor:
        """Logits [len(ids), V] after each of these tokens, which begin at position `start`; fewer without `logits`."""
        if start and not self.takes_several_tokens and len(ids) > 1:
            return torch.cat([self._feed(slot, start + i, [token], logits) for i, token in enumerate(ids)])
        state, text = self.caches.at(slot, start), self._ids[slot]
        text[start:] = ids
        out, state = self._run(text, len(ids), state, logits)
        self.caches.put(slot, len(text), state)
        return out

    def _run(self, ids: list[int], count: int, state: State | None, logits: bool) -> tuple[Tensor, State]:
        """Logits of the last `count` of these tokens, and the state after them. state: the one before them.

        logits: False if only the last token's logits are needed.
        """
        all_ids, has_cache = torch.tensor([ids], device=self.device), self._cache_name is not None
        options: dict[str, Any] = {"attention_mask": torch.ones_like(all_ids), "use_cache": has_cache}
        if "position_ids" in self._accepts:
            options["position_ids"] = torch.arange(len(ids), device=self.device)[None]
        cache = None if state is None else state.cache
        if cache is None and self._has_dynamic_cache:
            cache = DynamicCache(config=self.model.config)
        if self._cache_name is not None and cache is not None:
            options[prepared_name(self.model, self._cache_name)] = cache
        width = count if has_cache else len(ids)
        inputs = self.model.prepare_inputs_for_generation(
            all_ids, next_sequence_length=width, is_first_iteration=width == len(ids), **options
        )
        embedded = inputs.get("inputs_embeds")
        if embedded is not None and embedded.shape[1] > width:
            extra = embedded.shape[1] - width
            raise ValueError(f"prepare_inputs_for_generation adds {extra} virtual tokens, as prompt tuning does")
        if "logits_to_keep" in self._accepts:
            inputs["logits_to_keep"] = 0 if logits else 1  # 0: all
        self.module_state.restore(None if state is None else state.in_modules)
        out = self.model(**inputs, return_dict=True)
        if logits and out.logits.shape[1] != width:
            raise ValueError(f"for {width} tokens it returns the logits of {out.logits.shape[1]}")
        returned = None if self._cache_name is None else out.get(self._cache_name)
        after = State(cache if returned is None else returned, self.module_state.saved())  # None: changed in place
        return out.logits[0, -count:], after
