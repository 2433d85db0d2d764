"""Random EAGLE and EAGLE-2 heads in their official layout, and a plain transcription of their computation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

INNER = 40
LAYER = "layers.0."


@dataclass(frozen=True)
class Eagle1:
    """A written head."""

    folder: Path
    tensors: Mapping[str, Tensor]


def write_eagle1(
    folder: Path, model: Any, *, seed: int = 0, bias: bool | None = None, qkv_bias: bool = False, binary: bool = False
) -> Eagle1:
    """A random head for a tiny Llama. bias: None leaves the setting out, which means true."""
    config, gen = model.config, torch.Generator().manual_seed(seed)
    size, heads, key_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    key_size = key_heads * size // heads

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen) * (2 / shape[-1] ** 0.5)

    tensors = {
        "fc.weight": random(size, 2 * size),
        f"{LAYER}self_attn.q_proj.weight": random(size, size),
        f"{LAYER}self_attn.k_proj.weight": random(key_size, size),
        f"{LAYER}self_attn.v_proj.weight": random(key_size, size),
        f"{LAYER}self_attn.o_proj.weight": random(size, size),
        f"{LAYER}mlp.gate_proj.weight": random(INNER, size),
        f"{LAYER}mlp.up_proj.weight": random(INNER, size),
        f"{LAYER}mlp.down_proj.weight": random(size, INNER),
        f"{LAYER}post_attention_layernorm.weight": 1 + 0.3 * torch.randn(size, generator=gen),
    }
    if bias is not False:
        tensors["fc.bias"] = random(size)
    if qkv_bias:
        lengths = {"q": size, "k": key_size, "v": key_size}
        tensors |= {f"{LAYER}self_attn.{name}_proj.bias": random(length) for name, length in lengths.items()}
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": INNER,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "vocab_size": config.vocab_size,
        **({} if bias is None else {"bias": bias}),
        **({"qkv_bias": True} if qkv_bias else {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if binary:
        torch.save(stored, folder / "pytorch_model.bin")
    else:
        save_file(stored, folder / "model.safetensors")
    return Eagle1(folder, tensors)


@torch.inference_mode()
def transcribed(
    head: Eagle1, model: Any, text: Sequence[int], steps: int, *, shift: int = 0, normed: bool = True
) -> list[Tensor]:
    """The head's logits for each token of its greedy draft after `text`, row by row.

    Options for negative controls: shift takes earlier features; normed=False takes them before the final norm.
    """
    t, config = head.tensors, model.config
    size, heads, key_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    width = size // heads
    last: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    states = model(input_ids=torch.tensor([list(text)]), output_hidden_states=True).hidden_states[-1][0]
    hook.remove()
    states = states if normed else last[0][0]
    keys, values, logits = list[Tensor](), list[Tensor](), list[Tensor]()

    def weighted(x: Tensor, name: str) -> Tensor:
        return linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))

    def rotated(x: Tensor, position: int) -> Tensor:
        half = width // 2
        angles = position * 5000.0 ** -(torch.arange(half) / half)
        first, second = x[:, :half], x[:, half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], 1
        )

    def row(token: int, feature: Tensor, position: int) -> Tensor:
        entered = weighted(torch.cat([model.get_input_embeddings().weight[token], feature]), "fc")
        q, k, v = (weighted(entered, f"{LAYER}self_attn.{name}_proj").view(-1, width) for name in "qkv")
        keys.append(rotated(k, position))
        values.append(v)
        attended = []
        for i, query in enumerate(rotated(q, position)):
            shared = i * key_heads // heads
            weights = torch.stack([query @ key[shared] / width**0.5 for key in keys]).softmax(0)
            attended.append(sum(w * value[shared] for w, value in zip(weights, values, strict=True)))
        hidden = entered + weighted(torch.cat(attended), f"{LAYER}self_attn.o_proj")  # type: ignore[arg-type]
        middle = rms_norm(hidden, (size,), t[f"{LAYER}post_attention_layernorm.weight"], 1e-5)
        gate, up = (weighted(middle, f"{LAYER}mlp.{name}_proj") for name in ("gate", "up"))
        return hidden + weighted(silu(gate) * up, f"{LAYER}mlp.down_proj")

    out = torch.zeros(size)
    for position in range(1, len(text)):
        out = row(text[position], states[max(0, position - 1 - shift)], position)
    for step in range(steps):
        logits.append(model.lm_head(out))
        out = row(int(logits[-1].argmax()), out, len(text) + step)
    return logits
