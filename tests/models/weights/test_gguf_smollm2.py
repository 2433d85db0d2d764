"""SmolLM2 in several block types: neither drafts nor batches change its texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.models import quantized_models
from slipstream.models.weights.default_model import embedded_model
from tests.support.markers import needs_avx2

gguf = pytest.importorskip("gguf")
pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.exhaustive,
    pytest.mark.slow,
    needs_avx2,
]
KINDS = {"attn": "Q5_0", "ffn_up": "Q4_0", "ffn_gate": "Q5_1", "ffn_down": "Q4_1", "token_embd": "Q8_0"}
PROMPTS = ["List the days of the week, twice.", "Why is the sky blue?"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's weights, quantized by the gguf package."""
    from safetensors.torch import load_file

    path = tmp_path_factory.mktemp("smollm2") / "smollm2-mixed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(30)
    writer.add_context_length(8192)
    writer.add_embedding_length(576)
    writer.add_feed_forward_length(1536)
    writer.add_head_count(9)
    writer.add_head_count_kv(3)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    for key, tensor in load_file(embedded_model() / "model.safetensors").items():
        name, numbers = names.get_name(key, (".weight", ".bias")), tensor.float().numpy()
        if key == "lm_head.weight":
            continue
        if numbers.ndim == 1:
            writer.add_tensor(name, numbers)
            continue
        if ".attn_q." in name or ".attn_k." in name:  # llama.cpp interleaves both halves of a head
            numbers = numbers.reshape(-1, 2, 32, 576).swapaxes(1, 2).reshape(numbers.shape)
        kind = gguf.GGMLQuantizationType[next(kind for part, kind in KINDS.items() if part in name)]
        writer.add_tensor(name, gguf.quants.quantize(numpy.ascontiguousarray(numbers), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_texts_are_the_same_with_drafts_and_in_batches(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With forwards of any shape."""
    monkeypatch.setattr(quantized_models, "described", lambda header: embedded_model())
    decoder = SpeculativeDecoder(str(file), reproducible=False, max_batch_size=2)
    assert decoder.target.arithmetic == "Q4_0+Q4_1+Q5_0+Q5_1+Q8_0 blocks, int8 activations"
    params, all_texts = SamplingParams(max_tokens=24), dict[Any, list[list[int]]]()
    for drafter in ("none", "suffix"):
        drafting = decoder.using(drafter)
        all_texts[drafter, 1] = [drafting.generate(prompt, params).token_ids for prompt in PROMPTS]
        all_texts[drafter, 2] = [result.token_ids for result in drafting.generate(PROMPTS, params)]
    assert all(texts == all_texts["none", 1] for texts in all_texts.values())
    assert "Monday" in decoder.generate(PROMPTS[0], params).text
    ids = torch.tensor([decoder.encode(PROMPTS[1], chat=True)])
    logits = decoder.target.backend.forward(ids, [0], first_slot=0, logits=True)
    assert not torch.equal(logits, decoder.target.backend.forward(ids.flip(1), [0], first_slot=0, logits=True))
