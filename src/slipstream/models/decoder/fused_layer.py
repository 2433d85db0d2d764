"""A decoder layer in half the operators: one forward for every layer that a `LayerPlan` describes.

For few tokens, calling an operator costs as much as its arithmetic. Only the layer's forward is replaced; its modules
stay in place, and callers other than Slipstream run the model's own code. That code is the specification: if the logits
differ from its logits, all layers keep their own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, relu, silu

from slipstream.models.decoder.attention import Scores, attend, attend_in_blocks
from slipstream.models.decoder.cache import SlotCache, attend_ragged, given_cache
from slipstream.models.decoder.fused_linear import FusedOutput
from slipstream.models.decoder.plan import (
    ACTIVATIONS,
    SILU,
    DecoderPlan,
    ExpertsPlan,
    LatentPlan,
    LayerPlan,
    NormPlan,
    UnknownLayerError,
    in_halves,
    in_pairs,
)

SINGLE, GRAIN = 16384, 32768  # elements: one thread computes up to SINGLE; beyond, most operators use one per GRAIN
VECTORS = 64  # elements in the widest vectors; a remainder at the end of a thread's share is rounded differently


def activated(act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """act(x) for x [..., size]: each row gets the bits it would get alone, whatever the number of threads.

    If a thread's share would end within a vector, threads get whole rows instead, and one thread gets the rest.
    """
    threads, size, count = torch.get_num_threads(), x.shape[-1], x.numel()
    shares = {threads, min(threads, -(-count // GRAIN))}  # numbers of shares; GELU always uses all threads
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


Rope = tuple[Tensor, Tensor]  # cosines and sines [B, W, rotated numbers of a head]
GivenRope = Rope | Tensor  # as a model's own module returns them; a single tensor is complex


class Norm:
    """A norm over the last dimension as a single operator; RMSNorm uses LayerNorm's kernel, too.

    This works because the mean of (x, -x) is 0 and its variance is the mean square of x.
    """

    def __init__(self, module: nn.Module, plan: NormPlan) -> None:
        weight: Any = getattr(module, "weight", None)
        eps, bias = _epsilon(module), getattr(module, "bias", None)
        if weight is None or eps != plan.eps:
            raise UnknownLayerError(f"{type(module).__name__} has no weight, or another epsilon than {plan.eps}")
        weight, self.bias, self._plan = weight.detach(), None if bias is None else bias.detach(), plan
        if plan.offset:
            wide = weight.dtype if plan.is_centered else torch.promote_types(weight.dtype, torch.float32)
            weight = plan.offset + weight.to(wide)
        self.factors, self._size = weight.float().contiguous(), len(weight)
        self._signs = weight.new_tensor([[1.0], [-1.0]])
        self._after = weight if plan.rounds_first and not plan.is_centered else None
        self._within = None if self._after is not None else weight if plan.is_centered else weight.repeat(2)

    @property
    def eps(self) -> float:
        """Epsilon, which is added to the mean square."""
        return self._plan.eps

    @property
    def rounds_first(self) -> bool:
        """True if the norm rounds before it multiplies by its weight."""
        return self._after is not None

    @property
    def is_centered(self) -> bool:
        """True if the norm subtracts the mean, as LayerNorm does."""
        return self._plan.is_centered

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x [..., size] over its last dimension."""
        if self.is_centered:
            return layer_norm(x, (self._size,), self._within, self.bias, self.eps)
        both = (x.unsqueeze(-2) * self._signs).flatten(-2)
        both = both.to(x.dtype if x.device.type == "cpu" or self._within is None else self._within.dtype)
        out = layer_norm(both, (2 * self._size,), self._within, None, self.eps).narrow(-1, 0, self._size).to(x.dtype)
        return out if self._after is None else out * self._after


def _epsilon(norm: nn.Module) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


class RotaryEmbedding:
    """RoPE, prepared once per forward for all layers with the same cosines and sines."""

    def __init__(self) -> None:
        self._prepared: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, rope: Rope, plan: LayerPlan) -> Tensor:
        """x: [B, W, heads, D]. The first `plan.rotated` numbers of each head are rotated."""
        if not plan.rotated:
            return x
        cos, sin = rope
        prepared, half = self._prepared, plan.rotated // 2  # read once: another thread may be running the same model
        if prepared is None or prepared[0] is not sin:
            signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
            self._prepared = prepared = sin, cos.unsqueeze(2), signed.unsqueeze(2)
        part, rest = x[..., : plan.rotated], x[..., plan.rotated :]
        part = in_halves(part) if plan.rotates_pairs else part
        part = (part * prepared[1]).add_(part.roll(half, -1).mul_(prepared[2]))
        part = in_pairs(part) if plan.rotates_pairs else part
        return torch.cat((part, rest), -1) if rest.shape[-1] else part


def angles(rope: GivenRope, positions: Tensor | None, dtype: torch.dtype, plan: LayerPlan) -> Rope:
    """A model's cosines and sines at positions [B, W] as layers take them.

    Those of all pairs' first elements come before those of the second ones; see also `grows_queries`.
    """
    if isinstance(rope, Tensor):
        rope = rope.real, rope.imag
    if plan.angles_in_pairs:
        rope = in_halves(rope[0]), in_halves(rope[1])
    if plan.angles_of_pairs:
        rope = torch.cat((rope[0], rope[0]), -1), torch.cat((rope[1], rope[1]), -1)
    if plan.growth is not None and positions is not None:
        beta, count = plan.growth
        growth = 1 + beta * torch.log(1 + torch.floor(positions / count))[..., None]
        rope = torch.cat((rope[0], rope[0] * growth), -1), torch.cat((rope[1], rope[1] * growth), -1)
    return rope[0].to(dtype), rope[1].to(dtype)


class Ops(Protocol):
    """Computes a decoder layer around its attention, operator by operator or compiled."""

    heads: int
    key_heads: int

    def project_qkv_rope(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """From hidden states [B, W, H] to rotated queries and keys, and values, [B, heads, W, D]."""

    def residual_mlp(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """From hidden states and attention's output [B, W, heads * D] to the next layer's hidden states."""

    def whole_layer(
        self, hidden: Tensor, rope: Rope, cache: SlotCache, plan: LayerPlan, layer_input: Tensor | None
    ) -> Tensor | None:
        """The whole layer at once, including attention; None if it must be computed in the two parts above.

        layer_input: [B, W, numbers] from a second embedding.
        """


class Experts(Protocol):
    """A block of experts that the kernels compute. struct: the kernels' description, valid while the block lives."""

    plan: ExpertsPlan
    struct: Any

    def sum_of(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """The experts' weighted sum for hidden states [..., H], of the same shape and type.

        routed: the router's input, if it differs from x.
        """

    def check_forced(self, tokens: int) -> None:
        """Raise ValueError if a choice is forced for another number of tokens."""


class LatentHeads(Protocol):
    """The matrices of latent attention's heads for the kernels. struct: the kernels' description of them."""

    plan: LatentPlan
    struct: Any


class LayerOps:
    """A layer computed by PyTorch's operators: the specification of all faster ops."""

    def __init__(self, layer: nn.Module, plan: LayerPlan, rope: RotaryEmbedding) -> None:
        check_modules(layer, plan)
        self.plan, self._rope = plan, rope
        self.heads, self.key_heads, self.size = plan.heads, plan.key_heads, plan.size
        self.latent: LatentHeads | None = None
        self.queries_up: Any = None
        self.qkv = _product(layer, plan.qkv, _outputs(layer, plan))
        self.mixer: Any = None if plan.mixer is None else layer.get_submodule(plan.mixer)
        self.out = _product(layer, (plan.out,))
        self.gate_up: Any = None
        self.down: Any = None
        self.experts: Experts | None = None
        if plan.experts is not None:
            self.experts = _by_kernels(layer, plan.experts.block, plan.experts)
        if plan.down is not None:
            self.gate_up = _product(layer, plan.gate_up, (1 + plan.is_gated) * plan.inner)
            self.down = _product(layer, (plan.down,))
        self.sinks = None if plan.sinks is None else layer.get_parameter(plan.sinks).detach()
        self.head_norms: list[Any] = [Norm(layer.get_submodule(path), plan.norm) for path in plan.head_norms or ()]
        if (latent := plan.latent) is not None:
            self.latent = _by_kernels(layer, latent.heads, latent)
            self.head_norms = [_norm_of(layer, path, plan) for path in (latent.queries_norm, latent.norm)]
            if latent.queries_up is not None:
                self.queries_up = _product(layer, (latent.queries_up,), plan.heads * (latent.plain + plan.rotated))
        paths = *plan.norms, *plan.experts_norms
        norms = [None if path is None else Norm(layer.get_submodule(path), plan.norm) for path in paths]
        self.before_attention, self.after_attention, self.before_feed_forward, self.after_feed_forward = norms[:4]
        self.before_router, self.before_experts, self.after_experts, self.after_dense = norms[4:]
        self.values_norm: Norm | None = None
        if plan.values_norm is not None:
            ones = torch.ones(plan.size, dtype=self.head_norms[0].factors.dtype)
            eps = _epsilon(layer.get_submodule(plan.values_norm))
            self.values_norm = Norm(cast(nn.Module, SimpleNamespace(weight=ones, eps=eps)), plan.norm)
        part = plan.input
        self.input_gate: Any = None if part is None else _product(layer, (part.gate,), part.size)
        self.input_projection: Any = None if part is None else _product(layer, (part.projection,))
        self.after_input = None if part is None else Norm(layer.get_submodule(part.norm), plan.norm)
        self.scale = 1.0 if plan.scale is None else float(layer.get_buffer(plan.scale))
        self._act: Callable[[Tensor], Tensor] = silu
        if plan.squares:
            self._act = _squared
        elif ACTIVATIONS[plan.activation] != SILU:
            self._act = partial(gelu, approximate="tanh")

    def project_qkv_rope(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        batch, width = hidden.shape[:2]
        both = self.heads + self.key_heads
        heads = self.qkv(_normed(self.before_attention, hidden)).view(batch, width, -1, self.size)
        qk = heads.narrow(2, 0, both)
        if self.plan.rotates_first:
            qk = self._rotate(qk, rope)
        if self.head_norms:
            parts = qk.split((self.heads, self.key_heads), 2)
            normed = [self._norm_heads(norm, part) for norm, part in zip(self.head_norms, parts, strict=True)]
            qk = torch.cat(normed, 2)
        if not self.plan.rotates_first:
            qk = self._rotate(qk, rope)
        return qk.transpose(1, 2), heads.narrow(2, both, self.key_heads).transpose(1, 2)

    def _rotate(self, qk: Tensor, rope: Rope) -> Tensor:
        """Queries and keys [B, W, heads, D]."""
        if not self.plan.grows_queries:
            return self._rope(qk, rope, self.plan)
        queries, keys = qk.split((self.heads, self.key_heads), 2)
        (cos, cos_of_queries), (sin, sin_of_queries) = rope[0].chunk(2, -1), rope[1].chunk(2, -1)
        rotated = self._rope(queries, (cos_of_queries, sin_of_queries), self.plan)
        return torch.cat((rotated, self._rope(keys, (cos, sin), self.plan)), 2)

    def _norm_heads(self, norm: Norm, heads: Tensor) -> Tensor:
        return norm(heads.flatten(2)).view_as(heads) if self.plan.norms_all_heads else norm(heads)

    def residual_mlp(self, hidden: Tensor, attended: Tensor) -> Tensor:
        return self._after_mixing(hidden, self.out(attended))

    def mix(self, hidden: Tensor, options: Mapping[str, Any], layer_input: Tensor | None) -> Tensor:
        """The whole layer; the model's own module mixes the tokens. options: of the layer's forward."""
        mixed = self.mixer(_normed(self.before_attention, hidden), **options)
        return self._after_mixing(hidden, mixed[0] if isinstance(mixed, tuple) else mixed, layer_input)

    def _after_mixing(self, hidden: Tensor, mixed: Tensor, layer_input: Tensor | None = None) -> Tensor:
        x = hidden + self._added(self.after_attention, mixed)
        entering = (
            _normed(self.before_attention, hidden) if self.plan.is_parallel else _normed(self.before_feed_forward, x)
        )
        x = x.add_(self._added(self.after_feed_forward, self._feed_forward(entering, x)))
        if layer_input is not None:
            gated = activated(self._act, self.input_gate(x)).mul_(layer_input)
            x = x.add_(self._added(self.after_input, self.input_projection(gated)))
        return x if self.scale == 1 else x.mul_(self.scale)

    def _feed_forward(self, entering: Tensor, residual: Tensor) -> Tensor:
        if self.experts is None:
            return self._dense(entering)
        routed = None if self.before_router is None else self.before_router(residual)
        experts = self.experts.sum_of(self.before_experts(residual) if self.before_experts else entering, routed)
        if self.down is None:
            return experts
        return _normed(self.after_dense, self._dense(entering)) + _normed(self.after_experts, experts)

    def _dense(self, entering: Tensor) -> Tensor:
        both = self.gate_up(entering)
        if self.plan.is_gated:
            gate, up = both.split(self.plan.inner, -1)
            inner = activated(self._act, gate).mul_(up)
        else:
            inner = activated(self._act, both)
        output: Tensor = self.down(inner)
        return output

    def _added(self, norm: Norm | None, x: Tensor) -> Tensor:
        """The contribution of a part of the layer to the hidden states."""
        x = _normed(norm, x)
        return x if self.plan.residual == 1 else x * self.plan.residual

    def whole_layer(
        self, hidden: Tensor, rope: Rope, cache: SlotCache, plan: LayerPlan, layer_input: Tensor | None
    ) -> Tensor | None:
        """None: these ops compute a layer in two parts."""
        return None


def _squared(x: Tensor) -> Tensor:
    return relu(x).square()


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


class FusedLayer:
    """Replaces a decoder layer's `forward`.

    ops: computes the layer; at first it is `plain`, the specification.
    """

    def __init__(self, layer: nn.Module, plan: LayerPlan, rope: RotaryEmbedding) -> None:
        if "forward" in layer.__dict__:
            raise UnknownLayerError("its layers' forward was replaced already")
        self.plan, self.plain = plan, LayerOps(layer, plan, rope)
        self.ops: Ops = self.plain
        self._original_forward: Callable[..., Tensor] = layer.forward

    def __call__(self, hidden_states: Tensor, *inputs: Any, **options: Any) -> Tensor:
        """hidden_states: [B, W, H]. Calls from outside `HFBackend` go to the layer's own forward."""
        cache, positions = given_cache(options), options.get("position_ids")
        rope: Any = options.get("position_embeddings")
        mask: Any = options.get("attention_mask")
        further = [x for x in inputs if x is not None]
        if (
            len(further) != (self.plan.input is not None)
            or not isinstance(cache, SlotCache)
            or (mask is None and not self.plan.recurrent)
        ):
            return self._original_forward(hidden_states, *inputs, **options)
        if self.plan.rotated:
            rope = self._angles(rope, positions, hidden_states.dtype)
        elif rope is None:  # the model has no rotations
            nothing = hidden_states.new_empty(*hidden_states.shape[:2], 0)
            rope = nothing, nothing
        layer_input = further[0] if further else None
        output = self.ops.whole_layer(hidden_states, rope, cache, self.plan, layer_input)
        if output is not None:
            return output
        if self.plan.mixer is not None:
            return self.plain.mix(hidden_states, options, layer_input)
        qk, values = self.ops.project_qkv_rope(hidden_states, rope)
        attended = self._attend(qk, values, mask, cache)
        return self.ops.residual_mlp(hidden_states, attended.transpose(1, 2).flatten(2))

    def _angles(self, rope: GivenRope | None, positions: Tensor | None, dtype: torch.dtype) -> Rope:
        if rope is None or (positions is None and self.plan.growth):
            raise UnknownLayerError("its layers do not receive positions or rotations")
        rotated = rope[-1].shape[-1] * (2 if self.plan.angles_of_pairs else 1)
        if rotated != self.plan.rotated:
            raise UnknownLayerError(f"it rotates {rotated} of a head's {self.plan.size} numbers")
        return angles(rope, positions, dtype, self.plan)

    def with_ops(self, ops: Ops) -> FusedLayer:
        """A copy of this layer that computes with other ops."""
        layer = copy(self)
        layer.ops = ops
        return layer

    def _attend(self, qk: Tensor, values: Tensor, mask: Tensor, cache: SlotCache) -> Tensor:
        """qk: queries and keys [B, heads, W, D]."""
        queries, keys = qk.split((self.ops.heads, self.ops.key_heads), 1)
        keys, values = cache.update(keys, values, self.plan.index)
        blocks, scores = cache.blocks(mask), Scores(self.plan.scaling, self.plan.soft_cap, self.plain.sinks)
        if (rectangle_mask := cache.rectangle(mask)) is not None:
            assert cache.layout is not None
            return attend_ragged(queries, keys, values, rectangle_mask, blocks, cache.layout, scores)
        if blocks:
            return attend_in_blocks(queries, keys, values, blocks, scores)
        return attend(queries, keys, values, mask, scores)


def fused_layers(model: nn.Module, plan: DecoderPlan) -> list[tuple[nn.Module, FusedLayer]]:
    """The model's decoder layers and a forward for each.

    Raises `UnknownLayerError` with the reason if a layer has other modules than its plan, or if other code replaced its
    forward.
    """
    rope = RotaryEmbedding()
    return [(layer, FusedLayer(layer, of, rope)) for layer, of in zip(layers_of(model, plan), plan.layers, strict=True)]


def layers_of(model: nn.Module, plan: DecoderPlan) -> nn.ModuleList:
    """The model's decoder layers. Raises `UnknownLayerError` if they cannot be told from other modules."""
    count = len(plan.layers)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(lists) > 1:  # an image tower may have the same number of layers
        lists = [m for m in lists if m is decoder_module(model, plan).layers]
    if len(lists) != 1:
        raise UnknownLayerError(f"it has {len(lists)} lists of {count} modules, not one")
    return lists[0]


def decoder_module(model: Any, plan: DecoderPlan) -> Any:
    """The module that calls the layers. Raises `UnknownLayerError` if none does."""
    around, count = {"layers", plan.last_norm}, len(plan.layers)
    if plan.rotates:
        around.add(plan.rotary.partition(".")[0])
    for module in model.modules():
        if dict(module.named_children()).keys() >= around and len(module.get_submodule("layers")) == count:
            return module
    raise UnknownLayerError(f"none of its modules has {', '.join(sorted(around))} with {count} layers")


def is_fused(module: nn.Module) -> bool:
    """True if this is a layer whose forward was replaced."""
    return isinstance(module.__dict__.get("forward"), FusedLayer)


def check_modules(layer: nn.Module, plan: LayerPlan) -> None:
    """Raise `UnknownLayerError` unless a layer has its plan's modules, apart from activations and dropout."""
    parts = {path.partition(".")[0] for path in plan.modules if "." in path}
    paths = set[str]()
    for name, child in layer.named_children():
        within = [f"{name}.{inner}" for inner, module in child.named_children() if not _has_no_weights(module)]
        paths.update(within if name in parts else () if _has_no_weights(child) else (name,))
        holders = (layer, child) if name in parts else (layer,)
        parameters = [key for holder in holders for key, _ in holder.named_parameters(recurse=False)]
        if stray := [key for key in parameters if f"{name}.{key}" != plan.sinks]:
            raise UnknownLayerError(f"{type(layer).__name__} has {stray[0]}")
    if paths != plan.modules:
        further, missing = sorted(paths - plan.modules), sorted(plan.modules - paths)
        reason = f"has no {missing[0]}" if missing else f"has {further[0]}"
        raise UnknownLayerError(f"{type(layer).__name__} {reason}")


def _has_no_weights(module: nn.Module) -> bool:
    is_of_torch_or_transformers = type(module).__module__.startswith(("torch.nn", "transformers.activations"))
    return is_of_torch_or_transformers and not any(True for _ in module.parameters())


def _outputs(layer: nn.Module, plan: LayerPlan) -> int | None:
    """The outputs of a layer's first product; None if the recurrence decides their number."""
    if plan.recurrent:
        return None
    if plan.latent is None:
        kept = 0 if plan.reuses_keys else 2 - plan.shares_values
        return ((1 + plan.gates_queries) * plan.heads + kept * plan.key_heads) * plan.size + plan.heads * plan.gate_size
    if plan.latent.queries_norm is None:
        return plan.heads * (plan.latent.plain + plan.rotated) + plan.size
    return len(layer.get_parameter(f"{plan.latent.queries_norm}.weight")) + plan.size


def _norm_of(layer: nn.Module, path: str | None, plan: LayerPlan) -> Norm | None:
    """A norm of latent attention, whose epsilon may differ from the other norms'."""
    if path is None:
        return None
    module = layer.get_submodule(path)
    return Norm(module, replace(plan.norm, eps=_epsilon(module) or plan.norm.eps))


def _by_kernels(layer: nn.Module, path: str, plan: ExpertsPlan | LatentPlan) -> Any:
    """The module at this path, which the kernels compute by this plan."""
    module = layer.get_submodule(path)
    if getattr(module, "plan", None) != plan:
        raise UnknownLayerError(f"the kernels do not compute its {path}")
    return module


def _product(layer: nn.Module, paths: tuple[str, ...], outputs: int | None = None) -> Any:
    """The layer that computes these projections; several must be fused into one, which contains no others."""
    parts = [layer.get_submodule(path) for path in paths]
    joint: Any = parts[0]
    if len(parts) > 1:
        fused = [part for part in parts if isinstance(part, FusedOutput)]
        if len(fused) < len(parts) or len({part.source for part in fused}) != 1:
            raise UnknownLayerError(f"{', '.join(paths)} are not fused into one product")
        if [part.index for part in fused] != list(range(len(fused[0].source.sizes))):
            raise UnknownLayerError(f"{', '.join(paths)} share their fused product with other layers")
        joint = fused[0].source.joint
    if outputs is not None and joint.out_features != outputs:
        raise UnknownLayerError(f"{', '.join(paths)} have {joint.out_features} outputs, not {outputs}")
    return joint
