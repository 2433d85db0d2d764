"""Sampling options inside Hugging Face `generate`: the same distribution at every token of a sampled text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation import NoRepeatNGramLogitsProcessor

from slipstream import SamplingParams
from slipstream.core.rng import Race
from slipstream.core.types import Row
from slipstream.sampling.sampler import Sampler
from tests.support.tiny_models import fresh

VOCAB, EOS, LENGTH = 97, 2, 12
PROMPT = [5, 9, 5, 14, 60, 4, 9]

# (options, arguments of generate)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": ({"temperature": 0.6}, {"temperature": 0.6}),
    "top_k": ({"temperature": 1.0, "top_k": 8}, {"top_k": 8}),
    "top_p": ({"temperature": 1.0, "top_p": 0.7}, {"top_p": 0.7}),
    "min_p": ({"temperature": 1.0, "min_p": 0.2}, {"min_p": 0.2}),
    "repetition": ({"temperature": 1.0, "repetition_penalty": 1.6}, {"repetition_penalty": 1.6}),
    "bias": ({"temperature": 1.0, "logit_bias": {9: 4.0, 4: -2.0}}, {"sequence_bias": [[[9], 4.0], [[4], -2.0]]}),
    "bad words": (
        {"temperature": 1.0, "bad_words": [[60], *([9, t] for t in range(50)), [5, 14, 3]]},
        {"bad_words_ids": [[60], *([9, t] for t in range(50)), [5, 14, 3]]},
    ),
    "min_tokens": (
        {"temperature": 1.0, "min_tokens": 6, "logit_bias": {EOS: 5.0}},
        {"min_new_tokens": 6, "sequence_bias": [[[EOS], 5.0]]},
    ),
    "all in the order of generate": (
        {
            "temperature": 0.7,
            "top_k": 40,
            "top_p": 0.95,
            "min_p": 0.02,
            "repetition_penalty": 1.5,
            "logit_bias": {9: 4.0, 4: -2.0, 5: 3.0},
            "bad_words": [[60], [9, 9], [9, 5]],
            "min_tokens": 6,
            "logits_processors": [NoRepeatNGramLogitsProcessor(2)],
        },
        {
            "temperature": 0.7,
            "top_k": 40,
            "top_p": 0.95,
            "min_p": 0.02,
            "repetition_penalty": 1.5,
            "sequence_bias": [[[9], 4.0], [[4], -2.0], [[5], 3.0]],
            "bad_words_ids": [[60], [9, 9], [9, 5]],
            "min_new_tokens": 6,
            "logits_processor": [NoRepeatNGramLogitsProcessor(2)],
        },
    ),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return fresh("llama", vocab_size=VOCAB, initializer_range=0.3, eos_token_id=EOS)


@pytest.mark.parametrize("name", CASES)
def test_the_distribution_at_every_token_equals_that_of_generate(name: str, model: Any) -> None:
    options, arguments = CASES[name]
    torch.manual_seed(1)
    generated = model.generate(
        torch.tensor([PROMPT]),
        **({"top_k": 0} | arguments),
        do_sample=True,
        max_new_tokens=LENGTH,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    output = generated.sequences[0, len(PROMPT) :].tolist()
    row = Row(0, list(PROMPT), SamplingParams(**options), seed=0, end_ids=frozenset({EOS}))
    sampler = Sampler([row], Race(VOCAB, model.device), VOCAB, model.device)
    logits = torch.stack(generated.logits, dim=1)
    # the whole text as one draft: position j sees the prompt and the first j tokens
    ours = sampler.probs(sampler.scores(logits, torch.tensor([output[:-1]])))[0]
    theirs = torch.cat(generated.scores).softmax(-1)
    assert len(output) >= row.params.min_tokens
    assert torch.equal(ours > 0, theirs > 0)
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=0)
    assert not torch.allclose(theirs, logits[0].softmax(-1), atol=1e-3)
