"""Float16 models keep their weights, compute in float32 by the kernels, and no draft changes their texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.models.cpu.block_linear import BlockEmbedding, BlockLinear, block_linears
from slipstream.models.cpu.float16_linear import in_panels, not_in_panels
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from tests.support.architectures import tiny_model
from tests.support.markers import needs_kernels
from tests.support.plain_texts import alone_and_together
from tests.support.quantized_files import kl
from tests.support.tiny_models import fresh, prompts

pytestmark = needs_kernels


def saved(folder: Path, name: str = "llama", **changes: Any) -> Any:
    """A float16 model in a folder; returns the same model in float32."""
    model = fresh(name, dtype=torch.float16, head_dim=64, intermediate_size=64, **changes)
    model.save_pretrained(folder)
    return model.float()


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_same_weights_in_float32(name: str, tied: bool, tmp_path: Path) -> None:
    reference = saved(tmp_path, name, tie_word_embeddings=tied)
    loaded: Any = load(str(tmp_path), LoadOptions())
    assert loaded.backend.stack is not None and loaded.backend.shape_independent
    assert loaded.arithmetic == "F16 blocks, float32 activations" and loaded.model.dtype == torch.float32
    ids = torch.randint(0, reference.config.vocab_size, (1, 40), generator=torch.Generator().manual_seed(4))
    loaded.backend.reserve(1, 256)
    logits = loaded.backend.forward(ids, [0], first_slot=0, logits=True)
    with torch.inference_mode():
        expected = reference(input_ids=ids, use_cache=False).logits
        rounded = reference.half()(input_ids=ids, use_cache=False).logits.float()
    assert kl(expected, logits) < min(1e-5, kl(expected, rounded))
    embedding, output = loaded.model.get_input_embeddings(), loaded.model.get_output_embeddings()
    assert isinstance(embedding, BlockEmbedding) == tied and isinstance(output, BlockLinear)
    assert not tied or embedding.part is output.parts[0]
    assert {keys.dtype for layer in loaded.backend.cache.layers for keys in (layer.keys, layer.values)} == {
        torch.float16
    }


def test_texts_are_the_same_with_drafts_and_in_batches(tmp_path: Path) -> None:
    saved(tmp_path)
    decoder = SpeculativeDecoder(str(tmp_path), max_batch_size=3)
    params, texts = SamplingParams(max_tokens=30, ignore_eos=True), prompts([30, 9, 17])
    alone_and_together(decoder.using("ngram", num_draft_tokens=4), texts, params)


def test_a_loaded_model_stays_its_owners() -> None:
    model = fresh("llama", dtype=torch.float16, head_dim=64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with SpeculativeDecoder(model, drafter="none", fast=True, reproducible=False) as decoder:
        decoder.generate([5, 6, 7], SamplingParams(max_tokens=3))
        assert decoder.target.view is not None and block_linears(decoder.target.view.model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}


def test_layers_and_models_that_the_kernels_do_not_take_stay_as_they_are() -> None:
    odd = nn.Linear(40, 16, dtype=torch.float16)
    assert in_panels(odd) is odd
    mixture = tiny_model("mixtral").half()
    assert not_in_panels(mixture) == "most of its weights are in no nn.Linear"
    assert not_in_panels(tiny_model("llama").half()) is None
