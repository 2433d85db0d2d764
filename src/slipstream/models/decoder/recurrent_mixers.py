"""Recurrent layers of Hugging Face models, recognized by structure, on Slipstream's own states.

Only a layer's `forward` is replaced, and only for Slipstream's caches; its modules stay in place, and other callers run
the model's own code. That code is the specification: if the logits differ from its logits, the model runs on caches of
its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from slipstream.models.cpu.compiled_recurrence import compiled_recurrence
from slipstream.models.decoder.fused_linear import is_plain
from slipstream.models.decoder.recurrence import Heads, Projection, Recurrence, RecurrentStates

SILU = ("silu", "swish")
ORDERING = "fix_query_key_value_ordering"  # the method that separates heads
NO_LIMIT = (0.0, math.inf)  # for the time step of Mamba-2


class Form(Protocol):
    """A recurrent layer's projections around its recurrence. B rows of W tokens, hidden size H."""

    recurrence: Recurrence

    @property
    def projection(self) -> Projection | None:
        """The kernels' description of `project` and `finish`; None if they cannot compute them."""

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """From [B, W, H] to the recurrence's inputs [B, W, inputs], and the rest, which `finish` takes."""

    def finish(self, mixed: Tensor, rest: Tensor) -> Tensor:
        """From the recurrence's outputs [B, W, outputs], float32, to [B, W, H]."""


class GatedDelta:
    """Layers of Qwen3.5 and Qwen3-Next: the gated delta rule."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._dtype: torch.dtype = layer.conv1d.weight.dtype
        key_dim = layer.key_dim
        heads = Heads(
            layer.num_v_heads,
            layer.num_k_heads,
            layer.head_k_dim,
            layer.head_v_dim,
            0,
            key_dim,
            2 * key_dim,
            corrects=True,
            normalized=True,
            rate=_rate(layer),
            shift=layer.dt_bias.detach().float(),
        )
        self.recurrence = Recurrence(*_convolution(layer.conv1d), heads, self._dtype)

    @property
    def projection(self) -> Projection | None:
        layer, channels = self._layer, self.recurrence.channels
        norm = layer.norm.weight.detach().float(), layer.norm.variance_epsilon
        return Projection(0, channels + layer.value_dim, channels, norm=norm, group=layer.head_v_dim)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        layer = self._layer
        mixed, z = layer.in_proj_qkv(hidden), layer.in_proj_z(hidden)
        b, a = layer.in_proj_b(hidden), layer.in_proj_a(hidden)
        return torch.cat([mixed, b, a], -1), z

    def finish(self, mixed: Tensor, rest: Tensor) -> Tensor:
        layer, size = self._layer, self._layer.head_v_dim
        normed = layer.norm(mixed.to(self._dtype).reshape(-1, size), rest.reshape(-1, size))
        out: Tensor = layer.out_proj(normed.reshape(*mixed.shape[:2], -1))
        return out


class InterleavedGatedDelta(GatedDelta):
    """Gated delta layers with two joint projections, ordered head by head; see `order_outputs`."""

    @property
    def projection(self) -> Projection | None:
        return super().projection if ORDERING in vars(self._layer) else None

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        layer = self._layer
        together = layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden)
        query, key, value, z, b, a = layer.fix_query_key_value_ordering(*together)
        return torch.cat([*(part.flatten(2) for part in (query, key, value)), b, a], -1), z


def order_outputs(model: nn.Module) -> None:
    """Reorder layers' outputs from head by head to all queries, then all keys, values and gates."""
    for layer in recurrent_layers(model).values():
        if form_of(layer) is not InterleavedGatedDelta:
            continue
        projections = layer.in_proj_qkvz, layer.in_proj_ba
        if all(map(is_plain, projections)):
            numbered = (torch.arange(linear.out_features)[None, None] for linear in projections)
            parts = layer.fix_query_key_value_ordering(*numbered)
            groups = parts[:4], parts[4:]
            for linear, group in zip(projections, groups, strict=True):
                order = torch.cat([part.flatten() for part in group])
                linear.weight = nn.Parameter(linear.weight.detach()[order], requires_grad=False)
            setattr(layer, ORDERING, partial(_parts, [[part.shape[2:] for part in group] for group in groups]))


def _parts(groups: Sequence[Sequence[Sequence[int]]], *outputs: Tensor) -> list[Tensor]:
    """Splits the outputs of several layers into parts of these shapes."""
    return [
        part.unflatten(-1, shape)
        for output, shapes in zip(outputs, groups, strict=True)
        for part, shape in zip(output.split([math.prod(shape) for shape in shapes], -1), shapes, strict=True)
    ]


class StateSpace:
    """Mamba-2 layers: of Mamba-2, Bamba, Granite 4, Falcon-H1, Nemotron-H, Zamba 2."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._dtype: torch.dtype = layer.conv1d.weight.dtype
        inner, shared = layer.intermediate_size, layer.n_groups * layer.ssm_state_size
        heads = Heads(
            layer.num_heads,
            layer.n_groups,
            layer.ssm_state_size,
            layer.head_dim,
            inner + shared,
            inner,
            0,
            corrects=False,
            normalized=False,
            rate=_rate(layer),
            shift=layer.dt_bias.detach().float(),
            skip=layer.D.detach().float(),
            least_step=_limits(layer)[0],
        )
        self.recurrence = Recurrence(*_convolution(layer.conv1d), heads, self._dtype)
        self._scale = getattr(layer, "ssm_in_multiplier", None)
        self._scales = getattr(layer, "mup_vector", None)

    @property
    def projection(self) -> Projection | None:
        norm, inner = self._layer.norm, self._layer.intermediate_size
        if self._scale is not None or self._scales is not None or isinstance(norm, nn.Identity):
            return None
        weight, gates = norm.weight.detach().float(), inner + self.recurrence.channels
        return Projection(
            inner, gates, 0, norm=(weight, norm.variance_epsilon), group=norm.group_size, gates_first=True
        )

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self._scale is not None:
            hidden = hidden * self._scale
        projected: Tensor = self._layer.in_proj(hidden)
        if self._scales is not None:
            projected = projected * self._scales
        inner = self._layer.intermediate_size
        return projected[..., inner:], projected[..., :inner]

    def finish(self, mixed: Tensor, rest: Tensor) -> Tensor:
        norm = self._layer.norm
        gated = mixed * silu(rest) if isinstance(norm, nn.Identity) else norm(mixed, rest)
        out: Tensor = self._layer.out_proj(gated.to(self._dtype))
        return out


class ShortConvolution:
    """Layers of LFM2: only a gated convolution."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._dtype: torch.dtype = layer.conv.weight.dtype
        self.recurrence = Recurrence(*_convolution(layer.conv), None, self._dtype)

    @property
    def projection(self) -> Projection | None:
        channels = self.recurrence.channels
        return Projection(0, 3 * channels, channels, factors=2 * channels)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        before, after, x = self._layer.in_proj(hidden).chunk(3, -1)
        return before * x, after

    def finish(self, mixed: Tensor, rest: Tensor) -> Tensor:
        out: Tensor = self._layer.out_proj(rest * mixed.to(self._dtype))
        return out


FORMS: Sequence[tuple[Callable[[Any], Form], set[str], set[str]]] = (  # a form, its submodules, its other attributes
    (
        GatedDelta,
        {"conv1d", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj"},
        {"A_log", "dt_bias", "num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim", "key_dim"},
    ),
    (
        InterleavedGatedDelta,
        {"conv1d", "in_proj_qkvz", "in_proj_ba", "norm", "out_proj"},
        {"A_log", "dt_bias", "num_v_heads", "head_k_dim", "head_v_dim", "key_dim", ORDERING},
    ),
    (
        StateSpace,
        {"conv1d", "in_proj", "norm", "out_proj"},
        {"A_log", "D", "dt_bias", "num_heads", "head_dim", "n_groups", "ssm_state_size", "intermediate_size"},
    ),
    (ShortConvolution, {"conv", "in_proj", "out_proj"}, {"conv_kernel_size", "bias"}),
)


class RecurrentForward:
    """Replaces a recurrent layer's `forward`."""

    def __init__(self, layer: Any, form: Form) -> None:
        self._own, self._index, self.form = layer.forward, layer.layer_idx, form
        on_cpu = form.recurrence.weight.device.type == "cpu"
        self.compiled = compiled_recurrence(form.recurrence) if on_cpu else None

    def __call__(self, hidden_states: Tensor, *inputs: Any, **options: Any) -> Any:
        """[B, W, H] -> [B, W, H] on a cache with this layer's state; on any other cache, the layer's own forward."""
        caches = (getattr(x, "states", None) for x in (*inputs, *options.values()))
        states = next((cache for cache in caches if isinstance(cache, RecurrentStates)), None)
        if states is None:
            return self._own(hidden_states, *inputs, **options)
        prepared, rest = self.form.project(hidden_states)
        return self.form.finish(states.run(self._index, prepared), rest)


def recurrent_layers(model: nn.Module) -> dict[int, Any]:
    """The recurrent layers that can run on Slipstream's states, by number."""
    layers: Iterable[Any] = model.modules()
    return {layer.layer_idx: layer for layer in layers if form_of(layer) is not None}


def recurrent_states(model: nn.Module) -> RecurrentStates | None:
    """New states for a model's recurrent layers, whose forwards it replaces; None if there are no such layers."""
    layers = recurrent_layers(model)
    for layer in layers.values():
        if not isinstance(layer.forward, RecurrentForward):
            form: Any = form_of(layer)
            layer.forward = RecurrentForward(layer, form(layer))
    parts = {i: (layer.forward.form.recurrence, layer.forward.compiled) for i, layer in layers.items()}
    return RecurrentStates(parts) if parts else None


def form_of(layer: Any) -> Callable[[Any], Form] | None:
    """The entry of `FORMS` that fits a layer; None if none does."""
    if not hasattr(layer, "layer_idx"):
        return None
    children = {name for name, child in layer.named_children() if "act" not in name}
    form = next(
        (form for form, names, sizes in FORMS if children == names and all(hasattr(layer, x) for x in sizes)), None
    )
    is_silu = getattr(layer, "activation", SILU[0]) in SILU
    return form if is_silu and _limits(layer)[1] == math.inf else None


def _limits(layer: Any) -> tuple[float, float]:
    """The least and the largest time step of Mamba-2."""
    least, largest = getattr(layer, "time_step_limit", NO_LIMIT)
    return float(least), float(largest)


def _rate(layer: Any) -> Tensor:
    rate: Tensor = -layer.A_log.detach().float().exp()
    return rate


def _convolution(layer: nn.Conv1d) -> tuple[Tensor, Tensor | None]:
    """Weight [C, taps] and bias [C], float32."""
    bias = None if layer.bias is None else layer.bias.detach().float()
    return layer.weight.detach().float().squeeze(1).contiguous(), bias
