"""Tiny mixtures of experts of every declared family, and the check that drafts change no text of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.models.cpu.block_experts import expert_blocks

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
SPARSE = {"mlp_layer_types": ["sparse"] * 2}
SHARED = {"shared_expert_intermediate_size": 64}
GLM = {"n_routed_experts": 8, "n_shared_experts": 2, "routed_scaling_factor": 1.8}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "head_dim": 32,
    "v_head_dim": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
GROUPS = {"n_group": 4, "topk_group": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": SHARED,
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_next": SHARED | FULL,
    "qwen3_5_moe_text": SHARED | FULL,
    "olmoe": {},
    "mixtral": {},
    "flex_olmo": {},
    "minimax_m2": {},
    "hunyuan_v1_moe": {"moe_topk": 3},
    "granitemoe": {},
    "granitemoeshared": {"shared_intermediate_size": 64},
    "granitemoe_swa": FULL,
    "gpt_oss": {},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 3, "moe_layer_start_index": 0, "moe_num_shared_experts": 1},
    "glm4_moe": GLM | {"first_k_dense_replace": 0},
    "glm4_moe-groups": GLM | GROUPS | {"first_k_dense_replace": 0},
    "solar_open": GLM,
    "dots1": GLM | {"first_k_dense_replace": 0},
    "exaone_moe": FULL | SPARSE | {"num_shared_experts": 2, "routed_scaling_factor": 1.8},
    "hy_v3": SPARSE | {"num_shared_experts": 2, "router_scaling_factor": 1.8},
    "afmoe": FULL | {"num_shared_experts": 2, "route_scale": 1.8, "num_dense_layers": 0},
    "mellum": FULL | SPARSE,
    "glm4_moe_lite": GLM | LATENT | SPARSE,
    "deepseek_v2": GLM | LATENT | {"q_lora_rank": None},
    "deepseek_v2-groups": GLM | LATENT | GROUPS | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": GLM | LATENT | GROUPS,
    "lfm2_moe": FULL | {"num_dense_layers": 0, "use_expert_bias": True},
}


def mixture(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A tiny random model of a family, whose routers clearly prefer some experts."""
    config = AutoConfig.for_model(family.partition("-")[0], **(SHAPE | FAMILIES[family] | changes))
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


PROMPTS = [[5, 9, 5, 9, 5, 9, 70, 71], [100, 7, 33], list(range(40, 90))]


def assert_drafts_change_no_text(source: str, **options: Any) -> None:
    """Texts with drafts equal plain ones, alone and in a batch; `suffix` knows the texts of the batch already."""
    params = [SamplingParams(max_tokens=30, temperature=t, seed=3) for t in (0.0, 0.9, 0.0)]
    texts = []
    with SpeculativeDecoder(source, drafter="none", max_batch_size=4, **options) as plain:
        for drafter in ("none", "ngram", "suffix"):
            decoder = plain if drafter == "none" else plain.using(drafter, num_draft_tokens=5)
            alone = [decoder.generate(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
            together = decoder.generate(PROMPTS, params)
            texts += [[result.token_ids for result in alone], [result.token_ids for result in together]]
    assert all(other == texts[0] for other in texts[1:])
    assert sum(result.stats.num_accepted_tokens for result in together) > 10
