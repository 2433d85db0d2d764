"""Full precision distinguishes ties from bugs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.certificate import parity
from slipstream.certificate.parity import (
    CEILING,
    Difference,
    TieJudge,
    count_differences,
    explain,
    first_difference,
    verdict,
)
from tests.support.markers import mostly_slow
from tests.support.tiny_models import perturbed, shared, tokenizer

PROMPT, EXPECTED, GOT = [1, 2, 3, 4], [5, 6, 7], [5, 6, 8]
VOCAB = 20


def exact(second: float) -> Tensor:
    """Logits whose best token is 7, with token 8 `second` below it and the others far below."""
    logits = torch.full((VOCAB,), -9.0)
    logits[7], logits[8] = 3.0, 3.0 - second
    return logits


def judged(gap: float, errors: list[float], dtype: torch.dtype = torch.bfloat16) -> Difference:
    """errors: errors of the logit of token 8, at the position of the difference and at those before it."""

    def working(ids: list[int]) -> Tensor:
        rounded = exact(gap)
        rounded[8] += (errors + [0.0] * 9)[len(PROMPT) + 2 - len(ids)]
        return rounded

    difference = explain(PROMPT, EXPECTED, GOT, lambda ids, n: exact(gap).expand(n, -1), working, dtype)
    assert difference is not None
    return difference


@pytest.mark.parametrize(
    ("expected", "actual", "at"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [1], 0)]
)
def test_the_first_difference_is_found_by_position(expected: list[int], actual: list[int], at: int | None) -> None:
    assert first_difference(expected, actual) == at


def test_a_gap_within_rounding_is_a_tie() -> None:
    difference = judged(0.1, [0.08, 0.0, 0.0, 0.0])
    assert (difference.position, difference.expected, difference.got, difference.tie) == (2, 7, 8, True)
    assert difference.expected_gap == 0 and difference.got_gap == pytest.approx(0.1)


def test_a_lucky_position_does_not_hide_the_rounding_of_its_neighbors() -> None:
    assert judged(0.1, [0.0, 0.0, 0.08, 0.0]).tie


@pytest.mark.parametrize("gap", [0.2, 1.0, 3.0])
def test_a_gap_beyond_rounding_is_not_a_tie(gap: float) -> None:
    assert not judged(gap, [0.04, 0.05, 0.03, 0.05]).tie


def test_no_rounding_explains_a_gap_above_the_ceiling() -> None:
    assert not judged(CEILING[torch.bfloat16] + 0.1, [9.0] * 4).tie
    assert not judged(CEILING[torch.float32] * 2, [9.0] * 4, torch.float32).tie


def test_a_text_that_continues_after_the_end_of_the_other_is_not_a_tie() -> None:
    difference = explain(
        PROMPT, [5], [5, 6], lambda ids, n: exact(0).expand(n, -1), lambda ids: exact(0), torch.bfloat16
    )
    assert difference == Difference(1, None, 6)
    assert explain(PROMPT, [5], [5], lambda ids, n: exact(0), lambda ids: exact(0), torch.bfloat16) is None


# A tie is a tie of final scores: after penalties, bias, bad words and the noise of the seed

TOKENS = [5, 6, 7, 5, 6]
OPTIONS = [
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"logit_bias": {4: 3.0}},
    {"bad_words": [[9], [6, 7]]},
    {"min_tokens": 9, "stop_token_ids": list(range(3, 30))},
    {"temperature": 0.9, "top_k": 12},
    {"temperature": 1.4, "top_p": 0.9, "repetition_penalty": 1.3},
]
over_options = pytest.mark.parametrize("options", mostly_slow(OPTIONS, OPTIONS[0], OPTIONS[-1]))


def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(shared("llama"), perturbed("llama"), tokenizer=tokenizer(), reproducible=False)


def nearly(text: list[int], at: int, token: int) -> list[int]:
    return [*text[:at], token, *text[at + 1 :]]


@pytest.mark.slow
@over_options
def test_the_highest_score_belongs_to_the_token_of_plain_decoding(options: dict) -> None:
    plain, params = decoder().using("none"), SamplingParams(**{"max_tokens": 12, "seed": 3} | options)
    text = plain.generate(TOKENS, params).token_ids
    judge = TieJudge(plain)
    for at, token in enumerate(text):
        ids = [*TOKENS, *text[:at]]
        assert int(judge._scores(TOKENS, ids, plain.next_logits(ids), params).argmax()) == token


@pytest.mark.slow
@over_options
def test_a_wrong_token_is_a_tie_only_within_rounding(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, params = decoder().using("none"), SamplingParams(**{"max_tokens": 12, "seed": 3} | options)
    text = plain.generate(TOKENS, params).token_ids
    judge, at = TieJudge(plain), min(3, len(text) - 1)
    ids = [*TOKENS, *text[:at]]
    scores = judge._scores(TOKENS, ids, plain.next_logits(ids), params)
    second = int(scores.topk(2).indices[1])
    difference = judge.judge(TOKENS, text, nearly(text, at, second), params)
    assert difference is not None and difference.compared and not difference.tie and difference.position == at

    whole = plain.next_logits

    def rounded(tokens: list[int]) -> Tensor:
        logits = whole(tokens).clone()
        logits[second] += 1.0 if tokens == ids else 0.0
        return logits

    monkeypatch.setattr(judge.decoder, "next_logits", rounded)
    monkeypatch.setitem(parity.explain.__globals__["CEILING"], torch.float32, 10.0)
    gap = float(scores.max() - scores[second])
    difference = judge.judge(TOKENS, text, nearly(text, at, second), params)
    assert difference is not None and difference.tie == (gap <= 2 * difference.noise)


def test_raw_logits_would_judge_penalised_text_wrongly() -> None:
    plain, params = decoder().using("none"), SamplingParams(max_tokens=12, repetition_penalty=1.8)
    penalised, unpenalised = (
        plain.generate(TOKENS, options).token_ids for options in (params, replace(params, repetition_penalty=1.0))
    )
    at = next(i for i, (a, b) in enumerate(zip(penalised, unpenalised, strict=True)) if a != b)
    difference = TieJudge(plain).judge(TOKENS, penalised, unpenalised, params)
    assert difference is not None and difference.position == at and difference.expected_gap == 0.0
    assert difference.got_gap > 0


def test_sampled_text_is_compared_only_if_draws_are_coupled() -> None:
    judge, params = TieJudge(decoder()), SamplingParams(temperature=1.0, seed=1, max_tokens=3)
    difference = judge.judge(TOKENS, [7, 8, 9], [7, 9, 9], params, coupled=False)
    assert difference is not None and not difference.compared
    assert verdict(difference) == "differs at 1, as sampled text may"
    counted = count_differences([None, difference])
    assert (counted["identical"], counted["different"], counted["not_compared"]) == (1, 0, 1)
    assert judge.judge(TOKENS, [7, 8, 9], [7, 8, 9], params, coupled=False) is None
