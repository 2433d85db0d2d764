"""Reads heads of DFlash, in the layout of their authors and in that of `speculators`.

The authors number the target's layers by what leaves them, `speculators` by what enters them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from slipstream.errors import UsageError
from slipstream.models.heads.dflash import DFlashBackend, DFlashLayer, DFlashNetwork, DFlashWeights
from slipstream.models.heads.head_files import (
    FEATURES,
    HeadFiles,
    TensorReader,
    as_product,
    check_layer,
    check_size,
    own_embedding,
    token_ids_of,
)
from slipstream.models.heads.network import HeadConfig, Linear
from slipstream.models.heads.rotations import rope_theta, scaled_frequencies
from slipstream.models.loaded import Loaded

OUTPUT = "lm_head.weight"
REFUSED: dict[str, Any] = {  # flags of other networks, and the value that every head has which this one computes
    "projector_type": "dflash",
    "shift_label": False,
    "sample_from_anchor": False,
    "is_causal": False,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}


def read_dflash(files: HeadFiles, tensors: Mapping[str, Tensor], target: Loaded) -> DFlashBackend:
    """A head of DFlash for a target."""
    check_layer(files, several_layers=True)
    layer, source = files.layer, files.source
    flags: dict[str, Any] = {**files.settings, **files.settings.get("dflash_config", {})}
    for name, expected in REFUSED.items():
        if flags.get(name) not in (expected, None):
            raise UsageError(f"draft head {source!r} has {name}={flags[name]!r}; allowed: {expected!r}")
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise UsageError(f"draft head {source!r} has layer_types with 'sliding_attention'; allowed: 'full_attention'")
    vocab_size, block_size = target.backend.vocab_size, flags.get("block_size", 16)
    mask_token: Any = flags.get("mask_token_id")
    for name, value, least, most in (("block_size", block_size, 2, 256), ("mask_token_id", mask_token, 0, vocab_size)):
        if not isinstance(value, int) or not least <= value < most:
            raise UsageError(f"draft head {source!r} has {name}={value!r}; allowed: {least} to {most - 1}")
    config = _config(files, tensors, target)
    return DFlashBackend(DFlashNetwork(config, _weights(files, tensors, config, target)), mask_token, block_size)


def _config(files: HeadFiles, tensors: Mapping[str, Tensor], target: Loaded) -> HeadConfig:
    layer, target_config = files.layer, target.backend.model.config.get_text_config()  # type: ignore[attr-defined]
    size, heads = layer["hidden_size"], layer["num_attention_heads"]
    check_size(files, target, "hidden_size", size, target_config.hidden_size)
    check_size(files, target, "vocab_size", layer["vocab_size"], target.backend.vocab_size)
    inverse_frequencies, rotation_scale = scaled_frequencies(files.source, layer)
    return HeadConfig(
        layers=_layers(files, target_config.num_hidden_layers, target.name),
        hidden_size=size,
        target_hidden_size=size,
        intermediate_size=layer["intermediate_size"],
        num_heads=heads,
        num_key_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or size // heads,
        vocab_size=target.backend.vocab_size,
        eps=layer.get("rms_norm_eps", 1e-6),
        rope_theta=rope_theta(layer),
        max_length=target.backend.max_length,
        token_ids=token_ids_of(files, tensors, target.backend.vocab_size),
        inverse_frequencies=inverse_frequencies,
        rotation_scale=rotation_scale,
    )


def _layers(files: HeadFiles, count: int, target: str) -> tuple[int, ...]:
    """The layers whose entering hidden states are the features."""
    entering = files.settings.get("aux_hidden_state_layer_ids")
    leaving = files.settings.get("dflash_config", {}).get("target_layer_ids", files.settings.get("target_layer_ids"))
    named = entering if entering is not None else None if leaving is None else [i + 1 for i in leaving]
    if not named or not all(isinstance(i, int) and 0 <= i < count for i in named):
        raise UsageError(
            f"draft head {files.source!r} reads layers {named} of its target; {target!r} has {count}, allowed: "
            f"0 to {count - 1}, as transformers numbers hidden states"
        )
    return tuple(named)


def _weights(files: HeadFiles, tensors: Mapping[str, Tensor], config: HeadConfig, target: Loaded) -> DFlashWeights:
    model: Any = target.backend.model  # type: ignore[attr-defined]
    read = TensorReader(files.source, tensors, target.backend.device)
    product = partial(as_product, num_weights=sum(tensor.numel() for tensor in tensors.values()))
    size, count = config.hidden_size, config.vocab_size if config.token_ids is None else len(config.token_ids)
    if OUTPUT in tensors:
        lm_head = product(read(OUTPUT, count, size))
    elif config.token_ids is None:
        output = model.get_output_embeddings()
        lm_head = _in_type(output, model.dtype)
    else:
        raise UsageError(f"draft head {files.source!r} has d2t without {OUTPUT!r}; allowed: both or neither")
    return DFlashWeights(
        fc=product(read(FEATURES, size, len(config.layers) * size)),
        feature_norm=read("hidden_norm.weight", size),
        layers=[_layer(read, product, config, f"layers.{i}.") for i in range(files.layer["num_hidden_layers"])],
        final_norm=read("norm.weight", size),
        embed=own_embedding(files, tensors, config) or _unscaled(model.get_input_embeddings()),
        lm_head=lm_head,
    )


def _layer(read: TensorReader, product: Any, config: HeadConfig, name: str) -> DFlashLayer:
    size, middle, each = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * each, config.num_key_heads * each
    attention, mlp = f"{name}self_attn.", f"{name}mlp."
    return DFlashLayer(
        query=product(read(f"{attention}q_proj.weight", queries, size)),
        key_value=product(torch.cat([read(f"{attention}{part}_proj.weight", keys, size) for part in "kv"])),
        out=product(read(f"{attention}o_proj.weight", size, queries)),
        gate_up=product(torch.cat([read(f"{mlp}{part}_proj.weight", middle, size) for part in ("gate", "up")])),
        down=product(read(f"{mlp}down_proj.weight", size, middle)),
        block_norm=read(f"{name}input_layernorm.weight", size),
        query_norm=read(f"{attention}q_norm.weight", each),
        key_norm=read(f"{attention}k_norm.weight", each),
        middle_norm=read(f"{name}post_attention_layernorm.weight", size),
    )


def _in_type(output: nn.Module, dtype: torch.dtype) -> Linear:
    return lambda x: output(x.to(dtype))


def _unscaled(module: nn.Module) -> Any:
    """The target's embedding without the factor that some models multiply it with."""
    return partial(_looked_up, module.weight) if isinstance(module, nn.Embedding) else module


def _looked_up(weight: Tensor, tokens: Tensor) -> Tensor:
    return embedding(tokens, weight)
