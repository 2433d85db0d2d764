"""The number of weights that a token takes, by a model's configuration."""

from __future__ import annotations

import pytest
import transformers

from slipstream.models.model_size import cached_bytes, larger, num_weights_read
from tests.support.tiny_models import shared


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_the_estimate_is_about_the_number_of_weights(name: str) -> None:
    model = shared(name)
    embeddings = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    counted = sum(parameter.numel() for parameter in model.parameters()) - embeddings
    assert num_weights_read(model.config) == pytest.approx(counted, rel=0.05)


def test_of_a_mixture_the_experts_of_a_token_count() -> None:
    mixture = transformers.MixtralConfig()
    assert num_weights_read(mixture) == pytest.approx(12.8e9, rel=0.02)  # Mixtral 8x7B: 12.9 of 46.7 billion


def test_latent_attention_caches_a_latent_for_all_heads() -> None:
    assert cached_bytes(transformers.DeepseekV3Config(dtype="bfloat16")) == 61 * (512 + 64) * 2


def test_a_configuration_that_does_not_say_has_no_size() -> None:
    assert num_weights_read(transformers.MambaConfig()) is None
    assert larger(None, 5) == larger(5, None) == larger(5, 4) == ""


def test_a_draft_model_that_is_no_smaller_is_described_with_both_sizes() -> None:
    assert larger(494_000_000, 1_544_000_000) == (
        "is larger than its target, with about 1,544 million weights per token against 494 million"
    )
    assert larger(7000, 7000) == "is as large as its target, with about 7,000 weights per token"
