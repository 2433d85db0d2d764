"""Reads heads of EAGLE-3 and P-EAGLE.

Trainers number hidden states differently: `speculators` by the layer that they enter, others by the layer that they
leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import torch
from torch import Tensor

from slipstream.checks import is_whole
from slipstream.errors import UsageError
from slipstream.models.heads.head_backend import HeadBackend
from slipstream.models.heads.head_files import (
    COMPUTED,
    HeadFiles,
    check_settings,
    check_size,
    layer_settings,
    windows_of,
)
from slipstream.models.heads.head_kinds import FEATURES, MASK_FEATURE
from slipstream.models.heads.head_tensors import (
    EMBEDDING,
    OUTPUT,
    TensorReader,
    after_attention,
    output_layer,
    own_embedding,
    projections,
    token_ids_of,
)
from slipstream.models.heads.network import FurtherLayer, HeadConfig, HeadNetwork, HeadWeights
from slipstream.models.loaded import Loaded

MASKS = ("mask_token_id", "pard_token", "ptd_token_id")  # settings that may name the mask token


def read_eagle3(files: HeadFiles, tensors: Mapping[str, Tensor], target: Loaded) -> HeadNetwork:
    """The network of a head of the EAGLE-3 type."""
    model = target.backend.model  # type: ignore[attr-defined]
    check_settings(files, COMPUTED)
    config = _config(files, tensors, model.config.get_text_config(), target)
    read = TensorReader(files, tensors, target.backend.device)
    embed = own_embedding(read, config) or model.get_input_embeddings()
    return HeadNetwork(config, _weights(files, read, config, target), embed)


def read_peagle(files: HeadFiles, tensors: Mapping[str, Tensor], target: Loaded) -> HeadBackend:
    """A head of P-EAGLE: one of EAGLE-3, with a mask token and a mask feature for the tokens to come."""
    network = read_eagle3(files, tensors, target)
    name = next((name for name in MASKS if files.flags.get(name) is not None), " or ".join(MASKS))
    token = files.flags.get(name)
    if not is_whole(token, 0, target.backend.vocab_size - 1):
        raise UsageError(
            f"draft head {files.source!r} has {name}={token!r}; allowed: 0 to {target.backend.vocab_size - 1}"
        )
    size = len(network.config.layers) * network.config.target_hidden_size
    stored = {key: tensor.reshape(1, -1) for key, tensor in tensors.items() if key == MASK_FEATURE}
    feature = TensorReader(files, stored, target.backend.device)(MASK_FEATURE, 1, size)
    return HeadBackend(network, token, feature)


def _config(files: HeadFiles, tensors: Mapping[str, Tensor], target_config: Any, target: Loaded) -> HeadConfig:
    layer, flags, source = files.layer, files.flags, files.source
    sizes = {"hidden_size": target_config.hidden_size, "vocab_size": target.backend.vocab_size}
    target_size = flags.get("target_hidden_size") or layer["hidden_size"]
    check_size(files, target, "target_hidden_size", target_size, sizes["hidden_size"])
    check_size(files, target, "vocab_size", layer["vocab_size"], sizes["vocab_size"])
    count = target_config.num_hidden_layers
    listed = _layers(files, count)
    # heads are trained on states from servers, which pass them on in the order of the layers
    layers = tuple(sorted(listed)) if len(set(listed)) == len(listed) else listed
    if max(layers) >= count or min(layers) < 0:
        raise UsageError(
            f"draft head {source!r} reads layers {list(layers)} of its target; {target.name!r} has {count}, "
            f"allowed: 0 to {count - 1}"
        )
    if not files.is_of_speculators and not flags.get("norm_output", True):
        raise UsageError(f"draft head {source!r} has norm_output=False; allowed: True")
    for name in (EMBEDDING, OUTPUT):
        if layer["hidden_size"] != sizes["hidden_size"] and name not in tensors:
            raise UsageError(
                f"draft head {source!r} has hidden_size={layer['hidden_size']} and no tensor {name!r}; allowed: "
                f"{sizes['hidden_size']}, that of {target.name!r}, whose tensor it then uses"
            )
    return HeadConfig(
        layers=layers,
        target_hidden_size=target_size,
        token_ids=token_ids_of(files, tensors, target.backend.vocab_size),
        norm_before_residual=bool(flags.get("norm_before_residual", False)),
        norm_output=bool(flags.get("norm_output", False)) and files.is_of_speculators,
        windows=tuple(windows_of(files)),
        listed_layers=listed,
        unclear=_unclear(files),
        **layer_settings(files, target),
    )


def _unclear(files: HeadFiles) -> tuple[str, ...]:
    """The settings for which `head_check` also tries other values: layers, flags that are not set, and `norm_output`.

    `norm_output` is unclear because for `speculators` it normalizes what is fed back, for others what is scored.
    """
    open_flags = tuple(name for name in ("norm_before_residual", "norm_output") if name not in files.flags)
    is_read_twice = "norm_output" in files.flags and not files.is_of_speculators
    return ("layers", *open_flags, *(("norm_output",) if is_read_twice else ()))


def _layers(files: HeadFiles, count: int) -> tuple[int, ...]:
    """The layers whose inputs a head reads; if the files name none, those of the official code."""
    named = files.flags.get("eagle_aux_hidden_state_layer_ids", files.flags.get("target_layer_ids"))
    if named is None or named == []:
        return 2, count // 2, count - 3
    if not isinstance(named, list) or not all(is_whole(i, -inf) for i in named):
        raise UsageError(f"draft head {files.source!r} reads layers {named!r}; allowed: a list of layer numbers")
    return tuple(i if files.is_of_speculators else i + 1 for i in named)  # others number layers' outputs


def _weights(files: HeadFiles, read: TensorReader, config: HeadConfig, target: Loaded) -> HeadWeights:
    size = config.hidden_size

    def layer(number: int, inputs: int) -> dict[str, Any]:
        name = f"layers.{number}."
        return {
            "qkv": read.product(projections(config, name, "qkv"), inputs),
            "head_norms": _head_norms(read, config, name),
            **after_attention(read, config, name),
        }

    weights = HeadWeights(
        **layer(0, 2 * size),
        fc=read.product({FEATURES: size}, len(config.layers) * config.target_hidden_size),
        lm_head=output_layer(read, config, target),
        token_norm=read("layers.0.input_layernorm.weight", size),
        hidden_norm=read("layers.0.hidden_norm.weight", size),
        final_norm=read("norm.weight", size),
        feature_norms=_feature_norms(files, read, config),
        further=[
            FurtherLayer(**layer(i, size), first_norm=read(f"layers.{i}.input_layernorm.weight", size))
            for i in range(1, len(config.windows))
        ],
    )
    read.check_all_read()
    return weights


def _head_norms(read: TensorReader, config: HeadConfig, name: str) -> Tensor | None:
    heads = {"q": config.num_heads, "k": config.num_key_heads}
    norms = {f"{name}self_attn.{part}_norm.weight": count for part, count in heads.items()}
    if not norms.keys() & read.tensors.keys():
        return None
    return torch.cat([read(norm, config.head_dim).expand(count, 1, -1) for norm, count in norms.items()])


def _feature_norms(files: HeadFiles, read: TensorReader, config: HeadConfig) -> Tensor | None:
    count, size = len(config.layers), config.target_hidden_size
    if files.flags.get("fc_norm"):
        return torch.stack([read(f"fc_norm.{i}.weight", size) for i in range(count)])
    return read("input_norm.weight", count * size)[None] if files.flags.get("norm_before_fc") else None
