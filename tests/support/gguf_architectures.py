"""Tiny random models of many architectures, written as GGUF files in the form that llama.cpp's converter makes.

Metadata and orders follow conversion/*.py of github.com/ggml-org/llama.cpp; names of tensors are the gguf package's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.gguf_files import BY_NAME, TOKENS, _add_tokenizer, random_blocks

Written = Iterable[tuple[str, Tensor]]
Write = Callable[[Any, str, Tensor], Written | None]  # configuration, parameter, numbers; None: as they are
SIZES: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
HEADS = {"head_dim": 32}


@dataclass(frozen=True)
class Case:
    """An architecture. settings: of its configuration, beside `SIZES`; more: metadata, given the configuration."""

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    more: Callable[[Any], dict[str, Any]] = lambda config: {}
    write: Write = lambda config, name, numbers: None
    without: tuple[str, ...] = ()  # generic metadata that its files do not have
    rounded: tuple[str, ...] = ()  # parameters that come back with another last bit
    in_blocks: bool = True  # its files can be computed in blocks
    tensors: Callable[[Any], dict[str, Tensor]] = lambda config: {}

    def config(self) -> Any:
        config = AutoConfig.for_model(self.model_type, **(SIZES | self.settings))
        config.allow_global_per_layer_attribute_access = True  # of Gemma 4, whose layers differ in their heads
        return config


def model_of(config: Any, seed: int = 0) -> Any:
    """A model whose numbers, norms and persistent buffers among them, are all random."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        is_norm = "norm" in name or name.endswith((".D", "layer_scalar"))
        tensor.copy_((1 if is_norm and not is_shifted(config, name) else 0) + 0.15 * noise)
        if config.model_type == "gemma4_text" and name.endswith("q_norm.weight"):
            tensor *= 0.2  # its scores are not scaled, so that roundings would decide which token is attended to
    model.tie_weights()
    return model


def is_shifted(config: Any, name: str) -> bool:
    """True for norms that multiply by 1 plus their weight."""
    kinds = ("gemma", "gemma2", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text")
    return config.model_type in kinds and name.endswith("norm.weight") and "linear_attn" not in name


def write_case(
    path: Path, architecture: str, case: Case, kind: str = "F32", skip: tuple[str, ...] = (), **more: Any
) -> Any:
    """Write a file, and return its model. kind: of matrices, random ones for K types; skip: what to leave out; more:
    metadata."""
    import gguf

    config = case.config()
    model = model_of(config)
    writer = gguf.GGUFWriter(path, architecture)
    _add_tokenizer(writer)
    values = {name: value for name, value in generic(config).items() if name not in case.without}
    for name, value in (values | case.more(config) | more).items():
        if name not in skip:
            add_value(writer, f"{architecture}.{name}", value)
    kinds = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    for parameter, numbers in model.state_dict().items():
        if parameter == "lm_head.weight" and config.tie_word_embeddings:
            continue
        changed = numbers + 1 if is_shifted(config, parameter) else numbers
        for name, tensor in (
            case.write(config, parameter, changed) or experts(parameter, changed) or [(parameter, changed)]
        ):
            written = name if name.startswith(("blk.", "rope")) else names.get_name(name, (".weight", ".bias"))
            assert written is not None, name
            if written not in skip:
                add_tensor(writer, written, tensor, kind)
    for name, tensor in case.tensors(config).items():
        add_tensor(writer, name, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def add_tensor(writer: Any, name: str, tensor: Tensor, kind: str) -> None:
    import gguf
    from gguf.quants import quantize

    numbers = numpy.ascontiguousarray(tensor.float().numpy())
    is_matrix = numbers.ndim > 1 < numbers.shape[-1] and not any(
        part in name for part in ("conv", "ffn_gate_inp", "ssm_norm", "ssm_d", ".bias")
    )
    if is_matrix and numbers.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
        kind = "Q8_0"  # rows of whole blocks of the type only
    if kind == "F32" or not is_matrix:
        writer.add_tensor(name, numbers)
    else:
        number = gguf.GGMLQuantizationType[kind]
        if kind.endswith(("_K", "NVFP4")) or kind.startswith("IQ"):  # which the package does not quantize to
            scale = 0.0001 if kind in ("Q6_K", "IQ4_XS") else 0.0003  # so that no type has much larger numbers
            rows = random_blocks(BY_NAME[kind], *numbers.reshape(-1, numbers.shape[-1]).shape, len(name), scale)
            raw = rows.reshape(*numbers.shape[:-1], -1)
        else:
            raw = quantize(numbers, number)
        writer.add_tensor(name, raw, raw_dtype=number)


def add_value(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    (writer.add_array if isinstance(value, list) else kinds[type(value)])(key, value)


def generic(config: Any) -> dict[str, Any]:
    """What the converter writes for every architecture, from the configuration's fields that it has."""
    values = config.to_dict()
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": values.get("intermediate_size"),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": values.get("rms_norm_eps", values.get("norm_eps")),
        "attention.layer_norm_epsilon": values.get("layer_norm_eps", values.get("norm_epsilon")),
        "attention.key_length": values.get("head_dim"),
        "attention.value_length": values.get("head_dim"),
        "expert_count": getattr(config, "num_experts", None) or values.get("num_local_experts"),
        "expert_used_count": values.get("num_experts_per_tok"),
        "expert_group_count": values.get("n_group"),
        "expert_group_used_count": values.get("topk_group"),
        "vocab_size": config.vocab_size,
    }
    return {name: value for name, value in found.items() if value is not None} | rotary(config.rope_parameters)


def rotary(settings: dict[str, Any]) -> dict[str, Any]:
    local = settings.get("sliding_attention", {}).get("rope_theta")
    settings = settings.get("full_attention", settings)
    found: dict[str, Any] = {"rope.freq_base": float(settings["rope_theta"])}
    if local is not None:
        found["rope.freq_base_swa"] = float(local)
    if settings.get("rope_type") in ("linear", "yarn"):
        found |= {"rope.scaling.type": settings["rope_type"], "rope.scaling.factor": float(settings["factor"])}
    if settings.get("rope_type") == "yarn":
        found["rope.scaling.original_context_length"] = settings["original_max_position_embeddings"]
        for field, name in (
            ("attention_factor", "attn_factor"),
            ("beta_fast", "beta_fast"),
            ("beta_slow", "beta_slow"),
        ):
            if field in settings:
                found[f"rope.scaling.yarn_{name}"] = float(settings[field])
    return found


def experts(parameter: str, numbers: Tensor) -> Written | None:
    """Stacked experts, whose gate and up are tensors of their own."""
    if not parameter.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return None
    layer = f"blk.{parameter.split('.')[2]}"
    if parameter.endswith("down_proj"):
        return [(f"{layer}.ffn_down_exps.weight", numbers)]
    gate, up = numbers.chunk(2, 1)
    return [(f"{layer}.ffn_gate_exps.weight", gate), (f"{layer}.ffn_up_exps.weight", up)]


def permuted(config: Any, parameter: str, numbers: Tensor) -> Written | None:
    """Queries and keys of llama and its like: row 2 j + h of a head is the model's row j of half h."""
    if not parameter.endswith(("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")):
        return None
    heads = config.num_attention_heads if ".q_proj" in parameter else config.num_key_value_heads
    half = numbers.shape[0] // heads // 2
    places = [head * 2 * half + h * half + j for head in range(heads) for j in range(half) for h in range(2)]
    return [(parameter, numbers[places])]


def delta_net(config: Any, parameter: str, numbers: Tensor) -> Written | None:
    """Value heads in turn over the key heads, the decay instead of its logarithm."""
    if ".linear_attn." not in parameter:
        return None
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    skipped, size = 2 * keys * config.linear_key_head_dim, config.linear_value_head_dim

    def tiled(start: int, length: int) -> list[int]:
        each = values // keys
        order = [key * each + value for value in range(each) for key in range(keys)]
        return [*range(start), *(start + head * length + i for head in order for i in range(length))]

    name = parameter.rpartition("linear_attn.")[2]
    if name == "A_log":
        numbers = -numbers.exp()
    if name == "conv1d.weight":
        numbers = numbers.squeeze(1)
    if name in ("in_proj_qkv.weight", "conv1d.weight"):
        numbers = numbers[tiled(skipped, size)]
    elif name == "in_proj_z.weight":
        numbers = numbers[tiled(0, size)]
    elif name in ("in_proj_a.weight", "in_proj_b.weight", "dt_bias", "A_log"):
        numbers = numbers[tiled(0, 1)]
    elif name == "out_proj.weight":
        numbers = numbers[:, tiled(0, size)]
    layer = f"blk.{parameter.split('.')[2]}"
    special = {"dt_bias": f"{layer}.ssm_dt.bias", "A_log": f"{layer}.ssm_a"}
    return [(special.get(name, parameter), numbers)]


def delta_net_keys(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": 4,
        "rope.dimension_count": config.head_dim // 4,
        "rope.dimension_sections": [11, 11, 10, 0],
    }


def gpt_oss(config: Any, parameter: str, numbers: Tensor) -> Written | None:
    layer = f"blk.{parameter.split('.')[2]}" if ".layers." in parameter else ""
    if parameter.endswith("sinks"):
        return [(f"{layer}.attn_sinks.weight", numbers)]
    if ".experts." not in parameter:
        return None
    if "down_proj" in parameter:
        if parameter.endswith("bias"):
            return [(f"{layer}.ffn_down_exps.bias", numbers)]
        return [(f"{layer}.ffn_down_exps.weight", numbers.mT)]
    if parameter.endswith("bias"):
        return [(f"{layer}.ffn_gate_exps.bias", numbers[:, ::2]), (f"{layer}.ffn_up_exps.bias", numbers[:, 1::2])]
    rows = numbers.mT
    return [(f"{layer}.ffn_gate_exps.weight", rows[:, ::2]), (f"{layer}.ffn_up_exps.weight", rows[:, 1::2])]


def convolution(config: Any, parameter: str, numbers: Tensor) -> Written | None:
    """Short convolutions and sigmoid experts of LFM2."""
    if parameter.endswith("conv.conv.weight"):
        return [(parameter, numbers.squeeze(1))]
    if parameter.endswith("expert_bias"):
        return [(f"{parameter}.bias", numbers)]
    return None


def convolution_keys(config: Any) -> dict[str, Any]:
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    return {"shortconv.l_cache": config.conv_L_cache, "attention.head_count_kv": heads}


def sigmoid(config: Any, parameter: str, numbers: Tensor) -> Written | None:
    """The bias for the choice of experts."""
    if parameter.endswith("e_score_correction_bias"):
        return [(f"blk.{parameter.split('.')[2]}.exp_probs_b.bias", numbers)]
    return None


def latent_keys(config: Any, gating: int, is_joint: bool = False) -> dict[str, Any]:
    """is_joint: of a file that has the matrices of keys and values in one tensor."""
    rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    of_heads = {"key_length": config.qk_nope_head_dim + rotated, "value_length": config.v_head_dim}
    lengths = {"key_length": rank + rotated, "value_length": rank, "head_count_kv": 1}
    lengths |= {f"{name}_mla": size for name, size in of_heads.items()}
    if is_joint:
        lengths = of_heads | {"head_count_kv": config.num_attention_heads}
    keys = {
        **{f"attention.{name}": size for name, size in lengths.items()},
        "expert_count": config.n_routed_experts,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rotated,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": 1,
        "expert_gating_func": gating,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": gating == 2,
    }
    return {name: value for name, value in keys.items() if value is not None}


def latent(config: Any, parameter: str, numbers: Tensor) -> Written | None:
    """The matrix of keys and values of latent attention, in two; that of the keys transposed."""
    if not parameter.endswith("kv_b_proj.weight"):
        return sigmoid(config, parameter, numbers)
    layer = f"blk.{parameter.split('.')[2]}"
    heads = numbers.view(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
    return [(f"{layer}.attn_k_b.weight", keys.mT), (f"{layer}.attn_v_b.weight", values)]


def gemma4(config: Any, parameter: str, numbers: Tensor) -> Written | None:
    layer = f"blk.{parameter.split('.')[2]}" if ".layers." in parameter else ""
    special = {
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "layer_scalar": "layer_output_scale.weight",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    }
    name = next((written for ending, written in special.items() if parameter.endswith(ending)), None)
    return None if name is None else [(f"{layer}.{name}", numbers)]


def gemma4_keys(config: Any) -> dict[str, Any]:
    local = [kind == "sliding_attention" for kind in config.layer_types]
    full = config.per_layer_config[local.index(False)]
    kv = full.num_key_value_heads
    found = {
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": local,
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": config.head_dim,
        "final_logit_softcapping": config.final_logit_softcapping,
        "attention.head_count_kv": [config.num_key_value_heads if is_local else kv for is_local in local],
    }
    if config.enable_moe_block:
        found |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    if config.use_double_wide_mlp:
        first, wide = config.num_hidden_layers - config.num_kv_shared_layers, 2 * config.intermediate_size
        found["feed_forward_length"] = [config.intermediate_size if i < first else wide for i in range(len(local))]
    return found


def proportional(config: Any) -> dict[str, Tensor]:
    size = config.per_layer_config[config.layer_types.index("full_attention")].head_dim
    rotated = int(size * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    return {"rope_freqs.weight": torch.tensor([1.0] * rotated + [1e30] * (size // 2 - rotated))}


def granite_keys(config: Any) -> dict[str, Any]:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
    }


def granite_experts(config: Any, parameter: str, numbers: Tensor) -> Written | None:
    if parameter.endswith("router.weight"):
        return [(f"blk.{parameter.split('.')[2]}.ffn_gate_inp.weight", numbers)]
    return permuted(config, parameter, numbers)


def mamba(config: Any, parameter: str, numbers: Tensor) -> Written | None:
    layer = f"blk.{parameter.split('.')[2]}" if ".layers." in parameter else ""
    name = parameter.partition("mamba.")[2]
    groups = config.mamba_n_groups
    if name == "A_log":
        return [(f"{layer}.ssm_a", -numbers.exp()[:, None])]
    if name == "D":
        return [(f"{layer}.ssm_d", numbers[:, None])]
    if name == "dt_bias":
        return [(f"{layer}.ssm_dt.bias", numbers)]
    if name == "norm.weight":
        return [(f"{layer}.ssm_norm.weight", numbers.view(groups, -1))]
    if name == "conv1d.weight":
        return [(f"{layer}.ssm_conv1d.weight", numbers.squeeze(1))]
    if parameter.endswith("shared_mlp.input_linear.weight"):
        ending = "_shexp.weight" if config.num_local_experts else ".weight"
        return [
            (f"{layer}.ffn_{part}{ending}", half) for part, half in zip(("gate", "up"), numbers.chunk(2), strict=True)
        ]
    if parameter.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
        return [(f"{layer}.ffn_down.weight", numbers)]
    return granite_experts(config, parameter, numbers)


def mamba_keys(config: Any) -> dict[str, Any]:
    inner = config.mamba_expand * config.hidden_size
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    return granite_keys(config) | {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": inner,
        "ssm.time_step_rank": config.mamba_n_heads,
        "attention.head_count_kv": heads,
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
    }


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 8192
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def llama3_factors(config: Any) -> dict[str, Tensor]:
    size = config.head_dim
    factors = []
    for pair in range(size // 2):
        turns = 8192 / (2 * math.pi * config.rope_parameters["rope_theta"] ** (2 * pair / size))
        smooth = min(max((turns - 1) / 3, 0), 1)
        factors.append(1 / ((1 - smooth) / 8 + smooth))
    return {"rope_freqs.weight": torch.tensor(factors)}


def rotates(config: Any) -> dict[str, Any]:
    return {
        "rope.dimension_count": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    }


def theta(number: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": number} | more}


def pattern(config: Any) -> dict[str, Any]:
    return {"attention.sliding_window": config.sliding_window}


GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 4.0,
    "attention_multiplier": 0.25,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA4 = HEADS | {
    "num_hidden_layers": 6,
    "sliding_window": 8,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 20.0,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 9000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 90000.0},
    },
}
LATENT = theta(9000.0) | {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.8,
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    **dict.fromkeys(("qk_rope_head_dim", "head_dim"), 32),
    "qk_nope_head_dim": 64,
    "v_head_dim": 96,
}
DELTA_NET = HEADS | {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    **theta(70000.0, partial_rotary_factor=0.25, mrope_section=[11, 11, 10], mrope_interleaved=True),
}

CASES: dict[str, Case] = {
    "llama": Case("llama", HEADS | theta(5000.0), rotates, permuted),
    "llama-biased": Case("llama", theta(5000.0) | {"attention_bias": True, "mlp_bias": True}, rotates, permuted),
    "llama-llama3": Case("llama", HEADS | theta(5e5, **LLAMA3), rotates, permuted, tensors=llama3_factors),
    "llama-mixtral": Case(
        "mixtral",
        HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        rotates,
        permuted,
    ),
    "mistral3": Case(
        "ministral3",
        HEADS
        | theta(9000.0, **YARN, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)
        | {"max_position_embeddings": 512},
        lambda config: (
            rotates(config)
            | {
                "rope.scaling.yarn_log_multiplier": config.rope_parameters["mscale_all_dim"],
                "attention.temperature_scale": config.rope_parameters["llama_4_scaling_beta"],
            }
        ),
        permuted,
    ),
    "mistral3-mistral": Case("mistral", HEADS | {"sliding_window": None}, rotates, permuted),
    "qwen2": Case("qwen2", theta(1e6, **YARN) | {"tie_word_embeddings": True}),
    "qwen3": Case("qwen3", HEADS | theta(1e6)),
    "gemma": Case(
        "gemma", HEADS | {"tie_word_embeddings": True, "num_key_value_heads": 1}, without=("rope.freq_base",)
    ),
    "gemma2": Case(
        "gemma2",
        HEADS
        | {"tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": 32}
        | {"attn_logit_softcapping": 40.0, "final_logit_softcapping": 25.0},
        lambda config: (
            pattern(config)
            | {
                "attn_logit_softcapping": config.attn_logit_softcapping,
                "final_logit_softcapping": config.final_logit_softcapping,
            }
        ),
        without=("rope.freq_base",),
    ),
    "gemma3": Case(
        "gemma3_text",
        HEADS
        | {"tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": 32, "num_hidden_layers": 7}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 9000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 90000.0},
            }
        },
        pattern,
    ),
    "phi3": Case(
        "phi3",
        theta(9000.0, partial_rotary_factor=0.5) | {"sliding_window": 8, "original_max_position_embeddings": 512},
        lambda config: {
            "rope.dimension_count": 8,
            "rope.scaling.original_context_length": config.original_max_position_embeddings,
            "attention.sliding_window": config.sliding_window,
        },
    ),
    "phi3-longrope": Case(
        "phi3",
        theta(
            9000.0,
            partial_rotary_factor=1.0,
            rope_type="longrope",
            original_max_position_embeddings=64,
            long_factor=[1.5 + i for i in range(8)],
            short_factor=[1.0 + i / 10 for i in range(8)],
        )
        | {"original_max_position_embeddings": 64},
        lambda config: {
            "rope.dimension_count": 16,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(8) / math.log(64)),
            "attention.sliding_window": 0,
        },
        tensors=lambda config: {
            "rope_factors_long.weight": torch.tensor(config.rope_parameters["long_factor"]),
            "rope_factors_short.weight": torch.tensor(config.rope_parameters["short_factor"]),
        },
    ),
    "smollm3": Case("smollm3", theta(5e6) | {"num_hidden_layers": 5, "tie_word_embeddings": True}, rotates, permuted),
    "olmo2": Case("olmo2", theta(5e5)),
    "olmo2-olmo3": Case(
        "olmo3",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
                "full_attention": {
                    "rope_theta": 5e5,
                    **YARN,
                    "attention_factor": 1.2,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                },
            }
        }
        | {"sliding_window": 8, "num_hidden_layers": 4},
        lambda config: (
            pattern(config)
            | {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types]}
        ),
    ),
    "glm4": Case(
        "glm4",
        HEADS | theta(9000.0, partial_rotary_factor=0.5) | {"attention_bias": True},
        lambda config: {"rope.dimension_count": 16},
    ),
    "granite": Case("granite", theta(9000.0) | GRANITE, granite_keys, permuted),
    "cohere2": Case(
        "cohere2",
        theta(9000.0) | {"sliding_window": 8, "num_hidden_layers": 4, "logit_scale": 0.25, "tie_word_embeddings": True},
        lambda config: pattern(config) | rotates(config) | {"logit_scale": 0.25, "rope.scaling.type": "none"},
    ),
    "exaone4": Case(
        "exaone4",
        theta(9000.0) | {"sliding_window": 8, "num_hidden_layers": 4, "sliding_window_pattern": 4},
        lambda config: (
            pattern(config)
            | {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types]}
        ),
    ),
    "exaone4-full": Case("exaone4", theta(9000.0) | {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "ernie4_5": Case("ernie4_5", HEADS | theta(9000.0) | {"tie_word_embeddings": True}),
    "starcoder2": Case("starcoder2", theta(9000.0) | {"sliding_window": None, "use_bias": True}),
    "qwen3moe": Case(
        "qwen3_moe",
        HEADS | EXPERTS | theta(1e6) | {"norm_topk_prob": True},
        lambda config: {"expert_feed_forward_length": config.moe_intermediate_size},
    ),
    "qwen2moe": Case(
        "qwen2_moe",
        EXPERTS | theta(1e6) | {"shared_expert_intermediate_size": 64},
        lambda config: {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 64},
        lambda config, name, numbers: (
            [(name, numbers.squeeze(0))] if name.endswith("shared_expert_gate.weight") else None
        ),
    ),
    "olmoe": Case("olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4} | theta(9000.0)),
    "granitemoe": Case(
        "granitemoe",
        theta(9000.0) | GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 2},
        granite_keys,
        granite_experts,
    ),
    "gpt-oss": Case(
        "gpt_oss",
        HEADS
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "num_hidden_layers": 3}
        | theta(150000.0, **YARN, beta_fast=32.0, beta_slow=1.0, truncate=False),
        lambda config: pattern(config) | {"expert_feed_forward_length": config.intermediate_size},
        gpt_oss,
    ),
    "lfm2": Case(
        "lfm2",
        theta(1e6)
        | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": True}
        | {"block_auto_adjust_ff_dim": False},
        convolution_keys,
        convolution,
    ),
    "lfm2moe": Case(
        "lfm2_moe",
        theta(1e6)
        | EXPERTS
        | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": True}
        | {"num_dense_layers": 1},
        lambda config: (
            convolution_keys(config)
            | {"expert_feed_forward_length": 32, "leading_dense_block_count": 1, "expert_gating_func": 2}
        ),
        convolution,
    ),
    "glm4moe": Case(
        "glm4_moe",
        HEADS
        | theta(9000.0, partial_rotary_factor=0.5)
        | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5}
        | {"attention_bias": True, "use_qk_norm": True},
        lambda config: {
            "expert_count": 8,
            "rope.dimension_count": 16,
            "expert_feed_forward_length": 32,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
        },
        sigmoid,
    ),
    "deepseek2": Case("glm4_moe_lite", LATENT | {"q_lora_rank": 64}, lambda config: latent_keys(config, 2), latent),
    # YaRN, and groups of experts
    "deepseek2-yarn": Case(
        "glm4_moe_lite",
        LATENT
        | {"q_lora_rank": 64, "n_group": 4, "topk_group": 2}
        | theta(9000.0, **YARN, mscale=0.7, mscale_all_dim=0.7),
        lambda config: latent_keys(config, 2) | {"rope.scaling.yarn_log_multiplier": 0.07},
        latent,
    ),
    # the matrices of keys and values in one tensor, in an older file
    "deepseek2-joint": Case(
        "deepseek_v2",
        LATENT | {"q_lora_rank": None, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy"},
        lambda config: latent_keys(config, 1, is_joint=True),
    ),
    "qwen35": Case("qwen3_5_text", DELTA_NET, delta_net_keys, delta_net, rounded=("A_log",)),
    "qwen35moe": Case(
        "qwen3_5_moe_text",
        DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 64, "intermediate_size": None},
        lambda config: (
            delta_net_keys(config) | {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 64}
        ),
        lambda config, name, numbers: (
            [(name, numbers.squeeze(0))]
            if name.endswith("shared_expert_gate.weight")
            else delta_net(config, name, numbers)
        ),
        rounded=("A_log",),
    ),
    "gemma4": Case("gemma4_text", GEMMA4, gemma4_keys, gemma4, tensors=proportional),
    "gemma4-experts": Case(
        "gemma4_text",
        GEMMA4
        | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        gemma4_keys,
        gemma4,
        tensors=proportional,
    ),
    "gemma4-small": Case(
        "gemma4_text",
        GEMMA4
        | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": TOKENS, "use_double_wide_mlp": True}
        | {"num_hidden_layers": 12, "num_kv_shared_layers": 6},
        gemma4_keys,
        gemma4,
        tensors=proportional,
    ),
    "granitehybrid": Case(
        "granitemoehybrid",
        theta(9000.0)
        | GRANITE
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 64, "mamba_n_heads": 8}
        | {"mamba_d_state": 16, "mamba_n_groups": 2, "num_hidden_layers": 3}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        mamba_keys,
        mamba,
        rounded=("A_log",),
    ),
    "granitehybrid-dense": Case(
        "granitemoehybrid",
        theta(9000.0)
        | GRANITE
        | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96, "mamba_n_heads": 8}
        | {"mamba_d_state": 16, "num_hidden_layers": 3, "position_embedding_type": "rope"}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        mamba_keys,
        mamba,
        rounded=("A_log",),
    ),
}


def architecture(name: str) -> str:
    """The architecture of a case: its name up to a hyphen, but for gpt-oss."""
    return name if name == "gpt-oss" else name.partition("-")[0]
