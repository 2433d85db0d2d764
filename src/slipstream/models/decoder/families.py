"""The plan of each family of models, from its configuration.

A family is a function that changes the plan of Llama where its model differs, and the fields of its configuration that
it reads. A field that is not among them may say that the model computes something else, so there is no plan then.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from slipstream.models.decoder.mixtures import experts_plan
from slipstream.models.decoder.plan import DecoderPlan, LayerPlan, NormPlan, UnknownLayerError, activation_named

Family = Callable[[Any, DecoderPlan], DecoderPlan]
FAMILIES: dict[str, Family] = {}
FIELDS: dict[str, frozenset[str]] = {}  # of a family beyond `COMMON`


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


# sizes, and what the plan of Llama reads; biases are seen by the modules that have them, windows by `MaskBuilder`
COMMON = _names(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act rms_norm_eps max_position_embeddings original_max_position_embeddings rope_parameters rope_scaling "
    "rope_theta attention_bias attention_out_bias mlp_bias use_bias layer_types sliding_window use_sliding_window "
    "max_window_layers initializer_range use_cache pad_token_id bos_token_id eos_token_id eod_token_id "
    "tie_word_embeddings attention_dropout residual_dropout resid_pdrop embd_pdrop embedding_dropout pretraining_tp"
)
# computed by the model's own module of rotations
ROTATION = _names(
    "rope_type type rope_theta factor attention_factor original_max_position_embeddings low_freq_factor "
    "high_freq_factor beta_fast beta_slow mscale mscale_all_dim truncate long_factor short_factor long_mscale "
    "short_mscale partial_rotary_factor full_attention sliding_attention"
)
KINDS = frozenset(("full_attention", "sliding_attention"))
RECURRENT = frozenset(("linear_attention", "conv"))  # kinds of layers that only some families have
# fields that no class declares, but whose names say that they change numbers; a factor of 1 is neutral
FACTORS = re.compile(r"(?<!initializer_)scal|multipl|gain|mup_")
LIMITS = re.compile(r"temperature_tuning|soft_?cap|clip|clamp|beta|logn|alpha")


def plan_of(config: Any, windows: Sequence[int | None]) -> DecoderPlan:
    """The plan of a text configuration. windows: one per layer, as in `LayerPlan`.

    Types without an entry get the plan of Llama. Raises `UnknownLayerError` with the reason if there is no plan.
    """
    kind = config.model_type
    if (field := unknown_field(config, FIELDS.get(kind, frozenset()))) is not None:
        raise UnknownLayerError(f"its configuration has {field}")
    plan = FAMILIES.get(kind, llama)(config, _base(config, windows))
    recurrent = RECURRENT if any(layer.recurrent for layer in plan.layers) else frozenset[str]()
    if others := set(getattr(config, "layer_types", None) or ()) - KINDS - recurrent:
        raise UnknownLayerError(f"its configuration has layers of {sorted(others)[0]}")
    activation_named(plan.layers[0].activation)
    return plan


def unknown_field(config: Any, further: frozenset[str]) -> str | None:
    """The first field, with its value, that may change what is computed and is neither common nor one of these."""
    kinds = takewhile(lambda kind: kind.__module__ != "transformers.configuration_utils", type(config).__mro__)
    declared = {name for kind in kinds for name in inspect.get_annotations(kind)}
    for name, value in config.to_dict().items():
        if name not in COMMON | further and value and (name in declared or _changes_numbers(config, name, value)):
            return f"{name}={value!r}"
    for name, value in _rotation_fields(getattr(config, "rope_parameters", None) or {}):
        if name not in ROTATION | further and value:
            return f"{name}={value!r}"
    return None


def _changes_numbers(config: Any, name: str, value: Any) -> bool:
    if isinstance(value, list):  # a value for each layer, and not the same one
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
    """The plan of Llama, but for fields that other families name otherwise."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    norm = NormPlan(getattr(config, "rms_norm_eps", 0.0))
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
            key_heads=getattr(config, "num_key_value_heads", None) or heads,
            size=size,
            inner=config.intermediate_size,
            rotated=size,
            window=window,
            scaling=size**-0.5,
            activation=getattr(config, "hidden_act", None) or "silu",
        )
        for index, window in enumerate(windows)
    )
    return DecoderPlan(tuple(layers), norm)


def family(*kinds: str, fields: str = "") -> Callable[[Family], Family]:
    """Register the function of some types of models, and the further fields of their configurations."""

    def register(function: Family) -> Family:
        FAMILIES.update(dict.fromkeys(kinds, function))
        FIELDS.update(dict.fromkeys(kinds, _names(fields)))
        return function

    return register


@family("llama", "mistral", "ministral", "qwen2", "seed_oss", "cwm")
def llama(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Also Falcon 3, SmolLM 1 and 2, Yi and many others, whose type is this one."""
    return plan


@family("ministral3", fields="llama_4_scaling_beta")
def ministral3(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Queries grow with their position."""
    rotation = config.rope_parameters
    beta, positions = rotation.get("llama_4_scaling_beta"), rotation.get("original_max_position_embeddings")
    return plan.with_layers(growth=(beta, positions) if beta else None)


@family("qwen3")
def qwen3(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Norms of each head."""
    return plan.with_layers(head_norms=("self_attn.q_norm", "self_attn.k_norm"))


@family("gemma")
def gemma(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Norms whose weight is stored without its 1. The module of the embedding multiplies itself."""
    norm = replace(plan.norm, offset=1.0, rounds_first=False)
    return replace(plan.with_layers(norm=norm), norm=norm)


SOFT_CAPS = "query_pre_attn_scalar hidden_activation final_logit_softcapping attn_logit_softcapping"


@family("gemma2", fields=SOFT_CAPS)
def gemma2(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Norms before and after both parts; attention and logits are capped."""
    plan = gemma(config, plan).with_layers(
        after_attention="post_attention_layernorm",
        before_feed_forward="pre_feedforward_layernorm",
        after_feed_forward="post_feedforward_layernorm",
        scaling=config.query_pre_attn_scalar**-0.5,
        activation=config.hidden_activation,
        soft_cap=config.attn_logit_softcapping or 0.0,
    )
    return replace(plan, logit_cap=config.final_logit_softcapping or 0.0)


@family("gemma3_text", fields=f"{SOFT_CAPS} sliding_window_pattern _sliding_window_pattern")
def gemma3(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Gemma 2 with norms of each head. Its layers do not read the cap of attention."""
    return gemma2(config, plan).with_layers(head_norms=("self_attn.q_norm", "self_attn.k_norm"), soft_cap=0.0)


@family("phi3")
def phi3(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Joint projections; a part of each head is rotated."""
    return plan.with_layers(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",), rotated=_rotated(config, plan))


@family("smollm3", fields="no_rope_layers no_rope_layer_interval")
def smollm3(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Some layers do not rotate."""
    return plan.with_layers(lambda layer: {"rotated": layer.size if config.no_rope_layers[layer.index] else 0})


@family("olmo2", "olmo3")
def olmo2(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Norms after both parts and none before; queries and keys are normalised before they are divided into heads."""
    norm = replace(plan.norm, rounds_first=False)
    plan = _norms_after(plan).with_layers(
        norm=norm, head_norms=("self_attn.q_norm", "self_attn.k_norm"), norms_all_heads=True
    )
    return replace(plan, norm=norm)


@family("exaone4", fields="sliding_window_pattern")
def exaone4(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Norms after both parts; where there are windows, only layers with one rotate."""
    rotates_all = config.sliding_window is None
    return _norms_after(plan).with_layers(
        lambda layer: {"rotated": layer.size if rotates_all or layer.window else 0},
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
    )


@family("glm")
def glm(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """A joint projection of gate and up; neighbouring numbers of a part of each head are rotated."""
    return plan.with_layers(gate_up=("mlp.gate_up_proj",), rotated=_rotated(config, plan), rotates_pairs=True)


@family("glm4")
def glm4(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """GLM with norms after both parts, too."""
    return glm(config, plan).with_layers(
        after_attention="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm"
    )


GRANITE = "embedding_multiplier logits_scaling residual_multiplier attention_multiplier"


@family("granite", fields=GRANITE)
def granite(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Llama with factors."""
    plan = plan.with_layers(scaling=config.attention_multiplier, residual=config.residual_multiplier)
    return replace(plan, embedding=config.embedding_multiplier, logits=1 / config.logits_scaling)


@family("cohere", "cohere2", fields="logit_scale layer_norm_eps")
def cohere(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Attention and feed-forward part side by side after one LayerNorm; in Cohere 2 only layers with windows rotate."""
    norm, rotates_all = NormPlan(config.layer_norm_eps, is_centred=True), config.model_type == "cohere"
    plan = plan.with_layers(
        lambda layer: {"rotated": layer.size if rotates_all or layer.window else 0},
        norm=norm,
        before_feed_forward=None,
        is_parallel=True,
        rotates_pairs=True,
        angles_in_pairs=True,
    )
    return replace(plan, norm=norm, logits=config.logit_scale)


@family("ernie4_5")
def ernie4_5(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Neighbouring numbers are rotated."""
    return plan.with_layers(rotates_pairs=True)


@family("starcoder2", fields="norm_epsilon")
def starcoder2(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """LayerNorm, and a feed-forward part without a gate."""
    norm = NormPlan(config.norm_epsilon, is_centred=True)
    plan = plan.with_layers(norm=norm, gate_up=("mlp.c_fc",), down="mlp.c_proj", is_gated=False)
    return replace(plan, norm=norm)


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
    """Experts in every so many layers, but for those that are named."""
    step, dense = config.decoder_sparse_step, config.mlp_only_layers or ()
    layers = [i for i in range(len(plan.layers)) if i not in dense and (i + 1) % step == 0 and config.num_experts > 0]
    return _with_experts(config, plan, layers)


@family("qwen3_moe", fields=QWEN_EXPERTS)
def qwen3_moe(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Qwen 3 with the experts of Qwen 2."""
    return qwen2_moe(config, qwen3(config, plan))


@family("olmoe", fields=EXPERTS)
def olmoe(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Queries and keys are normalised before they are divided into heads."""
    head_norms = ("self_attn.q_norm", "self_attn.k_norm")
    return mixtral(config, plan.with_layers(head_norms=head_norms, norms_all_heads=True))


@family("granitemoe", fields=f"{GRANITE} {EXPERTS}")
def granitemoe(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Granite with experts."""
    return mixtral(config, granite(config, plan))


@family(
    "glm4_moe",
    fields=f"{EXPERTS} n_routed_experts n_shared_experts routed_scaling_factor first_k_dense_replace use_qk_norm "
    "n_group topk_group num_mtp_layers num_nextn_predict_layers",
)
def glm4_moe(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Dense layers first; a part of each head is rotated. The experts' block refuses a choice among groups."""
    head_norms = ("self_attn.q_norm", "self_attn.k_norm") if config.use_qk_norm else None
    plan = plan.with_layers(head_norms=head_norms, rotated=_rotated(config, plan))
    return _with_experts(config, plan, range(config.first_k_dense_replace, len(plan.layers)))


@family(
    "ernie4_5_moe",
    fields="moe_k moe_num_experts moe_num_shared_experts moe_intermediate_size moe_norm_min moe_layer_start_index "
    f"moe_layer_end_index moe_layer_interval {EXPERTS}",
)
def ernie4_5_moe(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """ERNIE 4.5 with experts in every so many of some layers."""
    layers = range(config.moe_layer_start_index, config.moe_layer_end_index + 1)
    sparse = [i for i in layers if (i + 1) % config.moe_layer_interval == 0]
    return _with_experts(config, ernie4_5(config, plan), sparse)


@family("gpt_oss", fields=f"{EXPERTS} swiglu_alpha swiglu_limit")
def gpt_oss(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Attention with sinks."""
    return mixtral(config, plan.with_layers(sinks="self_attn.sinks", angles_of_pairs=True))


def _with_experts(config: Any, plan: DecoderPlan, layers: Container[int]) -> DecoderPlan:
    """The plan with experts in these layers."""
    experts: dict[str, Any] = {"experts": experts_plan(config), "gate_up": (), "down": None, "inner": 0}
    return plan.with_layers(lambda layer: experts if layer.index in layers else {})


@family(
    "lfm2",
    fields="norm_eps conv_bias conv_L_cache block_multiple_of block_ffn_dim_multiplier block_auto_adjust_ff_dim "
    "full_attn_idxs",
)
def lfm2(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Short convolutions in most layers, and a width of the feed-forward part that may not be the one declared."""
    inner = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        multiple = config.block_multiple_of
        inner = int((config.block_ffn_dim_multiplier or 1) * int(2 * inner / 3))
        inner = -(-inner // multiple) * multiple if config.block_ffn_dim_multiplier is not None else inner
    norm, heads = NormPlan(config.norm_eps), ("self_attn.q_layernorm", "self_attn.k_layernorm")
    plan = plan.with_layers(
        norm=norm,
        inner=inner,
        out="self_attn.out_proj",
        head_norms=heads,
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        before_attention="operator_norm",
        before_feed_forward="ffn_norm",
    )
    plan = _with_recurrent(config, plan, "conv", "conv", ("in_proj",))
    return replace(plan, norm=norm, last_norm="embedding_norm")


@family(
    "qwen3_5_text",
    fields="linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
    "linear_num_value_heads mrope_section mrope_interleaved",
)
def qwen3_5(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Gated delta nets in most layers; the others have gates for their queries, and rotate a part of each head."""
    plan = qwen3(config, gemma(config, plan)).with_layers(gates_queries=True, rotated=_rotated(config, plan))
    parts = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
    return _with_recurrent(config, plan, "linear_attention", "linear_attn", parts)


@family(
    "granitemoehybrid",
    fields=f"{GRANITE} num_experts_per_tok router_aux_loss_coef shared_intermediate_size position_embedding_type "
    "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size "
    "mamba_conv_bias mamba_proj_bias time_step_limit",
)
def granitemoehybrid(config: Any, plan: DecoderPlan) -> DecoderPlan:
    """Granite with Mamba-2 in most layers and, in most models, without positions. Those with experts have no plan."""
    plan = granite(config, plan).with_layers(
        inner=config.shared_intermediate_size,
        gate_up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
        rotated=plan.layers[0].size if config.position_embedding_type == "rope" else 0,
    )
    return _with_recurrent(config, plan, "linear_attention", "mamba", ("in_proj",))


def _with_recurrent(config: Any, plan: DecoderPlan, kind: str, module: str, parts: Sequence[str]) -> DecoderPlan:
    """The plan whose layers of this kind have a recurrent module. parts: its first product."""
    changes = {
        "recurrent": module,
        "qkv": tuple(f"{module}.{part}" for part in parts),
        "out": f"{module}.out_proj",
        "head_norms": None,
        "rotated": 0,
        "gates_queries": False,
    }
    return plan.with_layers(lambda layer: changes if config.layer_types[layer.index] == kind else {})


def _norms_after(plan: DecoderPlan) -> DecoderPlan:
    return plan.with_layers(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_feed_forward=None,
        after_feed_forward="post_feedforward_layernorm",
    )


def _rotated(config: Any, plan: DecoderPlan) -> int:
    return int(plan.layers[0].size * (config.rope_parameters.get("partial_rotary_factor") or 1.0))
