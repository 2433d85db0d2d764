"""Folders of tiny random vision-language models with all that belongs to them, and what transformers reads."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from tests.support.tiny_models import byte_tokenizer

TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
    "initializer_range": 0.3,
}
QWEN_VISION = {"depth": 3, "num_heads": 2, "patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
MARKS = {
    "llava": "<image>",
    "idefics3": "<image>",
    "qwen2_vl": "<|image_pad|>",
    "qwen2_5_vl": "<|image_pad|>",
    "gemma3": "<start_of_image>",
}
FRAMES = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|vision_start|>", "<|vision_end|>"]
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
IN_PARTS = (
    "{% for m in messages %}{{ m['role'][0] }}:{% for p in m['content'] %}{% if p['type'] == 'image' %}MARK"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def tokenizer_of(kind: str) -> Any:
    """One token per byte, and those of images."""
    mark = MARKS[kind]
    framed = f"<|vision_start|>{mark}<|vision_end|>" if kind.startswith("qwen") else mark
    tokenizer = byte_tokenizer(IN_PARTS.replace("MARK", framed))
    specials = [mark, "<image_soft_token>", "<end_of_image>", *FRAMES, *TILES, "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    return tokenizer


def _configuration(kind: str, tokenizer: Any) -> tuple[Any, Any]:
    """The configuration and the image processor."""
    image_token = tokenizer.convert_tokens_to_ids(MARKS[kind])
    if kind == "llava":
        config = transformers.LlavaConfig(
            text_config=TEXT | {"model_type": "llama"},
            vision_config=VISION | {"model_type": "clip_vision_model"},
            image_token_index=image_token,
            vision_feature_layer=-2,
        )
        size = {"height": 28, "width": 28}
        return config, transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size)
    if kind == "idefics3":
        config = transformers.Idefics3Config(
            text_config=TEXT | {"model_type": "llama"},
            vision_config=VISION,
            image_token_id=image_token,
            scale_factor=2,
        )
        processor = transformers.Idefics3ImageProcessorPil(
            size={"longest_edge": 56}, max_image_size={"longest_edge": 28}, do_image_splitting=True
        )
        return config, processor
    if kind == "gemma3":
        config = transformers.Gemma3Config(
            text_config=TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            vision_config=VISION,
            image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
            boi_token_index=image_token,
            eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
            mm_tokens_per_image=16,
            tie_word_embeddings=False,
        )
        return config, transformers.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    tokens = {
        "image_token_id": image_token,
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    }
    if kind == "qwen2_vl":
        vision = QWEN_VISION | {"embed_dim": 32, "hidden_size": 128}
        config = transformers.Qwen2VLConfig(text_config=TEXT | MROPE, vision_config=vision, **tokens)
    else:
        sizes = {"hidden_size": 32, "out_hidden_size": 128, "intermediate_size": 32, "window_size": 28}
        vision = QWEN_VISION | sizes | {"fullatt_block_indexes": [1]}
        config = transformers.Qwen2_5_VLConfig(text_config=TEXT | MROPE, vision_config=vision, **tokens)
    edges = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    return config, transformers.Qwen2VLImageProcessorPil(patch_size=7, merge_size=2, size=edges)


def vision_folder(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A folder with a random model of this type, its tokenizer and its image processor."""
    tokenizer = tokenizer_of(kind)
    config, processor = _configuration(kind, tokenizer)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=dtype)
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder)
    return folder


def picture(seed: int = 0, width: int = 40, height: int = 30) -> Image.Image:
    """A picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    """A picture as a PNG file."""
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def asked(*contents: Any) -> list[dict[str, Any]]:
    """A user's message of texts and pictures."""
    parts = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in contents
    ]
    return [{"role": "user", "content": parts}]


def reference_inputs(kind: str, folder: Path, text: str, images: Sequence[Any]) -> dict[str, Any]:
    """What transformers' processor makes of a rendered text and its pictures."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    options = {"images": list(images), "text": text, "return_tensors": "pt", "add_special_tokens": False}
    if kind == "llava":
        made = transformers.LlavaProcessor(processor, tokenizer, patch_size=7, vision_feature_select_strategy="default")
        made.num_additional_image_tokens = 1
        return dict(made(**options))
    if kind == "idefics3":
        made = transformers.Idefics3Processor(processor, tokenizer, image_seq_len=4)
        return dict(made(**options))
    if kind == "gemma3":
        special = {"image_token": "<image_soft_token>", "boi_token": MARKS[kind], "eoi_token": "<end_of_image>"}
        for name, token in special.items():
            setattr(tokenizer, name, token)
            setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
        return dict(transformers.Gemma3Processor(processor, tokenizer, image_seq_length=16)(**options))
    # the processors of Qwen's families need torchvision, for videos
    inputs = processor(images=list(images), return_tensors="pt")
    for grid in inputs["image_grid_thw"]:
        text = text.replace(MARKS[kind], "<|video_pad|>" * int(grid.prod() // 4), 1)
    ids = tokenizer(text.replace("<|video_pad|>", MARKS[kind]), return_tensors="pt", add_special_tokens=False)
    types = (ids["input_ids"] == tokenizer.convert_tokens_to_ids(MARKS[kind])).int()
    return {**ids, **inputs, "mm_token_type_ids": types}
