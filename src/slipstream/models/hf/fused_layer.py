"""A decoder layer in half the operators: one forward for the layers that most models share, whatever their names.

At decoding widths an operator's call costs as much as its arithmetic. Layers are taken by structure: pre-norm attention
with rotary positions, a gated feed-forward part, and norms around them. Only the layer's forward is replaced; its
modules stay where they are, and calls from elsewhere than Slipstream run the model's own code, which is also the
specification: a layer that computes anything else gives other logits, and then all layers keep their own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from slipstream.models.hf.fused_linear import Part
from slipstream.models.hf.grouped_attention import attend, attend_in_blocks
from slipstream.models.hf.ragged_attention import RaggedSlots, attend_ragged

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "act_fn"}
BEFORE_BOTH = ("input_layernorm", "post_attention_layernorm")  # Llama, Mistral, Qwen
AROUND_BOTH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)  # Gemma
CLOSE = 0.02  # largest relative difference of a norm from the module it replaces; its weights are bfloat16


class UnknownLayerError(Exception):
    """This layer is built otherwise."""


class RootMeanSquare:
    """RMSNorm over the last dimension by LayerNorm's kernel, the only one that is a single operator on CPU.

    The mean of (x, -x) is 0 and its variance is the mean square of x. Models differ in how the weight is stored and in
    when they round; what gives the module's own numbers, or comes closest, is kept.
    """

    def __init__(self, norm: Any) -> None:
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if [name for name, _ in norm.named_parameters()] != ["weight"] or not isinstance(eps, float):
            raise UnknownLayerError
        weight = norm.weight.detach()
        self._size, self.eps, self._signs = len(weight), eps, weight.new_tensor([[1.0], [-1.0]])
        x = torch.linspace(-2, 3, 3 * self._size, device=weight.device).view(1, 3, -1).to(weight.dtype)
        expected = norm(x).detach().float()

        def error(form: tuple[Tensor | None, Tensor | None]) -> float:
            self._within, self._after = form
            return float((self(x).float() - expected).abs().max().detach())

        forms = (None, weight), (weight.repeat(2), None), ((1 + weight.float()).repeat(2), None)
        if error(min(forms, key=error)) > CLOSE * float(expected.abs().max()):
            raise UnknownLayerError

    @property
    def weight(self) -> tuple[Tensor, bool]:
        """The factors [size], float32, and whether the norm is rounded before it is multiplied with them."""
        factors = self._within if self._after is None else self._after
        assert factors is not None
        return factors[: self._size].float().contiguous(), self._after is not None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size]."""
        both = (x.unsqueeze(-2) * self._signs).flatten(-2)
        out = layer_norm(both, (2 * self._size,), self._within, None, self.eps).narrow(-1, 0, self._size)
        return out if self._after is None else out * self._after


class Turn:
    """Rotary positions, prepared once per forward for all layers that are given the same cosines and sines."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, W, heads, D]; cos, sin: [B, W, D]. Each half of a head turns with the other."""
        kept, half = self._kept, x.shape[-1] // 2
        if kept is None or kept[0] is not sin:
            signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
            self._kept = kept = sin, cos.unsqueeze(2), signed.unsqueeze(2)
        return (x * kept[1]).add_(x.roll(half, -1).mul_(kept[2]))


@dataclass(frozen=True)
class Spot:
    """A layer's place in the model. window: positions a token sees, itself included, None for all."""

    index: int
    window: int | None
    scaling: float


class Parts:
    """What a decoder layer computes around its attention."""

    def __init__(self, layer: Any, turn: Turn) -> None:
        names, attention, feed_forward = set(dict(layer.named_children())), layer.self_attn, layer.mlp
        norms = AROUND_BOTH if AROUND_BOTH[-1] in names else BEFORE_BOTH
        inner = set(dict(attention.named_children()))
        if (
            names != {"self_attn", "mlp", *norms}
            or inner - HEAD_NORMS != ATTENTION
            or set(dict(feed_forward.named_children())) != FEED_FORWARD
        ):
            raise UnknownLayerError
        self._turn, self.size = turn, attention.head_dim
        self.qkv, sizes = _whole(attention, ("q_proj", "k_proj", "v_proj"))
        self.heads, self.key_heads = sizes[0] // self.size, sizes[1] // self.size
        self.head_norms = [RootMeanSquare(getattr(attention, name)) for name in ("q_norm", "k_norm") if name in inner]
        self.out = attention.o_proj
        self.gate_up, (self.inner, _) = _whole(feed_forward, ("gate_proj", "up_proj"))
        self.act, self.down = feed_forward.act_fn, feed_forward.down_proj
        found = [RootMeanSquare(getattr(layer, name)) for name in norms]
        self.before_attention, self.before_feed_forward = found[0], found[len(found) // 2]
        after: list[RootMeanSquare | None] = [*found[1::2]] if len(found) == 4 else [None, None]
        self.after_attention, self.after_feed_forward = after

    def enter(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """From hidden states [B, W, H] to turned queries and keys, and values, [B, heads, W, D]."""
        batch, width = hidden.shape[:2]
        both = self.heads + self.key_heads
        heads = self.qkv(self.before_attention(hidden)).view(batch, width, -1, self.size)
        turning = heads.narrow(2, 0, both)
        if self.head_norms:
            parts = turning.split((self.heads, self.key_heads), 2)
            turning = torch.cat([norm(part) for norm, part in zip(self.head_norms, parts, strict=True)], 2)
        turned = self._turn(turning, cos, sin).transpose(1, 2)
        return turned, heads.narrow(2, both, self.key_heads).transpose(1, 2)

    def through(self, hidden: Tensor, turns: tuple[Tensor, Tensor], cache: RaggedSlots, spot: Spot) -> Tensor | None:
        """The whole layer at once, attention included; None where it is computed in parts, as here."""
        return None

    def leave(self, hidden: Tensor, found: Tensor) -> Tensor:
        """From the same and what attention found [B, W, heads * D] to the next layer's hidden states."""
        x = self.out(found)
        x = hidden + (x if self.after_attention is None else self.after_attention(x))
        gate, up = self.gate_up(self.before_feed_forward(x)).split(self.inner, -1)
        y = self.down(self.act(gate).mul_(up))
        return x.add_(y if self.after_feed_forward is None else self.after_feed_forward(y))


class FusedLayer:
    """What a decoder layer's `forward` is replaced with."""

    def __init__(self, layer: Any, turn: Turn, window: int | None) -> None:
        if "forward" in layer.__dict__:
            raise UnknownLayerError
        self.parts: Any = Parts(layer, turn)
        self._layer, self._spot = layer, Spot(layer.self_attn.layer_idx, window, layer.self_attn.scaling)

    def __call__(self, hidden_states: Tensor, *inputs: Any, **options: Any) -> Tensor:
        """hidden_states: [B, W, H]. Calls by anyone but `HFBackend` go to the layer's own forward."""
        cache, turns = options.get("past_key_values"), options.get("position_embeddings")
        mask = options.get("attention_mask")
        if inputs or turns is None or mask is None or not isinstance(cache, RaggedSlots):
            own: Tensor = type(self._layer).forward(self._layer, hidden_states, *inputs, **options)
            return own
        whole: Tensor | None = self.parts.through(hidden_states, turns, cache, self._spot)
        if whole is not None:
            return whole
        turned, fresh = self.parts.enter(hidden_states, *turns)
        found = self._attend(turned, fresh, mask, cache)
        return self.parts.leave(hidden_states, found.transpose(1, 2).flatten(2))

    def _attend(self, turned: Tensor, fresh: Tensor, mask: Tensor, cache: RaggedSlots) -> Tensor:
        """turned: queries and keys [B, heads, W, D]; fresh: values."""
        queries, keys = turned.split((self.parts.heads, self.parts.key_heads), 1)
        keys, values = cache.update(keys, fresh, self._spot.index)
        blocks = cache.blocks(mask)
        if (together := cache.rectangle(mask)) is not None:
            assert cache.layout is not None
            return attend_ragged(queries, keys, values, together, blocks, cache.layout, self._spot.scaling)
        if blocks:
            return attend_in_blocks(queries, keys, values, blocks, self._spot.scaling)
        return attend(queries, keys, values, mask, self._spot.scaling)


def fused_layers(model: nn.Module, windows: Sequence[int | None]) -> list[tuple[nn.Module, FusedLayer]]:
    """The model's decoder layers and a forward for each; empty if any is built otherwise or has been given one.

    windows: of each layer's attention, as in `Spot`.
    """
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == len(windows)]
    turn = Turn()
    try:
        layers = zip(found[0], windows, strict=True) if len(found) == 1 else ()
        return [(layer, FusedLayer(layer, turn, window)) for layer, window in layers]
    except (UnknownLayerError, AttributeError):
        return []


def is_fused(module: nn.Module) -> bool:
    """Whether this is a layer whose forward was replaced."""
    return isinstance(module.__dict__.get("forward"), FusedLayer)


def _whole(parent: Any, names: tuple[str, ...]) -> tuple[Any, list[int]]:
    """The common product of fused layers, and the sizes of their outputs."""
    parts = [getattr(parent, name) for name in names]
    if not all(isinstance(part, Part) for part in parts):
        raise UnknownLayerError
    fused = {part._source[0] for part in parts}
    if len(fused) != 1 or [part._index for part in parts] != list(range(len(parts[0]._source[0].sizes))):
        raise UnknownLayerError
    whole = fused.pop()
    return whole.whole, whole.sizes
