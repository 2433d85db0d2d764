"""Ties are judged by what a token is chosen by: scores after penalties, bias, bad words and the seed's noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.certificate import parity
from slipstream.certificate.parity import TieJudge, count_differences, verdict
from tests.support.tiny_models import perturbed, shared, tokenizer

PROMPT = [5, 6, 7, 5, 6]
OPTIONS = [
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"logit_bias": {4: 3.0}},
    {"bad_words": [[9], [6, 7]]},
    {"min_tokens": 9, "stop_token_ids": list(range(3, 30))},
    {"temperature": 0.9, "top_k": 12},
    {"temperature": 1.4, "top_p": 0.9, "repetition_penalty": 1.3},
]


def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(shared("llama"), perturbed("llama"), tokenizer=tokenizer(), reproducible=False)


def nearly(text: list[int], at: int, token: int) -> list[int]:
    return [*text[:at], token, *text[at + 1 :]]


@pytest.mark.parametrize("given", OPTIONS)
def test_the_token_of_the_highest_score_is_the_one_that_plain_decoding_chooses(given: dict) -> None:
    plain, params = decoder().using("none"), SamplingParams(**{"max_tokens": 12, "seed": 3} | given)
    text = plain.generate(PROMPT, params).token_ids
    judge = TieJudge(plain)
    for at, token in enumerate(text):
        ids = [*PROMPT, *text[:at]]
        assert int(judge._scores(PROMPT, ids, plain.next_logits(ids), params).argmax()) == token


@pytest.mark.parametrize("given", OPTIONS)
def test_a_wrong_token_is_no_tie_and_rounding_of_the_winner_is(given: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, params = decoder().using("none"), SamplingParams(**{"max_tokens": 12, "seed": 3} | given)
    text = plain.generate(PROMPT, params).token_ids
    judge, at = TieJudge(plain), min(3, len(text) - 1)
    ids = [*PROMPT, *text[:at]]
    scores = judge._scores(PROMPT, ids, plain.next_logits(ids), params)
    second = int(scores.topk(2).indices[1])
    found = judge.judge(PROMPT, text, nearly(text, at, second), params)
    assert found is not None and found.compared and not found.tie and found.position == at

    whole = plain.next_logits

    def rounded(tokens: list[int]) -> Tensor:
        logits = whole(tokens).clone()
        logits[second] += 1.0 if tokens == ids else 0.0
        return logits

    monkeypatch.setattr(judge.decoder, "next_logits", rounded)
    monkeypatch.setitem(parity.explain.__globals__["CEILING"], torch.float32, 10.0)
    gap = float(scores.max() - scores[second])
    found = judge.judge(PROMPT, text, nearly(text, at, second), params)
    assert found is not None and found.tie == (gap <= 2 * found.noise)


def test_raw_logits_would_judge_penalised_text_wrongly() -> None:
    plain, params = decoder().using("none"), SamplingParams(max_tokens=12, repetition_penalty=1.8)
    penalised, free = (
        plain.generate(PROMPT, one).token_ids for one in (params, replace(params, repetition_penalty=1.0))
    )
    at = next(i for i, (a, b) in enumerate(zip(penalised, free, strict=True)) if a != b)
    found = TieJudge(plain).judge(PROMPT, penalised, free, params)
    assert found is not None and found.position == at and found.expected_gap == 0.0 and found.got_gap > 0


def test_sampled_text_is_compared_where_draws_are_coupled_only() -> None:
    judge, params = TieJudge(decoder()), SamplingParams(temperature=1.0, seed=1, max_tokens=3)
    found = judge.judge(PROMPT, [7, 8, 9], [7, 9, 9], params, coupled=False)
    assert found is not None and not found.compared and verdict(found) == "differs at 1, as sampled text may"
    counted = count_differences([None, found])
    assert (counted["identical"], counted["different"], counted["not_compared"]) == (1, 0, 1)
    assert judge.judge(PROMPT, [7, 8, 9], [7, 8, 9], params, coupled=False) is None
