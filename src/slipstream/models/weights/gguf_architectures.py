"""Translates the files of each GGUF architecture to transformers' configuration and parameters.

Source: llama.cpp (github.com/ggml-org/llama.cpp, 2026): names and orders from conversion/*.py and
gguf-py/gguf/constants.py, defaults of missing values from src/models/*.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy

from slipstream.models.weights.gguf_file import GGUFHeader
from slipstream.models.weights.gguf_metadata import (
    FACTORS,
    LONG_FACTORS,
    REQUIRED,
    Metadata,
    rope_parameters,
    rotary_base,
)

if TYPE_CHECKING:
    from torch import Tensor

Settings = dict[str, Any]  # the fields of a configuration
Order = Callable[[Settings, int], Any]  # (fields, number of rows) -> for each row of the parameter, its row in the file
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
TOKENS = "token_embd.weight"


@dataclass(frozen=True)
class Key:
    """A value of the metadata. default: llama.cpp's for a missing value; a string means that field's value."""

    name: str
    kind: type = int
    default: Any = REQUIRED


@dataclass(frozen=True)
class Source:
    """The tensors of a file whose concatenated rows are those of a parameter, or of each expert."""

    names: tuple[str, ...]
    order: Order | None = None
    columns: Order | None = None  # for each column of the parameter, its column in the file
    change: Callable[..., Tensor] | None = None  # makes the parameter of the tensors if more than the order differs
    fused: str = ""  # the tensor that holds all these rows in some files


@dataclass(frozen=True)
class Architecture:
    """How to read the files of an architecture."""

    model_type: str
    keys: Mapping[str, Key]
    tensors: Mapping[str, str | Source]  # by parameter; those of layers without "model.layers.N."
    settings: Settings = field(default_factory=dict)  # fields that no file names
    flags: Mapping[str, str] = field(default_factory=dict)  # true if a tensor's name ends with this
    expects: Mapping[str, tuple[Any, ...]] = field(
        default_factory=dict
    )  # values that are allowed, the first if missing
    scalings: tuple[str, ...] = ("linear", "yarn", "llama3")  # of rotary positions
    rotates_partly: bool = False
    finish: Callable[[Metadata, Settings], None] = lambda metadata, settings: None  # changes the settings


def architecture_of(header: GGUFHeader) -> Architecture:
    """The architecture of a file. Raises `SlipstreamError` for an unsupported one."""
    name = header.architecture
    if name == "llama" and header.values.get("llama.expert_count"):
        return MIXTRAL
    if name == "granitehybrid" and not header.values.get("granitehybrid.expert_count"):
        return replace(ARCHITECTURES[name], tensors={**ARCHITECTURES[name].tensors, **GRANITE_WITHOUT_EXPERTS})
    if name == "deepseek2" and header.values.get("deepseek2.expert_gating_func") == 1:
        return DEEPSEEK_V2
    if name == "mistral3" and "mistral3.attention.temperature_scale" not in header.values:
        return MISTRAL
    if name == "olmo2" and header.values.get("olmo2.attention.sliding_window"):
        return OLMO3
    if name not in ARCHITECTURES:
        raise header.wrong(f"architecture {name!r} is not read yet", ", ".join(sorted(ARCHITECTURES)))
    return ARCHITECTURES[name]


def settings_of(header: GGUFHeader) -> Settings:
    """The fields of the configuration, `model_type` among them, that a file's metadata and tensors describe."""
    architecture, metadata = architecture_of(header), Metadata(header)
    if TOKENS not in header.tensors:
        raise header.wrong(f"it has no tensor {TOKENS!r}", "a file with all tensors of its model")
    settings: Settings = {"model_type": architecture.model_type, **architecture.settings}
    for name, key in architecture.keys.items():
        default = key.default
        if isinstance(default, str):
            default = settings[default]
        elif callable(default):
            default = default(settings)
        settings[name] = metadata.value(key.name, key.kind, default)
    settings["num_hidden_layers"] -= metadata.value("nextn_predict_layers", int, 0)
    settings["vocab_size"] = header.tensors[TOKENS].shape[0]
    settings["tie_word_embeddings"] = "output.weight" not in header.tensors
    settings |= {name: any(t.endswith(end) for t in header.tensors) for name, end in architecture.flags.items()}
    settings["rope_parameters"] = rope_parameters(metadata, architecture.scalings)
    for key_name, allowed in {**EXPECTED, **architecture.expects}.items():
        if allowed:
            metadata.expect(key_name, *allowed)
        else:
            metadata.ignore(key_name)
    if "head_dim" in settings:
        _rotate(metadata, settings, architecture.rotates_partly)
    architecture.finish(metadata, settings)
    metadata.check_all_known()
    return settings


def _rotate(metadata: Metadata, settings: Settings, partly: bool) -> None:
    """Check the lengths of heads, and add the rotated part of a head."""
    size = settings["head_dim"]
    if not size or size % 2:
        raise metadata.wrong("attention.key_length", size, "an even number from 2")
    metadata.expect("attention.value_length", size)
    if not partly:
        metadata.expect("rope.dimension_count", size)
        return
    rotated = metadata.value("rope.dimension_count", int, size)
    if not 0 < rotated <= size or rotated % 2:
        raise metadata.wrong("rope.dimension_count", rotated, f"even numbers to {size}")
    if rotated != 2 * len(settings["rope_parameters"].get("long_factor", range(rotated // 2))):
        raise metadata.wrong("rope.dimension_count", rotated, f"two for each number of {LONG_FACTORS!r}")
    settings["rope_parameters"]["partial_rotary_factor"] = rotated / size


def source_of(architecture: Architecture, parameter: str) -> Source | None:
    """The tensors of a parameter, by their whole names; None if none is known."""
    match = LAYER.fullmatch(parameter)
    name, beginning = (match[2], f"blk.{match[1]}.") if match else (parameter, "")
    stem, _, kind = name.rpartition(".")
    for key, ending in ((name, ""), (stem, f".{kind}")):
        if (tensors := architecture.tensors.get(key)) is not None:
            source = Source((tensors,)) if isinstance(tensors, str) else tensors
            names = tuple(f"{beginning}{tensor}{ending}" for tensor in source.names)
            fused = source.fused and f"{beginning}{source.fused}{ending}"
            return Source(names, source.order, source.columns, source.change, fused)
    return None


def _interleaved(heads: str) -> Order:
    """The order of queries and keys that the file rotates in pairs of neighbors, and the model in two halves."""

    def order(settings: Settings, rows: int) -> Any:
        return numpy.arange(rows).reshape(settings[heads], -1, 2).swapaxes(1, 2).ravel()

    return order


def _value_heads(size: str = "", *, after_keys: bool = False) -> Order:
    """The order of a gated delta net's value heads: those of a key head are neighbors in the model, not in the file.

    size: the field with the number of rows per head; without it, one row. after_keys: rows of queries and keys come
    first and keep their order.
    """

    def order(settings: Settings, rows: int) -> Any:
        keys = settings["linear_num_key_heads"]
        first = 2 * keys * settings["linear_key_head_dim"] if after_keys else 0
        tiled = numpy.arange(first, rows).reshape(-1, keys, settings[size] if size else 1).swapaxes(0, 1).ravel()
        return numpy.concatenate([numpy.arange(first), tiled])

    return order


def _without_one(tensor: Tensor) -> Tensor:
    return tensor - 1


def _logarithm(tensor: Tensor) -> Tensor:
    return (-tensor).log()


def _flat(tensor: Tensor) -> Tensor:
    return tensor.flatten()


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.mT


def _experts_interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """[experts, inputs, 2 * outputs] or [experts, 2 * outputs], alternating gate and up."""
    import torch  # not sooner, so that a file can be packed while it is imported

    gate_up = torch.stack((gate, up), 2).flatten(1, 2)
    return gate_up.mT if gate_up.dim() == 3 else gate_up


def _keys_and_values(keys: Tensor, values: Tensor | None = None) -> Tensor:
    """[heads * (key + value), rank], from keys [heads, rank, key] and values [heads, value, rank], or as it is."""
    import torch

    return keys if values is None else torch.cat([keys.mT, values], 1).flatten(0, 1)


# metadata


def _without(keys: Mapping[str, Key], *names: str) -> dict[str, Key]:
    return {name: key for name, key in keys.items() if name not in names}


def _head_size(settings: Settings) -> int:
    return int(settings["hidden_size"] // max(settings["num_attention_heads"], 1))


EXPECTED = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
}
CORE = {
    "hidden_size": Key("embedding_length"),
    "num_hidden_layers": Key("block_count"),
    "num_attention_heads": Key("attention.head_count"),
    "num_key_value_heads": Key("attention.head_count_kv", int, "num_attention_heads"),
    "head_dim": Key("attention.key_length", int, _head_size),
    "intermediate_size": Key("feed_forward_length"),
    "max_position_embeddings": Key("context_length"),
}
DENSE = CORE | {"rms_norm_eps": Key("attention.layer_norm_rms_epsilon", float)}
SILU = {"hidden_act": "silu"}
USED = {"num_experts_per_tok": Key("expert_used_count")}


# tensors

TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
POST_NORMS = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
ATTENTION: dict[str, str | Source] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
ROTATED = ATTENTION | {
    "self_attn.q_proj": Source(("attn_q",), _interleaved("num_attention_heads")),
    "self_attn.k_proj": Source(("attn_k",), _interleaved("num_key_value_heads")),
}
MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
LLAMA = {**TOP, **NORMS, **ROTATED, **MLP}
QWEN = {**TOP, **NORMS, **ATTENTION, **MLP}


def _experts(place: str, router: str = "gate") -> dict[str, str | Source]:
    gate_up = Source(("ffn_gate_exps.weight", "ffn_up_exps.weight"), fused="ffn_gate_up_exps.weight")
    return {
        f"{place}{router}": "ffn_gate_inp",
        f"{place}experts.gate_up_proj": gate_up,
        f"{place}experts.down_proj": "ffn_down_exps.weight",
    }


def _shared(place: str) -> dict[str, str]:
    return {f"{place}.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}


def _shifted(tensors: Mapping[str, str]) -> dict[str, str | Source]:
    """Norms whose weights files store plus 1."""
    return {name: Source((tensor,), change=_without_one) for name, tensor in tensors.items()}


BIAS = {"attention_bias": "attn_q.bias"}
BIASES = BIAS | {"mlp_bias": "ffn_gate.bias"}


def _windows(metadata: Metadata, settings: Settings, period: int) -> None:
    """Give layers windows, except the last of each `period`, unless the file has a flag for each layer."""
    layers = settings["num_hidden_layers"]
    name = "attention.sliding_window_pattern"
    flags = []
    if type(metadata.raw(name)) is int:
        period = metadata.value(name, int)  # 0: all layers have a window
    else:
        flags = metadata.of_layers(name, bool, [])
    has_window = flags[:layers] or [not period or bool((layer + 1) % period) for layer in range(layers)]
    settings["layer_types"] = ["sliding_attention" if window else "full_attention" for window in has_window]


def _no_windows(settings: Settings) -> None:
    settings["sliding_window"] = None
    settings["layer_types"] = ["full_attention"] * settings["num_hidden_layers"]


def _two_rotations(metadata: Metadata, settings: Settings, theta: float = 10000.0) -> None:
    """Add rotary settings for layers with a window, without scaling, to those of other layers."""
    local = {"rope_type": "default", "rope_theta": rotary_base(metadata, "rope.freq_base_swa", theta)}
    settings["rope_parameters"] = {"full_attention": settings["rope_parameters"], "sliding_attention": local}


def _query_scale(settings: Settings, layers_of_27b: int) -> None:
    is_27b = settings["num_hidden_layers"] == layers_of_27b
    settings["query_pre_attn_scalar"] = _head_size(settings) if is_27b else settings["head_dim"]


def _gemma2(metadata: Metadata, settings: Settings) -> None:
    _windows(metadata, settings, 2)
    _query_scale(settings, 46)


def _gemma3(metadata: Metadata, settings: Settings) -> None:
    window = metadata.value("attention.sliding_window", int, 0)
    _windows(metadata, settings, 6)
    if not window:
        _no_windows(settings)
    settings["sliding_window"] = window or settings["max_position_embeddings"]  # transformers requires one
    softcap = metadata.value("final_logit_softcapping", float, 0.0)
    settings["final_logit_softcapping"] = softcap or None
    _query_scale(settings, 62)
    _two_rotations(metadata, settings)


def _gpt_oss(metadata: Metadata, settings: Settings) -> None:
    _windows(metadata, settings, 2)
    if settings["rope_parameters"]["rope_type"] == "yarn":
        settings["rope_parameters"]["truncate"] = False


def _phi3(metadata: Metadata, settings: Settings) -> None:
    settings["sliding_window"] = metadata.value("attention.sliding_window", int, 0) or None
    length = settings["max_position_embeddings"]
    settings["original_max_position_embeddings"] = metadata.value("rope.scaling.original_context_length", int, length)


def _smollm3(metadata: Metadata, settings: Settings) -> None:
    settings["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(settings["num_hidden_layers"])]


def _granite(metadata: Metadata, settings: Settings) -> None:
    metadata.expect("rope.scaling.finetuned", True)  # false: no rotation at all
    _multipliers(metadata, settings)


def _multipliers(metadata: Metadata, settings: Settings) -> None:
    if not settings["logits_scaling"]:
        raise metadata.wrong("logit_scale", settings["logits_scaling"], "a number other than 0")
    for name in ("embedding_multiplier", "residual_multiplier"):
        settings[name] = settings[name] or 1.0  # 0: not multiplied
    settings["attention_multiplier"] = settings["attention_multiplier"] or settings["head_dim"] ** -0.5


def _olmo3(metadata: Metadata, settings: Settings) -> None:
    _windows(metadata, settings, 4)
    _two_rotations(metadata, settings, settings["rope_parameters"]["rope_theta"])


def _exaone4(metadata: Metadata, settings: Settings) -> None:
    default = 4096 if settings["num_hidden_layers"] == 64 else 0
    window = metadata.value("attention.sliding_window", int, default)
    _windows(metadata, settings, 4)
    if window:
        settings |= {"sliding_window": window, "sliding_window_pattern": 4}
    else:
        _no_windows(settings)


def _expert_width(settings: Settings) -> int:
    return int(settings["intermediate_size"] // max(settings["num_experts_per_tok"], 1))


def _lfm2(metadata: Metadata, settings: Settings) -> None:
    heads = metadata.of_layers("attention.head_count_kv", int)
    if len({*heads} - {0}) != 1:
        raise metadata.wrong("attention.head_count_kv", heads[:8], "0 for convolutions, the same for the other layers")
    settings["num_key_value_heads"] = max(heads)
    settings["layer_types"] = ["full_attention" if count else "conv" for count in heads]


def _deepseek2(metadata: Metadata, settings: Settings) -> None:
    rank, rotated = settings["kv_lora_rank"], metadata.value("rope.dimension_count", int)
    heads, key, value = settings["num_attention_heads"], "attention.key_length", "attention.value_length"
    if f"blk.0.{LATENT_HEADS.fused}.weight" in metadata.header.tensors:  # older files store the keys of each head
        metadata.expect("attention.head_count_kv", heads)
    else:
        metadata.expect("attention.head_count_kv", 1)
        metadata.expect(key, rank + rotated)
        metadata.expect(value, rank)
        key, value = f"{key}_mla", f"{value}_mla"
    # files of GLM-4.7-Flash that do not say how experts are chosen mean the sigmoid
    is_glm = settings["num_hidden_layers"] == 47 and settings["vocab_size"] == 154_880
    gating = metadata.value("expert_gating_func", int, 2 if is_glm else REQUIRED)
    if gating not in (1, 2):
        raise metadata.wrong("expert_gating_func", gating, "1, the softmax, or 2, the sigmoid")
    dense = metadata.value("leading_dense_block_count", int, 0)
    layers = range(settings["num_hidden_layers"])
    settings |= {
        "num_key_value_heads": heads,
        **dict.fromkeys(("qk_rope_head_dim", "head_dim"), rotated),
        "qk_nope_head_dim": metadata.value(key, int) - rotated,
        "v_head_dim": metadata.value(value, int),
        "q_lora_rank": metadata.value("attention.q_lora_rank", int, 0) or None,
    }
    if gating == 1:
        settings |= {"topk_method": "group_limited_greedy", "first_k_dense_replace": dense}
    else:
        settings["mlp_layer_types"] = ["dense" if layer < dense else "sparse" for layer in layers]
    if (multiplier := metadata.value("rope.scaling.yarn_log_multiplier", float, 0.0)) > 0:  # a tenth of these factors
        settings["rope_parameters"] |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * multiplier, 6))
    _groups(metadata, settings)


def _groups(metadata: Metadata, settings: Settings) -> None:
    settings["n_group"] = metadata.value("expert_group_count", int, 0) or 1
    settings["topk_group"] = metadata.value("expert_group_used_count", int, 0) or settings["n_group"]
    settings["routed_scaling_factor"] = settings["routed_scaling_factor"] or 1.0  # 0: not multiplied


def _qwen35(metadata: Metadata, settings: Settings) -> None:
    interval = metadata.value("full_attention_interval", int, 4)
    if not interval:
        raise metadata.wrong("full_attention_interval", interval, "a number from 1")
    layers = range(settings["num_hidden_layers"])
    settings["layer_types"] = ["linear_attention" if (i + 1) % interval else "full_attention" for i in layers]
    inner, heads = metadata.value("ssm.inner_size", int), settings["linear_num_value_heads"]
    keys = settings["linear_num_key_heads"]
    if not (heads and keys) or heads % keys or inner % heads:
        raise metadata.wrong("ssm.time_step_rank", heads, f"multiples of ssm.group_count ({keys}) that divide {inner}")
    settings["linear_value_head_dim"] = inner // heads
    sections = metadata.array("rope.dimension_sections")
    # a text token's three positions are equal, so these sections change nothing
    settings["rope_parameters"] |= {"mrope_section": sections[:3] or [11, 11, 10], "mrope_interleaved": True}


def _gemma4(metadata: Metadata, settings: Settings) -> None:
    header = metadata.header
    settings["head_dim"] = metadata.value("attention.key_length_swa", int)
    _windows(metadata, settings, 6)
    full = [index for index, kind in enumerate(settings["layer_types"]) if kind == "full_attention"]
    metadata.expect("attention.value_length", settings["global_head_dim"])
    metadata.expect("attention.value_length_swa", settings["head_dim"])
    metadata.expect("rope.dimension_count", settings["global_head_dim"])
    metadata.expect("rope.dimension_count_swa", settings["head_dim"])
    heads = metadata.of_layers("attention.head_count_kv", int)
    of_full, of_windows = {heads[i] for i in full}, {count for i, count in enumerate(heads) if i not in full}
    settings["attention_k_eq_v"] = all(f"blk.{i}.attn_v.weight" not in header.tensors for i in full)
    is_shared = settings["attention_k_eq_v"]
    if len(of_full) > 1 or len(of_windows) > 1 or (of_full | of_windows != of_windows and not is_shared):
        raise metadata.wrong("attention.head_count_kv", heads[:8], "one number per kind of layer")
    settings["num_key_value_heads"] = min(of_windows or of_full)
    settings["num_global_key_value_heads"] = min(of_full) if is_shared and of_full else None
    inner = metadata.of_layers("feed_forward_length", int)
    settings["intermediate_size"], settings["use_double_wide_mlp"] = min(inner), max(inner) == 2 * min(inner)
    shared, kinds = settings["num_kv_shared_layers"], settings["layer_types"]
    first = len(kinds) - shared
    if first < 1 or not set(kinds[first:]) <= set(kinds[:first]):
        raise metadata.wrong("attention.shared_kv_layers", shared, "a number that leaves a layer of each kind before")
    if (table := header.tensors.get("per_layer_token_embd.weight")) is not None:
        if table.shape[0] != settings["vocab_size"]:
            raise header.wrong(f"tensor {table.name!r} is {list(table.shape)}", f"{settings['vocab_size']} rows")
        settings["vocab_size_per_layer_input"] = table.shape[0]
    experts = metadata.value("expert_count", int, 0)
    used, width = metadata.value("expert_used_count", int, 0), metadata.value("expert_feed_forward_length", int, 0)
    if bool(experts) != any(".ffn_gate_inp." in name for name in header.tensors):
        raise metadata.wrong("expert_count", experts, "the number of the experts that its tensors hold")
    settings["enable_moe_block"] = bool(experts)
    if experts:
        settings |= {"num_experts": experts, "top_k_experts": used, "moe_intermediate_size": width}
    if full and FACTORS not in header.tensors:
        raise header.wrong(f"it has no tensor {FACTORS!r}", "a file that says how much of a head is rotated")
    if settings["rope_parameters"]["rope_type"] == "default":  # all of a head is rotated
        settings["rope_parameters"] |= {"rope_type": "proportional", "partial_rotary_factor": 1.0}
    _two_rotations(metadata, settings)


def _ministral3(metadata: Metadata, settings: Settings) -> None:
    rope = settings["rope_parameters"]
    if rope["rope_type"] != "yarn":
        raise metadata.header.wrong(f"it scales rotary positions by {rope['rope_type']}", "yarn")
    multiplier = metadata.value("rope.scaling.yarn_log_multiplier", float)
    rope |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    rope["llama_4_scaling_beta"] = metadata.value("attention.temperature_scale", float)


def _mamba(metadata: Metadata, settings: Settings) -> None:
    rotates = metadata.value("rope.scaling.finetuned", bool, True)
    heads = metadata.of_layers("attention.head_count_kv", int)
    if len({*heads} - {0}) > 1:
        raise metadata.wrong("attention.head_count_kv", heads[:8], "0 for Mamba, the same for the other layers")
    inner, states = metadata.value("ssm.inner_size", int), settings["mamba_n_heads"]
    if inner % settings["hidden_size"] or not states or inner % states:
        raise metadata.wrong("ssm.inner_size", inner, f"multiples of {settings['hidden_size']} and of {states} heads")
    settings |= {
        "num_key_value_heads": max(heads) or settings["num_attention_heads"],
        "layer_types": ["full_attention" if count else "linear_attention" for count in heads],
        "position_embedding_type": "rope" if rotates else None,
        "mamba_expand": inner // settings["hidden_size"],
        "mamba_d_head": inner // states,
        "num_local_experts": metadata.value("expert_count", int, 0),
        "num_experts_per_tok": metadata.value("expert_used_count", int, 0),
    }
    shared = metadata.value("expert_shared_feed_forward_length", int, 0)
    settings["shared_intermediate_size"] = shared or settings["intermediate_size"]
    _multipliers(metadata, settings)


GRANITE = DENSE | {
    "logits_scaling": Key("logit_scale", float),
    "embedding_multiplier": Key("embedding_scale", float, 0.0),
    "residual_multiplier": Key("residual_scale", float, 0.0),
    "attention_multiplier": Key("attention.scale", float, 0.0),
}
QWEN_EXPERTS = (
    DENSE
    | USED
    | {
        "num_experts": Key("expert_count"),
        "moe_intermediate_size": Key("expert_feed_forward_length", int, _expert_width),
    }
)
LFM2 = _without(CORE, "num_key_value_heads") | {
    "norm_eps": DENSE["rms_norm_eps"],
    "conv_L_cache": Key("shortconv.l_cache"),
}
DELTA_NET = {
    "linear_conv_kernel_dim": Key("ssm.conv_kernel"),
    "linear_key_head_dim": Key("ssm.state_size"),
    "linear_num_key_heads": Key("ssm.group_count"),
    "linear_num_value_heads": Key("ssm.time_step_rank"),
}
SIGMOID_EXPERTS = USED | {
    "n_routed_experts": Key("expert_count"),
    "moe_intermediate_size": Key("expert_feed_forward_length"),
    "n_shared_experts": Key("expert_shared_count"),
    "norm_topk_prob": Key("expert_weights_norm", bool, False),
    "routed_scaling_factor": Key("expert_weights_scale", float, 0.0),
}
# expectations that `keys` replace
ANY_EXPERTS: dict[str, tuple[Any, ...]] = dict.fromkeys(("expert_count", "expert_used_count"), ())
ANY_GROUPS = ANY_EXPERTS | dict.fromkeys(("expert_group_count", "expert_group_used_count"), ())
SOFTMAX, SIGMOID = (ANY_EXPERTS | {"expert_gating_func": (number,)} for number in (1, 2))


GRANITE_WITHOUT_EXPERTS: dict[str, str | Source] = {
    "shared_mlp.input_linear": Source(("ffn_gate", "ffn_up")),
    "shared_mlp.output_linear": "ffn_down",
}
GEMMA_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
SHORT_CONVOLUTION: dict[str, str | Source] = {
    "model.embed_tokens": "token_embd",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    **ATTENTION,
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
VALUES = _value_heads("linear_value_head_dim")
VALUES_AFTER_KEYS = _value_heads("linear_value_head_dim", after_keys=True)
QWEN35: dict[str, str | Source] = {
    **QWEN,
    **_shifted(
        {
            "model.norm": "output_norm",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "post_attention_norm",
            **HEAD_NORMS,
        }
    ),
    "linear_attn.in_proj_qkv": Source(("attn_qkv",), VALUES_AFTER_KEYS),
    "linear_attn.in_proj_z": Source(("attn_gate",), VALUES),
    "linear_attn.in_proj_a": Source(("ssm_alpha",), _value_heads()),
    "linear_attn.in_proj_b": Source(("ssm_beta",), _value_heads()),
    "linear_attn.conv1d": Source(("ssm_conv1d",), VALUES_AFTER_KEYS),
    "linear_attn.dt_bias": Source(("ssm_dt.bias",), _value_heads()),
    "linear_attn.A_log": Source(("ssm_a",), _value_heads(), change=_logarithm),
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": Source(("ssm_out",), columns=VALUES),
}
LATENT_HEADS = Source(("attn_k_b", "attn_v_b"), change=_keys_and_values, fused="attn_kv_b")
LATENT_ATTENTION: dict[str, str | Source] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": LATENT_HEADS,
    "self_attn.o_proj": "attn_output",
}

MISTRAL = Architecture("mistral", DENSE, LLAMA, SILU | {"sliding_window": None})
MIXTRAL = Architecture(
    "mixtral",
    DENSE | USED | {"num_local_experts": Key("expert_count")},
    {**TOP, **NORMS, **ROTATED, **_experts("mlp.")},
    SILU | {"sliding_window": None},
    expects=SOFTMAX,
)
DEEPSEEK = Architecture(
    "glm4_moe_lite",
    _without(DENSE, "num_key_value_heads", "head_dim")
    | SIGMOID_EXPERTS
    | {"kv_lora_rank": Key("attention.kv_lora_rank")},
    {
        **TOP,
        **NORMS,
        **MLP,
        **LATENT_ATTENTION,
        **_experts("mlp."),
        **_shared("mlp.shared_experts"),
        "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    },
    SILU | {"attention_bias": False, "rope_interleave": True},
    expects=ANY_GROUPS,
    scalings=("yarn",),
    finish=_deepseek2,
)
DEEPSEEK_V2 = replace(
    DEEPSEEK,
    model_type="deepseek_v2",
    settings=SILU | {"attention_bias": False},
    expects=ANY_GROUPS | {"expert_weights_norm": (False,)},
)
OLMO2 = Architecture("olmo2", DENSE, {**QWEN, **POST_NORMS, **HEAD_NORMS}, SILU, BIAS)
OLMO3 = replace(
    OLMO2, model_type="olmo3", keys=DENSE | {"sliding_window": Key("attention.sliding_window")}, finish=_olmo3
)
ARCHITECTURES = {
    "llama": Architecture("llama", DENSE, LLAMA, SILU, BIASES),
    "mistral3": Architecture(
        "ministral3", DENSE, LLAMA, SILU | {"sliding_window": None}, scalings=("yarn",), finish=_ministral3
    ),
    "qwen2": Architecture("qwen2", DENSE, QWEN, SILU | {"use_sliding_window": False}),
    "qwen3": Architecture("qwen3", DENSE, {**QWEN, **HEAD_NORMS}, SILU | {"use_sliding_window": False}, BIAS),
    "gemma": Architecture(
        "gemma",
        DENSE,
        {**QWEN, **_shifted({**NORMS, "model.norm": "output_norm"})},
        {"hidden_act": "gelu_pytorch_tanh", "attention_bias": False},
    ),
    "gemma2": Architecture(
        "gemma2",
        DENSE
        | {
            "sliding_window": Key("attention.sliding_window", int, 4096),
            "attn_logit_softcapping": Key("attn_logit_softcapping", float, 50.0),
            "final_logit_softcapping": Key("final_logit_softcapping", float, 30.0),
        },
        {**QWEN, **_shifted({**GEMMA_NORMS, "model.norm": "output_norm"})},
        {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
        scalings=(),
        finish=_gemma2,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        DENSE,
        {**QWEN, **_shifted({**GEMMA_NORMS, **HEAD_NORMS, "model.norm": "output_norm"})},
        {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "attn_logit_softcapping": None},
        scalings=("linear", "yarn"),
        finish=_gemma3,
    ),
    "phi3": Architecture(
        "phi3",
        DENSE,
        {
            **QWEN,
            "self_attn.qkv_proj": "attn_qkv",
            "mlp.gate_up_proj": "ffn_up",
        },
        SILU,
        scalings=("longrope",),
        rotates_partly=True,
        finish=_phi3,
    ),
    "smollm3": Architecture(
        "smollm3",
        DENSE,
        LLAMA,
        SILU | {"use_sliding_window": False, "sliding_window": None, "no_rope_layer_interval": 4},
        BIASES,
        scalings=("linear", "yarn"),
        finish=_smollm3,
    ),
    "olmo2": OLMO2,
    "glm4": Architecture(
        "glm4",
        DENSE,
        {
            **QWEN,
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            "mlp.gate_up_proj": "ffn_up",
        },
        SILU,
        BIAS,
        rotates_partly=True,
    ),
    "granite": Architecture("granite", GRANITE, LLAMA, SILU, BIASES, finish=_granite),
    "cohere2": Architecture(
        "cohere2",
        CORE
        | {
            "layer_norm_eps": Key("attention.layer_norm_epsilon", float),
            "logit_scale": Key("logit_scale", float),
            "sliding_window": Key("attention.sliding_window"),
        },
        QWEN,
        SILU | {"attention_bias": False},
        scalings=(),
        finish=lambda metadata, settings: _windows(metadata, settings, 4),
    ),
    "exaone4": Architecture("exaone4", DENSE, {**QWEN, **POST_NORMS, **HEAD_NORMS}, SILU, finish=_exaone4),
    "ernie4_5": Architecture("ernie4_5", DENSE, QWEN, SILU, {"use_bias": "attn_q.bias"}),
    "starcoder2": Architecture(
        "starcoder2",
        CORE | {"norm_epsilon": Key("attention.layer_norm_epsilon", float)},
        {**QWEN, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
        {"hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
        {"use_bias": "attn_q.bias"},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        QWEN_EXPERTS,
        {**QWEN, **HEAD_NORMS, **_experts("mlp.")},
        SILU | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
        BIAS,
        SOFTMAX | {"expert_weights_norm": (True,)},
    ),
    "qwen2moe": Architecture(
        "qwen2_moe",
        QWEN_EXPERTS
        | {"shared_expert_intermediate_size": Key("expert_shared_feed_forward_length", int, "intermediate_size")},
        {**QWEN, **_experts("mlp."), **_shared("mlp.shared_expert"), "mlp.shared_expert_gate": "ffn_gate_inp_shexp"},
        SILU | {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
        {"qkv_bias": "attn_q.bias"},
        SOFTMAX | {"expert_weights_norm": (False,)},
    ),
    "olmoe": Architecture(
        "olmoe",
        DENSE | USED | {"num_experts": Key("expert_count"), "clip_qkv": Key("attention.clamp_kqv", float, 0.0)},
        {**QWEN, **HEAD_NORMS, **_experts("mlp.")},
        SILU | {"norm_topk_prob": False},
        BIAS,
        SOFTMAX,
        finish=lambda metadata, settings: settings.update(clip_qkv=settings["clip_qkv"] or None),
    ),
    "granitemoe": Architecture(
        "granitemoe",
        GRANITE | USED | {"num_local_experts": Key("expert_count")},
        {**TOP, **NORMS, **ROTATED, **_experts("block_sparse_moe.", "router")},
        SILU,
        BIAS,
        SOFTMAX | {"expert_shared_feed_forward_length": (0,)},
        finish=_granite,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        _without(DENSE, "intermediate_size")
        | USED
        | {
            "intermediate_size": Key("expert_feed_forward_length"),
            "num_local_experts": Key("expert_count"),
            "sliding_window": Key("attention.sliding_window"),
        },
        {
            **TOP,
            **ATTENTION,
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "post_attention_norm",
            "self_attn.sinks": "attn_sinks.weight",
            "mlp.router": "ffn_gate_inp",
            "mlp.experts.gate_up_proj": Source(
                ("ffn_gate_exps.weight", "ffn_up_exps.weight"), change=_experts_interleaved
            ),
            "mlp.experts.gate_up_proj_bias": Source(
                ("ffn_gate_exps.bias", "ffn_up_exps.bias"), change=_experts_interleaved
            ),
            "mlp.experts.down_proj": Source(("ffn_down_exps.weight",), change=_transposed),
            "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
        },
        SILU | {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        BIAS,
        ANY_EXPERTS | {"expert_gating_func": (3,), "feed_forward_length": ()},
        ("yarn",),
        finish=_gpt_oss,
    ),
    "lfm2": Architecture(
        "lfm2",
        LFM2,
        SHORT_CONVOLUTION,
        {"conv_bias": False, "block_auto_adjust_ff_dim": False},
        scalings=(),
        finish=_lfm2,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        LFM2
        | USED
        | {
            "num_experts": Key("expert_count"),
            "moe_intermediate_size": Key("expert_feed_forward_length"),
            "num_dense_layers": Key("leading_dense_block_count"),
        },
        {
            **SHORT_CONVOLUTION,
            **_experts("feed_forward."),
            "feed_forward.expert_bias": "exp_probs_b.bias",
        },
        {"conv_bias": False, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
        {"use_expert_bias": "exp_probs_b.bias"},
        SIGMOID,
        (),
        finish=_lfm2,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        DENSE | SIGMOID_EXPERTS | {"first_k_dense_replace": Key("leading_dense_block_count")},
        {
            **QWEN,
            **HEAD_NORMS,
            "post_attention_layernorm": "post_attention_norm",
            **_experts("mlp."),
            **_shared("mlp.shared_experts"),
            "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
        },
        SILU,
        BIAS | {"use_qk_norm": "attn_q_norm.weight"},
        SIGMOID,
        rotates_partly=True,
        finish=_groups,
    ),
    "deepseek2": DEEPSEEK,
    "qwen35": Architecture(
        "qwen3_5_text", DENSE | DELTA_NET, QWEN35, SILU, BIAS, scalings=(), rotates_partly=True, finish=_qwen35
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        _without(DENSE, "intermediate_size")
        | DELTA_NET
        | USED
        | {
            "num_experts": Key("expert_count"),
            "moe_intermediate_size": Key("expert_feed_forward_length"),
            "shared_expert_intermediate_size": Key("expert_shared_feed_forward_length"),
        },
        {
            **QWEN35,
            **_experts("mlp."),
            **_shared("mlp.shared_expert"),
            "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        },
        SILU,
        BIAS,
        SOFTMAX | {"expert_weights_norm": (True,), "feed_forward_length": ()},
        (),
        True,
        _qwen35,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        _without(DENSE, "num_key_value_heads", "head_dim", "intermediate_size")
        | {
            "global_head_dim": Key("attention.key_length"),
            "sliding_window": Key("attention.sliding_window"),
            "num_kv_shared_layers": Key("attention.shared_kv_layers", int, 0),
            "hidden_size_per_layer_input": Key("embedding_length_per_layer_input"),
            "final_logit_softcapping": Key("final_logit_softcapping", float, 30.0),
        },
        {
            **QWEN,
            **GEMMA_NORMS,
            **HEAD_NORMS,
            "layer_scalar": "layer_output_scale.weight",
            "per_layer_input_gate": "inp_gate",
            "per_layer_projection": "proj",
            "post_per_layer_input_norm": "post_norm",
            "model.embed_tokens_per_layer": "per_layer_token_embd",
            "model.per_layer_model_projection": "per_layer_model_proj",
            "model.per_layer_projection_norm": "per_layer_proj_norm",
            **_experts("", "router.proj"),
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
            "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            "post_feedforward_layernorm_1": "post_ffw_norm_1",
            "post_feedforward_layernorm_2": "post_ffw_norm_2",
        },
        {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "use_bidirectional_attention": None},
        expects=ANY_EXPERTS,
        scalings=("proportional",),
        finish=_gemma4,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        _without(GRANITE, "num_key_value_heads")
        | {
            "mamba_d_conv": Key("ssm.conv_kernel"),
            "mamba_d_state": Key("ssm.state_size"),
            "mamba_n_groups": Key("ssm.group_count"),
            "mamba_n_heads": Key("ssm.time_step_rank"),
        },
        {
            **TOP,
            **NORMS,
            **ROTATED,
            **_experts("block_sparse_moe.", "router"),
            "shared_mlp.input_linear": Source(("ffn_gate_shexp", "ffn_up_shexp")),
            "shared_mlp.output_linear": "ffn_down_shexp",
            "mamba.in_proj": "ssm_in",
            "mamba.conv1d": "ssm_conv1d",
            "mamba.dt_bias": "ssm_dt.bias",
            "mamba.A_log": Source(("ssm_a",), change=_logarithm),
            "mamba.D": "ssm_d",
            "mamba.norm": Source(("ssm_norm",), change=_flat),
            "mamba.out_proj": "ssm_out",
        },
        SILU | {"mamba_proj_bias": False},
        BIAS | {"mamba_conv_bias": "ssm_conv1d.bias"},
        SOFTMAX,
        finish=_mamba,
    ),
}
