"""`compare`: the arms of a benchmark, judged as its texts are, option by option."""

from __future__ import annotations

from typing import Any

import pytest

import slipstream
from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.bench.comparison import HF, PLAIN, SPECULATIVE, compare, compare_batch, summarise
from slipstream.certificate.wrong_rules import load_wrong_rule
from slipstream.text.prompt_sets import NamedPrompt
from tests.support.markers import subcases
from tests.support.tiny_models import perturbed, shared, tokenizer

PROMPTS = [NamedPrompt("the heron, the heron"), NamedPrompt("a fish and a stone, a fish")]


def pair(**options: Any) -> SpeculativeDecoder:
    model, draft = shared("llama"), perturbed("llama")
    return SpeculativeDecoder(model, draft, tokenizer=tokenizer(), **{"reproducible": False} | options)


@pytest.mark.parametrize("given", [{"repetition_penalty": 1.6, "min_tokens": 5}, {"stop_token_ids": [7, 8, 9, 10]}])
def test_hugging_face_gets_the_same_options(given: dict[str, Any]) -> None:
    done = list(compare(pair(), PROMPTS, SamplingParams(max_tokens=16, **given), with_hf=True))
    counts = summarise(done)["arms"]
    assert list(counts) == [PLAIN, SPECULATIVE, HF]
    assert all(line["different"] == line["not_compared"] == 0 for line in counts.values())


def test_texts_are_prompts_too() -> None:
    params = SamplingParams(max_tokens=6)
    named, texts = (list(slipstream.compare(pair(), given, params)) for given in (PROMPTS, [p.prompt for p in PROMPTS]))
    for one, other in zip(named, texts, strict=True):
        assert one.prompt.prompt == other.prompt.prompt
        assert one.runs[SPECULATIVE].token_ids == other.runs[SPECULATIVE].token_ids != []
        assert other.runs[SPECULATIVE].difference is None and other.speed_up(SPECULATIVE) > 0
    with pytest.raises(UsageError, match=r"^prompts='the heron'; allowed: a list of prompts$"):
        next(slipstream.compare(pair(), "the heron", params))


@subcases(
    "name, value",
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("logit_bias", {3: 1.0}),
        ("bad_words", ((5,),)),
        ("stop", ["a"]),
    ],
)
def test_options_that_hugging_face_would_not_apply_are_refused_by_name(name: str, value: Any) -> None:
    params = SamplingParams(max_tokens=8, **{name: value})
    with pytest.raises(UsageError, match=f"arm 'hf generate' with {name}"):
        next(compare(pair(), PROMPTS, params, with_hf=True))
    assert next(compare(pair(), PROMPTS, params)).runs.keys() == {PLAIN, SPECULATIVE}


def test_sampled_text_of_a_rule_that_does_not_couple_draws_is_not_called_different() -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0)
    for rule, compared in (("rejection", False), ("match", True)):
        counts = summarise(list(compare(pair(acceptance=rule), PROMPTS, params)))["arms"][SPECULATIVE]
        assert counts["different"] == 0 and (counts["identical"] == 2) >= compared
        assert bool(counts["not_compared"]) is not compared


def test_a_wrong_rule_differs_alone_and_in_a_batch() -> None:
    toy = SpeculativeDecoder("toy", "toy:2")
    params = SamplingParams(max_tokens=24)
    wrong = toy.using("model", num_draft_tokens=4, acceptance=load_wrong_rule("first-mismatch-kept"))
    assert summarise(list(compare(wrong, PROMPTS, params)))["arms"][SPECULATIVE]["different"] == 2
    done = list(compare(toy, PROMPTS, params))
    assert compare_batch(toy, done, params)["identical"] == 2
    assert compare_batch(wrong, done, params)["different"] == 2
