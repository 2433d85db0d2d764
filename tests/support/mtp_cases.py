"""Tiny targets with random multi-token-prediction layers in the layouts of their checkpoints, and what these draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.tiny_models import VOCAB, tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MIXTURE: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
QWEN: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "partial_rotary_factor": 0.5,
}


def _prefixed(prefix: str, names: Mapping[str, str]) -> Callable[[int, int, str], str]:
    """How a layout names a layer's tensors, from its number, the target's number of layers, and our names."""

    def name(number: int, num_layers: int, ours: str) -> str:
        return prefix.format(number, num_layers + number) + names.get(ours, ours)

    return name


DEEPSEEK = _prefixed("model.layers.{1}.", {"norm.weight": "shared_head.norm.weight"})
MIMO = _prefixed(
    "model.mtp_layers.{0}.",
    {
        "enorm.weight": "token_layernorm.weight",
        "hnorm.weight": "hidden_layernorm.weight",
        "eh_proj.weight": "input_proj.weight",
        "norm.weight": "final_layernorm.weight",
    },
)


def _of_qwen(number: int, num_layers: int, ours: str) -> str:
    shared = {
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj.weight": "mtp.fc.weight",
        "norm.weight": "mtp.norm.weight",
    }
    return shared.get(ours, f"mtp.layers.{number}.{ours}")


@dataclass(frozen=True)
class Layout:
    """A kind of target and how its checkpoints name MTP layers. like: which of its layers they are like."""

    config: Callable[[], Any]
    name: Callable[[int, int, str], str]
    like: int
    hidden_first: bool = False
    counted_as: str = "num_nextn_predict_layers"  # where the configuration tells their number


LAYOUTS: dict[str, Layout] = {
    "deepseek_v3": Layout(lambda: transformers.DeepseekV3Config(**SHAPE | MIXTURE | LATENT), DEEPSEEK, 2),
    "glm4_moe": Layout(lambda: transformers.Glm4MoeConfig(**SHAPE | MIXTURE, head_dim=8), DEEPSEEK, 2),
    "qwen3_5": Layout(lambda: transformers.Qwen3_5TextConfig(**SHAPE | QWEN), _of_qwen, 3),
    "mimo": Layout(lambda: transformers.Qwen2Config(**SHAPE), MIMO, 1, hidden_first=True),
}


@dataclass(frozen=True)
class Written:
    """A checkpoint that was written. layers: tensors of each MTP layer by our names."""

    folder: Path
    layout: Layout
    layers: list[dict[str, Tensor]]


def write_target(folder: Path, kind: str, *, count: int = 1, seed: int = 0, dtype: Any = torch.float32) -> Written:
    """A random target of this kind with `count` MTP layers."""
    layout = LAYOUTS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(layout.config(), dtype=dtype)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors, gen = load_file(file), torch.Generator().manual_seed(seed + 1)
    size, num_layers = SHAPE["hidden_size"], model.config.num_hidden_layers
    start = f"model.layers.{layout.like}."
    layers = list[dict[str, Tensor]]()
    for _ in range(count):
        block = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        layer = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=gen) for name, tensor in block.items()}
        layer |= {f"{name}.weight": 1 + 0.3 * torch.randn(size, generator=gen) for name in ("enorm", "hnorm", "norm")}
        layer["eh_proj.weight"] = torch.randn(size, 2 * size, generator=gen) / size**0.5
        layers.append({name: tensor.to(dtype) for name, tensor in layer.items()})
    for number, layer in enumerate(layers):
        tensors |= {layout.name(number, num_layers, name): tensor.contiguous() for name, tensor in layer.items()}
    save_file(tensors, file, {"format": "pt"})
    return Written(folder, layout, layers)
