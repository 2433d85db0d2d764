"""Any decoder-only Hugging Face model as a backend: slot-addressed memory, explicit positions and masks.

The model's forward is used as it is. This module, its neighbours and
the drop-in for `generate` are the only ones that import transformers.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from slipstream.errors import UsageError
from slipstream.models.hf import grouped_attention as grouped
from slipstream.models.hf.fast_forwards import Shortcuts
from slipstream.models.hf.kv_cache import ATTENDED_UNIT
from slipstream.models.hf.ragged_attention import RaggedSlots


class HFBackend(Shortcuts):
    """Runs a `PreTrainedModel` on slot-addressed memory."""

    def __init__(self, model: Any) -> None:
        check_supported(model)
        self.attended_unit = ATTENDED_UNIT
        self.model = model.eval()
        self.device: torch.device = model.get_input_embeddings().weight.device
        config = model.config.get_text_config()
        self.vocab_size: int = model.get_output_embeddings().out_features
        self.max_length: int = getattr(config, "max_position_embeddings", None) or 1 << 20
        self._window, self._layer_types = _windows(config)
        self._cache = RaggedSlots(config.num_hidden_layers)
        self._float_mask = model.dtype if config._attn_implementation == "eager" else None
        is_grouped = config._attn_implementation == grouped.NAME
        self._repeats = grouped.repeats_of(config) if is_grouped else None
        self._key_positions = torch.arange(0, device=self.device)

    def reserve(self, rows: int, length: int) -> None:
        """Grow the memory; the longest view sets the size of the mask."""
        self._cache.reserve(rows, -(-length // self.attended_unit) * self.attended_unit)
        self._key_positions = torch.arange(self._cache._shape[1], device=self.device)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        """One forward of the model over tokens [B, W]; see `Backend.forward`."""
        out = self._eager(tokens, starts, first_slot, 0 if logits else 1)
        return out.to(self.device) if logits else out.new_empty(0)

    @torch.inference_mode()
    def answer(self, tokens: Tensor, start: int, *, slot: int, columns: Tensor) -> Tensor:
        """See `Answering.answer`."""
        return self._eager(tokens, [start], slot, columns).to(self.device)

    def _eager(self, tokens: Tensor, starts: list[int], first_slot: int, keep: int | Tensor) -> Tensor:
        first = torch.tensor(starts, device=self.device)[:, None]
        positions = first + self._key_positions[: tokens.shape[1]]
        view = self._cache.place(
            first_slot,
            starts,
            positions,
            self.attended_unit,
            self.attended_lengths if self.device.type == "cpu" else (),
        )
        return self._through(tokens, positions, positions, view, keep)

    def _through(self, tokens: Tensor, positions: Tensor, queries: Tensor, view: int, keep: int | Tensor) -> Tensor:
        out = self.model(
            input_ids=tokens,
            attention_mask=self._masks(queries, view),
            # padding may stick out over the context's end, where learned positions have no row
            position_ids=positions.clamp(max=self.max_length - 1),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: Tensor = out.logits
        return logits

    @torch.inference_mode()
    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy keys and values between slots."""
        self._cache.copy(source, destination, length)

    def _masks(self, positions: Tensor, view: int) -> Tensor | dict[str, Tensor]:
        """[B, 1, W, view] masks, True where a query may look: one, or one per layer type for mixed models."""
        keys, queries = self._key_positions[:view], positions[:, None, :, None]
        causal = keys <= queries
        masks = {"full_attention": self._as_mask(causal)}
        if self._window is not None:
            masks["sliding_attention"] = self._as_mask(causal & (keys > queries - self._window))
        return masks if len(self._layer_types) > 1 else masks[next(iter(self._layer_types))]

    def _as_mask(self, allowed: Tensor) -> Tensor:
        if self._repeats is not None:
            return grouped.group_mask(allowed, self._repeats, self.model.dtype)
        if self._float_mask is None:
            return allowed
        blocked = torch.finfo(self._float_mask).min
        return torch.zeros(allowed.shape, dtype=self._float_mask, device=allowed.device).masked_fill(~allowed, blocked)


def _windows(config: Any) -> tuple[int | None, frozenset[str]]:
    """The sliding window, if any layer has one, and the set of attention types among the layers."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["sliding_attention" if window else "full_attention"]
    kinds = frozenset(types)
    return (window if "sliding_attention" in kinds else None), kinds


def check_supported(model: Any) -> None:
    """Refuse, by name and with the reason, models whose state cannot be addressed by position."""
    name, config = type(model).__name__, model.config.get_text_config()
    parameters = inspect.signature(model.forward).parameters
    reason = None
    if model.config.is_encoder_decoder:
        reason = "it is an encoder-decoder model; allowed: decoder-only models"
    elif getattr(model, "_is_stateful", False) or not _only_attention(config):
        reason = "it carries recurrent state or compressed attention, which cannot be rolled back to an earlier token"
    elif missing := [p for p in ("position_ids", "past_key_values", "logits_to_keep") if p not in parameters]:
        reason = f"its forward takes no {missing[0]}"
    elif model.get_output_embeddings() is None:
        reason = "it has no language-modelling head"
    elif config._attn_implementation not in ("sdpa", "eager", grouped.NAME):
        reason = f"attn_implementation={config._attn_implementation!r} takes no explicit mask; allowed: 'sdpa', 'eager'"
    if reason:
        raise UsageError(f"model {name} is not supported: {reason}")


def _only_attention(config: Any) -> bool:
    allowed = {DynamicLayer, DynamicSlidingWindowLayer}
    kinds = set(getattr(config, "layer_types", None) or [])
    layers = DynamicCache(config=config).layers
    return kinds <= {"full_attention", "sliding_attention"} and all(type(layer) in allowed for layer in layers)
