"""Tensors that a model does not use: which are harmless, and that all others refuse the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.weights.unused_tensors import refuse_unused
from tests.support.gguf_files import SHAPE
from tests.support.tiny_models import fresh

NEEDED = (
    "model.layers.2.mlp.up_proj.weight",
    "model.layers.0.mlp.up_proj.weight_scale",
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.0.self_attn.q_proj.weight_scale_inv",
    "model.layers.0.self_attn.sinks",
    "model.layers.0.mlp.gate.e_score_correction_bias",
    "model.layers.0.post_feedforward_layernorm.weight",
    "lm_head.weight",
    "lm_head.bias",
    "blk.0.attn_q.scale",
    "h.0.attn.c_attn.bias",
)
HARMLESS = (
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "blk.0.attn_rot_embd.weight",
    "transformer.h.0.attn.masked_bias",
    "model.layers.0.self_attn.k_scale",
    "model.layers.0.self_attn.k_proj.k_scale",
    "mtp.layers.0.mlp.up_proj.qweight",
    "model.mtp_layers.0.input_proj.weight",
    "model.layers.3.eh_proj.weight_packed",
    "model.layers.3.mlp.up_proj.weight_packed",
    "blk.3.nextn.eh_proj.weight",
    "blk.3.ffn_up.weight",
    "model.vision_tower.encoder.layers.0.fc.weight",
    "v.blk.0.ln1.weight",
    "v_head.summary.weight",
)


@pytest.mark.parametrize("name", NEEDED)
def test_a_tensor_that_may_matter_is_refused_by_name(name: str) -> None:
    with pytest.raises(SlipstreamError, match=f"model 'm': 1 tensors of the file are not used, first {name}; allowed:"):
        refuse_unused("m", [*HARMLESS, name])
    refuse_unused("m", [name], [r"model\.|lm_head|blk|attn.c_attn.bias"])  # patterns of the model's own class


def test_what_follows_from_the_configuration_and_what_texts_do_not_need_is_harmless() -> None:
    refuse_unused("m", HARMLESS)


def checkpoint(folder: Path, change: Callable[[dict[str, Tensor]], None], **settings: object) -> str:
    """A tiny model in float32 whose tensors are changed."""
    fresh("llama", **SHAPE, **settings).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("rounding", ["none", "int8"])
def test_a_bias_that_the_architecture_lacks_refuses_the_checkpoint(rounding: str, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    folder = checkpoint(tmp_path, lambda tensors: tensors.update({name: torch.ones(SHAPE["hidden_size"])}))
    with pytest.raises(SlipstreamError, match=f"tensors of the file are not used, first {name}"):
        load(folder, LoadOptions(rounding=rounding))


@pytest.mark.parametrize("is_equal", [True, False])
def test_an_output_layer_of_its_own_is_used_whatever_the_configuration_says(is_equal: bool, tmp_path: Path) -> None:
    def untie(tensors: dict[str, Tensor]) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embedding.clone() if is_equal else embedding.flip(0).contiguous()

    folder, ids = checkpoint(tmp_path, untie, tie_word_embeddings=True), [5, 9, 11]
    logits = []
    for rounding in ("none", "int8"):
        backend = load(folder, LoadOptions("auto", rounding=rounding)).backend
        backend.reserve(1, 64)
        logits.append(backend.forward(torch.tensor([ids]), [0], first_slot=0, logits=True)[0])
    assert (logits[0].argmax(-1) == logits[1].argmax(-1)).all()


def write_shards(folder: Path, other: Callable[[Tensor], Tensor]) -> None:
    """Split a checkpoint in two files of which the second has other tensors under names of the first."""
    tensors = load_file(folder / "model.safetensors")
    first, *rest = sorted(tensors)
    save_file({first: tensors[first]}, folder / "a.safetensors", {"format": "pt"})
    stale = {first: other(tensors[first])}
    save_file({name: tensors[name] for name in rest} | stale, folder / "b.safetensors", {"format": "pt"})
    places = {first: "a.safetensors"} | dict.fromkeys(rest, "b.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "model.safetensors").unlink()


def test_a_tensor_is_read_from_the_file_that_the_index_names(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, lambda tensors: None)
    whole = load(folder, LoadOptions(rounding="int8")).model.state_dict()
    write_shards(tmp_path, lambda tensor: tensor + 1)
    shards = load(folder, LoadOptions(rounding="int8")).model
    shards.state_dict()
    assert all(torch.equal(weight, whole[name]) for name, weight in shards.state_dict().items())
    with pytest.raises(
        SlipstreamError, match=r"tensor '[\w.]+' is in two files, with different numbers; allowed: only"
    ):
        load(folder, LoadOptions())


def test_equal_copies_of_a_tensor_are_harmless(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, lambda tensors: None)
    write_shards(tmp_path, torch.clone)
    load(folder, LoadOptions())
