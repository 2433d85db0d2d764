"""Models that read text and images: our loop writes the text of `generate`, and images are refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder, UsageError
from slipstream.integrations.transformers.custom_generate import custom_generate
from tests.support.markers import mostly_exhaustive
from tests.support.tiny_models import fresh

VOCAB = 97
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
GEMMA_TOKENS = {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92, "mm_tokens_per_image": 1}
QWEN_TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}

# class -> its configuration
CONFIGS: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {
        "text_config": TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": VISION,
        **GEMMA_TOKENS,
        "tie_word_embeddings": False,
    },
    "Qwen2VLForConditionalGeneration": {
        "text_config": TEXT | MROPE,
        "vision_config": QWEN_VISION | {"embed_dim": 16, "hidden_size": 32},
        **QWEN_TOKENS,
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": TEXT | MROPE,
        "vision_config": QWEN_VISION
        | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 16, "fullatt_block_indexes": [0]},
        **QWEN_TOKENS,
    },
    "Qwen3VLForConditionalGeneration": {
        "text_config": TEXT | MROPE,
        "vision_config": QWEN_VISION
        | {
            "hidden_size": 16,
            "out_hidden_size": 32,
            "intermediate_size": 16,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
        **QWEN_TOKENS,
    },
    "LlavaForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "siglip_vision_model"},
        "image_token_index": 90,
        "image_seq_length": 4,
    },
    "Mistral3ForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
        "image_token_index": 90,
        "spatial_merge_size": 2,
    },
    "Idefics3ForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION,
        "image_token_id": 90,
        "scale_factor": 2,
    },
}


@cache
def multimodal(name: str) -> Any:
    """A model of a class of CONFIGS in float32, always with the same weights. Tests must not change it."""
    kind = getattr(transformers, name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind._from_config(kind.config_class(**CONFIGS[name]), dtype=torch.float32)
    return model.eval()


pytestmark = pytest.mark.usefixtures("cache_audit")
COUNT = 16
IDS = torch.tensor([[0, 0, 5, 9, 11, 5, 9, 11], [5, 9, 11, 5, 9, 11, 5, 20]])
BATCH = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": COUNT, "pad_token_id": 0, "eos_token_id": [7, 49]}
KEPT = ("Gemma3", "Qwen2_5_VL", "Llava", "Idefics3")  # the others are like one of these
over_classes = pytest.mark.parametrize(
    "name", mostly_exhaustive(CONFIGS, *(f"{name}ForConditionalGeneration" for name in KEPT))
)
TYPES = {  # processors return this beside the ids of a text: no token belongs to an image
    "Gemma3ForConditionalGeneration": "token_type_ids",
    "Qwen2VLForConditionalGeneration": "mm_token_type_ids",
    "Qwen2_5_VLForConditionalGeneration": "mm_token_type_ids",
    "Qwen3VLForConditionalGeneration": "mm_token_type_ids",
}


@pytest.mark.slow
@over_classes
def test_a_multimodal_model_without_images_gives_the_text_of_generate(name: str) -> None:
    model, types = multimodal(name), {TYPES[name]: torch.zeros_like(IDS)} if name in TYPES else {}
    plain = model.generate(**BATCH, **GREEDY)
    for more in ({}, types):
        assert torch.equal(model.generate(**BATCH, **GREEDY, **more, custom_generate=custom_generate), plain)
    drafted = model.generate(**BATCH, **GREEDY, custom_generate=custom_generate, assistant_model=model)
    assert torch.equal(drafted, plain)


@pytest.mark.slow
@over_classes
def test_a_multimodal_folder_runs_on_its_language_model(name: str, tmp_path: Path) -> None:
    model = multimodal(name)
    model.save_pretrained(tmp_path)
    plain = model.generate(**BATCH, **GREEDY | {"eos_token_id": None})[:, IDS.shape[1] :].tolist()
    made = SpeculativeDecoder(str(tmp_path), dtype="float32", device="cpu", reproducible=False)
    texts = made.generate(
        [[t for t in row if t] for row in IDS.tolist()], SamplingParams(max_tokens=COUNT, ignore_eos=True)
    )
    assert [text.token_ids for text in texts] == plain


MEDIA: dict[str, dict[str, Any]] = {
    "(image input|pixel_values) is given; allowed: text only": {"pixel_values": torch.rand(2, 3, 28, 28)},
    "token_type_ids is given; allowed: input_ids": {"token_type_ids": torch.ones_like(IDS)},
}


@pytest.mark.parametrize("message", MEDIA)
def test_images_are_refused_by_name(message: str) -> None:
    model = multimodal("Gemma3ForConditionalGeneration")
    with pytest.raises(UsageError, match=message):
        model.generate(**BATCH, **GREEDY, **MEDIA[message], custom_generate=custom_generate)


def test_token_types_of_zero_are_refused_if_the_model_embeds_them() -> None:
    types = {"token_type_ids": torch.zeros_like(IDS[1:])}  # GPT-2 adds an embedding for them
    model, prompt = fresh("gpt2"), {"input_ids": IDS[1:] % VOCAB, "attention_mask": torch.ones_like(IDS[1:])}
    bare = model.generate(**prompt, **GREEDY)
    assert not torch.equal(model.generate(**prompt, **GREEDY, **types), bare)
    with pytest.raises(UsageError, match="token_type_ids is given; allowed: input_ids and attention_mask only"):
        model.generate(**prompt, **GREEDY, **types, custom_generate=custom_generate)


def test_a_model_that_is_not_causal_is_refused_in_one_line(tmp_path: Path) -> None:
    transformers.T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2).save_pretrained(
        tmp_path
    )
    with pytest.raises(
        SlipstreamError, match="T5Config is not for a causal language model; allowed: models that generate"
    ) as error:
        SpeculativeDecoder(str(tmp_path))
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
