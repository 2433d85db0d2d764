"""Checkpoints laid out as quantizers publish them run as the model of their dequantized weights, or are refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import SpeculativeDecoder
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.plain_models import load_unpacked
from slipstream.models.quantized_models import checkpoint_of
from tests.support.markers import mostly_exhaustive, mostly_slow
from tests.support.mtp_cases import write_target
from tests.support.quantized_files import (
    BLOCKS,
    MIXTURES,
    PACKERS,
    Checkpoint,
    rounded,
    scaled,
    settings,
    words,
    write_checkpoint,
)

PROMPT = [5, 9, 11, 5, 9, 11, 5]
INTEGERS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
DYNAMIC = {
    "-:.*o_proj.*": {},
    r"+:.*\.down_proj": {"bits": 8, "group_size": 32, "sym": True},
    "model.*q_proj": {"bits": 2},
}
BRAIN = torch.bfloat16
WRITERS: dict[str, dict[str, Any]] = {
    "gptq-2": {"form": "gptq", "bits": 2, "group": 64},
    "gptq-3": {"form": "gptq", "bits": 3},
    "gptq-3-sym": {"form": "gptq", "bits": 3, "symmetric": True},
    "gptq-4": {"form": "gptq"},
    "gptq-4-sym": {"form": "gptq", "symmetric": True},
    "gptq-8": {"form": "gptq", "bits": 8},
    "gptq-8-sym": {"form": "gptq", "bits": 8, "symmetric": True, "group": 0},
    "gptq_v2-4": {"form": "gptq_v2", "quantization": {"format": "gptq_v2", "meta": {"quantizer": ["gptqmodel:7.7.0"]}}},
    "gptqmodel-4": {"form": "gptq", "quantization": {"format": "gptq", "meta": {"quantizer": ["gptqmodel:7.7.0"]}}},
    "gptq_v2-3": {"form": "gptq_v2", "bits": 3},
    "gptqmodel-dynamic": {
        "form": "gptq",
        "exceptions": {
            "o_proj": {},
            "down_proj": {"bits": 8, "group": 32, "symmetric": True},
            "q_proj": {"bits": 2},
        },
        "quantization": {"dynamic": DYNAMIC},
    },
    "awq": {"form": "awq"},
    "gptqmodel-awq": {"form": "awq", "quantization": {"version": None, "checkpoint_format": "gemm", "format": "gemm"}},
    "pack-quantized-4": {"form": "compressed-tensors", "symmetric": True, "dtype": BRAIN},
    "pack-quantized-4-asym": {"form": "compressed-tensors", "group": 64},
    "pack-quantized-8": {"form": "compressed-tensors", "bits": 8, "group": 0, "symmetric": True},
    "pack-quantized-8-asym": {"form": "compressed-tensors", "bits": 8},
    "int-quantized": {"form": "int-quantized", "bits": 8, "group": 0, "symmetric": True},
    "int-quantized-asym": {"form": "int-quantized", "bits": 8, "group": 0},
    "float-quantized-channel": {"form": "float-quantized", "dtype": BRAIN},
    "float-quantized-tensor": {"form": "float-quantized", "block": (0, 0), "dtype": BRAIN},
    "float-quantized-block": {"form": "float-quantized", "block": (96, 64), "dtype": BRAIN},
    "naive-quantized": {"form": "float-quantized", "quantization": {"format": "naive-quantized"}},
    "mixed-precision": {
        "form": "compressed-tensors",
        "symmetric": True,
        "group": 64,
        "exceptions": {
            "down_proj": {"form": "int-quantized", "bits": 8, "group": 0},
            "v_proj": {"form": "float-quantized"},
            "layers.0.mlp.up_proj": {},
        },
        "quantization": {
            "format": "mixed-precision",
            "ignore": ["lm_head", r"re:.*layers\.0\.mlp\.up_proj"],
            "config_groups": {
                "group_0": {"targets": ["re:.*down_proj"], "weights": INTEGERS, "format": "int-quantized"},
                "group_1": {"targets": ["re:.*v_proj"], "weights": FLOATS, "format": "float-quantized"},
                "group_2": {"targets": ["Linear"], "weights": WEIGHTS, "format": "pack-quantized"},
            },
        },
    },
    "modelopt": {"form": "modelopt", "dtype": BRAIN},
    "fp8-block": {"form": "fp8", "dtype": BRAIN},
    "fp8-tensor": {"form": "fp8", "block": (0, 0), "quantization": {"weight_block_size": None}},
    "fbgemm_fp8": {"form": "fbgemm_fp8", "dtype": BRAIN},
}
RARE = ("gptq-3-sym", "gptq-4-sym", "gptq-8-sym", "gptq_v2-3", "pack-quantized-8-asym", "int-quantized-asym")
QUICK = ("gptqmodel-dynamic", "mixed-precision", "modelopt", "fp8-block")
MIXED_FORMS = ("gptq", "awq", "compressed-tensors", "modelopt", "fp8")


def settings_of(checkpoint: Checkpoint) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((checkpoint.folder / "config.json").read_text())
    return settings


def describe(checkpoint: Checkpoint, quantization: object) -> str:
    """Writes another `quantization_config`, or none, and returns the folder's name."""
    config = settings_of(checkpoint) | {"quantization_config": quantization}
    if quantization is None:
        del config["quantization_config"]
    (checkpoint.folder / "config.json").write_text(json.dumps(config))
    return str(checkpoint.folder)


def assert_dequantized(checkpoint: Checkpoint) -> None:
    """The weights are those of the reference to the bit, and the loaded model computes with them."""
    source, ids = str(checkpoint.folder), torch.tensor([PROMPT])
    weights = load_unpacked(source, LoadOptions("float32")).state_dict()
    for parameter, numbers in checkpoint.reference.state_dict().items():
        assert torch.equal(weights[parameter], numbers), parameter
    backend = load(source, LoadOptions("float32")).backend
    backend.reserve(1, 64)
    with torch.inference_mode():
        expected = checkpoint.reference(input_ids=ids).logits
    logits = backend.forward(ids, [0], first_slot=0, logits=True)
    assert torch.allclose(logits, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "writer", [*mostly_slow([w for w in WRITERS if w not in RARE], *QUICK), *mostly_exhaustive(RARE)]
)
def test_layouts_run_as_the_model_of_their_dequantized_weights(
    writer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_layers = 2 if "exceptions" in WRITERS[writer] else 1
    checkpoint = write_checkpoint(tmp_path / "made", num_hidden_layers=num_layers, **WRITERS[writer])
    assert_dequantized(checkpoint)
    with caplog.at_level(logging.WARNING, "slipstream"):
        loaded = load(str(checkpoint.folder), LoadOptions())
    unpacked = [record.message for record in caplog.records if "unpacked to bfloat16" in record.message]
    assert len(unpacked) == (not loaded.arithmetic)
    assert not any("not used" in record.message for record in caplog.records)


@pytest.mark.each_value
@pytest.mark.parametrize("form", mostly_slow(MIXED_FORMS, "gptq"))
@pytest.mark.parametrize("name", mostly_slow(MIXTURES, "mixtral"))
def test_mixtures_of_experts_are_computed_in_their_blocks_or_unpacked(
    form: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = write_checkpoint(tmp_path / "made", form, name, group=32, symmetric=True)
    assert_dequantized(checkpoint)
    with caplog.at_level(logging.WARNING, "slipstream"):
        loaded = load(str(checkpoint.folder), LoadOptions())
    unpacked = [record.message for record in caplog.records if "is unpacked to bfloat16" in record.message]
    assert len(unpacked) == (not loaded.arithmetic)
    if name == "mixtral":
        assert "the checkpoint has no tensor 'model.layers.0.mlp.experts.0.gate_proj.weight'" in unpacked[0]


def test_modelopt_settings_in_a_file_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = write_checkpoint(tmp_path / "made", "modelopt")
    describe(checkpoint, None)
    file = checkpoint.folder / "hf_quant_config.json"
    settings = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": settings}))
    with caplog.at_level(logging.WARNING, "slipstream"):
        assert_dequantized(checkpoint)
    assert checkpoint_of(
        str(checkpoint.folder), LoadOptions(device="cuda")
    )  # transformers cannot read it there, either
    assert any("activations are not rounded as its quantization describes" in r.message for r in caplog.records)
    file.write_text(json.dumps({"quantization": settings | {"quant_algo": "NVFP4"}}))
    with pytest.raises(
        SlipstreamError, match=r"quantization_config.quant_algo of hf_quant_config.json is 'nvfp4'; allowed: fp8"
    ):
        load(str(checkpoint.folder), LoadOptions())


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("awq", {"version": "gemv"}, "quantization_config.version of config.json is 'gemv'; allowed: gemm"),
        ("awq", {"version": "marlin"}, "quantization_config.version of config.json is 'marlin'; allowed: gemm"),
        ("awq", {"checkpoint_format": "gemv_fast"}, "quantization_config.checkpoint_format .* is 'gemv_fast'"),
        ("gptq", {"format": "gptq_p"}, "quantization_config.format of config.json is 'gptq_p'; allowed: gptq"),
        ("gptq", {"format": "gptq_v2"}, "quantization_config.format of config.json is 'gptq_v2'; allowed: gptq"),
        ("gptq", {"dynamic": {"+:(": {"bits": 8}}}, "quantization_config.dynamic of config.json is .*regular expr"),
        ("compressed-tensors", {"format": "nvfp4-pack-quantized"}, "format of config.json is 'nvfp4-pack-quantized'"),
        ("fp8", {"weight_block_size": [128]}, r"weight_block_size of config.json is \[128\]; allowed: two whole"),
        ("fp8", {"weight_block_size": [64, 64]}, r"weight_scale_inv' is \[3, \d\]; allowed: .* per block of 64 x 64"),
        ("fp8", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo of config.json is 'nvfp4'"),
        ("fp8", {"quant_method": "mine"}, "quantization_config.quant_method of config.json is 'mine', which"),
        ("fp8", {"quant_method": None}, "no `quant_method`"),
        ("fp8", None, r"weight' is of type F8_E4M3, but config.json has no quantization_config"),
        ("int-quantized", None, r"weight' is of type I8, but config.json has no quantization_config"),
        ("gptq", None, r"qweight' is of type I32, but config.json has no quantization_config"),
    ],
)
def test_quantizations_that_nobody_applies_are_refused(
    form: str, change: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "made", form, num_hidden_layers=1)
    known = settings_of(checkpoint)["quantization_config"]
    folder = describe(checkpoint, None if change is None else known | change)
    for options in (LoadOptions(), LoadOptions("float32")):
        with pytest.raises(SlipstreamError, match=message):
            load(folder, options)
    if change is None or change.get("quant_method"):  # transformers' reader does not know these, either
        with pytest.raises(SlipstreamError, match=r"which transformers does not read|has no quantization_config"):
            load(folder, LoadOptions(extra={"low_cpu_mem_usage": True}))


@pytest.mark.parametrize("form", ["float-quantized", "int-quantized", "fp8", "modelopt"])
def test_scales_without_their_numbers_and_numbers_without_their_scales_are_refused(form: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "made", form, num_hidden_layers=1)
    tensors, name = checkpoint.tensors(), "model.layers.0.mlp.up_proj.weight"
    scale = next(key for key in tensors if key.startswith(f"{name}_scale"))
    folder = checkpoint.change(tensors | {name: torch.ones(512, 256, dtype=BRAIN)})
    with pytest.raises(SlipstreamError, match=f"tensor '{name}' is of type bfloat16; allowed: float8_e4m3fn, float8"):
        load(folder, LoadOptions())
    del tensors[scale]
    folder = checkpoint.change(tensors)
    with pytest.raises(SlipstreamError, match=f"tensor '{name}' is of type (float8_e4m3fn|int8); allowed: bfloat16"):
        load(folder, LoadOptions("float32"))


@pytest.mark.each_value
@pytest.mark.parametrize("bits", mostly_slow([2, 3, 4, 8], 4))
@pytest.mark.parametrize(("form", "label"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq"), ("gptq_v2", None)])
def test_symmetric_zero_points_are_read_whatever_the_label(
    form: str, label: str | None, bits: int, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(
        tmp_path / "made",
        form,
        bits=bits,
        symmetric=True,
        num_hidden_layers=1,
        quantization={"checkpoint_format": label},
    )
    assert_dequantized(checkpoint)


def test_zero_points_that_are_not_symmetric_as_the_settings_say_are_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "made", num_hidden_layers=1, quantization={"sym": True})
    with pytest.raises(
        SlipstreamError,
        match=r"proj\.qzeros' stores \d+ to \d+, although quantization_config.sym is true; allowed: 7 throughout, or 8",
    ):
        load(str(checkpoint.folder), LoadOptions())


@pytest.mark.parametrize("writer", ["autogptq", "gptqmodel"])
@pytest.mark.parametrize("bits", mostly_slow([2, 4, 8], 4))
def test_zero_points_of_zero_wrap_around(writer: str, bits: int, tmp_path: Path) -> None:
    """AutoGPTQ's kernels wrap each zero point around; gptqmodel subtracts from whole words, and adds to them again."""
    checkpoint = write_checkpoint(tmp_path / "made", "gptq_v2", bits=bits, num_hidden_layers=1)
    tensors, name = checkpoint.tensors(), "model.layers.0.mlp.up_proj"
    zeros = torch.randint(0, 1 << bits, (2, 512), generator=torch.Generator().manual_seed(1)).numpy()
    zeros[:, ::5] = 0
    packed = words(zeros, bits) - sum(1 << shift for shift in range(0, 32, bits))
    if writer == "autogptq":
        packed = words((zeros - 1) % (1 << bits), bits)
    settings = settings_of(checkpoint)["quantization_config"] | {"meta": {"quantizer": [f"{writer}:7.0.0"]}}
    weights = list[torch.Tensor]()
    for form, stored in (("gptq", packed), ("gptq_v2", words(zeros, bits))):
        folder = checkpoint.change(tensors | {f"{name}.qzeros": stored})
        describe(checkpoint, settings | {"checkpoint_format": form})
        weights.append(load_unpacked(folder, LoadOptions("float32")).model.layers[0].mlp.up_proj.weight)
    assert torch.equal(*weights)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("form", mostly_exhaustive(MIXED_FORMS, "compressed-tensors", "gptq", "fp8"))
@pytest.mark.parametrize("kind", mostly_slow(["mimo", "qwen3_5", "glm4_moe"], "mimo"))
def test_quantized_mtp_layers_are_left_out(
    kind: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_target(tmp_path, kind)
    stored, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    for name, weight in list(stored.items()):
        is_plain = any(part in name for part in ("embed_tokens", "lm_head", ".gate.", "conv1d"))
        if weight.dim() == 2 and len(weight) % 8 == 0 and not is_plain:
            del stored[name]
            matrix = scaled(weight, BLOCKS[form], torch.float32) if form in BLOCKS else None
            matrix = matrix or rounded(weight, 4, 16, symmetric=True)
            stored |= PACKERS[form](name.removesuffix(".weight"), matrix, torch.float16)
    save_file(stored, tmp_path / "model.safetensors")
    config["quantization_config"] = settings(form, 4, 16, symmetric=True, block=BLOCKS.get(form, (0, 0)))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING, "slipstream"):
        texts = [
            SpeculativeDecoder(str(tmp_path), reproducible=False, **options).generate([5, 9], max_tokens=8).token_ids
            for options in ({"drafter": "none"}, {})
        ]
    assert texts[0] == texts[1]
    assert not any("not used" in record.message for record in caplog.records)
    reason = f"draft='mtp': the MTP layers of {str(tmp_path)!r} are quantized, tensor "
    assert any(record.message.startswith(reason) for record in caplog.records)
    with pytest.raises(UsageError, match=r"are quantized, tensor .*; allowed: MTP layers in floating point"):
        SpeculativeDecoder(str(tmp_path), "mtp")
