"""Tiny mixtures of experts of every declared family, and a GGUF file of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.models.cpu.block_experts import expert_blocks
from tests.support.gguf_files import BY_NAME, byte_level, random_blocks

SHAPE: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 96,
    "num_experts_per_tok": 3,
    "num_experts": 8,
    "num_local_experts": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FULL = {"layer_types": ["full_attention"] * 2}
SHARED = {"shared_expert_intermediate_size": 64}
GLM = {"n_routed_experts": 8, "n_shared_experts": 2, "routed_scaling_factor": 1.8}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": SHARED,
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_next": SHARED | FULL,
    "qwen3_5_moe_text": SHARED | FULL,
    "olmoe": {},
    "mixtral": {},
    "granitemoe": {},
    "gpt_oss": {},
    "glm4_moe": GLM | {"first_k_dense_replace": 0},
    "glm4_moe_lite": GLM | LATENT | {"mlp_layer_types": ["sparse"] * 2},
    "lfm2_moe": FULL | {"num_dense_layers": 0, "use_expert_bias": True},
}


def mixture(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A tiny random model of a family, whose routers clearly prefer some experts."""
    config = AutoConfig.for_model(family, **(SHAPE | FAMILIES[family] | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("bias") and tensor.is_floating_point():
                tensor.data.normal_(0, 0.1)
            elif isinstance(tensor, nn.Parameter) and tensor.dim() > 1:
                tensor.data.normal_(0, 0.3)
    return model


def block_of(model: Any) -> tuple[str, nn.Module]:
    """The first block of experts, and its name."""
    return expert_blocks(model)[0]


def write_gguf(path: Path, kind: str, family: str = "qwen3_moe") -> Any:
    """A GGUF file of a tiny Qwen mixture in blocks of this type; returns the model of the file's numbers."""
    import gguf
    from gguf.quants import dequantize, quantize

    sizes = {"moe_intermediate_size": 256, "hidden_size": 256, "shared_expert_intermediate_size": 256}
    sizes["head_dim"] = 64
    model, architecture = mixture(family, **sizes), family.replace("_", "")
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    byte_level("qwen2", {"<a>": 3, "<b>": 3, "<c>": 3}, merges=("Ċ Ċ",))(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)

    def add(name: str, tensor: torch.Tensor) -> None:
        """Writes a tensor, and gives it the numbers that the file holds."""
        numbers = tensor.float().numpy()
        if tensor.dim() == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(name, numbers[0] if "shexp" in name else numbers)
            return
        number = gguf.GGMLQuantizationType[kind]
        if kind in ("Q4_K", "Q5_K", "Q6_K"):
            rows = numbers.reshape(-1, numbers.shape[-1])
            raw = random_blocks(BY_NAME[kind], *rows.shape, seed=len(name), scale=0.0003)
            raw = raw.reshape(*numbers.shape[:-1], -1)
        else:
            raw = quantize(numbers, number)
        writer.add_tensor(name, raw, raw_dtype=number)
        tensor.copy_(torch.from_numpy(dequantize(raw, number).astype(numpy.float32)))

    for key, tensor in model.state_dict().items():
        if key.endswith("experts.gate_up_proj"):
            layer = key.split(".")[2]
            for part, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
                add(f"blk.{layer}.ffn_{part}_exps.weight", half)
        elif key.endswith("experts.down_proj"):
            add(f"blk.{key.split('.')[2]}.ffn_down_exps.weight", tensor)
        elif key != "lm_head.weight" or not config.tie_word_embeddings:
            add(names.get_name(key, (".weight", ".bias")), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
