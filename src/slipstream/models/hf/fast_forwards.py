"""Faster forwards of a model, each tried against its own logits before it is kept, and what only they can do."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.core.cache_state import PROMPT_UNIT
from slipstream.core.interfaces import RowSegment
from slipstream.errors import SlipstreamError
from slipstream.models.cpu.compiled_layer import NativeParts, native_parts
from slipstream.models.hf import grouped_attention as grouped
from slipstream.models.hf.fused_layer import FusedLayer, fused_layers
from slipstream.models.hf.ragged_attention import RaggedSlots, lay_out

log = logging.getLogger("slipstream")

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of a faster forward's logits, relative to the largest


class Trial:
    """A layer's forward that also computes what other parts would give, and notes the largest difference."""

    def __init__(self, forward: FusedLayer, parts: NativeParts) -> None:
        self._forward, self.parts = forward, parts
        self.error = 0.0  # relative to the largest of the layer's outputs

    def __call__(self, *inputs: Any, **options: Any) -> Tensor:
        """The layer's own output."""
        own = self._forward.parts
        self._forward.parts = self.parts
        found = self._forward(*inputs, **options)
        self._forward.parts = own
        expected = self._forward(*inputs, **options)
        error = float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
        self.error = max(self.error, error if math.isfinite(error) else math.inf)
        return expected


class Shortcuts:
    """What an `HFBackend` can do beside its plain forward."""

    attended_lengths: tuple[int, ...] = ()
    ragged = False
    model: Any
    attended_unit: int
    device: torch.device
    vocab_size: int
    _window: int | None
    _layer_types: frozenset[str]
    _cache: RaggedSlots
    _repeats: int | None

    if TYPE_CHECKING:

        def reserve(self, rows: int, length: int) -> None:
            """See `Backend.reserve`."""

        def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
            """See `Backend.forward`."""

        def _through(
            self, tokens: Tensor, positions: Tensor, queries: Tensor, view: int, keep: int | Tensor
        ) -> Tensor: ...

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

    def fuse_layers(self) -> None:
        """Give decoder layers a forward of fewer operators if it gives this model's own logits."""
        layers = fused_layers(self.model, self._layer_windows())
        if self._repeats is None or not layers:
            return
        expected = self._a_few_logits()
        for layer, forward in layers:
            layer.forward = forward
        if not self._gives(expected, "the forward of its layers"):
            for layer, _ in layers:
                del layer.forward
            return
        self._hasten(layers)
        self.ragged = self.device.type == "cpu"  # elsewhere forwards are captured as rectangles

    def _layer_windows(self) -> list[int | None]:
        """The window of each layer's attention, None where it sees everything."""
        config = self.model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or list(self._layer_types) * config.num_hidden_layers
        return [self._window if kind == "sliding_attention" else None for kind in kinds]

    def _hasten(self, layers: Sequence[tuple[Any, FusedLayer]]) -> None:
        """Give these layers compiled parts if all have them and they compute the same from the same input."""
        made = [native_parts(forward.parts) for _, forward in layers]
        trials = [Trial(forward, parts) for (_, forward), parts in zip(layers, made, strict=True) if parts is not None]
        if len(trials) < len(layers):
            return
        for (layer, _), trial in zip(layers, trials, strict=True):
            layer.forward = trial
        try:
            self._a_few_logits()
        finally:
            for layer, forward in layers:
                layer.forward = forward
        if max(trial.error for trial in trials) > TOLERANCE[self.model.dtype]:
            log.info(
                "%s keeps the operators of its layers: compiled ones give other numbers", type(self.model).__name__
            )
            return
        for (_, forward), trial in zip(layers, trials, strict=True):
            forward.parts = trial.parts

    def _a_few_logits(self) -> Tensor:
        """Logits of a few tokens, float32: some at the start, and some that look back at them."""
        self.reserve(1, 2 * self.attended_unit)
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
    def forward_ragged(
        self,
        tokens: Tensor,
        segments: Sequence[RowSegment],
        *,
        widths: Sequence[int] | None,
        columns: Tensor | None = None,
    ) -> Tensor:
        """See `Ragged.forward_ragged`."""
        layout = lay_out(segments, len(tokens), widths)
        view = self._cache.place_ragged(layout, self.attended_unit, self.attended_lengths)
        return self._through(
            tokens[None], layout.positions[None], layout.queries, view, 0 if columns is None else columns
        )[0]

    @torch.inference_mode()
    def attended_length_agrees(self, widths: Sequence[int], read: int, whole: int) -> bool:
        """See `AttendedLengths.attended_length_agrees`."""
        shapes = {(layer.keys.shape[1], layer.keys.shape[3]) for layer in self._cache.layers if layer.keys is not None}
        if self._repeats is None or not shapes:
            return False
        blocks = range(PROMPT_UNIT, grouped.BLOCK + 1, PROMPT_UNIT)  # prompts come in multiples of the unit
        agree = partial(grouped.attended_length_agrees, self._repeats, self.model.dtype, read, whole)
        return all(agree(*shape, width) for shape in shapes for width in (*widths, *blocks))
