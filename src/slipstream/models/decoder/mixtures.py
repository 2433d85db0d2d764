"""The experts of each family of mixtures, from its configuration.

An entry of `MIXTURES` describes what transformers' block of experts computes; `csrc/blocks/experts.c` computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slipstream.errors import one_line
from slipstream.models.cpu.structs import MAX_GROUPS
from slipstream.models.decoder.plan import ExpertsPlan, UnknownLayerError, activation_named


def experts_plan(config: Any) -> ExpertsPlan:
    """The experts of a text configuration. Raises `UnknownLayerError` if they are not declared."""
    if (make := MIXTURES.get(config.model_type)) is None:
        raise UnknownLayerError(f"the experts of {config.model_type} are not declared")
    try:
        return make(config)
    except (TypeError, ArithmeticError) as error:  # a field is null or 0
        raise UnknownLayerError(f"its configuration does not fit its experts: {one_line(error)}") from error


def _softmax(config: Any, count: int, inner: int, **further: Any) -> ExpertsPlan:
    """count: of experts; inner: see `ExpertsPlan`."""
    plan: dict[str, Any] = {
        "block": "mlp",
        "used": getattr(config, "num_experts_per_tok", None),
        "hidden": config.hidden_size,
        "activation": activation_named(getattr(config, "hidden_act", "silu")),
        "normalizes": getattr(config, "norm_topk_prob", True),
    }
    return ExpertsPlan(count=count, inner=inner, **plan | further)


def _qwen3(config: Any, **further: Any) -> ExpertsPlan:
    return _softmax(config, config.num_experts, config.moe_intermediate_size, **further)


def _qwen2(config: Any) -> ExpertsPlan:
    """Softmax, and a shared expert with its own gate."""
    shared = {"shared": "shared_expert", "shared_inner": config.shared_expert_intermediate_size}
    return _qwen3(config, **shared, shared_gate="shared_expert_gate")


def _mixtral(config: Any, **further: Any) -> ExpertsPlan:
    return _softmax(config, config.num_local_experts, config.intermediate_size, **further)


def _granite(config: Any) -> ExpertsPlan:
    return _mixtral(config, block="block_sparse_moe", router="router")


def _gpt_oss(config: Any) -> ExpertsPlan:
    """SwiGLU with limits, and biases everywhere."""
    slope, limit = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
    further = {"router": "router", "activation": (slope, 0.0), "limit": limit, "shift": 1.0}
    return _mixtral(config, **further, is_biased=True, returns_pair=True)


def _groups(config: Any) -> dict[str, int]:
    """The groups of experts: the router chooses from a few of them."""
    groups, used = getattr(config, "n_group", 1) or 1, getattr(config, "topk_group", 1) or 1
    count, chosen = _field(config, "n_routed_experts", "num_experts"), config.num_experts_per_tok
    if groups > MAX_GROUPS or count % groups or not used * (count // groups) >= chosen:
        raise UnknownLayerError(f"its router chooses {chosen} of {count} experts from {used} of {groups} groups")
    return {"groups": groups, "used_groups": min(used, groups)}


def _field(config: Any, *names: str) -> Any:
    """The value of a field that has one of these names."""
    return next(getattr(config, name) for name in names if hasattr(config, name))


def _deepseek(config: Any, **further: Any) -> ExpertsPlan:
    inner, count = config.moe_intermediate_size, _field(config, "n_routed_experts", "num_experts")
    shared_inner = inner * _field(config, "n_shared_experts", "num_shared_experts")
    factor = _field(config, "routed_scaling_factor", "router_scaling_factor", "route_scale")
    return _softmax(config, count, inner, factor=factor, shared="shared_experts", shared_inner=shared_inner, **further)


def _glm(config: Any, bias: str = "gate.e_score_correction_bias", **further: Any) -> ExpertsPlan:
    return _deepseek(config, **_groups(config), is_sigmoid=True, floor=1e-20, choice_bias=bias, **further)


def _deepseek_v2(config: Any) -> ExpertsPlan:
    """Softmax without dividing the chosen scores by their sum; its layers ignore `norm_topk_prob`."""
    if config.topk_method not in ("greedy", "group_limited_greedy"):
        raise UnknownLayerError(f"its router chooses experts by {config.topk_method!r}")
    return _deepseek(config, **(_groups(config) if config.topk_method != "greedy" else {}), normalizes=False)


def _ernie4_5(config: Any) -> ExpertsPlan:
    """Softmax with a bias that affects only the choice."""
    inner, num_shared = config.moe_intermediate_size, config.moe_num_shared_experts
    if config.use_bias:
        raise UnknownLayerError("its experts have biases")
    shared = {"shared": "shared_experts", "shared_inner": inner * num_shared} if num_shared else {}
    return _softmax(
        config,
        config.moe_num_experts,
        inner,
        used=config.moe_k,
        floor=config.moe_norm_min,
        choice_bias="gate.moe_statics.e_score_correction_bias",
        bias_is_row=True,
        **shared,
    )


def _hunyuan(config: Any) -> ExpertsPlan:
    """Softmax, and a shared expert of the same size; `moe_topk` may be a list with a number for each layer."""
    count, inner, used = config.num_experts, config.intermediate_size, config.moe_topk
    if isinstance(used, list):
        if len({*used}) != 1:
            raise UnknownLayerError(f"its configuration has moe_topk={used}")
        used = used[0]
    return _softmax(config, count, inner, used=used, router="gate.wg", shared="shared_mlp", shared_inner=inner)


def _lfm2(config: Any) -> ExpertsPlan:
    return _qwen3(
        config,
        block="feed_forward",
        is_sigmoid=True,
        factor=config.routed_scaling_factor,
        floor=1e-6,
        choice_bias="expert_bias" if config.use_expert_bias else None,
    )


def _gemma4(config: Any) -> ExpertsPlan:
    """The router and the experts read different norms of the same hidden states."""
    return _qwen3(
        config,
        block="experts",
        used=config.top_k_experts,
        activation=activation_named(config.hidden_activation),
        router="router.proj",
        router_scale="router.scale",
        expert_scales="router.per_expert_scale",
    )


# by the type of the configuration
MIXTURES: Mapping[str, Callable[[Any], ExpertsPlan]] = {
    "qwen2_moe": _qwen2,
    **dict.fromkeys(("qwen3_moe", "mellum"), _qwen3),
    "qwen3_next": _qwen2,
    "qwen3_5_moe_text": _qwen2,
    **dict.fromkeys(
        ("olmoe", "flex_olmo"), lambda config: _softmax(config, config.num_experts, config.intermediate_size)
    ),
    "mixtral": _mixtral,
    "minimax_m2": lambda config: _mixtral(config, is_sigmoid=True, choice_bias="e_score_correction_bias"),
    **dict.fromkeys(("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"), _granite),
    "gpt_oss": _gpt_oss,
    "ernie4_5_moe": _ernie4_5,
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "deepseek_v3", "dots1", "exaone_moe", "solar_open"), _glm),
    "hunyuan_v1_moe": _hunyuan,
    "afmoe": lambda config: _glm(config, "expert_bias", router="router.gate"),
    "hy_v3": lambda config: _glm(config, "e_score_correction_bias"),
    "deepseek_v2": _deepseek_v2,
    "lfm2_moe": _lfm2,
    "gemma4_text": _gemma4,
}
