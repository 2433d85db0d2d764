"""The attention masks of a Hugging Face model: additive or boolean, grouped or not, one per kind of attention."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from slipstream.models.hf import grouped_attention as grouped

STATEFUL = frozenset(("linear_attention", "conv"))  # kinds of layers without a mask
Masks = Tensor | dict[str, Tensor] | dict[str, Tensor | None] | None  # one for all layers, or one per kind


def unmasked_window(model: Any) -> int | None:
    """The sliding window of a model of transformers that has one in its cache and none in its masks; else None.

    `generate` then reads a prompt without a window and goes on with one, token by token (Moshi).
    """
    config = model.config.get_text_config()
    window: int | None = getattr(config, "sliding_window", None)
    if not window or getattr(config, "layer_types", None):
        return None
    classes = {*type(model).__mro__, *type(model.base_model).__mro__}
    homes = {kind.__module__ for kind in classes if kind.__module__.startswith("transformers.models.")}
    masked = any("create_sliding_window_causal_mask" in vars(sys.modules[home]) for home in homes)
    return window if homes and not masked else None


class MaskBuilder:
    """Builds the masks a model's layers expect.

    repeats: query heads per key head if attention is grouped, else None. windows: of each layer's attention, the
    positions a token sees, itself included; None for all of them.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self._window: int | None = getattr(config, "sliding_window", None)
        everywhere = "sliding_attention" if self._window else "full_attention"
        kinds = getattr(config, "layer_types", None) or [everywhere] * config.num_hidden_layers
        self.windows = [self._window if kind == "sliding_attention" else None for kind in kinds]
        self._kinds = frozenset("full_attention" if kind == "hybrid" else kind for kind in kinds) - STATEFUL
        self._dtype: torch.dtype = model.dtype
        self._is_eager = config._attn_implementation == "eager"
        self.repeats = grouped.repeats_of(config) if config._attn_implementation == grouped.NAME else None

    def build(self, queries: Tensor, keys: Tensor, visible: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """What queries at positions [B, W] may see of keys at positions [S], or [B, 1, 1, S] where rows differ.

        visible: [B, 1, W, S], which of the keys before a query it follows; None for all. Returns [B, 1, W, S] (grouped:
        see `group_mask`), or one per kind of attention if the layers differ.
        """
        last = queries[:, None, :, None]
        causal = keys <= last if visible is None else (keys <= last) & visible
        masks = {"full_attention": self._form(causal)}
        if "sliding_attention" in self._kinds and self._window is not None:
            masks["sliding_attention"] = self._form(causal & (keys > last - self._window))
        return masks if len(self._kinds) > 1 else masks[next(iter(self._kinds))]

    def nothing(self, device: torch.device) -> Tensor | dict[str, Tensor]:
        """In place of masks, for layers that need none."""
        empty = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        return dict.fromkeys(self._kinds, empty) if len(self._kinds) > 1 else empty

    def build_hybrid(self, queries: Tensor, keys: Tensor) -> dict[str, Tensor | None] | None:
        """The same for a model with recurrent layers, which take none; None if it has no others."""
        if not self._kinds:
            return None
        built = self.build(queries, keys)
        masks = built if isinstance(built, dict) else dict.fromkeys(self._kinds, built)
        return {**dict.fromkeys(STATEFUL), **masks}

    def _form(self, allowed: Tensor) -> Tensor:
        """A boolean mask in the form that the model's attention takes."""
        if self.repeats is not None:
            return grouped.group_mask(allowed, self.repeats, self._dtype)
        if not self._is_eager:
            return allowed
        blocked = torch.finfo(self._dtype).min
        return torch.zeros(allowed.shape, dtype=self._dtype, device=allowed.device).masked_fill(~allowed, blocked)
