"""The plan of each family of models, from its configuration.

A family is a function that changes Llama's plan where its models differ, and the configuration fields that it handles.
Any other field may mean that the model computes something else, so such a model gets no plan.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from slipstream.models.decoder.attention import STATEFUL
from slipstream.models.decoder.mixtures import experts_plan
from slipstream.models.decoder.plan import (
    SQUARED,
    DecoderPlan,
    InputPlan,
    LatentPlan,
    LayerPlan,
    NormPlan,
    SecondEmbedding,
    UnknownLayerError,
    activation_named,
)

HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
Family = Callable[[Any, DecoderPlan], DecoderPlan]
FAMILIES: dict[str, Family] = {}
FIELDS: dict[str, frozenset[str]] = {}  # of each family, in addition to `COMMON`


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


# sizes, and fields that Llama's plan handles; modules handle their own biases, `MaskBuilder` the windows
COMMON = _names(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act rms_norm_eps max_position_embeddings original_max_position_embeddings rope_parameters rope_scaling "
    "rope_theta attention_bias attention_out_bias mlp_bias use_bias layer_types sliding_window use_sliding_window "
    "max_window_layers initializer_range use_cache pad_token_id bos_token_id eos_token_id eod_token_id "
    "tie_word_embeddings attention_dropout residual_dropout resid_pdrop embd_pdrop embedding_dropout pretraining_tp"
)
# handled by the model's own rotary module
ROTATION = _names(
    "rope_type type rope_theta factor attention_factor original_max_position_embeddings low_freq_factor "
    "high_freq_factor beta_fast beta_slow mscale mscale_all_dim truncate long_factor short_factor long_mscale "
    "short_mscale partial_rotary_factor full_attention sliding_attention max_position_embeddings"
)
KINDS = frozenset(("full_attention", "sliding_attention"))
# undeclared fields whose names suggest that they change results; a factor of 1 is neutral
FACTORS = re.compile(r"(?<!initializer_)scal|multipl|gain|mup_")
LIMITS = re.compile(r"temperature_tuning|soft_?cap|clip|clamp|beta|logn|alpha")


def plan_of(config: Any, windows: Sequence[int | None]) -> DecoderPlan:
    """The plan of a text configuration. windows: one per layer, as in `LayerPlan`.

    Unregistered types get Llama's plan. Raises `UnknownLayerError` with the reason if there is no plan.
    """
    kind = config.model_type
    if (field := unknown_field(config, FIELDS.get(kind, frozenset()))) is not None:
        raise UnknownLayerError(f"its configuration has {field}")
    plan = FAMILIES.get(kind, llama)(config, _base(config, windows))
    recurrent = STATEFUL if any(layer.recurrent for layer in plan.layers) else frozenset[str]()
    if others := set(getattr(config, "layer_types", None) or ()) - KINDS - recurrent:
        raise UnknownLayerError(f"its configuration has layers of {sorted(others)[0]}")
    activation_named(plan.layers[0].activation)
    return plan


def plan_of_model(model: Any, windows: Sequence[int | None]) -> DecoderPlan:
    """The plan of a loaded model, or of a multimodal model's language part; see `plan_of`."""
    plan = plan_of(model.config.get_text_config(), windows)
    # Gemma 3's multimodal class ignores the cap in its text configuration
    return replace(plan, logit_cap=0.0) if model.config.model_type == "gemma3" else plan


def unknown_field(config: Any, further: frozenset[str]) -> str | None:
    """The first field, with its value, that may change the computation and is neither in `COMMON` nor in `further`."""
    kinds = takewhile(lambda kind: kind.__module__ != "transformers.configuration_utils", type(config).__mro__)
    declared = {name for kind in kinds for name in inspect.get_annotations(kind)}
    for name, value in config.to_dict().items():
        may_differ = name in declared or name == "per_layer_config" or _changes_numbers(config, name, value)
        if name not in COMMON | further and value and may_differ:
            return f"{name}={value!r}"
    for name, value in _rotation_fields(getattr(config, "rope_parameters", None) or {}):
        if name not in ROTATION | further and value:
            return f"{name}={value!r}"
    return None


def _changes_numbers(config: Any, name: str, value: Any) -> bool:
    if isinstance(value, list):  # a value for each layer; neutral if all are equal
        return len(value) == config.num_hidden_layers and any(item != value[0] for item in value)
    if not isinstance(value, bool | int | float):
        return False
    is_factor = bool(FACTORS.search(name)) and (value is True or value != 1)
    return is_factor or bool(LIMITS.search(name))


def _rotation_fields(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        yield name, value
        if isinstance(value, dict):
            yield from _rotation_fields(value)


def _base(config: Any, windows: Sequence[int | None]) -> DecoderPlan:
    """Llama's plan, which also understands other families' names of fields."""
    heads, norm = config.num_attention_heads, NormPlan(getattr(config, "rms_norm_eps", 0.0))
    each = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * len(windows)
    layers = (
        LayerPlan(
            index=index,
            qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            out="self_attn.o_proj",
            gate_up=("mlp.gate_proj", "mlp.up_proj"),
            down="mlp.down_proj",
            before_attention="input_layernorm",
            after_attention=None,
            before_feed_forward="post_attention_layernorm",
            after_feed_forward=None,
            head_norms=None,
            norm=norm,
            heads=heads,
            key_heads=getattr(of, "num_key_value_heads", None) or heads,
            size=size,
            inner=getattr(config, "intermediate_size", None) or 0,
            rotated=size,
            window=window,
            scaling=size**-0.5,
            activation=getattr(config, "hidden_act", None) or "silu",
            squares=getattr(config, "hidden_act", None) == SQUARED,
        )
        for index, (of, window) in enumerate(zip(each, windows, strict=True))
        for size in (getattr(of, "head_dim", None) or config.hidden_size // heads,)
    )
    return DecoderPlan(tuple(layers), norm)


def family(*kinds: str, fields: str = "") -> Callable[[Family], Family]:
    """Register a function for some types of models, and the additional fields that it handles."""

    def register(function: Family) -> Family:
        FAMILIES.update(dict.fromkeys(kinds, function))
        FIELDS.update(dict.fromkeys(kinds, _names(fields)))
        return function

    return register


@family("llama", "mistral", "ministral", "qwen2", "seed_oss", "cwm")
def llama(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Llama, and many models that declare its type: Falcon 3, SmolLM 1 and 2, Yi and others."""
    return plan


@family("ministral3", fields="llama_4_scaling_beta")
def ministral3(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """A factor of the queries grows with their position."""
    rotation = config.rope_parameters
    beta, positions = rotation.get("llama_4_scaling_beta"), rotation.get("original_max_position_embeddings")
    return plan.with_layers(growth=(beta, positions) if beta else None)


@family("qwen3")
def qwen3(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Norms of each head."""
    return plan.with_layers(head_norms=HEAD_NORMS)


@family("gemma")
def gemma(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Norm weights are stored minus 1. The embedding module applies its own factor."""
    return _with_norm(plan, replace(plan.norm, offset=1.0, rounds_first=False))


SOFT_CAPS = "query_pre_attn_scalar hidden_activation final_logit_softcapping attn_logit_softcapping"


@family("gemma2", fields=SOFT_CAPS)
def gemma2(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Norms before and after attention and the feed-forward part; attention scores and logits are capped."""
    plan = gemma(config, plan).with_layers(
        after_attention="post_attention_layernorm",
        before_feed_forward="pre_feedforward_layernorm",
        after_feed_forward="post_feedforward_layernorm",
        scaling=config.query_pre_attn_scalar**-0.5,
        activation=config.hidden_activation,
        soft_cap=config.attn_logit_softcapping or 0.0,
    )
    return replace(plan, logit_cap=config.final_logit_softcapping or 0.0)


@family("vaultgemma", fields=SOFT_CAPS)
def vaultgemma(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Gemma 2 without norms after attention and the feed-forward part."""
    return gemma2(config, plan).with_layers(after_attention=None, after_feed_forward=None)


@family("gemma3_text", fields=f"{SOFT_CAPS} sliding_window_pattern _sliding_window_pattern")
def gemma3(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Gemma 2 with norms of each head. Its layers ignore the cap of attention scores."""
    return gemma2(config, plan).with_layers(head_norms=HEAD_NORMS, soft_cap=0.0)


@family(
    "gemma4_text",
    "gemma4_unified_text",
    fields="per_layer_config hidden_activation final_logit_softcapping attention_k_eq_v use_bidirectional_attention "
    "vocab_size_per_layer_input hidden_size_per_layer_input num_kv_shared_layers use_double_wide_mlp enable_moe_block "
    "num_experts top_k_experts moe_intermediate_size",
)
def gemma4(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Gemma 3 with a norm of values, and different heads in layers without a window; mixtures also have a dense part.

    In small models the last layers reuse keys and values of earlier ones, and a second embedding enters each layer.
    """
    if config.use_bidirectional_attention == "all":
        raise UnknownLayerError("its configuration has use_bidirectional_attention='all'")
    full = dict[str, Any]()
    if config.attention_k_eq_v:
        full = {"qkv": ("self_attn.q_proj", "self_attn.k_proj"), "shares_values": True}
    plan = _rounded_once(plan).with_layers(
        lambda layer: full if config.layer_types[layer.index] == "full_attention" else {},
        after_attention="post_attention_layernorm",
        before_feed_forward="pre_feedforward_layernorm",
        after_feed_forward="post_feedforward_layernorm",
        head_norms=HEAD_NORMS,
        values_norm="self_attn.v_norm",
        scaling=1.0,
        activation=config.hidden_activation,
        scale="layer_scalar",
    )
    if getattr(config, "enable_moe_block", False):
        plan = plan.with_layers(
            experts=experts_plan(config),
            before_router="router",
            before_experts="pre_feedforward_layernorm_2",
            after_experts="post_feedforward_layernorm_2",
            after_dense="post_feedforward_layernorm_1",
        )
    plan = _with_second_embedding(config, _with_shared_keys(config, plan))
    return replace(plan, logit_cap=config.final_logit_softcapping or 0.0)


def _with_shared_keys(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """The plan in which the last layers reuse the keys and values of the last earlier layer of the same type."""
    kinds, first = config.layer_types, len(plan.layers) - config.num_kv_shared_layers
    source = {kind: index for index, kind in enumerate(kinds[: max(first, 0)])}
    if missing := set(kinds[max(first, 0) :]) - source.keys():
        raise UnknownLayerError(f"none of its layers has the keys and values of its last {missing.pop()}")
    wide = 2 if config.use_double_wide_mlp else 1

    def changes(layer: LayerPlan) -> dict[str, Any]:
        if layer.index < first:
            return {}
        return {
            "keys_of": source[kinds[layer.index]],
            "qkv": layer.qkv[:1],
            "head_norms": ("self_attn.q_norm",),
            "values_norm": None,
            "shares_values": False,
            "inner": wide * layer.inner,
        }

    return plan.with_layers(changes)


def _with_second_embedding(config: Any, plan: DecoderPlan) -> DecoderPlan:
    size = getattr(config, "hidden_size_per_layer_input", 0)
    if not size:
        return plan
    second = SecondEmbedding(
        size,
        "embed_tokens_per_layer",
        "per_layer_model_projection",
        "per_layer_projection_norm",
        config.hidden_size**-0.5,
        2.0**-0.5,
    )
    layer_input = InputPlan(size, "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
    return replace(plan.with_layers(input=layer_input), second_embedding=second)


@family("phi3")
def phi3(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Joint projections; rotates a part of each head."""
    return plan.with_layers(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",), rotated=_rotated(config, plan))


@family("smollm3", fields="no_rope_layers no_rope_layer_interval")
def smollm3(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Some layers have no rotation."""
    return plan.with_layers(lambda layer: {"rotated": layer.size if config.no_rope_layers[layer.index] else 0})


@family("olmo2", "olmo3")
def olmo2(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Norms only after both parts; queries and keys are normalized across all heads."""
    return _norms_after(_rounded_once(plan)).with_layers(head_norms=HEAD_NORMS, norms_all_heads=True)


@family("exaone4", fields="sliding_window_pattern")
def exaone4(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Qwen 3 with norms only after both parts; in models with windows, only layers with a window rotate."""
    return _norms_after(_rotating_in_windows(config, qwen3(config, plan)))


def _rotating_in_windows(config: Any, plan: DecoderPlan) -> DecoderPlan:
    rotates_all = config.sliding_window is None
    return plan.with_layers(lambda layer: {"rotated": layer.size if rotates_all or layer.window else 0})


@family("glm")
def glm(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """A joint projection of gate and up; rotates pairs of neighbors in a part of each head."""
    return plan.with_layers(gate_up=("mlp.gate_up_proj",), rotated=_rotated(config, plan), rotates_pairs=True)


@family("glm4")
def glm4(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """GLM with additional norms after both parts."""
    return glm(config, plan).with_layers(
        after_attention="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm"
    )


GRANITE = "embedding_multiplier logits_scaling residual_multiplier attention_multiplier"


@family("granite", fields=GRANITE)
def granite(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Factors scale embeddings, attention, residuals and logits."""
    plan = plan.with_layers(scaling=config.attention_multiplier, residual=config.residual_multiplier)
    return replace(plan, embedding=config.embedding_multiplier, logits=1 / config.logits_scaling)


@family("hyperclovax", fields=f"{GRANITE} use_post_norm")
def hyperclovax(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Granite with additional norms after both parts; logits are multiplied by their factor, not divided."""
    plan = replace(granite(config, plan), logits=config.logits_scaling)
    return plan.with_layers(after_attention="post_norm1", after_feed_forward="post_norm2")


@family("granite_swa", fields=f"{GRANITE} layer_rope_theta")
def granite_swa(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Granite with sinks; some layers have no rotation."""
    thetas = config.layer_rope_theta
    if len(set(thetas) - {0}) > 1:
        raise UnknownLayerError(f"its configuration has layer_rope_theta={thetas}")
    plan = granite(config, plan).with_layers(
        lambda layer: {"rotated": layer.size if thetas[layer.index] else 0}, sinks="self_attn.sinks"
    )
    return replace(plan, rotary="rotary_embs.0")


@family("cohere", "cohere2", fields="logit_scale layer_norm_eps")
def cohere(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """One LayerNorm feeds both attention and feed-forward part; in Cohere 2 only layers with windows rotate."""
    rotates_all = config.model_type == "cohere"
    plan = _with_norm(plan, NormPlan(config.layer_norm_eps, is_centered=True)).with_layers(
        lambda layer: {"rotated": layer.size if rotates_all or layer.window else 0},
        before_feed_forward=None,
        is_parallel=True,
        rotates_pairs=True,
        angles_in_pairs=True,
    )
    return replace(plan, logits=config.logit_scale)


@family("helium")
def helium(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """ERNIE 4.5 with norms that round only once."""
    return ernie4_5(config, _rounded_once(plan))


@family("ernie4_5")
def ernie4_5(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Rotates pairs of neighbors."""
    return plan.with_layers(rotates_pairs=True)


@family("starcoder2", fields="norm_epsilon")
def starcoder2(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """LayerNorm, and an ungated feed-forward part."""
    plan = _with_norm(plan, NormPlan(config.norm_epsilon, is_centered=True))
    return plan.with_layers(gate_up=("mlp.c_fc",), down="mlp.c_proj", is_gated=False)


@family("phi", fields="layer_norm_eps")
def phi(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """One LayerNorm feeds both attention and an ungated feed-forward part; rotates as Phi 3 does."""
    plan = _with_norm(plan, NormPlan(config.layer_norm_eps, is_centered=True)).with_layers(
        out="self_attn.dense",
        gate_up=("mlp.fc1",),
        down="mlp.fc2",
        is_gated=False,
        is_parallel=True,
        before_feed_forward=None,
        rotated=_rotated(config, plan),
    )
    return replace(plan, last_norm="final_layernorm")


@family("arcee")
def arcee(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """An ungated feed-forward part."""
    return plan.with_layers(gate_up=("mlp.up_proj",), is_gated=False)


@family("jais2", fields="layer_norm_eps")
def jais2(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Arcee with LayerNorm."""
    return arcee(config, _with_norm(plan, NormPlan(config.layer_norm_eps, is_centered=True)))


@family("nemotron", fields="norm_eps")
def nemotron(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Arcee with LayerNorm, whose weights are stored minus 1; rotates a part of each head."""
    plan = _with_norm(plan, NormPlan(config.norm_eps, offset=1.0, is_centered=True))
    return arcee(config, plan).with_layers(rotated=_rotated(config, plan))


@family("hunyuan_v1_dense", fields="alpha")
def hunyuan(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Norms of each head, after the rotation."""
    return plan.with_layers(head_norms=("self_attn.query_layernorm", "self_attn.key_layernorm"), rotates_first=True)


EXPERTS = (
    "num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob output_router_logits "
    "router_aux_loss_coef router_jitter_noise"
)
QWEN_EXPERTS = f"{EXPERTS} decoder_sparse_step mlp_only_layers"


@family("mixtral", fields=EXPERTS)
def mixtral(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Llama with experts in each layer."""
    return _with_experts(config, plan, range(len(plan.layers)))


@family("qwen2_moe", fields=f"{QWEN_EXPERTS} shared_expert_intermediate_size qkv_bias")
def qwen2_moe(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Experts in every n-th layer, except in those listed."""
    step, dense = config.decoder_sparse_step, config.mlp_only_layers or ()
    layers = [i for i in range(len(plan.layers)) if i not in dense and (i + 1) % step == 0 and config.num_experts > 0]
    return _with_experts(config, plan, layers)


@family("qwen3_moe", fields=QWEN_EXPERTS)
def qwen3_moe(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Qwen 3 with the experts of Qwen 2."""
    return qwen2_moe(config, qwen3(config, plan))


@family("olmoe", fields=EXPERTS)
def olmoe(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Queries and keys are normalized across all heads."""
    return mixtral(config, plan.with_layers(head_norms=HEAD_NORMS, norms_all_heads=True))


@family("flex_olmo", fields=EXPERTS)
def flex_olmo(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """OLMo 2 with experts in each layer."""
    return mixtral(config, olmo2(config, plan))


@family("minimax_m2", fields=EXPERTS)
def minimax_m2(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """OLMoE that rotates a part of each head."""
    return olmoe(config, plan.with_layers(rotated=_rotated(config, plan)))


@family("granitemoe", fields=f"{GRANITE} {EXPERTS}")
def granitemoe(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Granite with experts in each layer."""
    return mixtral(config, granite(config, plan))


@family("granitemoe_swa", fields=f"{GRANITE} {EXPERTS} layer_rope_theta shared_intermediate_size")
def granitemoe_swa(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Granite with sinks and experts."""
    return _with_dense_part(config, granite_swa(config, plan))


@family("granitemoeshared", fields=f"{GRANITE} {EXPERTS} shared_intermediate_size")
def granitemoeshared(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Granite with experts; most models also have a dense part."""
    return _with_dense_part(config, granite(config, plan))


def _with_dense_part(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """The plan with the dense part and the experts that the configuration has."""
    if not config.shared_intermediate_size:
        return mixtral(config, plan)
    return plan.with_layers(
        experts=experts_plan(config) if config.num_local_experts else None,
        inner=config.shared_intermediate_size,
        gate_up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
    )


GROUPED_EXPERTS = f"{EXPERTS} n_routed_experts n_shared_experts routed_scaling_factor n_group topk_group"


@family(
    "glm4_moe",
    fields=f"{GROUPED_EXPERTS} first_k_dense_replace use_qk_norm num_mtp_layers num_nextn_predict_layers",
)
def glm4_moe(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Experts after some dense layers; rotates a part of each head."""
    head_norms = HEAD_NORMS if config.use_qk_norm else None
    plan = plan.with_layers(head_norms=head_norms, rotated=_rotated(config, plan))
    return _with_experts(config, plan, range(config.first_k_dense_replace, len(plan.layers)))


@family("hunyuan_v1_moe", fields=f"{EXPERTS} alpha moe_topk sep_token_id")
def hunyuan_moe(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Hunyuan with experts in each layer."""
    return mixtral(config, hunyuan(config, plan))


@family("solar_open", fields=GROUPED_EXPERTS)
def solar_open(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Llama with the experts of GLM-4.5 in each layer."""
    return mixtral(config, plan)


@family(
    "afmoe", fields=f"{EXPERTS} num_shared_experts num_dense_layers route_scale global_attn_every_n_layers mup_enabled"
)
def afmoe(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Gates of attention, norms before and after both parts, and experts after some dense layers."""
    plan = _rotating_in_windows(config, qwen3(config, _rounded_once(plan))).with_layers(
        qkv=(*plan.layers[0].qkv, "self_attn.gate_proj"),
        gate_size=plan.layers[0].size,
        after_attention="post_attention_layernorm",
        before_feed_forward="pre_mlp_layernorm",
        after_feed_forward="post_mlp_layernorm",
    )
    plan = replace(plan, embedding=config.hidden_size**0.5 if config.mup_enabled else 1.0)
    return _with_experts(config, plan, range(config.num_dense_layers, len(plan.layers)))


@family("dots1", fields=f"{GROUPED_EXPERTS} first_k_dense_replace")
def dots1(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Qwen 3 with experts after some dense layers."""
    return _with_experts(config, qwen3(config, plan), range(config.first_k_dense_replace, len(plan.layers)))


@family("hy_v3", fields=f"{EXPERTS} mlp_layer_types num_shared_experts router_scaling_factor enable_moe_fp32_combine")
def hy_v3(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Hunyuan 3: Qwen 3 with experts in the layers that `mlp_layer_types` calls sparse."""
    return _with_experts(config, qwen3(config, plan), _sparse(config))


@family("mellum", fields=f"{EXPERTS} mlp_layer_types num_mtp_layers num_nextn_predict_layers")
def mellum(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Hunyuan 3 with a rotation for each type of layer."""
    return hy_v3(config, plan)


@family(
    "exaone_moe",
    fields=f"{GROUPED_EXPERTS} mlp_layer_types num_shared_experts first_k_dense_replace sliding_window_pattern",
)
def exaone_moe(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """EXAONE 4 with Qwen 3's norms, and experts in the layers that `mlp_layer_types` calls sparse."""
    return hy_v3(config, _rotating_in_windows(config, plan))


@family(
    "ernie4_5_moe",
    fields="moe_k moe_num_experts moe_num_shared_experts moe_intermediate_size moe_norm_min moe_layer_start_index "
    f"moe_layer_end_index moe_layer_interval {EXPERTS}",
)
def ernie4_5_moe(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """ERNIE 4.5 with experts in every n-th layer of a range."""
    layers = range(config.moe_layer_start_index, config.moe_layer_end_index + 1)
    sparse = [i for i in layers if (i + 1) % config.moe_layer_interval == 0]
    return _with_experts(config, ernie4_5(config, plan), sparse)


@family("gpt_oss", fields=f"{EXPERTS} swiglu_alpha swiglu_limit")
def gpt_oss(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """A sink in each head, one angle per pair of numbers, and norms that round only once."""
    return mixtral(config, _rounded_once(plan).with_layers(sinks="self_attn.sinks", angles_of_pairs=True))


LATENT = (
    f"{EXPERTS} kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim n_routed_experts "
    "n_shared_experts n_group topk_group routed_scaling_factor aux_loss_alpha"
)


@family("deepseek_v2", fields=f"{LATENT} first_k_dense_replace topk_method")
def deepseek_v2(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Latent attention, with rotations as complex numbers; experts after some dense layers."""
    plan = _with_latent(config, plan).with_layers(rotates_pairs=True, angles_of_pairs=True)
    return _with_experts(config, plan, range(config.first_k_dense_replace, len(plan.layers)))


@family("youtu", fields=f"{LATENT} rope_interleave embedding_initializer_range")
def youtu(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Latent attention that rotates pairs of neighbors, and moves the first numbers of all pairs to the front."""
    pairs = bool(config.rope_interleave)
    return _with_latent(config, plan).with_layers(rotates_pairs=pairs, parts_pairs=pairs)


@family(
    *("deepseek_v3", "glm4_moe_lite"),
    fields=f"{LATENT} first_k_dense_replace mlp_layer_types rope_interleave num_nextn_predict_layers num_mtp_layers",
)
def deepseek_v3(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Youtu with experts in the layers that `mlp_layer_types` calls sparse, or in all after some dense ones."""
    dense = getattr(config, "first_k_dense_replace", None) or 0
    is_named = getattr(config, "mlp_layer_types", None)
    return _with_experts(config, youtu(config, plan), _sparse(config) if is_named else range(dense, len(plan.layers)))


LATENT_ATTENTION = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")


def latent_plan(config: Any) -> LatentPlan | None:
    """The latent attention of a text configuration; None if it declares none."""
    if getattr(config, "model_type", None) not in LATENT_ATTENTION:
        return None
    has_rank = config.q_lora_rank is not None
    return LatentPlan(
        count=config.num_attention_heads,
        rank=config.kv_lora_rank,
        plain=config.qk_nope_head_dim,
        values=config.v_head_dim,
        heads="self_attn.kv_b_proj",
        norm="self_attn.kv_a_layernorm",
        queries_up="self_attn.q_b_proj" if has_rank else None,
        queries_norm="self_attn.q_a_layernorm" if has_rank else None,
    )


def _with_latent(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """The plan with latent attention. YaRN also multiplies its scores, by the square of a factor (`mscale_all_dim`)."""
    latent, rotated, rope = latent_plan(config), config.qk_rope_head_dim, config.rope_parameters
    assert latent is not None
    scaling = (latent.plain + rotated) ** -0.5
    if rope["rope_type"] != "default" and (scale := rope.get("mscale_all_dim")) and rope["factor"] > 1:
        scaling *= (0.1 * scale * math.log(rope["factor"]) + 1) ** 2
    return plan.with_layers(
        qkv=("self_attn.q_a_proj" if latent.queries_up else "self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"),
        latent=latent,
        size=latent.rank + rotated,
        rotated=rotated,
        key_heads=1,
        scaling=scaling,
    )


def _with_experts(config: Any, plan: DecoderPlan, layers: Container[int]) -> DecoderPlan:
    """The plan with experts in these layers."""
    experts: dict[str, Any] = {"experts": experts_plan(config), "gate_up": (), "down": None, "inner": 0}
    return plan.with_layers(lambda layer: experts if layer.index in layers else {})


def _sparse(config: Any) -> list[int]:
    """The layers that `mlp_layer_types` calls sparse."""
    return [i for i, kind in enumerate(config.mlp_layer_types) if kind == "sparse"]


@family(
    "lfm2",
    fields="norm_eps conv_bias conv_L_cache block_multiple_of block_ffn_dim_multiplier block_auto_adjust_ff_dim "
    "full_attn_idxs",
)
def lfm2(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Short convolutions in most layers; the feed-forward width may differ from `intermediate_size`."""
    inner = config.intermediate_size
    if getattr(config, "block_auto_adjust_ff_dim", False):
        multiple = config.block_multiple_of
        inner = int((config.block_ffn_dim_multiplier or 1) * int(2 * inner / 3))
        inner = -(-inner // multiple) * multiple if config.block_ffn_dim_multiplier is not None else inner
    plan = _with_norm(plan, NormPlan(config.norm_eps)).with_layers(
        inner=inner,
        out="self_attn.out_proj",
        head_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        before_attention="operator_norm",
        before_feed_forward="ffn_norm",
    )
    plan = _with_recurrent(config, plan, "conv", "conv", ("in_proj",))
    return replace(plan, last_norm="embedding_norm")


@family("lfm3", fields="norm_eps conv_bias conv_L_cache use_sandwich_norm use_attention_gate")
def lfm3(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """LFM 2 with gates of heads, and norms after both parts."""
    norms = ("post_operator_norm", "post_ffn_norm") if config.use_sandwich_norm else (None, None)
    gated: dict[str, Any] = {"qkv": (*plan.layers[0].qkv, "self_attn.g_proj"), "gate_size": 1}
    plan = lfm2(config, plan).with_layers(
        lambda layer: {} if layer.recurrent else {"out": "self_attn.o_proj", "head_norms": HEAD_NORMS},
        after_attention=norms[0],
        after_feed_forward=norms[1],
    )
    return plan.with_layers(lambda layer: gated if config.use_attention_gate and not layer.recurrent else {})


@family(
    "lfm2_moe",
    fields=f"{EXPERTS} norm_eps conv_bias conv_L_cache num_dense_layers use_expert_bias routed_scaling_factor",
)
def lfm2_moe(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """LFM 2 with experts after some dense layers."""
    plan = replace(lfm2(config, plan), rotary="pos_emb")
    return _with_experts(config, plan, range(config.num_dense_layers, len(plan.layers)))


DELTA_NET = (
    "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads "
    "mrope_section mrope_interleaved"
)


@family("qwen3_5_text", fields=DELTA_NET)
def qwen3_5(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Gated delta nets in most layers; the others gate what each query attends to, and rotate a part of each head."""
    return _with_delta_nets(config, plan, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


@family("qwen3_next", fields=f"{DELTA_NET} {QWEN_EXPERTS} shared_expert_intermediate_size")
def qwen3_next(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Qwen 3.5 with joint projections, and the experts of Qwen 2."""
    return qwen2_moe(config, _with_delta_nets(config, plan, "in_proj_qkvz", "in_proj_ba"))


def _with_delta_nets(config: Any, plan: DecoderPlan, *parts: str) -> DecoderPlan:
    plan = qwen3(config, gemma(config, plan)).with_layers(gates_queries=True, rotated=_rotated(config, plan))
    return _with_recurrent(config, plan, "linear_attention", "linear_attn", parts)


@family("qwen3_5_moe_text", fields=f"{DELTA_NET} {EXPERTS} shared_expert_intermediate_size")
def qwen3_5_moe(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Qwen 3.5 with the experts of Qwen 2 in each layer."""
    return _with_experts(config, qwen3_5(config, plan), range(len(plan.layers)))


@family(
    "granitemoehybrid",
    fields=f"{GRANITE} {EXPERTS} shared_intermediate_size position_embedding_type "
    "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size "
    "mamba_conv_bias mamba_proj_bias time_step_limit",
)
def granitemoehybrid(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Granite with Mamba-2 in most layers; most models have no rotations, and mixtures also have a dense part."""
    rotated = plan.layers[0].size if config.position_embedding_type == "rope" else 0
    plan = granitemoeshared(config, plan).with_layers(rotated=rotated)
    return _with_recurrent(config, plan, "linear_attention", "mamba", ("in_proj",))


def _with_recurrent(config: Any, plan: DecoderPlan, kind: str, module: str, parts: Sequence[str]) -> DecoderPlan:
    """The plan with a recurrent module in layers of this kind. parts: the paths of its first product."""
    changes = {
        "recurrent": module,
        "qkv": tuple(f"{module}.{part}" for part in parts),
        "out": f"{module}.out_proj",
        "head_norms": None,
        "rotated": 0,
        "gates_queries": False,
    }
    return plan.with_layers(lambda layer: changes if config.layer_types[layer.index] == kind else {})


def _with_norm(plan: DecoderPlan, norm: NormPlan) -> DecoderPlan:
    return replace(plan.with_layers(norm=norm), norm=norm)


def _rounded_once(plan: DecoderPlan) -> DecoderPlan:
    """The plan with norms that round only after multiplying by their weight."""
    return _with_norm(plan, replace(plan.norm, rounds_first=False))


def _norms_after(plan: DecoderPlan) -> DecoderPlan:
    return plan.with_layers(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_feed_forward=None,
        after_feed_forward="post_feedforward_layernorm",
    )


def _rotated(config: Any, plan: DecoderPlan) -> int:
    return int(plan.layers[0].size * (config.rope_parameters.get("partial_rotary_factor") or 1.0))
