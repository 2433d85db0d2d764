"""A new draft head for a target: its sizes, and weights that begin with those of the target's last layer.

Weights are read by multiplying unit vectors by the modules, which works for packed, fused and quantized weights, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import UsageError
from slipstream.models.backend_capabilities import HiddenStates
from slipstream.models.heads.network import HeadConfig
from slipstream.models.hf.decoder_layers import decoder_layers
from slipstream.models.loaded import Loaded

FEWEST_LAYERS = 3  # a head's features come from three layers
TOKEN_DEVIATION = 0.02  # standard deviation of weights for the token, an input that the target's layer lacks
FEATURES = 0.5  # standard deviation of a new head's inputs
UNITS = 256  # unit vectors multiplied at a time, where outputs are many
# the head's tensors that a decoder layer may have under the same name; each group shares an input
GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


def model_of(target: Loaded) -> Any:
    """The module that a target's backend runs. Raises `UsageError` if its hidden states cannot be read."""
    model = getattr(target.backend, "model", None)
    if model is None or not isinstance(target.backend, HiddenStates):
        raise unreadable(target)
    if target.backend.num_layers < FEWEST_LAYERS:
        raise UsageError(
            f"target {target.name!r} has {target.backend.num_layers} layers; allowed: {FEWEST_LAYERS} or more"
        )
    return model


def unreadable(target: Loaded) -> UsageError:
    """The error for a target whose hidden states cannot be read."""
    return UsageError(
        f"the hidden states of target {target.name!r} cannot be read; allowed: models that run on Slipstream's own KV "
        "cache and pass it to their layers by name"
    )


def feature_layers(target: Loaded) -> tuple[int, ...]:
    """The layers whose entering hidden states a new head reads: an early one, the middle and the last."""
    count = config_layers(model_of(target))
    return min(2, count // 2 - 1), count // 2, count - 1


def new_head(target: Loaded, max_length: int, token_ids: Tensor) -> HeadConfig:
    """The sizes of a head that reads three of the target's layers. token_ids: tokens that it can propose, ascending."""
    config = model_of(target).config.get_text_config()
    size, heads = config.hidden_size, config.num_attention_heads
    return HeadConfig(
        layers=feature_layers(target),
        hidden_size=size,
        target_hidden_size=size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * size,
        num_heads=heads,
        num_key_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or size // heads,
        vocab_size=target.backend.vocab_size,
        eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(config),
        max_length=max_length,
        token_ids=token_ids,
    )


@torch.no_grad()
def starting_weights(target: Loaded, config: HeadConfig, seed: int) -> dict[str, Tensor]:
    """Tensors of a new head in float32, by their names in its files without ".weight".

    They come from the target's last layer, final norm and output layer where sizes match; others are random.
    """
    model, device = model_of(target), target.backend.device
    _, layers = decoder_layers(model, config_layers(model))
    last, generator = layers[-1], torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=generator) / shape[1] ** 0.5 for name, shape in _shapes(config)}
    weights["fc"] *= FEATURES
    for names in GROUPS:
        inputs = weights[f"layers.0.{names[0]}"].shape[1] // (2 if "q_proj" in names[0] else 1)
        units = torch.eye(inputs, dtype=model.dtype, device=device)
        for name in names:
            copied, drawn = _weight(last, name, units), weights[f"layers.0.{name}"]
            if copied is None:
                continue
            if drawn.shape[1] == 2 * inputs:  # its input is the token, then the hidden state
                token = TOKEN_DEVIATION * torch.randn(copied.shape, generator=generator)
                copied = torch.cat([token, copied], 1)
            if copied.shape == drawn.shape:
                weights[f"layers.0.{name}"] = copied
    size = config.hidden_size
    norms = {
        "layers.0.hidden_norm": _submodule(last, "input_layernorm"),
        "layers.0.input_layernorm": None,
        "layers.0.post_attention_layernorm": _submodule(last, "pre_feedforward_layernorm")
        or _submodule(last, "post_attention_layernorm"),
        "norm": _final_norm(model, layers),
    }
    weights |= {name: _factors(norm, size, model.dtype, device) for name, norm in norms.items()}
    rows = _output_rows(model.get_output_embeddings(), config, model.dtype, device)
    return weights | ({} if rows is None else {"lm_head": rows})


def config_layers(model: Any) -> int:
    """The number of decoder layers in a model."""
    return int(model.config.get_text_config().num_hidden_layers)


def _shapes(config: HeadConfig) -> Sequence[tuple[str, tuple[int, int]]]:
    assert config.token_ids is not None
    size, inner, features = config.hidden_size, config.intermediate_size, len(config.layers) * config.target_hidden_size
    queries, keys = config.num_heads * config.head_dim, config.num_key_heads * config.head_dim
    return [
        ("fc", (size, features)),
        ("layers.0.self_attn.q_proj", (queries, 2 * size)),
        ("layers.0.self_attn.k_proj", (keys, 2 * size)),
        ("layers.0.self_attn.v_proj", (keys, 2 * size)),
        ("layers.0.self_attn.o_proj", (size, queries)),
        ("layers.0.mlp.gate_proj", (inner, size)),
        ("layers.0.mlp.up_proj", (inner, size)),
        ("layers.0.mlp.down_proj", (size, inner)),
        ("lm_head", (len(config.token_ids), size)),
    ]


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def _weight(layer: nn.Module, name: str, units: Tensor) -> Tensor | None:
    """The weight [outputs, inputs] of a layer's product, float32; None if no product has this name and these inputs."""
    module = _submodule(layer, name)
    if module is None:
        return None
    try:
        outputs: Tensor = module(units)
        bias = module(torch.zeros_like(units[:1]))
    except (RuntimeError, ValueError):  # of another width
        return None
    return (outputs.float() - bias.float()).T.cpu().contiguous()


def _factors(norm: nn.Module | None, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The factors [size] of a norm; ones without an RMSNorm."""
    ones = torch.ones(size)
    if norm is None:
        return ones
    factors: Tensor = norm(ones.to(device, dtype)[None, None]).float().cpu().flatten()
    return factors if factors.shape == ones.shape and bool(factors.any()) else ones


def _final_norm(model: Any, layers: nn.ModuleList) -> nn.Module | None:
    """The module called "norm" next to the list of layers; None if there is none."""
    parents = (module for module in model.modules() if any(child is layers for child in module.children()))
    return next((norm for module in parents if (norm := _submodule(module, "norm")) is not None), None)


def _output_rows(
    output: nn.Module | None, config: HeadConfig, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """[draft vocabulary, H] in float32: the output layer's weights of the draft vocabulary."""
    if output is None or config.token_ids is None:
        return None
    parts = []
    for start in range(0, config.hidden_size, UNITS):
        count = min(UNITS, config.hidden_size - start)
        units = torch.zeros(count, config.hidden_size, dtype=dtype, device=device)
        units[torch.arange(count), start + torch.arange(count)] = 1
        parts.append(output(units)[:, config.token_ids.to(device)].float().T.cpu())
    return torch.cat(parts, 1)


def _rope_theta(config: Any) -> float:
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # in models with several types of layers
    return float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
