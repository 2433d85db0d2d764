"""Log-probabilities are those of the target's raw logits, the same to the bit whatever was drafted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from tests.support.tiny_models import VOCAB, perturbed, prompts, shared, tokenizer

PROMPTS = prompts([6, 11, 17])
PARAMS = SamplingParams(max_tokens=24, logprobs=3)
SAMPLED = replace(PARAMS, temperature=0.8, seed=4, repetition_penalty=1.2)


@cache
def decoder() -> SpeculativeDecoder:
    made = SpeculativeDecoder(
        shared("llama"), perturbed("llama"), tokenizer=tokenizer(), reproducible=True, acceptance="match"
    )
    assert made.reproducible
    return made


@pytest.mark.slow
@pytest.mark.parametrize("params", [PARAMS, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_drafting_and_batches_do_not_change_logprobs_by_a_bit(drafter: str, params: SamplingParams) -> None:
    plain = [decoder().using("none").generate(prompt, params) for prompt in PROMPTS]
    drafted = decoder().using(drafter, num_draft_tokens=4).generate(PROMPTS, params)
    assert sum(result.stats.num_draft_tokens for result in drafted) > 0
    for expected, drafted_result in zip(plain, drafted, strict=True):
        assert expected.token_ids == drafted_result.token_ids and expected.logprobs == drafted_result.logprobs


@pytest.mark.parametrize("params", [PARAMS, SAMPLED], ids=["greedy", "sampled"])
def test_requesting_logprobs_does_not_change_the_text(params: SamplingParams) -> None:
    asked = decoder().generate(PROMPTS, [params, replace(params, logprobs=None), params])
    silent = decoder().generate(PROMPTS, replace(params, logprobs=None))
    assert [result.token_ids for result in asked] == [result.token_ids for result in silent]
    assert [result.logprobs is None for result in asked] == [False, True, False]
    assert all(result.logprobs is None and result.to_dict()["logprobs"] is None for result in silent)


@pytest.mark.parametrize("params", [PARAMS, SAMPLED], ids=["greedy", "sampled"])
def test_logprobs_are_the_log_softmax_of_hugging_faces_logits(params: SamplingParams) -> None:
    result = decoder().using("model", num_draft_tokens=4).generate(PROMPTS[1], params)
    with torch.no_grad():
        logits = shared("llama")(torch.tensor([PROMPTS[1] + result.token_ids])).logits[0, len(PROMPTS[1]) - 1 : -1]
    expected = logits.float().log_softmax(-1)
    assert result.logprobs is not None and len(result.logprobs) == len(result.token_ids) == 24
    for entry, token, distribution in zip(result.logprobs, result.token_ids, expected, strict=True):
        assert entry.token_id == token and entry.logprob == pytest.approx(float(distribution[token]), abs=1e-4)
        best = distribution.topk(3)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [token for token, _ in entry.top] == best.indices.tolist()


def test_a_text_cut_inside_a_block_has_one_logprob_per_token() -> None:
    made = decoder().using("model", num_draft_tokens=4)
    ids = made.generate(PROMPTS[0], PARAMS).token_ids
    cut = made.generate(PROMPTS[0], replace(PARAMS, stop_token_ids=[ids[9]], logprobs=0))
    assert cut.logprobs is not None
    assert [entry.token_id for entry in cut.logprobs] == cut.token_ids == ids[: len(cut.token_ids)]
    assert len(cut.token_ids) <= 10 and all(entry.top == () for entry in cut.logprobs)


def test_streams_samples_and_json_have_logprobs() -> None:
    params = replace(SAMPLED, n=2)
    result = decoder().generate(PROMPTS[0], params)
    assert result.logprobs and result.alternatives[0].logprobs
    chunks = list(decoder().stream(PROMPTS[0], SAMPLED))
    assert [entry for chunk in chunks for entry in chunk.round.logprobs or ()] == result.logprobs
    saved = result.to_dict()["logprobs"][0]
    assert set(saved) == {"token_id", "logprob", "top", "token", "top_tokens"} and len(saved["top"]) == 3


def test_more_logprobs_than_the_vocabulary_has_are_refused() -> None:
    assert decoder().generate(PROMPTS[0], SamplingParams(max_tokens=2, logprobs=VOCAB)).logprobs
    with pytest.raises(UsageError, match=rf"^logprobs={VOCAB + 1}; allowed: at most {VOCAB}"):
        decoder().generate(PROMPTS[0], SamplingParams(max_tokens=2, logprobs=VOCAB + 1))
