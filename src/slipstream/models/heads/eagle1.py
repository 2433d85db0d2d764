"""Heads of EAGLE (Li et al. 2024, arXiv 2401.15077) and EAGLE-2: one decoder layer over tokens and last hidden states.

EAGLE-2 has the same weights. A row's feature is the target's last hidden state after its final norm, at the position
before; the layer's output takes its place where the target has not been yet. The target's own output layer scores it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from slipstream.errors import UsageError
from slipstream.models.heads.head_files import (
    COMPUTED,
    FEATURES,
    HeadFiles,
    TensorReader,
    as_product,
    check_settings,
    check_size,
    own_embedding,
    rope_theta,
    scaled_frequencies,
    windows_of,
)
from slipstream.models.heads.network import Attend, HeadConfig, Linear, rotated, rotations
from slipstream.models.loaded import Loaded

LAYER = "layers.0."


@dataclass(frozen=True)
class Eagle1Weights:
    """A head's products and its norm; qkv and gate_up are joint. final_norm, lm_head, embed: the target's."""

    fc: Linear
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    middle_norm: Tensor
    final_norm: Callable[[Tensor], Tensor]
    lm_head: Linear
    embed: Callable[[Tensor], Tensor]


class Eagle1Network:
    """See `Network`."""

    def __init__(self, config: HeadConfig, weights: Eagle1Weights) -> None:
        self.config, self.weights = config, weights
        self.dtype, self.device = weights.middle_norm.dtype, weights.middle_norm.device
        self._cosines, self._sines = rotations(config, self.dtype, self.device)

    def enter(self, features: Tensor) -> Tensor:
        return self.weights.final_norm(features).to(self.dtype)

    def layer(self, tokens: Tensor, entered: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        config, weights = self.config, self.weights
        residual = weights.fc(torch.cat([weights.embed(tokens).to(self.dtype), entered], -1))
        qkv = weights.qkv(residual).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        both = config.num_heads + config.num_key_heads
        turned = rotated(qkv[:, :both], self._cosines[positions][:, None], self._sines[positions][:, None])
        attended = attend(turned[:, : config.num_heads], turned[:, config.num_heads :], qkv[:, both:])
        hidden = residual + weights.out(attended.transpose(1, 2).flatten(2))
        normed = rms_norm(hidden, (hidden.shape[-1],), weights.middle_norm, config.eps)
        gate, up = weights.gate_up(normed).chunk(2, -1)
        return hidden + weights.down(silu(gate) * up)

    def returned(self, outputs: Tensor) -> Tensor:
        return outputs

    def draft_logits(self, outputs: Tensor) -> Tensor:
        return self.weights.lm_head(outputs)


def read_eagle1(files: HeadFiles, tensors: Mapping[str, Tensor], target: Loaded) -> Eagle1Network:
    """The network of a head in the official layout of EAGLE and EAGLE-2."""
    check_settings(files, COMPUTED | {"num_hidden_layers": (1,)})
    model, layer = target.backend.model, files.layer  # type: ignore[attr-defined]
    text_config, norm = model.config.get_text_config(), getattr(model.get_decoder(), "norm", None)
    lm_head = model.get_output_embeddings()
    if norm is None:
        raise UsageError(
            f"draft head {files.source!r} with target {target.name!r}, which has no final norm called 'norm'; "
            "allowed: with targets that have one"
        )
    check_size(files, target, "hidden_size", layer["hidden_size"], text_config.hidden_size)
    check_size(files, target, "vocab_size", layer["vocab_size"], target.backend.vocab_size)
    heads, (inverse_frequencies, rotation_scale) = (
        layer["num_attention_heads"],
        scaled_frequencies(files.source, layer),
    )
    config = HeadConfig(
        layers=(text_config.num_hidden_layers,),
        hidden_size=layer["hidden_size"],
        target_hidden_size=layer["hidden_size"],
        intermediate_size=layer["intermediate_size"],
        num_heads=heads,
        num_key_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer["hidden_size"] // heads,
        vocab_size=target.backend.vocab_size,
        eps=layer.get("rms_norm_eps", 1e-6),
        rope_theta=rope_theta(layer),
        max_length=target.backend.max_length,
        inverse_frequencies=inverse_frequencies,
        rotation_scale=rotation_scale,
        windows=tuple(windows_of(files)),
    )
    read = TensorReader(files.source, tensors, target.backend.device)
    size, middle, key_size = config.hidden_size, config.intermediate_size, config.num_key_heads * config.head_dim
    product = partial(as_product, num_weights=sum(tensor.numel() for tensor in tensors.values()))
    counts = {"q": size, "k": key_size, "v": key_size}
    qkv = product(torch.cat([read(f"{LAYER}self_attn.{n}_proj.weight", rows, size) for n, rows in counts.items()]))
    if layer.get("qkv_bias"):
        qkv = _plus(qkv, torch.cat([read(f"{LAYER}self_attn.{n}_proj.bias", rows) for n, rows in counts.items()]))
    fc = product(read(FEATURES, size, 2 * size))
    weights = Eagle1Weights(
        fc=_plus(fc, read("fc.bias", size)) if layer.get("bias", True) else fc,
        qkv=qkv,
        out=product(read(f"{LAYER}self_attn.o_proj.weight", size, size)),
        gate_up=product(torch.cat([read(f"{LAYER}mlp.{name}_proj.weight", middle, size) for name in ("gate", "up")])),
        down=product(read(f"{LAYER}mlp.down_proj.weight", size, middle)),
        middle_norm=read(f"{LAYER}post_attention_layernorm.weight", size),
        final_norm=norm,
        lm_head=lambda outputs: lm_head(outputs.to(model.dtype)),
        embed=own_embedding(files, tensors, config) or model.get_input_embeddings(),
    )
    read.check_all_read()
    return Eagle1Network(config, weights)


def _plus(product: Linear, bias: Tensor) -> Linear:
    return lambda x: product(x) + bias
