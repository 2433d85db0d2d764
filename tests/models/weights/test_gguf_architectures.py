"""Files of every architecture become the model they were written from: configuration, parameters and logits."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.models import quantized_models
from slipstream.models.cpu.block_linear import BlockLinear, block_linears
from slipstream.models.cpu.kernel_libraries import block_kernels
from slipstream.models.decoder.mixtures import MIXTURES
from slipstream.models.decoder.planned_model import PLANNED
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.weights.gguf_architectures import settings_of
from slipstream.models.weights.gguf_configuration import described
from slipstream.models.weights.gguf_conversion import dequantized
from slipstream.models.weights.gguf_file import read_header
from slipstream.models.weights.gguf_packing import PackedAhead
from slipstream.models.weights.gguf_tensors import GGUFTensors
from tests.support.gguf_architectures import CASES, architecture, is_shifted, write_case
from tests.support.markers import mostly_slow, needs_avx2
from tests.support.quantized_files import kl

gguf = pytest.importorskip("gguf")
# fields that change nothing: of training, of saving, of tokens; and layer_types that are written in another form
OTHER = (
    *("initializer_range", "architectures", "transformers_version", "dtype", "use_cache", "output_router_logits"),
    *(
        "router_aux_loss_coef",
        "router_jitter_noise",
        "attention_dropout",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ),
    *("_name_or_path", "num_nextn_predict_layers", "num_mtp_layers", "pretraining_tp", "max_window_layers"),
    *(
        "allow_global_per_layer_attribute_access",
        "block_multiple_of",
        "block_ffn_dim_multiplier",
        "chunk_size_feed_forward",
        "mamba_chunk_size",
    ),
)
LATENT = CASES["deepseek2"]
NARROW = replace(LATENT, settings=LATENT.settings | {"qk_nope_head_dim": 24, "v_head_dim": 40})  # not for kernels
# tests of decoder/ read files of mixtures and of hybrids in blocks
DENSE = [name for name, case in CASES.items() if case.in_blocks and case.model_type in PLANNED.keys() - MIXTURES]
IDS = torch.randint(0, 250, (1, 40), generator=torch.Generator().manual_seed(4))


pytestmark = pytest.mark.usefixtures("own_cache")


def compared(config: Any) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in OTHER}


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("name", mostly_slow(CASES, "llama", "gemma3", "qwen3moe", "qwen35"))
def test_a_file_gives_the_configuration_parameters_and_logits_it_was_written_from(name: str, tmp_path: Path) -> None:
    case, file = CASES[name], tmp_path / "model.gguf"
    model = write_case(file, architecture(name), case)
    header = read_header(file)
    loaded = dequantized(header, described(header), torch.float32).eval()
    wanted, found = compared(model.config), compared(loaded.config)
    assert {field: found.get(field) for field in wanted} == wanted
    expected, parameters = model.state_dict(), loaded.state_dict()
    assert parameters.keys() == expected.keys()
    for parameter, numbers in expected.items():
        if parameter.endswith(case.rounded) or is_shifted(model.config, parameter):
            assert torch.allclose(parameters[parameter], numbers, rtol=1e-5, atol=2e-7), parameter
        else:
            assert torch.equal(parameters[parameter], numbers), parameter
    assert torch.allclose(logits(loaded), logits(model), rtol=1e-3, atol=1e-4)


@needs_avx2
@pytest.mark.parametrize("name", mostly_slow(DENSE, "llama", "gemma3"))
def test_a_quantized_file_is_computed_in_its_blocks(name: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_case(file, architecture(name), CASES[name], "Q8_0")
    header = read_header(file)
    reference = dequantized(header, described(header), torch.float32).eval()
    loaded = load(str(file), LoadOptions(activations="int15"))
    assert block_linears(loaded.model)
    loaded.backend.reserve(1, 256)
    found, expected = loaded.backend.forward(IDS, [0], first_slot=0, logits=True), logits(reference)
    assert kl(expected, found) < 1e-6 < kl(expected, expected.roll(1, 1))


@needs_avx2
def test_columns_in_another_order_take_their_inputs_in_that_order(tmp_path: Path) -> None:
    write_case(tmp_path / "model.gguf", "qwen35", CASES["qwen35"], "Q8_0")
    tensors, name = GGUFTensors(read_header(tmp_path / "model.gguf")), "model.layers.0.linear_attn.out_proj.weight"
    part = tensors.part(name, (64, 96), block_kernels())
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    expected = x @ tensors.values(name, (64, 96)).T
    found = BlockLinear([part], None, "int15")(x)
    assert torch.allclose(found, expected, atol=1e-3)
    part.inputs_from = None
    assert not torch.allclose(BlockLinear([part], None, "int15")(x), expected, atol=1e-1)


SCALED = ("attn_q", "attn_v", "attn_output", "output", "token_embd", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def scales_of(name: str) -> dict[str, torch.Tensor]:
    generator, experts = torch.Generator().manual_seed(3), getattr(CASES[name].config(), "num_experts", 0)
    tensors = SCALED if experts else (*SCALED[:5], "ffn_gate", "ffn_up", "ffn_down")
    prefixes = ["" if tensor in ("output", "token_embd") else "blk.1." for tensor in tensors]
    return {
        f"{prefix}{tensor}.scale": 0.5 + torch.rand(experts if "_exps" in tensor else 1, generator=generator)
        for prefix, tensor in zip(prefixes, tensors, strict=True)
    }


def write_scaled(file: Path, name: str, scales: dict[str, torch.Tensor]) -> None:
    """A file in NVFP4 with these tensors, too."""
    wide = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    case = replace(CASES[name], settings=CASES[name].settings | wide, tensors=lambda _: scales)
    write_case(file, architecture(name), case, "NVFP4")


@pytest.mark.slow
@needs_avx2
@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_a_scale_of_a_whole_matrix_multiplies_all_its_numbers(name: str, tmp_path: Path) -> None:
    file, plain = tmp_path / "scaled.gguf", tmp_path / "plain.gguf"
    scales = scales_of(name)
    write_scaled(file, name, scales)
    write_scaled(plain, name, {})
    header, unscaled = read_header(file), GGUFTensors(read_header(plain))
    reference = dequantized(header, described(header), torch.float32).eval()
    place = 1 if name == "qwen3moe" else 0
    weight = "model.layers.1." + ("mlp.experts.down_proj", "mlp.down_proj.weight")[1 - place]
    shape = tuple(reference.state_dict()[weight].shape)
    scale = scales["blk.1.ffn_down_exps.scale" if place else "blk.1.ffn_down.scale"]
    expected = unscaled.values(weight, shape) * scale.view(-1, *[1] * (len(shape) - 1))
    assert torch.equal(reference.state_dict()[weight], expected) and not bool((scale == 1).any())
    loaded = load(str(file), LoadOptions(activations="int15"))
    assert block_linears(loaded.model)
    loaded.backend.reserve(1, 256)
    found, wanted = loaded.backend.forward(IDS, [0], first_slot=0, logits=True), logits(reference)
    assert kl(wanted, found) < 1e-6 < kl(wanted, wanted.roll(1, 1))
    assert kl(wanted, logits(load(str(plain), LoadOptions("float32")).model)) > 1e-4


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        ("blk.1.ffn_up_exps.scale", torch.ones(3), r"tensor 'blk.1.ffn_up_exps.scale' is \[3\]; allowed: \[8\]"),
        ("blk.1.attn_q.scale", torch.ones(2), r"tensor 'blk.1.attn_q.scale' is \[2\]; allowed: \[1\]"),
        ("output.scale", torch.tensor([float("nan")]), "'output.scale' holds numbers that are not finite"),
        (
            "blk.1.attn_q.input_scale",
            torch.ones(1),
            "1 tensors of the file are not used, first blk.1.attn_q.input_scale",
        ),
        ("blk.1.attn_norm.scale", torch.ones(1), "1 tensors of the file are not used, first blk.1.attn_norm.scale"),
    ],
)
def test_scales_that_do_not_fit_are_refused(name: str, scale: torch.Tensor, message: str, tmp_path: Path) -> None:
    write_scaled(tmp_path / "scaled.gguf", "qwen3moe", scales_of("qwen3moe") | {name: scale})
    for options in (LoadOptions(), LoadOptions("float32")):
        with pytest.raises(SlipstreamError, match=message):
            load(str(tmp_path / "scaled.gguf"), options)


@needs_avx2
def test_a_file_that_must_be_unpacked_is_not_packed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_case(tmp_path / "model.gguf", "deepseek2", NARROW)
    monkeypatch.setattr(quantized_models, "PackedAhead", lambda *arguments: pytest.fail("packed"))
    assert not block_linears(load(str(tmp_path / "model.gguf"), LoadOptions()).model)


@needs_avx2
def test_matrices_in_another_order_are_not_packed_ahead(tmp_path: Path) -> None:
    write_case(tmp_path / "model.gguf", "qwen35", CASES["qwen35"], "Q8_0")
    with PackedAhead(read_header(tmp_path / "model.gguf"), block_kernels()) as ahead:
        assert ahead.part("blk.0.ffn_up.weight") is not None
        assert ahead.part("blk.0.attn_qkv.weight") is ahead.part("blk.0.attn_gate.weight") is None


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_unpacked_numbers_are_those_of_the_gguf_package(kind: str, tmp_path: Path) -> None:
    write_case(tmp_path / "model.gguf", "qwen3moe", CASES["qwen3moe"], kind)
    header = read_header(tmp_path / "model.gguf")
    loaded = dequantized(header, described(header), torch.float32)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}

    def numbers(name: str) -> torch.Tensor:
        return torch.from_numpy(gguf.quants.dequantize(reader[name].data, reader[name].tensor_type).copy())

    layer = loaded.model.layers[1]
    gate, up = numbers("blk.1.ffn_gate_exps.weight"), numbers("blk.1.ffn_up_exps.weight")
    assert torch.allclose(layer.mlp.experts.gate_up_proj, torch.cat([gate, up], 1), rtol=1e-6, atol=0)
    assert torch.allclose(layer.self_attn.q_proj.weight, numbers("blk.1.attn_q.weight"), rtol=1e-6, atol=0)


def refusal(file: Path) -> str:
    """The message of every way to load a file, which must be the same."""
    messages = set()
    for options in (LoadOptions(), LoadOptions("float32"), LoadOptions("bfloat16")):
        with pytest.raises(SlipstreamError) as error:
            load(str(file), options)
        messages.add(str(error.value))
    (message,) = messages
    assert "\n" not in message and "; allowed: " in message
    return message


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"skip": ("embedding_length",)}, "its metadata have no llama.embedding_length; allowed"),
        ("llama", {"attention.layer_norm_rms_epsilon": "small"}, "is 'small'; allowed: a finite number"),
        ("llama", {"attention.head_count": 2.5}, "llama.attention.head_count is 2.5; allowed: a whole number"),
        ("llama", {"attention.head_count": [4, 2]}, r"head_count is \[4, 2\]; allowed: the same for all layers"),
        ("llama", {"attention.head_count": [4, 4, 4]}, "an array of 3; allowed: an item for each of 2 layers"),
        ("llama", {"attention.some_gain": 2.0}, "metadata have llama.attention.some_gain, which is not supported yet"),
        ("llama", {"attention.value_length": 16}, "llama.attention.value_length is 16; allowed: 32"),
        ("llama", {"rope.dimension_count": 16}, "llama.rope.dimension_count is 16; allowed: 32"),
        ("qwen2", {"rope.freq_base": 0.0}, "qwen2.rope.freq_base is 0.0; allowed: a number above 1"),
        ("gemma4-experts", {"rope.freq_base_swa": 0.0}, "gemma4.rope.freq_base_swa is 0.0; allowed: a number above 1"),
        ("llama", {"attention.causal": False}, "llama.attention.causal is False; allowed: True"),
        ("llama", {"skip": ("blk.1.ffn_up.weight",)}, "has no tensor 'blk.1.ffn_up.weight' for the model's"),
        ("qwen3", {"expert_count": 8}, "qwen3.expert_count is 8; allowed: 0"),
        ("qwen3moe", {"skip": ("blk.1.ffn_up_exps.weight",)}, "has no tensor 'blk.1.ffn_up_exps.weight'"),
        ("qwen3moe", {"expert_gating_func": 2}, "qwen3moe.expert_gating_func is 2; allowed: 1"),
        ("glm4moe", {"expert_group_count": 8, "expert_group_used_count": 4}, "expert_group_count is 8; allowed: 0, 1"),
        (
            "olmo2-olmo3",
            {"rope.scaling.attn_factor": 1.3},
            r"'attn_factor': 1.29.*; allowed: types none, linear and yarn",
        ),
        ("gemma2", {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, "by linear; allowed: no scaling"),
        ("deepseek2", {"skip": ("expert_gating_func",)}, "metadata have no deepseek2.expert_gating_func"),
        ("deepseek2", {"expert_gating_func": 3}, "expert_gating_func is 3; allowed: 1, the softmax, or 2, the sigmoid"),
        ("deepseek2", {"expert_gating_func": 1}, "expert_weights_norm is True; allowed: False"),
        ("deepseek2-joint", {"expert_gating_func": 2}, "has no tensor 'blk.1.exp_probs_b.bias'"),
        ("deepseek2-joint", {"attention.head_count_kv": 1}, "head_count_kv is 1; allowed: 4"),
        ("deepseek2", {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, "by linear; allowed: yarn"),
        ("gemma4-experts", {"expert_count": 0}, "gemma4.expert_count is 0; allowed: the number of the experts"),
        (
            "gemma4-small",
            {"attention.shared_kv_layers": 7},
            "shared_kv_layers is 7; allowed: a number that leaves a layer",
        ),
        ("gemma4-small", {"attention.shared_kv_layers": 12}, "shared_kv_layers is 12; allowed"),
        ("gemma4-small", {"attention.shared_kv_layers": 5}, "has no tensor 'blk.6.attn_"),
        (
            "gemma4-small",
            {"embedding_length_per_layer_input": 0},
            "tensors of the file are not used, first blk.0.inp_gate",
        ),
        ("gemma4-small", {"skip": ("embedding_length_per_layer_input",)}, "no gemma4.embedding_length_per_layer_input"),
        ("gemma4-small", {"skip": ("blk.3.inp_gate.weight",)}, "has no tensor 'blk.3.inp_gate.weight'"),
        (
            "phi3-longrope",
            {"rope.dimension_count": 2},
            "dimension_count is 2; allowed: two for each number of 'rope_fac",
        ),
        ("phi3-longrope", {"rope.scaling.original_context_length": 0}, "_length is 0; allowed: a number from 2"),
        ("phi3-longrope", {"rope.scaling.original_context_length": 1}, "_length is 1; allowed: a number from 2"),
        ("lfm2", {"attention.head_count_kv": [0, 2, 4]}, "allowed: 0 for convolutions"),
        ("llama", {"attention.key_length": 63, "attention.value_length": 63}, "key_length is 63; allowed: an even"),
        ("granite", {"rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned is False; allowed: True"),
    ],
)
def test_files_that_would_mean_another_model_are_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_case(tmp_path / "model.gguf", architecture(name), CASES[name], **change)
    assert re.search(message, refusal(tmp_path / "model.gguf"))


def test_sizes_that_the_tensors_do_not_have_are_refused_whatever_tensor_is_read_first(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_case(file, architecture("gemma4-small"), CASES["gemma4-small"], embedding_length_per_layer_input=16)
    for options in (LoadOptions(), LoadOptions("float32"), LoadOptions("bfloat16")):
        with pytest.raises(SlipstreamError, match=r"tensor '.*' is \[32.*\]; allowed: \[16.*\], by the file's own"):
            load(str(file), options)


def test_an_architecture_that_nothing_reads_is_refused_by_name(tmp_path: Path) -> None:
    write_case(tmp_path / "model.gguf", "llama", CASES["llama"])
    content = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "other.gguf").write_bytes(content.replace(b"llama", b"lamma"))
    message = refusal(tmp_path / "other.gguf")
    assert "architecture 'lamma' is not read yet; allowed: cohere2, deepseek2, " in message


def test_a_missing_value_is_the_one_that_llama_cpp_takes(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_case(file, "qwen3moe", CASES["qwen3moe"], skip=("expert_feed_forward_length", "rope.freq_base"))
    settings = settings_of(read_header(file))
    assert settings["moe_intermediate_size"] == 96 // 2 and settings["rope_parameters"]["rope_theta"] == 10000.0
    write_case(file, "llama", CASES["llama-biased"], skip=("attention.head_count_kv",))
    assert settings_of(read_header(file))["num_key_value_heads"] == 4
    write_case(file, "gemma2", CASES["gemma2"], skip=("attn_logit_softcapping", "attention.sliding_window"))
    settings = settings_of(read_header(file))
    assert (settings["attn_logit_softcapping"], settings["sliding_window"]) == (50.0, 4096)


def test_a_file_that_does_not_fit_into_memory_unpacked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_case(tmp_path / "model.gguf", "deepseek2", NARROW, "F32")
    monkeypatch.setattr("slipstream.models.weights.gguf_conversion.memory_bytes", lambda: 100_000)
    with pytest.raises(SlipstreamError, match=r"unpacked to bfloat16 it takes 0\.0 GB of memory.*; allowed: 0\.0 GB"):
        load(str(tmp_path / "model.gguf"), LoadOptions())
    with pytest.raises(SlipstreamError, match="unpacked to float32 it takes"):
        load(str(tmp_path / "model.gguf"), LoadOptions("float32"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4-experts", "deepseek2", pytest.param("granitehybrid", marks=pytest.mark.slow)])
def test_a_file_that_is_unpacked_is_loaded(name: str, tmp_path: Path) -> None:
    model = write_case(tmp_path / "model.gguf", architecture(name), CASES[name])
    backend = load(str(tmp_path / "model.gguf"), LoadOptions(dtype="float32")).backend
    backend.reserve(1, 64)
    found, expected = backend.forward(IDS, [0], first_slot=0, logits=True), logits(model)
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_the_usual_factor_of_yarn_may_stand_in_a_file(tmp_path: Path) -> None:
    file, factor = tmp_path / "model.gguf", 0.1 * math.log(4) + 1
    rope = {"skip": ("rope.scaling.yarn_attn_factor",), "rope.scaling.attn_factor": factor}
    write_case(file, "olmo2", CASES["olmo2-olmo3"], **rope)
    assert "attention_factor" not in settings_of(read_header(file))["rope_parameters"]["full_attention"]


@pytest.mark.parametrize(
    ("name", "key", "allowed"),
    [
        ("qwen35", "full_attention_interval", "a number from 1"),
        ("qwen3", "attention.key_length", "an even number from 2"),
        ("granite", "attention.key_length", "an even number from 2"),
        ("granite", "logit_scale", "a number other than 0"),
    ],
)
def test_numbers_that_divide_are_not_0(name: str, key: str, allowed: str, tmp_path: Path) -> None:
    write_case(tmp_path / "model.gguf", name, CASES[name], **{key: 0.0 if key == "logit_scale" else 0})
    with pytest.raises(SlipstreamError, match=rf"{name}.{key} is 0(\.0)?; allowed: {allowed}"):
        settings_of(read_header(tmp_path / "model.gguf"))


@pytest.mark.parametrize("pattern, windows", [(0, "ss"), (1, "ff"), (2, "sf"), (True, "ss"), (False, "ff")])
def test_a_pattern_of_windows_is_a_period_or_a_flag(pattern: Any, windows: str, tmp_path: Path) -> None:
    more = {"attention.sliding_window_pattern": pattern}
    write_case(tmp_path / "model.gguf", "gemma2", CASES["gemma2"], **more)
    kinds = settings_of(read_header(tmp_path / "model.gguf"))["layer_types"]
    assert "".join(kind[0] for kind in kinds)[:2] == windows
