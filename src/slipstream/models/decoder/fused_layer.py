"""A decoder layer in half the operators: one forward for the structure that most models' layers have in common.

At decoding widths an operator's call costs as much as its arithmetic. Layers are recognised by structure: pre-norm
attention with rotary positions, a gated feed-forward part, and norms around them. Only the layer's forward is replaced;
its modules stay where they are, and callers other than Slipstream run the model's own code, which is also the
specification: a layer that computes anything else gives other logits, and then all layers keep their own forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from slipstream.models.decoder.attention import attend, attend_in_blocks
from slipstream.models.decoder.cache import SlotCache, attend_ragged, given_cache
from slipstream.models.decoder.fused_linear import FusedOutput

SILU, GELU = (1.0, 0.0), (math.sqrt(8 / math.pi), 0.044715 * math.sqrt(8 / math.pi))
CLOSE_ACTIVATION = 0.01  # largest relative difference from one of these; the module's outputs are bfloat16
SINGLE, GRAIN = 16384, 32768  # elements: up to SINGLE in one thread; beyond, most operators use a thread per GRAIN
VECTORS = 64  # elements of the widest vectors; the rest of a thread's share is rounded differently
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
ATTENTION = {*PROJECTIONS, "o_proj"}
HEAD_NORMS = ("q_norm", "k_norm")
FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "act_fn"}
BEFORE_BOTH = ("input_layernorm", "post_attention_layernorm")  # Llama, Mistral, Qwen
AROUND_BOTH = (*BEFORE_BOTH, "pre_feedforward_layernorm", "post_feedforward_layernorm")  # Gemma
CLOSE_NORM = 0.02  # largest relative difference of a norm from the module it replaces; its weights are bfloat16
Activation = tuple[float, float]  # slope and cubic term of x * sigmoid(slope * x + cubic * x^3)


def activated(act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """act(x) of x [..., size]: each row gets the bits it would get alone, whatever the number of threads.

    If a thread's share would end within a vector, threads get whole rows instead, and one thread gets what is left.
    """
    threads, size, count = torch.get_num_threads(), x.shape[-1], x.numel()
    shares = {threads, min(threads, -(-count // GRAIN))}  # how many there are; GELU always uses all threads
    shares_are_whole_vectors = size % VECTORS == 0 and all(-(-count // share) % VECTORS == 0 for share in shares)
    if x.device.type != "cpu" or threads == 1 or count <= SINGLE or shares_are_whole_vectors:
        return act(x)
    rows = x.flatten(0, -2)
    shared = len(rows) - len(rows) % threads
    shared = shared if shared * size >= threads * GRAIN else 0
    step = max(1, SINGLE // size)
    parts = [act(rows[:shared])] if shared else []
    parts += [act(rows[first : first + step]) for first in range(shared, len(rows), step)]
    return torch.cat(parts).view(x.shape)


def recognise_activation(act: Callable[[Tensor], Tensor]) -> Activation | str:
    """Slope and cubic term of an activation, or the reason why it is neither SiLU nor GELU."""
    x = torch.linspace(-9, 9, 1001, dtype=torch.float32).to(torch.bfloat16)
    expected, exact = act(x.clone()).float(), x.float()
    for slope, cubic in (SILU, GELU):
        computed = exact * torch.sigmoid(slope * exact + cubic * exact**3)
        if torch.allclose(computed, expected, rtol=CLOSE_ACTIVATION, atol=1e-4):
            return slope, cubic
    return f"the activation {type(act).__name__} is neither SiLU nor GELU by its tanh formula"


Rope = tuple[Tensor, Tensor]  # cosines and sines [B, W, D]


class UnknownLayerError(Exception):
    """Why a layer is not one of those that can be fused."""


class RootMeanSquare:
    """RMSNorm over the last dimension by LayerNorm's kernel, the only one that is a single operator on CPU.

    The mean of (x, -x) is 0 and its variance is the mean square of x. Models differ in how the weight is stored and in
    when they round; the form that gives the module's own numbers, or comes closest, is used.
    """

    def __init__(self, norm: nn.Module) -> None:
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        parameters = dict(norm.named_parameters())
        if list(parameters) != ["weight"] or not isinstance(eps, float):
            raise UnknownLayerError(f"{type(norm).__name__} is not an RMSNorm with a weight and an epsilon")
        weight = parameters["weight"].detach()
        self._size, self.eps, self._signs = len(weight), eps, weight.new_tensor([[1.0], [-1.0]])
        x = torch.linspace(-2, 3, 3 * self._size, device=weight.device).view(1, 3, -1).to(weight.dtype)
        expected = norm(x).detach().float()

        def error(form: tuple[Tensor | None, Tensor | None]) -> float:
            self._within, self._after = form  # the form of the last call stays
            return float((self(x).float() - expected).abs().max().detach())

        wide = torch.promote_types(weight.dtype, torch.float32)
        forms = (None, weight), (weight.repeat(2), None), ((1 + weight.to(wide)).repeat(2), None)
        if error(min(forms, key=error)) > CLOSE_NORM * float(expected.abs().max()):
            raise UnknownLayerError(f"{type(norm).__name__} computes something other than RMSNorm")

    @property
    def weight(self) -> tuple[Tensor, bool]:
        """The factors [size], float32, and whether the norm is rounded before it is multiplied by them."""
        factors = self._within if self._after is None else self._after
        assert factors is not None
        return factors[: self._size].float().contiguous(), self._after is not None

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise x [..., size] over its last dimension."""
        both = (x.unsqueeze(-2) * self._signs).flatten(-2)
        both = both.to(x.dtype if x.device.type == "cpu" or self._within is None else self._within.dtype)
        out = layer_norm(both, (2 * self._size,), self._within, None, self.eps).narrow(-1, 0, self._size).to(x.dtype)
        return out if self._after is None else out * self._after


class RotaryEmbedding:
    """RoPE, prepared once per forward for all layers that are given the same cosines and sines."""

    def __init__(self) -> None:
        self._prepared: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, rope: Rope) -> Tensor:
        """x: [B, W, heads, D]. Each half of a head is rotated with the other."""
        cos, sin = rope
        prepared, half = self._prepared, x.shape[-1] // 2  # read once: another thread may be running the same model
        if prepared is None or prepared[0] is not sin:
            if sin.shape[-1] != x.shape[-1]:
                raise UnknownLayerError(f"it rotates {sin.shape[-1]} of a head's {x.shape[-1]} numbers")
            if sin.dtype != x.dtype:
                raise UnknownLayerError(f"it rotates {x.dtype} numbers by {sin.dtype} angles")
            signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
            self._prepared = prepared = sin, cos.unsqueeze(2), signed.unsqueeze(2)
        return (x * prepared[1]).add_(x.roll(half, -1).mul_(prepared[2]))


@dataclass(frozen=True)
class AttentionSpec:
    """The settings of a layer's attention.

    index: number of the layer. window: how many positions a token sees, itself included; None if it sees all.
    """

    index: int
    window: int | None
    scaling: float


class Ops(Protocol):
    """What a decoder layer computes around its attention, operator by operator or compiled."""

    heads: int
    key_heads: int

    def project_qkv_rope(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """From hidden states [B, W, H] to rotated queries and keys, and values, [B, heads, W, D]."""

    def residual_mlp(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """From hidden states and attention's output [B, W, heads * D] to the next layer's hidden states."""

    def whole_layer(self, hidden: Tensor, rope: Rope, cache: SlotCache, spec: AttentionSpec) -> Tensor | None:
        """The whole layer at once, attention included; None if it must be computed in the two parts above."""


class LayerOps:
    """A layer by PyTorch's operators: the specification of all faster ops."""

    def __init__(self, layer: nn.Module, rope: RotaryEmbedding) -> None:
        children = dict(layer.named_children())
        order = AROUND_BOTH if AROUND_BOTH[-1] in children else BEFORE_BOTH
        if set(children) != {"self_attn", "mlp", *order}:
            raise UnknownLayerError(f"{type(layer).__name__} has {', '.join(sorted(children))}")
        attention, mlp = dict(children["self_attn"].named_children()), dict(children["mlp"].named_children())
        if set(attention) - set(HEAD_NORMS) != ATTENTION:
            raise UnknownLayerError(f"{type(layer).__name__}'s attention has {', '.join(sorted(attention))}")
        if set(mlp) != FEED_FORWARD:
            raise UnknownLayerError(f"{type(layer).__name__}'s feed-forward part has {', '.join(sorted(mlp))}")
        self._rope: RotaryEmbedding = rope
        self.size = declared(children["self_attn"], "head_dim", int)
        self.qkv, sizes = _joint_product(attention, PROJECTIONS)
        self.heads, self.key_heads = sizes[0] // self.size, sizes[1] // self.size
        self.head_norms = [RootMeanSquare(attention[name]) for name in HEAD_NORMS if name in attention]
        self.out: nn.Module = attention["o_proj"]
        self.gate_up, (self.inner, _) = _joint_product(mlp, ("gate_proj", "up_proj"))
        self.act, self.down = mlp["act_fn"], mlp["down_proj"]
        norms = [RootMeanSquare(children[name]) for name in order]
        self.before_attention, self.before_feed_forward = norms[0], norms[len(norms) // 2]
        after: list[RootMeanSquare | None] = [*norms[1::2]] if len(norms) == 4 else [None, None]
        self.after_attention, self.after_feed_forward = after

    def project_qkv_rope(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        batch, width = hidden.shape[:2]
        both = self.heads + self.key_heads
        heads = self.qkv(self.before_attention(hidden)).view(batch, width, -1, self.size)
        qk = heads.narrow(2, 0, both)
        if self.head_norms:
            parts = qk.split((self.heads, self.key_heads), 2)
            qk = torch.cat([norm(part) for norm, part in zip(self.head_norms, parts, strict=True)], 2)
        return self._rope(qk, rope).transpose(1, 2), heads.narrow(2, both, self.key_heads).transpose(1, 2)

    def residual_mlp(self, hidden: Tensor, attended: Tensor) -> Tensor:
        x: Tensor = self.out(attended)
        x = hidden + (x if self.after_attention is None else self.after_attention(x))
        gate, up = self.gate_up(self.before_feed_forward(x)).split(self.inner, -1)
        y: Tensor = self.down(activated(self.act, gate).mul_(up))
        return x.add_(y if self.after_feed_forward is None else self.after_feed_forward(y))

    def whole_layer(self, hidden: Tensor, rope: Rope, cache: SlotCache, spec: AttentionSpec) -> Tensor | None:
        """None: these ops compute a layer in two parts."""
        return None


class FusedLayer:
    """Replaces a decoder layer's `forward`.

    ops: computes the layer; at first it is `plain`, the specification. spec: describes the layer's attention.
    """

    def __init__(self, layer: nn.Module, rope: RotaryEmbedding, window: int | None) -> None:
        if "forward" in layer.__dict__:
            raise UnknownLayerError("its layers' forward was replaced already")
        self.plain = LayerOps(layer, rope)
        self.ops: Ops = self.plain
        attention = layer.get_submodule("self_attn")
        scaling = declared(attention, "scaling", float)
        self.spec = AttentionSpec(declared(attention, "layer_idx", int), window, scaling)
        self._original_forward: Callable[..., Tensor] = layer.forward

    def __call__(self, hidden_states: Tensor, *inputs: Any, **options: Any) -> Tensor:
        """hidden_states: [B, W, H]. Calls from outside `HFBackend` go to the layer's own forward."""
        cache, rope = given_cache(options), options.get("position_embeddings")
        mask = options.get("attention_mask")
        if inputs or rope is None or mask is None or not isinstance(cache, SlotCache):
            return self._original_forward(hidden_states, *inputs, **options)
        output = self.ops.whole_layer(hidden_states, rope, cache, self.spec)
        if output is not None:
            return output
        qk, values = self.ops.project_qkv_rope(hidden_states, rope)
        attended = self._attend(qk, values, mask, cache)
        return self.ops.residual_mlp(hidden_states, attended.transpose(1, 2).flatten(2))

    def with_ops(self, ops: Ops) -> FusedLayer:
        """A copy of this layer that computes with other ops."""
        layer = copy(self)
        layer.ops = ops
        return layer

    def _attend(self, qk: Tensor, values: Tensor, mask: Tensor, cache: SlotCache) -> Tensor:
        """qk: queries and keys [B, heads, W, D]."""
        queries, keys = qk.split((self.ops.heads, self.ops.key_heads), 1)
        keys, values = cache.update(keys, values, self.spec.index)
        blocks = cache.blocks(mask)
        if (rectangle_mask := cache.rectangle(mask)) is not None:
            assert cache.layout is not None
            return attend_ragged(queries, keys, values, rectangle_mask, blocks, cache.layout, self.spec.scaling)
        if blocks:
            return attend_in_blocks(queries, keys, values, blocks, self.spec.scaling)
        return attend(queries, keys, values, mask, self.spec.scaling)


def fused_layers(model: nn.Module, windows: Sequence[int | None]) -> list[tuple[nn.Module, FusedLayer]]:
    """The model's decoder layers and a forward for each.

    windows: one per layer, as in `AttentionSpec`. Raises `UnknownLayerError` with the reason if any layer has another
    structure, or a forward that other code replaced.
    """
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == len(windows)]
    if len(lists) != 1:
        raise UnknownLayerError(f"it has {len(lists)} lists of {len(windows)} modules, not one")
    rope = RotaryEmbedding()
    return [(layer, FusedLayer(layer, rope, window)) for layer, window in zip(lists[0], windows, strict=True)]


def is_fused(module: nn.Module) -> bool:
    """True if this is a layer whose forward was replaced."""
    return isinstance(module.__dict__.get("forward"), FusedLayer)


def declared(module: nn.Module, name: str, kind: type) -> Any:
    """An attribute that a module must have. Raises `UnknownLayerError` if it is missing or of another type."""
    value = getattr(module, name, None)
    if not isinstance(value, kind):
        raise UnknownLayerError(f"{type(module).__name__} has no {name}")
    return value


def _joint_product(children: dict[str, nn.Module], names: tuple[str, ...]) -> tuple[Any, list[int]]:
    """The common product of fused linear layers, and the sizes of their outputs."""
    parts = [part for name in names if isinstance(part := children[name], FusedOutput)]
    sources = {part.source for part in parts}
    if len(parts) != len(names) or len(sources) != 1:
        raise UnknownLayerError(f"{', '.join(names)} are not fused into one product")
    (fused,) = sources
    if [part.index for part in parts] != list(range(len(fused.sizes))):
        raise UnknownLayerError(f"{', '.join(names)} are not all that is fused into their product")
    return fused.joint, fused.sizes
