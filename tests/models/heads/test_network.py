"""Scaled rotary positions of heads are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.models.heads.head_files import head_files
from slipstream.models.heads.load import load_head
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from tests.support.head_cases import write_head
from tests.support.tiny_models import fresh, prompts, tokenizer

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"type": "linear", "factor": 3.0},  # the old name of rope_type
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
]


@pytest.mark.each_value
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: str(next(iter(scaling.values()))))
def test_queries_are_rotated_as_transformers_rotates_them(tmp_path: Path, scaling: dict[str, Any], place: str) -> None:
    model = fresh("llama", num_hidden_layers=5)
    settings = scaling | ({"rope_theta": 5000.0} if place == "rope_parameters" else {})
    head = write_head(tmp_path, model, layer={place: settings, "max_position_embeddings": 1024})
    options = LoadOptions()
    files = head_files(str(head.folder), options)
    assert files is not None
    backend = load_head(files, load(model, options, tokenizer()), options).backend
    positions = torch.tensor([[0, 1, 7, 100, 600, 1023]])
    x = torch.randn(1, 4, 6, 8)
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=1024, rope_theta=5000.0, rope_scaling=scaling
    )
    expected, _ = apply_rotary_pos_emb(x, x, *LlamaRotaryEmbedding(config)(x, positions))
    assert torch.allclose(backend.network._rotate(x, positions), expected, atol=1e-5)  # type: ignore[attr-defined]
    plain = transformers.LlamaConfig(hidden_size=32, num_attention_heads=4, rope_theta=5000.0)
    unscaled, _ = apply_rotary_pos_emb(x, x, *LlamaRotaryEmbedding(plain)(x, positions))
    assert torch.allclose(unscaled, expected, atol=1e-5) == ("default" in scaling.values())


@pytest.mark.slow
def test_scaled_positions_change_no_text(tmp_path: Path) -> None:
    model = fresh("llama", num_hidden_layers=5)
    head = write_head(tmp_path, model, layer={"rope_scaling": {"rope_type": "llama3", **LLAMA3}})
    decoder = SpeculativeDecoder(model, str(head.folder), drafter="model", num_draft_tokens=3, tokenizer=tokenizer())
    for options in ({}, {"temperature": 0.8, "seed": 3}):
        params = SamplingParams(max_tokens=20, **options)
        results = [any_decoder.generate(prompts([9, 17]), params) for any_decoder in (decoder, decoder.using("none"))]
        assert [r.token_ids for r in results[0]] == [r.token_ids for r in results[1]]
