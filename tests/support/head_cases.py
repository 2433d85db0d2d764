"""Random draft heads in the layouts of their trainers, and a plain transcription of their computation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

INNER, DRAFTED = 40, 37  # inner size of a head, and the number of tokens it can propose


@dataclass(frozen=True)
class Written:
    """A written head: its folder, its tensors by the names of `speculators`, and the layers it reads."""

    folder: Path
    tensors: Mapping[str, Tensor]
    layers: tuple[int, ...]
    norm_before_residual: bool = False
    norm_output: bool = False


def write_head(
    folder: Path,
    model: Any,
    *,
    layout: str = "speculators",
    layers: Sequence[int] = (1, 2, 4),
    seed: int = 0,
    tokens: Sequence[int] = (),
    layer: Mapping[str, Any] | None = None,
    **flags: Any,
) -> Written:
    """A random head for a tiny Llama. tokens: those it can propose, by default random ones; flags: its settings.

    layer: further settings of its decoder layer.
    """
    config, gen = model.config, torch.Generator().manual_seed(seed)
    size, heads, key_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    width = size // heads

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen) * (2 / shape[-1] ** 0.5)

    def norm(length: int = size) -> Tensor:
        return 1 + 0.3 * torch.randn(length, generator=gen)

    ids = torch.tensor(tokens) if tokens else torch.randperm(config.vocab_size, generator=gen)[:DRAFTED].sort().values
    tensors = {
        "fc.weight": random(size, len(layers) * size),
        "layers.0.self_attn.q_proj.weight": random(heads * width, 2 * size),
        "layers.0.self_attn.k_proj.weight": random(key_heads * width, 2 * size),
        "layers.0.self_attn.v_proj.weight": random(key_heads * width, 2 * size),
        "layers.0.self_attn.o_proj.weight": random(size, heads * width),
        "layers.0.mlp.gate_proj.weight": random(INNER, size),
        "layers.0.mlp.up_proj.weight": random(INNER, size),
        "layers.0.mlp.down_proj.weight": random(size, INNER),
        "layers.0.hidden_norm.weight": norm(),
        "layers.0.input_layernorm.weight": norm(),
        "layers.0.post_attention_layernorm.weight": norm(),
        "norm.weight": norm(),
        "lm_head.weight": random(len(ids), size),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True),
    }
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": norm() for i in range(len(layers))}
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(len(layers) * size)
    layer = {
        **(layer or {}),
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": INNER,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "vocab_size": config.vocab_size,
    }
    if layout == "speculators":
        settings = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "eagle_aux_hidden_state_layer_ids": list(layers),
            "draft_vocab_size": len(ids),
            "transformer_layer_config": layer,
            **flags,
        }
        stored = dict(tensors)
    else:  # this layout numbers layers by their outputs
        nested = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in layers], **flags}
        settings = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(ids), "eagle_config": nested}
        settings |= layer
        stored = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    named = {name: bool(flags.get(name)) for name in ("norm_before_residual", "norm_output")}
    if layout != "speculators":
        named["norm_output"] = False
    return Written(folder, tensors, tuple(layers), **named)


def without(head: Written, name: str) -> Written:
    """The head without one of its tensors, for negative controls of the transcription."""
    return replace(head, tensors={key: tensor for key, tensor in head.tensors.items() if key != name})


@torch.inference_mode()
def transcribed(head: Written, model: Any, text: Sequence[int], steps: int, *, shift: int = 0) -> list[int]:
    """The head's greedy draft after `text`, row by row as in the paper. shift: for negative controls."""
    t, config = head.tensors, model.config
    size, heads, key_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    width = size // heads
    states = model(input_ids=torch.tensor([list(text)]), output_hidden_states=True).hidden_states
    ids = t["d2t"] + torch.arange(len(t["d2t"]))

    def normed(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, (x.shape[-1],), t[name], 1e-5)

    def feature(position: int) -> Tensor:
        parts = [states[i][0, position] for i in head.layers]
        if "fc_norm.0.weight" in t:
            parts = [normed(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)]
        joined = torch.cat(parts)
        return linear(normed(joined, "input_norm.weight") if "input_norm.weight" in t else joined, t["fc.weight"])

    def rotated(x: Tensor, position: int) -> Tensor:
        half = width // 2
        angles = position * 5000.0 ** -(torch.arange(half) / half)
        first, second = x[:, :half], x[:, half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], 1
        )

    keys, values, drafted = list[Tensor](), list[Tensor](), list[int]()
    shared = torch.arange(heads) * key_heads // heads  # the key head that each query head reads

    def row(token: int, entered: Tensor, position: int) -> Tensor:
        before = normed(entered, "layers.0.hidden_norm.weight")
        embedded = normed(model.get_input_embeddings().weight[token], "layers.0.input_layernorm.weight")
        both = torch.cat([embedded, before])
        q, k, v = (linear(both, t[f"layers.0.self_attn.{name}_proj.weight"]).view(-1, width) for name in "qkv")
        keys.append(rotated(k, position))
        values.append(v)
        past_keys, past_values = torch.stack(keys)[:, shared], torch.stack(values)[:, shared]
        weights = ((rotated(q, position) * past_keys).sum(-1) / width**0.5).softmax(0)
        attended = (weights[..., None] * past_values).sum(0).flatten()
        residual = before if head.norm_before_residual else entered
        hidden = residual + linear(attended, t["layers.0.self_attn.o_proj.weight"])
        middle = normed(hidden, "layers.0.post_attention_layernorm.weight")
        gate, up = (linear(middle, t[f"layers.0.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return hidden + linear(silu(gate) * up, t["layers.0.mlp.down_proj.weight"])

    out = torch.zeros(size)
    for position in range(1, len(text)):
        out = row(text[position], feature(max(0, position - 1 - shift)), position)
    for step in range(steps):
        drafted.append(int(ids[linear(normed(out, "norm.weight"), t["lm_head.weight"]).argmax()]))
        entered = normed(out, "norm.weight") if head.norm_output else out
        out = row(drafted[-1], entered, len(text) + step)
    return drafted
