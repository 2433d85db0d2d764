"""Any decoder-only Hugging Face model as a backend: a slot-addressed KV cache, explicit positions and masks.

The model's own forward is used as it is. `slipstream.models.hf.fast_forwards` makes it faster.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from slipstream.core.cache_state import PROMPT_UNIT
from slipstream.core.interfaces import RowSegment
from slipstream.errors import UsageError
from slipstream.models.hf import decoder_layers
from slipstream.models.hf import grouped_attention as grouped
from slipstream.models.hf.attention_masks import MaskBuilder
from slipstream.models.hf.ragged_attention import RaggedCache, lay_out


class HFBackend:
    """Runs a `PreTrainedModel` on a slot-addressed KV cache.

    Optional capabilities: `PromptLogits`, `AttendedLengths`, `RaggedForwards`, `LayerKinds`. ragged: whether the
    model's layers take ragged forwards, which `fuse_layers` finds out.
    """

    def __init__(self, model: Any, cache: RaggedCache | None = None) -> None:
        """cache: of another backend, to share it; by default a new one."""
        check_supported(model)
        self.model = model.eval()
        self.device: torch.device = model.get_input_embeddings().weight.device
        config = model.config.get_text_config()
        self.vocab_size: int = model.get_output_embeddings().out_features
        self.max_length: int = getattr(config, "max_position_embeddings", None) or 1 << 20
        self.num_layers: int = config.num_hidden_layers
        self.cache = RaggedCache(config.num_hidden_layers) if cache is None else cache
        self.masks = MaskBuilder(model)
        self.ragged = False
        self._key_positions = torch.arange(0, device=self.device)

    @property
    def attended_unit(self) -> int:
        """See `Backend`; shared with all backends on the same cache."""
        return self.cache.attended_unit

    @attended_unit.setter
    def attended_unit(self, unit: int) -> None:
        self.cache.attended_unit = unit

    @property
    def attended_lengths(self) -> tuple[int, ...]:
        """See `AttendedLengths`; shared like the unit, and always empty on other devices than the CPU."""
        return self.cache.attended_lengths

    @attended_lengths.setter
    def attended_lengths(self, lengths: tuple[int, ...]) -> None:
        self.cache.attended_lengths = lengths if self.device.type == "cpu" else ()

    def reserve(self, rows: int, length: int) -> None:
        """Grow the cache; see `Backend.reserve`."""
        self.cache.reserve(rows, length)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        """One forward of the model over tokens [B, W]; see `Backend.forward`."""
        out = self._forward_rows(tokens, starts, first_slot, 0 if logits else 1)
        return out.to(self.device) if logits else out.new_empty(0)

    @torch.inference_mode()
    def answer(self, tokens: Tensor, start: int, *, slot: int, columns: Tensor) -> Tensor:
        """See `PromptLogits.answer`."""
        return self._forward_rows(tokens, [start], slot, columns).to(self.device)

    @torch.inference_mode()
    def forward_ragged(
        self,
        tokens: Tensor,
        segments: Sequence[RowSegment],
        *,
        widths: Sequence[int] | None,
        columns: Tensor | None = None,
    ) -> Tensor:
        """See `RaggedForwards.forward_ragged`."""
        layout = lay_out(segments, len(tokens), widths)
        attended = self.cache.place_ragged(layout)
        mask = self.masks.build(layout.queries, self.key_positions()[:attended])
        return self._run(tokens[None], layout.positions[None], mask, 0 if columns is None else columns)[0]

    @torch.inference_mode()
    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy keys and values between slots."""
        self.cache.copy(source, destination, length)

    @torch.inference_mode()
    def attended_length_agrees(self, widths: Sequence[int], length: int, whole: int) -> bool:
        """See `AttendedLengths.attended_length_agrees`."""
        repeats = self.masks.repeats
        shapes = {(layer.keys.shape[1], layer.keys.shape[3]) for layer in self.cache.layers if layer.keys is not None}
        if repeats is None or not shapes:
            return False
        blocks = range(PROMPT_UNIT, grouped.BLOCK + 1, PROMPT_UNIT)  # prompts come in multiples of the unit
        return all(
            grouped.attended_length_agrees(
                grouped.Heads(repeats, key_heads, size, self.model.dtype), width, length, whole
            )
            for key_heads, size in shapes
            for width in (*widths, *blocks)
        )

    def layer_kinds(self) -> Sequence[Hashable]:
        """See `LayerKinds.layer_kinds`."""
        return decoder_layers.kinds(self.model, self.masks.windows)

    def weights_digest(self) -> str:
        """See `LayerSubsets.weights_digest`."""
        return decoder_layers.digest(self.model)

    def layer_subset(self, layers: Sequence[int]) -> HFBackend:
        """See `LayerSubsets.layer_subset`."""
        return HFBackend(decoder_layers.make_layer_subset(self.model, self.num_layers, layers), self.cache)

    def key_positions(self) -> Tensor:
        """The positions [P] of all keys in the cache, made anew when it has grown."""
        if len(self._key_positions) != self.cache.shape[1]:
            self._key_positions = torch.arange(self.cache.shape[1], device=self.device)
        return self._key_positions

    def _forward_rows(self, tokens: Tensor, starts: list[int], first_slot: int, keep: int | Tensor) -> Tensor:
        keys = self.key_positions()
        positions = torch.tensor(starts, device=self.device)[:, None] + keys[: tokens.shape[1]]
        attended = self.cache.place(first_slot, starts, positions)
        return self._run(tokens, positions, self.masks.build(positions, keys[:attended]), keep)

    def _run(self, tokens: Tensor, positions: Tensor, mask: Tensor | dict[str, Tensor], keep: int | Tensor) -> Tensor:
        out = self.model(
            input_ids=tokens,
            attention_mask=mask,
            # padding may reach beyond the context's end, where learned positions have no row
            position_ids=positions.clamp(max=self.max_length - 1),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: Tensor = out.logits
        return logits


def check_supported(model: Any) -> None:
    """Refuse, by name and with the reason, models whose state cannot be addressed by position."""
    if (reason := not_by_position(model)) is not None:
        raise UsageError(f"model {type(model).__name__} is not supported: {reason}")


def not_by_position(model: Any) -> str | None:
    """Why a model's state cannot be written at explicit positions, behind an explicit mask; None if it can."""
    config = model.config.get_text_config()
    parameters = inspect.signature(model.forward).parameters
    reason = None
    if getattr(model, "_is_stateful", False) or not _only_attention(config):
        reason = "it carries recurrent state or compressed attention"
    elif missing := [p for p in ("position_ids", "past_key_values", "logits_to_keep") if p not in parameters]:
        reason = f"its forward takes no {missing[0]}"
    elif model.get_output_embeddings() is None:
        reason = "it has no language-modelling head"
    elif config._attn_implementation not in ("sdpa", "eager", grouped.NAME):
        reason = f"attn_implementation={config._attn_implementation!r} takes no explicit mask; allowed: 'sdpa', 'eager'"
    return reason


def _only_attention(config: Any) -> bool:
    allowed = {DynamicLayer, DynamicSlidingWindowLayer}
    kinds = set(getattr(config, "layer_types", None) or [])
    layers = DynamicCache(config=config).layers
    return kinds <= {"full_attention", "sliding_attention"} and all(type(layer) in allowed for layer in layers)
