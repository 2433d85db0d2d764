"""Heads of EAGLE (Li et al. 2024, arXiv 2401.15077) and EAGLE-2: one decoder layer over tokens and last hidden states.

EAGLE-2 has the same weights. A row's feature is the target's last hidden state, after the final norm, at the position
before; if the target has not read that position yet, it is the head's own output there. The target's output layer turns
the layer's output into scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import UsageError
from slipstream.models.heads.head_files import (
    COMPUTED,
    NOT_EAGLE3,
    HeadFiles,
    check_settings,
    check_size,
    layer_settings,
    windows_of,
)
from slipstream.models.heads.head_kinds import FEATURES
from slipstream.models.heads.head_tensors import TensorReader, after_attention, own_embedding, projections
from slipstream.models.heads.network import Attend, HeadConfig, HeadLayers, LayerWeights, Linear
from slipstream.models.loaded import Loaded

LAYER = "layers.0."


@dataclass(kw_only=True)
class Eagle1Weights(LayerWeights):
    """A head's products and its norm. final_norm, lm_head and, in some heads, embed are the target's."""

    fc: Linear
    final_norm: Callable[[Tensor], Tensor]
    lm_head: Linear
    embed: Callable[[Tensor], Tensor]


class Eagle1Network(HeadLayers):
    """The network of EAGLE and EAGLE-2."""

    def __init__(self, config: HeadConfig, weights: Eagle1Weights) -> None:
        super().__init__(config, weights.middle_norm)
        self.weights = weights

    def enter(self, features: Tensor) -> Tensor:
        return self.weights.final_norm(features).to(self.dtype)

    def layer(self, tokens: Tensor, entered: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        residual = self.weights.fc(torch.cat([self.weights.embed(tokens).to(self.dtype), entered], -1))
        return self._finish(self.weights, residual, self.weights.qkv(residual), positions, attend)

    def returned(self, outputs: Tensor) -> Tensor:
        return outputs

    def draft_logits(self, outputs: Tensor) -> Tensor:
        return self.weights.lm_head(outputs)


def read_eagle1(files: HeadFiles, tensors: Mapping[str, Tensor], target: Loaded) -> Eagle1Network:
    """The network of a head in the official layout of EAGLE and EAGLE-2."""
    check_settings(files, COMPUTED | NOT_EAGLE3 | {"num_hidden_layers": (1,)})
    model, layer = target.backend.model, files.layer  # type: ignore[attr-defined]
    text_config, norm = model.config.get_text_config(), getattr(model.get_decoder(), "norm", None)
    lm_head = model.get_output_embeddings()
    if norm is None:
        raise UsageError(
            f"draft head {files.source!r} does not work with target {target.name!r}, which has no final norm called "
            "'norm'; allowed: targets that have one"
        )
    check_size(files, target, "hidden_size", layer["hidden_size"], text_config.hidden_size)
    check_size(files, target, "vocab_size", layer["vocab_size"], target.backend.vocab_size)
    config = HeadConfig(
        layers=(text_config.num_hidden_layers,),
        target_hidden_size=layer["hidden_size"],
        windows=tuple(windows_of(files)),
        **(layer_settings(files, target) | {"head_dim": layer["hidden_size"] // layer["num_attention_heads"]}),
    )
    read = TensorReader(files, tensors, target.backend.device)
    size, parts = config.hidden_size, projections(config, LAYER, "qkv")
    qkv, fc = read.product(parts, size), read.product({FEATURES: size}, 2 * size)
    if layer.get("qkv_bias"):
        biases = [read(f"{name.removesuffix('weight')}bias", outputs) for name, outputs in parts.items()]
        qkv = _plus(qkv, torch.cat(biases))
    weights = Eagle1Weights(
        fc=_plus(fc, read("fc.bias", size)) if layer.get("bias", "fc.bias" in tensors) else fc,
        qkv=qkv,
        **after_attention(read, config, LAYER),
        final_norm=norm,
        lm_head=lambda outputs: lm_head(outputs.to(model.dtype)),
        embed=own_embedding(read, config) or model.get_input_embeddings(),
    )
    read.check_all_read()
    return Eagle1Network(config, weights)


def _plus(product: Linear, bias: Tensor) -> Linear:
    return lambda x: product(x) + bias
