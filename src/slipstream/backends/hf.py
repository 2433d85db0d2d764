"""Any decoder-only Hugging Face model as a backend: slot-addressed memory, explicit positions and masks.

The model's forward is used as it is. This module, its neighbours and
the drop-in for `generate` are the only ones that import transformers.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from slipstream.backends import Piece, grouped
from slipstream.backends.lean import lean_layers
from slipstream.backends.ragged import lay_out
from slipstream.backends.slots import VIEW, SlotCache
from slipstream.memo import PROMPT_UNIT
from slipstream.types import SlipstreamError, UsageError

log = logging.getLogger("slipstream")

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of a faster forward's logits, relative to the largest


class HFBackend:
    """Runs a `PreTrainedModel` on slot-addressed memory."""

    reads: tuple[int, ...] = ()

    def __init__(self, model: Any) -> None:
        check_supported(model)
        self.view = VIEW
        self.model = model.eval()
        self.device: torch.device = model.get_input_embeddings().weight.device
        config = model.config.get_text_config()
        self.vocab_size: int = model.get_output_embeddings().out_features
        self.max_length: int = getattr(config, "max_position_embeddings", None) or 1 << 20
        self._window, self._layer_types = _windows(config)
        self._cache = SlotCache(config.num_hidden_layers)
        self._float_mask = model.dtype if config._attn_implementation == "eager" else None
        is_grouped = config._attn_implementation == grouped.NAME
        self._repeats = grouped.repeats_of(config) if is_grouped else None
        self._key_positions = torch.arange(0, device=self.device)
        self.ragged = False

    def reserve(self, rows: int, length: int) -> None:
        """Grow the memory; the longest view sets the size of the mask."""
        self._cache.reserve(rows, -(-length // self.view) * self.view)
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

    @torch.inference_mode()
    def forward_ragged(
        self, tokens: Tensor, pieces: Sequence[Piece], *, widths: Sequence[int] | None, columns: Tensor | None = None
    ) -> Tensor:
        """See `Ragged.forward_ragged`."""
        layout = lay_out(pieces, len(tokens), widths)
        view = self._cache.place_ragged(layout, self.view, self.reads)
        return self._through(
            tokens[None], layout.positions[None], layout.queries, view, 0 if columns is None else columns
        )[0]

    def _eager(self, tokens: Tensor, starts: list[int], first_slot: int, keep: int | Tensor) -> Tensor:
        first = torch.tensor(starts, device=self.device)[:, None]
        positions = first + self._key_positions[: tokens.shape[1]]
        view = self._cache.place(
            first_slot, starts, positions, self.view, self.reads if self.device.type == "cpu" else ()
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
    def reads_agree(self, widths: Sequence[int], read: int, whole: int) -> bool:
        """See `Frugal.reads_agree`."""
        shapes = {(layer.keys.shape[1], layer.keys.shape[3]) for layer in self._cache.layers if layer.keys is not None}
        if self._repeats is None or not shapes:
            return False
        blocks = range(PROMPT_UNIT, grouped.BLOCK + 1, PROMPT_UNIT)  # prompts come in multiples of the unit
        agree = partial(grouped.reads_agree, self._repeats, self.model.dtype, read, whole)
        return all(agree(*shape, width) for shape in shapes for width in (*widths, *blocks))

    def group_queries(self) -> None:
        """Use grouped attention if it gives this model's own logits."""
        config = self.model.config.get_text_config()
        repeats = grouped.repeats_of(config)
        if config._attn_implementation != "sdpa" or repeats is None:
            return
        expected = self._a_few_logits()
        self.model.config._attn_implementation, self._repeats = grouped.NAME, repeats
        if not self._gives(expected, "its own attention"):
            self.model.config._attn_implementation, self._repeats = "sdpa", None

    def shorten_layers(self) -> None:
        """Give decoder layers a forward of fewer operators if it gives this model's own logits."""
        layers = lean_layers(self.model, self.model.config.get_text_config().num_hidden_layers)
        if self._repeats is None or not layers:
            return
        expected = self._a_few_logits()
        for layer, forward in layers:
            layer.forward = forward
        if not self._gives(expected, "the forward of its layers"):
            for layer, _ in layers:
                del layer.forward
            return
        self.ragged = self.device.type == "cpu"  # elsewhere forwards are captured as rectangles

    def _a_few_logits(self) -> Tensor:
        """Logits of a few tokens, float32: some at the start, and some that look back at them."""
        self.reserve(1, 2 * self.view)
        tokens = torch.arange(1, 10, device=self.device)[None] % self.vocab_size
        first = self.forward(tokens[:, :6], [0], first_slot=0, logits=True)
        return torch.cat([first, self.forward(tokens[:, 6:], [6], first_slot=0, logits=True)], 1).float()

    def _gives(self, expected: Tensor, kept: str) -> bool:
        """Whether the model still gives these logits; if not, `kept` says what it keeps."""
        try:
            got = self._a_few_logits()
        except (SlipstreamError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.info("%s keeps %s: %s", type(self.model).__name__, kept, error)
            return False
        return bool((got - expected).abs().max() <= TOLERANCE[self.model.dtype] * expected.abs().max())

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
