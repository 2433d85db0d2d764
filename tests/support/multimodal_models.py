"""Tiny random models that read text and images: the classes, and small configurations of both parts."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

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
