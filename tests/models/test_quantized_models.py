"""Weights quantized at load: they take the nearest codes, the model gets another name, and no draft changes a text."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.cpu.block_linear import block_linears
from slipstream.models.cpu.quantized_linear import rounded
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.plain_models import load_unpacked
from tests.support.markers import mostly_slow, needs_avx2
from tests.support.plain_texts import alone_and_together
from tests.support.quantized_files import SHAPE, kl, write_checkpoint
from tests.support.tiny_models import fresh

IDS = torch.randint(0, 250, (1, 40), generator=torch.Generator().manual_seed(4))
PROMPTS = [[5, 9, 5, 9, 5, 9, 70, 71], [100, 7, 33], list(range(40, 90))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model in bfloat16."""
    path = tmp_path_factory.mktemp("plain")
    fresh("qwen2", **SHAPE).bfloat16().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("bits", [4, 8])
@settings(max_examples=30)
@given(
    seed=st.integers(0, 1 << 30), size=st.sampled_from([0.0, 1e-9, 0.02, 3.0, 1e5]), shift=st.sampled_from([0, 1, -5])
)
def test_every_weight_takes_a_near_code_and_extreme_groups_stay_finite(
    bits: int, seed: int, size: float, shift: int
) -> None:
    weight = (torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) + shift) * size
    matrix = rounded(weight, bits)
    values, groups = matrix.values().unflatten(1, (-1, 32)), weight.unflatten(1, (-1, 32))
    assert values.isfinite().all() and int(matrix.codes.max()) < 1 << bits
    reach = groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)
    step = groups.abs().amax(-1) / 127 if bits == 8 else reach / 15
    nearest = 0.51 * step + 2.0**-24  # for the rounding of scales to float16
    error = (values - groups).square().mean(-1).sqrt()
    assert (error <= nearest * (1 if bits == 8 else 1.1)).all()
    if bits == 8:
        assert ((values - groups).abs() <= nearest.unsqueeze(-1) * 1.1).all()


def test_a_narrower_range_is_chosen_where_its_codes_are_nearer() -> None:
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    weight[:, 0] = 4.0  # an outlier
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scale = (high - low) / 15
    whole = ((weight / scale + (-low / scale).round()).round().clamp(0, 15) - (-low / scale).round()) * scale
    assert (rounded(weight, 4).values() - weight).square().sum() < (whole - weight).square().sum() * 0.95


@needs_avx2
@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_logits_are_those_of_the_rounded_weights(quantize: str, folder: str) -> None:
    loaded = load(folder, LoadOptions(activations="int15", rounding=quantize))
    assert loaded.name == f"{folder} quantized to {quantize}, group 32" and loaded.backend.shape_independent
    formats = {"int4": "Q8_0+int4 group 32", "int8": "Q8_0"}
    assert loaded.arithmetic == f"{formats[quantize]} blocks, int15 activations"
    loaded.backend.reserve(1, 64)
    actual_logits = loaded.backend.forward(IDS, [0], first_slot=0, logits=True)
    rounded_model, original = (
        load_unpacked(folder, LoadOptions("float32", rounding=kind)) for kind in (quantize, "none")
    )
    with torch.inference_mode():
        near, far = (
            kl(model(input_ids=IDS, use_cache=False).logits, actual_logits) for model in (rounded_model, original)
        )
    assert near < 1e-6 and near < far / 10
    weight, first = rounded_model.model.layers[1].mlp.up_proj.weight, original.model.layers[1].mlp.up_proj.weight
    assert torch.equal(weight, rounded(first.detach(), 4 if quantize == "int4" else 8).values())


@needs_avx2
@pytest.mark.parametrize("quantize", mostly_slow(["int4", "int8"], "int4"))
def test_texts_are_the_same_with_drafts_and_in_batches(quantize: str, folder: str) -> None:
    decoder = SpeculativeDecoder(folder, quantize=quantize, max_batch_size=3)
    assert decoder.reproducible and f"quantized to {quantize}, group 32" in repr(decoder)
    params = SamplingParams(max_tokens=30)
    for length in (1, 6, 15):
        results = alone_and_together(decoder.using("ngram", num_draft_tokens=length), PROMPTS, params)
    assert len({tuple(result.token_ids) for result in results}) == len(PROMPTS)


def test_a_draft_model_is_not_quantized_with_its_target(folder: str) -> None:
    draft = load(folder, LoadOptions(fast=False, rounding="int8").for_draft("bfloat16"))
    assert not block_linears(draft.model) and draft.name == folder and draft.rounding == "none"
    original = load_unpacked(folder, LoadOptions("float32")).model.layers[0].mlp.up_proj.weight
    assert torch.equal(draft.model.model.layers[0].mlp.up_proj.weight, original.bfloat16())


def test_without_kernels_the_rounded_weights_are_unpacked_with_one_warning(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLIPSTREAM_KERNELS", "off")
    with caplog.at_level(logging.WARNING, "slipstream"):
        loaded = load(folder, LoadOptions(rounding="int4"))
    messages = [record.message for record in caplog.records if "unpacked" in record.message]
    assert messages == [f"{folder} is unpacked to bfloat16, which rounds its weights: SLIPSTREAM_KERNELS is off"]
    assert loaded.model.dtype == torch.bfloat16 and loaded.name.endswith("quantized to int4, group 32")
    expected = load_unpacked(folder, LoadOptions("float32", rounding="int4")).model.layers[0].mlp.up_proj.weight
    unpacked = load(folder, LoadOptions(fast=False, rounding="int4")).model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(expected.bfloat16(), unpacked)


@needs_avx2
def test_a_configuration_whose_buffers_are_not_finite_is_refused(folder: str, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "damaged")
    config = json.loads(Path(folder, "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = -1.5
    (tmp_path / "damaged" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"quantize='int8', but .* cannot be built: .* buffer .*inv_freq; allowed"):
        load(str(tmp_path / "damaged"), LoadOptions(rounding="int8"))
    with pytest.raises(SlipstreamError, match="logits that are not finite"):
        load(str(tmp_path / "damaged"), LoadOptions())


@needs_avx2
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "num_hidden_layers",
            1 << 31,
            r"num_hidden_layers of config.json is 2147483648; allowed: at most \d+, the number",
        ),
        ("head_dim", 1 << 31, "by its configuration, inv_freq of .* has 1073741824 numbers"),
    ],
)
def test_a_configuration_that_would_fill_the_memory_is_refused(
    field: str, value: int, message: str, folder: str, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "damaged")
    config = json.loads(Path(folder, "config.json").read_text())
    del config["layer_types"]  # whose number transformers checks
    (tmp_path / "damaged" / "config.json").write_text(json.dumps(config | {field: value}))
    for rounding in ("int8", "none") if field == "num_hidden_layers" else ("int8",):
        with pytest.raises(SlipstreamError, match=message):
            load(str(tmp_path / "damaged"), LoadOptions(rounding=rounding))


def test_models_that_cannot_be_quantized_are_refused(folder: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"quantize='int3'; allowed: none, int4, int8"):
        SpeculativeDecoder("toy", quantize="int3")
    with pytest.raises(UsageError, match=r"quantize='int4', but the toy model has no weights .*; allowed: 'none'"):
        SpeculativeDecoder("toy", quantize="int4")
    with pytest.raises(UsageError, match=r"quantize='int4', but the models are loaded already; allowed: 'none'"):
        SpeculativeDecoder(fresh("llama"), quantize="int4")
    with pytest.raises(UsageError, match=r"quantize='int4', but the model is loaded already; allowed: 'none'"):
        SpeculativeDecoder(fresh("llama"), folder, quantize="int4")
    with pytest.raises(UsageError, match=r"quantize='int8', but model 'a.gguf' is quantized already, in GGUF"):
        load("a.gguf", LoadOptions(rounding="int8"))
    checkpoint = write_checkpoint(tmp_path / "gptq", num_hidden_layers=1)
    with pytest.raises(
        UsageError, match=r"quantize='int4', but model .* is quantized already, by gptq; allowed: 'none'"
    ):
        load(str(checkpoint.folder), LoadOptions(rounding="int4"))
    with pytest.raises(UsageError, match=r"quantize='int4' with load_options device_map; allowed: on the CPU"):
        load(folder, LoadOptions(rounding="int4", extra={"device_map": "cpu"}))
    fresh("llama").save_pretrained(tmp_path / "odd")
    with pytest.raises(UsageError, match=r"down_proj.weight' of model .* has 48 inputs, not a multiple of 32; allowed"):
        load(str(tmp_path / "odd"), LoadOptions(rounding="int8"))


@needs_avx2
def test_biases_that_the_model_lacks_are_refused_when_quantizing_at_load(folder: str, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "more")
    tensors, name = load_file(tmp_path / "more" / "model.safetensors"), "model.layers.0.mlp.up_proj"
    for value in (0.0, 1.0):
        bias = {f"{name}.bias": torch.full_like(tensors[f"{name}.weight"][:, 0], value)}
        save_file(tensors | bias, tmp_path / "more" / "model.safetensors", {"format": "pt"})
        if not value:
            load(str(tmp_path / "more"), LoadOptions(rounding="int8"))
    with pytest.raises(SlipstreamError, match=rf"tensors of the file are not used, first {name}\.bias;"):
        load(str(tmp_path / "more"), LoadOptions(rounding="int8"))
