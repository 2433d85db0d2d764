"""The plan of each family computes what transformers' model does, all layers in one call, in bfloat16 and in blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.models.decoder.attention import MaskBuilder
from slipstream.models.decoder.families import FAMILIES, plan_of
from slipstream.models.decoder.fused_layer import Norm
from slipstream.models.decoder.plan import UnknownLayerError
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.trials import difference
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.notices import warn_slower
from slipstream.models.plain_models import load_unpacked
from tests.support.markers import mostly_exhaustive, mostly_slow, needs_kernels

pytestmark = needs_kernels

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW, THETA = {"sliding_window": 24}, {"rope_type": "default", "rope_theta": 1e4}
PART = THETA | {"partial_rotary_factor": 0.5}
CAPS = {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0}
KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
# all experts of a layer are used, so that roundings do not decide which
EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 4),
    **dict.fromkeys(("moe_num_experts", "moe_k"), 4),
    "moe_intermediate_size": 96,
}
SHARED = {"n_shared_experts": 2, "routed_scaling_factor": 1.8}
LINEAR = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
MULTIPLIERS = {"embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.3}
DELTA_NET = {
    "layer_types": LINEAR,
    "rope_parameters": PART | {"mrope_section": [6, 5, 5]},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
}
MAMBA = MULTIPLIERS | {
    "attention_multiplier": 0.2,
    "layer_types": LINEAR,
    "shared_intermediate_size": 160,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
}
GEMMA4 = (
    WINDOW
    | KINDS
    | {"hidden_size_per_layer_input": 0, "global_head_dim": 128, "num_global_key_value_heads": 1}
    | {"final_logit_softcapping": 4.0}
)
LATENT = {
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 8),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim"), 32),
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 96,
    "n_shared_experts": 1,
    **dict.fromkeys(("n_group", "topk_group"), 1),
}
YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": WINDOW,
    "ministral": WINDOW | KINDS,
    "ministral3": {
        "rope_parameters": THETA
        | {"original_max_position_embeddings": 16, "max_position_embeddings": 512, "llama_4_scaling_beta": 0.4},
    },
    "qwen2": {},
    "qwen3": {},
    "seed_oss": {},
    "cwm": WINDOW | KINDS,
    "gemma": {},
    "gemma2": WINDOW | KINDS | CAPS,
    "vaultgemma": WINDOW | KINDS | CAPS,
    "gemma3_text": WINDOW | KINDS | {"query_pre_attn_scalar": 32, "final_logit_softcapping": 4.0},
    "phi": {"rope_parameters": PART},
    "phi3": {"rope_parameters": PART},
    "smollm3": {"no_rope_layer_interval": 2},
    "olmo2": {},
    "olmo3": WINDOW | KINDS,
    "exaone4": WINDOW | KINDS,
    "glm": {"rope_parameters": PART},
    "glm4": {"rope_parameters": PART},
    "granite": MULTIPLIERS | {"attention_multiplier": 0.2},
    "granite_swa": MULTIPLIERS | WINDOW | KINDS | {"attention_multiplier": 0.2, "layer_rope_theta": [0, 5e3] * 2},
    "hyperclovax": MULTIPLIERS | {"attention_multiplier": 0.2},
    "cohere": {"logit_scale": 0.3},
    "cohere2": WINDOW | KINDS | {"logit_scale": 0.3},
    "ernie4_5": {},
    "helium": {"head_dim": 32},
    "starcoder2": WINDOW | {"hidden_act": "gelu_pytorch_tanh"},
    "arcee": {"hidden_act": "relu2"},
    "jais2": {"hidden_act": "relu2"},
    "nemotron": {"hidden_act": "relu2", "rope_parameters": PART},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": EXPERTS | {"moe_topk": 4},
    "mixtral": EXPERTS | WINDOW,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 64, "mlp_only_layers": [2]},
    "qwen3_moe": EXPERTS | {"decoder_sparse_step": 2},
    "olmoe": EXPERTS | {"head_dim": 32},
    "flex_olmo": EXPERTS | {"head_dim": 32},
    "minimax_m2": EXPERTS | {"rope_parameters": PART},
    "granitemoe": EXPERTS | MULTIPLIERS | {"attention_multiplier": 0.2},
    "granitemoeshared": EXPERTS | MULTIPLIERS | {"attention_multiplier": 0.2, "shared_intermediate_size": 160},
    "granitemoe_swa": EXPERTS | MULTIPLIERS | WINDOW | KINDS | {"attention_multiplier": 0.2},
    "glm4_moe": EXPERTS | SHARED | {"rope_parameters": PART, "use_qk_norm": True, "first_k_dense_replace": 1},
    "solar_open": EXPERTS | SHARED,
    "dots1": EXPERTS | SHARED | {"first_k_dense_replace": 1},
    "afmoe": EXPERTS
    | WINDOW
    | KINDS
    | {"num_shared_experts": 2, "num_dense_layers": 1, "route_scale": 1.8, "mup_enabled": True},
    "hy_v3": EXPERTS | {"num_shared_experts": 2, "router_scaling_factor": 1.8},
    "mellum": EXPERTS
    | WINDOW
    | KINDS
    | {"mlp_layer_types": ["sparse", "dense"] * 2}
    | {"rope_parameters": {"full_attention": THETA, "sliding_attention": THETA | {"rope_theta": 5e2}}},
    "exaone_moe": EXPERTS | WINDOW | KINDS | {"num_shared_experts": 2, "first_k_dense_replace": 1},
    "gpt_oss": EXPERTS | WINDOW | KINDS,
    "ernie4_5_moe": EXPERTS | {"moe_layer_interval": 2},
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "conv_bias": True,
        "block_multiple_of": 64,
        "block_ffn_dim_multiplier": 1.2,
    },
    "lfm3": WINDOW | {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"], "conv_L_cache": 5},
    "qwen3_5_text": DELTA_NET,
    "qwen3_next": EXPERTS | DELTA_NET | {"rope_parameters": PART, "shared_expert_intermediate_size": 64},
    "granitemoehybrid": MAMBA | {"num_local_experts": 0, "num_experts_per_tok": 0},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 2},
    "qwen3_5_moe_text": EXPERTS | DELTA_NET | {"shared_expert_intermediate_size": 64},
    "granitemoehybrid-experts": EXPERTS | MAMBA,
    "deepseek_v2": EXPERTS
    | LATENT
    | {"q_lora_rank": None, "first_k_dense_replace": 1}
    | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}, "routed_scaling_factor": 1.5},
    "deepseek_v3": EXPERTS | LATENT | {"q_lora_rank": 96, "first_k_dense_replace": 1, "rope_interleave": False},
    "deepseek_v3-dense": LATENT
    | {"q_lora_rank": 96, "first_k_dense_replace": 4}
    | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "youtu": LATENT | {"q_lora_rank": 96},
    "glm4_moe_lite": EXPERTS | LATENT | {"q_lora_rank": 64, "mlp_layer_types": ["dense", *["sparse"] * 3]},
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": {name: value for name, value in GEMMA4.items() if name != "hidden_size_per_layer_input"},
    "gemma4_text-small": GEMMA4
    | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 320}
    | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "gemma4_text-experts": EXPERTS | GEMMA4 | {"enable_moe_block": True, "top_k_experts": 4, "attention_k_eq_v": True},
}
DENSE = [name for name, settings in CONFIGS.items() if not settings.keys() >= EXPERTS.keys()]
# one of each structure that the kernels for blocks distinguish
STRUCTURES = (
    *("llama", "gemma2", "phi3", "olmo2", "cohere2", "starcoder2", "granite", "lfm2", "qwen3_5_text"),
    *("granitemoehybrid", "gemma4_text"),
)
PROMPT = [5, 9, 5, 9, 5, 9, 70, 71, 5, 9]
IDS = torch.randint(3, 320, (1, 60), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a family's tiny model, see `save_model`."""

    @cache
    def folder(name: str) -> str:
        path = tmp_path_factory.mktemp(name)
        save_model(name, path)
        return str(path)

    return folder


def tiny_model(name: str, **changes: Any) -> Any:
    """A family's tiny model in bfloat16, whose norms and biases are random, too."""
    config = transformers.AutoConfig.for_model(name.partition("-")[0], **SHAPE | CONFIGS[name] | changes)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config)
        randomize(model, name)
    return model.bfloat16()


def save_model(name: str, folder: Path, **changes: Any) -> None:
    tiny_model(name, **changes).save_pretrained(folder)


def randomize(model: Any, name: str) -> None:
    """Change all vectors at random, and the states of recurrent layers so that they last."""
    for key, parameter in model.state_dict().items():
        if parameter.dim() == 1 and parameter.is_floating_point():
            parameter += 0.3 * torch.randn_like(parameter)
        if name.startswith("gemma4") and key.endswith("q_norm.weight"):
            parameter *= 0.2  # its scores are not scaled, so that roundings would decide which token is attended to
        if key.endswith("A_log"):
            parameter -= 3  # as initialized, states forget each token at the next


@torch.inference_mode()
def own_logits(folder: str, dtype: str, rounding: str = "none") -> Tensor:
    """Of transformers' own forward."""
    logits: Tensor = load_unpacked(folder, LoadOptions(dtype, rounding=rounding))(input_ids=IDS).logits
    return logits.float()


def logits_of(backend: Any) -> Tensor:
    """Of a prompt; each token must have the bits that it has alone."""
    assert isinstance(backend, HFBackend) and backend.stack is not None and backend.shape_independent
    backend.reserve(2, 64)
    whole = backend.forward(IDS, [0], first_slot=0, logits=True)
    backend.forward(IDS[:, :50], [0], first_slot=1, logits=False)
    for i in range(50, 54):
        assert torch.equal(backend.forward(IDS[:, i : i + 1], [i], first_slot=1, logits=True)[0, 0], whole[0, i])
    return whole.float()


def test_every_family_is_tried() -> None:
    assert {name.partition("-")[0] for name in CONFIGS} == set(FAMILIES)


# their layers are like those of another family, which runs instead of them
ALIKE = {
    *("ministral", "seed_oss", "cwm", "vaultgemma", "granite_swa", "hyperclovax", "cohere", "ernie4_5", "jais2"),
    *("hunyuan_v1_dense", "flex_olmo", "granitemoeshared", "granitemoe_swa", "solar_open", "exaone_moe", "lfm3"),
    *(
        "granitemoehybrid",
        "deepseek_v3-dense",
        "gemma4_unified_text",
        "gemma",
        "phi",
        "olmo3",
        "glm",
        "helium",
        "arcee",
    ),
    *("hunyuan_v1_moe", "qwen2_moe", "olmoe", "granitemoe", "dots1", "hy_v3", "lfm2_moe", "qwen3_5_moe_text"),
    *("deepseek_v2", "youtu", "glm4_moe_lite", "ministral3", "mellum"),
}


@pytest.mark.parametrize(
    "name",
    [
        *mostly_slow([name for name in CONFIGS if name not in ALIKE], "llama", "gemma3_text", "qwen3_5_text"),
        *mostly_exhaustive(sorted(ALIKE)),
    ],
)
def test_bfloat16_layers_are_as_near_to_the_model_as_transformers_own(
    name: str, folder_of: Callable[[str], str]
) -> None:
    folder = folder_of(name)
    exact, own = own_logits(folder, "float32"), own_logits(folder, "bfloat16")
    logits = logits_of(load(folder, LoadOptions()).backend)
    assert difference(logits, exact) <= 1.2 * difference(own, exact) < 0.05


@pytest.mark.parametrize("name", CONFIGS)
def test_norms_are_rounded_as_often_as_transformers_own(name: str) -> None:
    model, x = tiny_model(name), torch.randn(64, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(3))
    plan, layer = plan_of(model.config, MaskBuilder(model).windows).layers[0], model.get_decoder().layers[0]
    for module in (layer.get_submodule(path) for path in plan.norms if path is not None):
        computed, expected = Norm(module, plan.norm)(x.bfloat16()), module(x.bfloat16())
        assert (computed != expected).float().mean() < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_exhaustive(DENSE, *STRUCTURES))
def test_layers_in_blocks_compute_the_rounded_weights(name: str, folder_of: Callable[[str], str]) -> None:
    folder = folder_of(name)
    logits = logits_of(load(folder, LoadOptions(activations="int15", rounding="int4")).backend)
    assert difference(logits, own_logits(folder, "float32", "int4")) <= 0.01


# matrices named w1, w2 and w3, those of all experts in one tensor, and other names of their own
QUANTIZED = (
    "lfm2_moe",
    "granitemoehybrid-experts",
    "gemma4_text-experts",
    "mixtral",
    "minimax_m2",
    "hy_v3",
    "exaone_moe",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZED)
def test_experts_are_quantized_whatever_the_names_of_their_tensors(name: str, folder_of: Callable[[str], str]) -> None:
    logits = logits_of(load(folder_of(name), LoadOptions(activations="int15", rounding="int8")).backend)
    assert difference(logits, own_logits(folder_of(name), "float32")) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["none", "int4"])
@pytest.mark.parametrize(
    "name", mostly_exhaustive(DENSE, "cohere2", "gemma4_text")
)  # each decoder measures its forwards
def test_texts_are_the_same_with_drafts(name: str, quantize: str, folder_of: Callable[[str], str]) -> None:
    decoder = SpeculativeDecoder(folder_of(name), quantize=quantize, drafter="none")
    params = SamplingParams(max_tokens=40)
    plain = decoder.generate(PROMPT, params).token_ids
    assert decoder.using("ngram", num_draft_tokens=5).generate(PROMPT, params).token_ids == plain


CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm=True"),
    ("llama", {"residual_multiplier": 0.22}, "residual_multiplier=0.22"),
    ("llama", {"head_sizes": [8, 16, 8, 16]}, "head_sizes="),
    ("llama", {"attn_logit_softcapping": 1.0}, "attn_logit_softcapping=1.0"),
    ("llama", {"attn_temperature_tuning": True}, "attn_temperature_tuning=True"),
    ("llama", {"use_logn_attn": True}, "use_logn_attn=True"),
    ("llama", {"no_rope_layers": [1, 0, 1, 0]}, "no_rope_layers="),
    ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier=12.0"),
    ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    ("mistral", {"rope_parameters": THETA | {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta=0.1"),
    ("llama", {"hidden_act": "relu"}, "the activation 'relu'"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "layers of chunked_attention"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm=True"),
    ("granite_swa", {"layer_rope_theta": [0, 1e4, 0, 5e3]}, "layer_rope_theta="),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ("qwen3_moe", {"router_logit_scale": 0.5}, "router_logit_scale=0.5"),
    ("mixtral", {"hidden_act": "relu"}, "the activation 'relu'"),
    ("glm4_moe", {"n_group": 4, "topk_group": 2}, "2 of 4 groups"),
    ("deepseek_v3", {"q_scale": 2.0}, "q_scale=2.0"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "'noaux_tc'"),
    ("qwen2_moe", {"num_shared_experts": 2, "shared_expert_scale": 0.5}, "shared_expert_scale=0.5"),
    ("qwen3_5_moe_text", {"router_scaling": 0.5}, "router_scaling=0.5"),
    ("lfm2_moe", {"conv_gain": 2.0}, "conv_gain=2.0"),
    ("granitemoehybrid-experts", {"shared_expert_multiplier": 0.5}, "shared_expert_multiplier=0.5"),
    (
        "gemma4_text",
        {"num_kv_shared_layers": 3},
        "none of its layers has the keys and values of its last full_attention",
    ),
    ("gemma4_text-small", {"per_layer_input_scale": 0.5}, "per_layer_input_scale=0.5"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
    ("gemma4_text-experts", {"router_gain": 2.0}, "router_gain=2.0"),
    ("llama", {"per_layer_config": {0: {"intermediate_size": 64}}}, "per_layer_config="),
]


@pytest.mark.parametrize(("name", "change", "reason"), CHANGES)
def test_there_is_no_plan_for_what_is_unknown(name: str, change: dict[str, Any], reason: str) -> None:
    config = transformers.AutoConfig.for_model(name.partition("-")[0], **SHAPE | CONFIGS[name])
    plan_of(config, [None] * 4)
    for field, value in change.items():
        setattr(config, field, value)
    with pytest.raises(UnknownLayerError, match=reason):
        plan_of(config, [None] * 4)


HARMLESS = {
    "model_max_length": 2048,
    "unsloth_version": "2024.9",
    "is_llama_config": True,
    "transformers.js_config": {"dtype": "q4"},
    "quantization_config": {"activation_scale_ub": 1200.0},
    "residual_multiplier": 1.0,
    "attn_logit_softcapping": None,
    "attn_temperature_tuning": False,
    "no_rope_layers": [1, 1, 1, 1],
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}


@pytest.mark.parametrize("field", HARMLESS)
def test_fields_that_no_model_reads_and_neutral_values_do_no_harm(field: str) -> None:
    config = transformers.AutoConfig.for_model("llama", **SHAPE)
    setattr(config, field, HARMLESS[field])
    assert plan_of(config, [None] * 4) == plan_of(transformers.AutoConfig.for_model("llama", **SHAPE), [None] * 4)


def test_a_model_without_a_plan_keeps_its_own_forward_and_one_line_says_why(
    folder_of: Callable[[str], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_slower.cache_clear()
    model = load_unpacked(folder_of("llama"), LoadOptions("bfloat16"))
    model.config.attention_gain = 3.0
    model.save_pretrained(tmp_path)
    loaded: Any = load(str(tmp_path), LoadOptions())
    assert loaded.backend.stack is None
    (message,) = [record.message for record in caplog.records if "own forward" in record.message]
    assert message.endswith("keeps its layers' own forward: its configuration has attention_gain=3.0")
