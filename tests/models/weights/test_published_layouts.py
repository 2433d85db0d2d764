"""Checkpoints laid out as each quantiser publishes them run as the model of their dequantised weights, or are refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import SpeculativeDecoder
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.plain_models import load_unpacked
from tests.support.markers import mostly_slow
from tests.support.quantised_files import MIXTURES, Checkpoint, write_checkpoint
from tests.support.tiny_models import reference

PROMPT = [5, 9, 11, 5, 9, 11, 5]
INTEGERS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
DYNAMIC = {"-:.*o_proj.*": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 32, "sym": True}, "q_proj": {"bits": 2}}
DYNAMIC["model.*q_proj"] = {"bits": 2}
BRAIN = torch.bfloat16
WRITERS: dict[str, dict[str, Any]] = {
    "gptq-2": {"form": "gptq", "bits": 2, "group": 64},
    "gptq-3": {"form": "gptq", "bits": 3},
    "gptq-3-sym": {"form": "gptq", "bits": 3, "symmetric": True},
    "gptq-4": {"form": "gptq"},
    "gptq-4-sym": {"form": "gptq", "symmetric": True},
    "gptq-8": {"form": "gptq", "bits": 8},
    "gptq-8-sym": {"form": "gptq", "bits": 8, "symmetric": True, "group": 0},
    "gptq_v2-4": {"form": "gptq_v2", "quantisation": {"format": "gptq_v2", "meta": {"quantizer": ["gptqmodel:7.7.0"]}}},
    "gptqmodel-4": {"form": "gptq", "quantisation": {"format": "gptq", "meta": {"quantizer": ["gptqmodel:7.7.0"]}}},
    "gptq_v2-3": {"form": "gptq_v2", "bits": 3},
    "gptqmodel-dynamic": {
        "form": "gptq",
        "exceptions": {
            "o_proj": {},
            "down_proj": {"bits": 8, "group": 32, "symmetric": True},
            "q_proj": {"bits": 2},
        },
        "quantisation": {"dynamic": DYNAMIC},
    },
    "awq": {"form": "awq"},
    "gptqmodel-awq": {"form": "awq", "quantisation": {"version": None, "checkpoint_format": "gemm", "format": "gemm"}},
    "pack-quantized-4": {"form": "compressed-tensors", "symmetric": True, "dtype": BRAIN},
    "pack-quantized-4-asym": {"form": "compressed-tensors", "group": 64},
    "pack-quantized-8": {"form": "compressed-tensors", "bits": 8, "group": 0, "symmetric": True},
    "pack-quantized-8-asym": {"form": "compressed-tensors", "bits": 8},
    "int-quantized": {"form": "int-quantized", "bits": 8, "group": 0, "symmetric": True},
    "int-quantized-asym": {"form": "int-quantized", "bits": 8, "group": 0},
    "float-quantized-channel": {"form": "float-quantized", "dtype": BRAIN},
    "float-quantized-tensor": {"form": "float-quantized", "block": (0, 0), "dtype": BRAIN},
    "float-quantized-block": {"form": "float-quantized", "block": (96, 64), "dtype": BRAIN},
    "naive-quantized": {"form": "float-quantized", "quantisation": {"format": "naive-quantized"}},
    "mixed-precision": {
        "form": "compressed-tensors",
        "symmetric": True,
        "group": 64,
        "exceptions": {
            "down_proj": {"form": "int-quantized", "bits": 8, "group": 0},
            "v_proj": {"form": "float-quantized"},
            "layers.0.mlp.up_proj": {},
        },
        "quantisation": {
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
    "fp8-tensor": {"form": "fp8", "block": (0, 0), "quantisation": {"weight_block_size": None}},
    "fbgemm_fp8": {"form": "fbgemm_fp8", "dtype": BRAIN},
}
QUICK = ("gptqmodel-dynamic", "mixed-precision", "modelopt", "fp8-block")
MIXED_FORMS = ("gptq", "awq", "compressed-tensors", "modelopt", "fp8")


def settings_of(checkpoint: Checkpoint) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((checkpoint.folder / "config.json").read_text())
    return settings


def describe(checkpoint: Checkpoint, quantisation: object) -> str:
    """Writes another `quantization_config`, or none, and returns the folder's name."""
    config = settings_of(checkpoint) | {"quantization_config": quantisation}
    if quantisation is None:
        del config["quantization_config"]
    (checkpoint.folder / "config.json").write_text(json.dumps(config))
    return str(checkpoint.folder)


def assert_dequantised(checkpoint: Checkpoint) -> None:
    """The weights are those of the reference to the bit, and so is the text."""
    source = str(checkpoint.folder)
    weights = load_unpacked(source, LoadOptions("float32")).state_dict()
    for parameter, numbers in checkpoint.reference.state_dict().items():
        assert torch.equal(weights[parameter], numbers), parameter
    decoder = SpeculativeDecoder(source, dtype="float32")
    assert decoder.generate(PROMPT, max_tokens=12).token_ids == reference(checkpoint.reference, PROMPT, 12)


@pytest.mark.parametrize("writer", [w if w in QUICK else pytest.param(w, marks=pytest.mark.slow) for w in WRITERS])
def test_layouts_run_as_the_model_of_their_dequantised_weights(
    writer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = write_checkpoint(tmp_path / "made", **WRITERS[writer])
    assert_dequantised(checkpoint)
    with caplog.at_level(logging.WARNING, "slipstream"):
        loaded = load(str(checkpoint.folder), LoadOptions())
    unpacked = [record.message for record in caplog.records if "unpacked to bfloat16" in record.message]
    assert len(unpacked) == (not loaded.arithmetic)
    assert not any("not used" in record.message for record in caplog.records)


@pytest.mark.parametrize("form", mostly_slow(MIXED_FORMS, "gptq"))
@pytest.mark.parametrize("name", mostly_slow(MIXTURES, "mixtral"))
def test_mixtures_of_experts_are_unpacked(
    form: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = write_checkpoint(tmp_path / "made", form, name, group=32, symmetric=True)
    assert_dequantised(checkpoint)
    with caplog.at_level(logging.WARNING, "slipstream"):
        load(str(checkpoint.folder), LoadOptions())
    assert [record.message for record in caplog.records if "it is a mixture of experts" in record.message]


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_mixture_is_not_quantised_at_load(name: str, tmp_path: Path) -> None:
    MIXTURES_MODEL = __import__("transformers").AutoModelForCausalLM.from_config(MIXTURES[name]())
    MIXTURES_MODEL.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="quantize='int4', but model .* is a mixture of experts; allowed: 'none'"):
        load(str(tmp_path), LoadOptions(rounding="int4"))
