"""Checkpoints of models that read more than text: their language part runs as it would alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder, UsageError
from slipstream.models.cpu.block_linear import block_linears
from slipstream.models.hf.backend import HFBackend
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.plain_models import load_unpacked
from slipstream.models.quantized_models import WITH_LANGUAGE_PART
from slipstream.models.weights.gguf_tensors import RowsOfFile
from tests.models.decoder.test_families import CONFIGS, SHAPE, randomize
from tests.support.markers import mostly_exhaustive, mostly_slow, needs_kernels

pytestmark = needs_kernels

# with as many layers as the language part, which must not be taken for it
TOWER = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "patch_size": 14}
IMAGE = TOWER | {"image_size": 28}
QWEN = {
    "vision_config": {
        **{"depth": 4, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "patch_size": 14},
        **{"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 128, "num_position_embeddings": 16},
    },
    **{"image_token_id": 310, "video_token_id": 311, "vision_start_token_id": 312, "vision_end_token_id": 313},
}
PARTS: dict[str, tuple[str, dict[str, Any]]] = {  # the language part, and the other parts
    "gemma3": ("gemma3_text", {"vision_config": IMAGE, "image_token_index": 310, "mm_tokens_per_image": 1}),
    "gemma4": (
        "gemma4_text-small",
        {
            "vision_config": TOWER | {"num_key_value_heads": 2, "head_dim": 32},
            "audio_config": None,
            **{"image_token_id": 310, "audio_token_id": 311, "video_token_id": 312},
        },
    ),
    "gemma4_unified": (
        "gemma4_unified_text",
        {
            "vision_config": {"patch_size": 4, "mm_embed_dim": 64, "mm_posemb_size": 4, "output_proj_dims": 64},
            "audio_config": None,
            **{"image_token_id": 310, "audio_token_id": 311, "video_token_id": 312},
        },
    ),
    "llava": ("llama", {"vision_config": IMAGE | {"model_type": "clip_vision_model"}, "image_token_index": 310}),
    "mistral3": (
        "ministral3",
        {"vision_config": IMAGE | {"model_type": "pixtral", "head_dim": 32}, "image_token_index": 310},
    ),
    "qwen3_5": ("qwen3_5_text", QWEN),
    "qwen3_5_moe": ("qwen3_5_moe_text", QWEN),
}
IDS = torch.randint(3, 300, (1, 40), generator=torch.Generator().manual_seed(4))
PROMPT = [5, 9, 5, 9, 5, 9, 70, 71, 5, 9]
over_types = pytest.mark.parametrize("kind", PARTS)


def models(kind: str, tied: bool) -> tuple[Any, Any]:
    """A model of this type with random weights, and its language part alone, over the same weights."""
    name, others = PARTS[kind]
    text = SHAPE | CONFIGS[name] | {"tie_word_embeddings": tied, "model_type": name.partition("-")[0]}
    config = transformers.AutoConfig.for_model(kind, text_config=text, tie_word_embeddings=tied, **others)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        whole = transformers.AutoModelForMultimodalLM.from_config(config)
        randomize(whole, kind)
    language = copy.deepcopy(config.get_text_config())
    if kind == "gemma3":
        assert language.final_logit_softcapping
        language.final_logit_softcapping = None  # which the class that reads images ignores
    alone = transformers.AutoModelForCausalLM.from_config(language)
    alone.model.load_state_dict(whole.model.language_model.state_dict())
    alone.lm_head.weight = alone.model.embed_tokens.weight if tied else whole.lm_head.weight
    return whole.eval(), alone.eval()


@pytest.fixture(scope="module")
def folders_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], tuple[Path, Path]]:
    """The folders of `models`, in bfloat16 and in the layout in which such models are published."""

    @cache
    def folders(kind: str, tied: bool) -> tuple[Path, Path]:
        path = tmp_path_factory.mktemp(kind)
        for model, name in zip(models(kind, tied), ("whole", "alone"), strict=True):
            model.bfloat16().save_pretrained(path / name)
        return path / "whole", path / "alone"

    return folders


def test_every_type_is_tried() -> None:
    assert set(PARTS) == set(WITH_LANGUAGE_PART)


@over_types
def test_texts_are_those_of_the_language_part_alone(kind: str) -> None:
    whole, alone = models(kind, tied=False)
    with torch.inference_mode():
        expected = alone(input_ids=IDS, use_cache=False).logits
        assert torch.equal(whole(input_ids=IDS, use_cache=False).logits, expected)


@pytest.mark.each_value
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantize", ["none", "int4", "int8"])
@over_types
def test_the_language_part_runs_in_one_call_with_the_bits_it_has_alone(
    kind: str, quantize: str, tied: bool, folders_of: Callable[[str, bool], tuple[Path, Path]]
) -> None:
    found = []
    for folder in folders_of(kind, tied):
        backend = load(str(folder), LoadOptions(rounding=quantize)).backend
        assert isinstance(backend, HFBackend) and backend.stack is not None and backend.shape_independent
        assert bool(block_linears(backend.model)) == (quantize != "none")
        backend.reserve(1, 64)
        found.append(backend.forward(IDS, [0], first_slot=0, logits=True))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "kind", mostly_exhaustive([kind for kind in PARTS if kind != "qwen3_5_moe"], "gemma4", "qwen3_5")
)
def test_the_numbers_that_its_blocks_stand_for_are_those_of_the_language_part(
    kind: str, folders_of: Callable[[str, bool], tuple[Path, Path]]
) -> None:
    options = LoadOptions("float32", rounding="int4")
    with torch.inference_mode():
        found = [load_unpacked(str(folder), options)(input_ids=IDS).logits for folder in folders_of(kind, True)]
    assert torch.equal(*found)


def test_embeddings_for_each_layer_stay_in_their_file(
    folders_of: Callable[[str, bool], tuple[Path, Path]],
) -> None:
    folder, _ = folders_of("gemma4", True)
    model: Any = load(str(folder), LoadOptions(rounding="int4")).model
    embedding = model.model.embed_tokens_per_layer
    stored = load_file(folder / "model.safetensors")["model.language_model.embed_tokens_per_layer.weight"]
    assert isinstance(embedding.part, RowsOfFile)
    assert torch.equal(embedding.part.rows(IDS[0]), stored[IDS[0]].float())


@pytest.mark.parametrize("kind", mostly_slow(PARTS, "gemma4"))
def test_texts_are_the_same_with_drafts(kind: str, folders_of: Callable[[str, bool], tuple[Path, Path]]) -> None:
    params, texts = SamplingParams(max_tokens=24), []
    for folder in folders_of(kind, True):
        decoder = SpeculativeDecoder(str(folder), quantize="int4", drafter="none")
        texts.append(decoder.generate(PROMPT, params).token_ids)
        texts.append(decoder.using("ngram", num_draft_tokens=5).generate(PROMPT, params).token_ids)
    assert texts == texts[:1] * 4


def changed(folder: Path, to: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> str:
    """A copy of a folder with another configuration and other tensors."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (to / "config.json").write_text(json.dumps(config))
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return str(to)


def of_another_type(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    config["model_type"] = "paligemma"


def with_a_connector(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["model.connector.weight"] = torch.zeros(4, 4)


def twice(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    name = next(name for name in tensors if name.endswith("language_model.norm.weight"))
    tensors["language_model.model.norm.weight"] = tensors[name].clone()


def without_a_norm(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    del tensors[next(name for name in tensors if name.endswith("language_model.norm.weight"))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            of_another_type,
            r"of type 'paligemma' is more than a language model \(\w+\); allowed: 'none', or .*gemma3",
        ),
        (with_a_connector, r"1 tensors of the file are not used, first model\.connector\.weight"),
        (twice, r"norm\.weight' is there as '.*norm\.weight', too; allowed: one tensor of each name"),
        (without_a_norm, r"tensor 'model\.norm\.weight' is missing"),
    ],
)
def test_what_cannot_be_quantized_is_refused_by_name(
    change: Callable[[dict[str, Any], dict[str, Any]], None],
    message: str,
    folders_of: Callable[[str, bool], tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    source = changed(folders_of("qwen3_5", True)[0], tmp_path, change)
    with pytest.raises((SlipstreamError, UsageError), match=message):
        load(source, LoadOptions(rounding="int4"))
