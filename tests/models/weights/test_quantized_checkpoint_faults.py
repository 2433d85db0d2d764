"""Quantized checkpoints that are damaged or have unknown settings are refused in one line that names the tensor."""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.models.cpu.block_linear import block_linears
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.weights.quantized_checkpoint import scheme_of
from tests.support.markers import needs_avx2
from tests.support.quantized_files import Checkpoint, write_checkpoint

pytestmark = needs_avx2


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A checkpoint that a test may change."""
    return write_checkpoint(tmp_path / "own", group=64, num_hidden_layers=1)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("bits", 5, r"quantization_config.bits of config.json is 5; allowed: 2, 3, 4, 8"),
        ("bits", 4.0, r"quantization_config.bits of config.json is 4.0; allowed: 2, 3, 4, 8"),
        ("group_size", 0, r"quantization_config.group_size of config.json is 0; allowed: a whole number from 1, or -1"),
        ("checkpoint_format", "marlin", r"checkpoint_format of config.json is 'marlin'; allowed: gptq, gptq_v2"),
    ],
)
def test_unknown_settings_are_refused(key: str, value: object, message: str, checkpoint: Checkpoint) -> None:
    described = json.loads((checkpoint.folder / "config.json").read_text())
    described["quantization_config"][key] = value
    (checkpoint.folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(SlipstreamError, match=message):
        load(str(checkpoint.folder), LoadOptions())


DAMAGE = {
    "qweight": (lambda t: t[:-1], r"qweight' is \[31, 256\]; allowed: \[32, 256\], by config.json"),
    "scales": (lambda t: t.int(), r"scales' is of type int32; allowed: bfloat16, float16, float32"),
    "qzeros": (lambda t: t[:, 1:], r"qzeros' is \[4, 31\]; allowed: \[4, 32\], by config.json"),
    "g_idx": (lambda t: t + 9, r"g_idx' names groups from 9 to 12; allowed: 0 to 3"),
}


@pytest.mark.parametrize("key", DAMAGE)
def test_damaged_tensors_are_refused_by_name(key: str, checkpoint: Checkpoint) -> None:
    tensors, name = checkpoint.tensors(), f"model.layers.0.self_attn.q_proj.{key}"
    change, message = DAMAGE[key]
    folder = checkpoint.change(tensors | {name: change(tensors[name]).contiguous()})
    with pytest.raises(SlipstreamError, match=rf"tensor 'model.layers.0.self_attn.q_proj.{message}"):
        load(folder, LoadOptions())
    without = {other: tensor for other, tensor in tensors.items() if other != name}
    if key != "g_idx":
        with pytest.raises(SlipstreamError, match=r"tensor 'model.layers.0.self_attn.q_proj.\w+' is missing"):
            load(checkpoint.change(without), LoadOptions())
    infinite = tensors[f"{name.rpartition('.')[0]}.scales"] * torch.inf
    with pytest.raises(SlipstreamError, match="scales' holds numbers that are not finite"):
        load(checkpoint.change(tensors | {f"{name.rpartition('.')[0]}.scales": infinite}), LoadOptions())


def test_a_truncated_file_is_refused_with_the_tensor_that_it_lacks(checkpoint: Checkpoint) -> None:
    file = checkpoint.folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(
        SlipstreamError,
        match=r"tensor '[\w.]+' ends at byte [\d,]+ of model.safetensors, which is truncated; allowed: up to",
    ):
        load(str(checkpoint.folder), LoadOptions())
    for head in (b"", content[:5], struct.pack("<Q", 1 << 40), content[:200]):
        file.write_bytes(head)
        with pytest.raises(SlipstreamError, match=r"model.safetensors could not be read: its header is not JSON"):
            load(str(checkpoint.folder), LoadOptions())
    entry = '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, Infinity]}}'
    nested = '{"x": ' + 100_000 * "[" + 100_000 * "]" + "}"
    for header in (
        '{"__metadata__": [1]}',
        '{"__metadata__": "x"}',
        '{"__metadata__": null}',
        entry,
        nested,
        '{"x": {}}',
    ):
        file.write_bytes(struct.pack("<Q", len(header)) + header.encode() + content)
        with pytest.raises(SlipstreamError, match=r"model.safetensors could not be read: its header is not JSON"):
            load(str(checkpoint.folder), LoadOptions())
    file.unlink()
    with pytest.raises(SlipstreamError, match=r"has no model.safetensors"):
        load(str(checkpoint.folder), LoadOptions())
    for index in ("[]", "{}", '{"weight_map": {"x": 3}}', '{"weight_map": [1]}'):
        (checkpoint.folder / "model.safetensors.index.json").write_text(index)
        with pytest.raises(SlipstreamError, match=r"model.safetensors.index.json could not be read: "):
            load(str(checkpoint.folder), LoadOptions())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "quantization_config.transform_config"),
        (
            {"config_groups": {"all": {"weights": {"num_bits": 3}}}},
            "quantization_config.config_groups.all.weights.num_bits",
        ),
        (
            {"config_groups": {"all": {"weights": {"num_bits": 4, "type": "float"}}}},
            "quantization_config.config_groups.all.weights.num_bits",
        ),
    ],
)
def test_schemes_that_rotate_weights_or_have_other_bits_are_refused(change: dict[str, object], message: str) -> None:
    known = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    plain = known | {"config_groups": {"all": {"weights": {"num_bits": 4}}}, "transform_config": None}
    assert scheme_of("m", {"quantization_config": plain}) is not None
    with pytest.raises(SlipstreamError, match=rf"model 'm': {message} of config.json is .*; allowed: "):
        scheme_of("m", {"quantization_config": plain | change})


def test_files_that_safetensors_refuses_are_refused_in_one_line(checkpoint: Checkpoint) -> None:
    file = checkpoint.folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(SlipstreamError, match=r"model\.safetensors could not be read: "):
        load(str(checkpoint.folder), LoadOptions())


def test_a_damaged_generation_config_is_refused_in_one_line(checkpoint: Checkpoint) -> None:
    (checkpoint.folder / "generation_config.json").write_text("{")
    with pytest.raises(SlipstreamError, match=r"generation_config\.json"):
        load(str(checkpoint.folder), LoadOptions())


def test_groups_and_rows_that_are_no_multiple_of_32_are_unpacked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = write_checkpoint(tmp_path / "odd", group=8, intermediate_size=520, num_hidden_layers=1)
    with caplog.at_level(logging.WARNING, "slipstream"):
        loaded = load(str(checkpoint.folder), LoadOptions())
    assert not block_linears(loaded.model)
    assert any("in groups of 8; computed with: multiples of 32" in record.message for record in caplog.records)


def test_biases_that_the_model_lacks_are_refused_unless_they_are_zeros(checkpoint: Checkpoint) -> None:
    tensors, name = checkpoint.tensors(), "model.layers.0.self_attn.o_proj.bias"
    load(checkpoint.change(tensors | {name: torch.zeros(256, dtype=torch.float16)}), LoadOptions())
    with pytest.raises(SlipstreamError, match=rf"tensors of the file are not used, first {name};"):
        load(checkpoint.change(tensors | {name: torch.ones(256, dtype=torch.float16)}), LoadOptions())
    with pytest.raises(SlipstreamError, match=rf"tensors of the file are not used, first {name};"):
        load(str(checkpoint.folder), LoadOptions(fast=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_type": "Float8Tensor"}, r"is of torchao's type Float8Tensor; allowed: Int4Tensor, Intx"),
        (
            {"_data": {"activation_quantization": "int8_asym_per_token"}},
            r"changes activations too; allowed: only weights",
        ),
    ],
)
def test_unknown_torchao_tensors_are_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "ao", "torchao", dtype=torch.bfloat16, num_hidden_layers=1)
    file = checkpoint.folder / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    name = "model.layers.0.mlp.up_proj.weight"
    described = json.loads(header["__metadata__"][name])
    header["__metadata__"][name] = json.dumps(described | change)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    with pytest.raises(SlipstreamError, match=rf"tensor '{name}' {message}|tensor '{name}' \(Int4Tensor\) {message}"):
        load(str(checkpoint.folder), LoadOptions())
