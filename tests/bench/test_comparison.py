"""`compare`: the arms of a benchmark, how their texts are compared, and its options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import slipstream
from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.apps.cli.tables import summary_lines
from slipstream.bench.comparison import (
    HF,
    PLAIN,
    SPECULATIVE,
    Comparison,
    Run,
    compare,
    compare_batch,
    num_runs,
    speed_up,
    student_quantile,
    summarize,
    within_noise,
)
from slipstream.text.prompt_sets import NamedPrompt
from tests.support.markers import subcases
from tests.support.tiny_models import perturbed, shared, tokenizer
from tests.support.wrong_acceptance_rules import load_wrong_rule

PROMPTS = [NamedPrompt("the heron, the heron"), NamedPrompt("a fish and a stone, a fish")]


def pair(**options: Any) -> SpeculativeDecoder:
    model, draft = shared("llama"), perturbed("llama")
    return SpeculativeDecoder(model, draft, tokenizer=tokenizer(), **{"reproducible": False} | options)


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.6, "min_tokens": 5}, {"stop_token_ids": [7, 8, 9, 10]}])
def test_hugging_face_gets_the_same_options(options: dict[str, Any]) -> None:
    comparisons = list(compare(pair(), PROMPTS, SamplingParams(max_tokens=16, **options), with_hf=True))
    counts = summarize(comparisons)["arms"]
    assert list(counts) == [PLAIN, SPECULATIVE, HF]
    assert all(line["different"] == line["not_compared"] == 0 for line in counts.values())


def test_compare_needs_no_params() -> None:
    (comparison,) = compare(SpeculativeDecoder("toy", drafter="ngram"), ["The heron"])
    assert len(comparison.runs["plain"].token_ids) <= SamplingParams().max_tokens


def test_compare_accepts_plain_texts_as_prompts() -> None:
    params = SamplingParams(max_tokens=6)
    named, texts = (
        list(slipstream.compare(pair(), prompts, params)) for prompts in (PROMPTS, [p.prompt for p in PROMPTS])
    )
    for first, second in zip(named, texts, strict=True):
        assert first.prompt.prompt == second.prompt.prompt
        assert first.runs[SPECULATIVE].token_ids == second.runs[SPECULATIVE].token_ids != []
        assert second.runs[SPECULATIVE].difference is None and second.speed_up(SPECULATIVE) > 0
    with pytest.raises(UsageError, match=r"^prompts='the heron'; allowed: a list of prompts$"):
        next(slipstream.compare(pair(), "the heron", params))


@pytest.mark.slow
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
def test_options_that_hugging_face_does_not_apply_are_refused_by_name(name: str, value: Any) -> None:
    params = SamplingParams(max_tokens=8, **{name: value})
    with pytest.raises(UsageError, match=f"arm 'hf generate' with {name}"):
        next(compare(pair(), PROMPTS, params, with_hf=True))
    assert next(compare(pair(), PROMPTS, params)).runs.keys() == {PLAIN, SPECULATIVE}


def test_sampled_text_is_compared_only_under_the_match_rule() -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0)
    for rule, compared in (("rejection", False), ("match", True)):
        counts = summarize(list(compare(pair(acceptance=rule), PROMPTS, params)))["arms"][SPECULATIVE]
        assert counts["different"] == 0 and (counts["identical"] == 2) >= compared
        assert bool(counts["not_compared"]) is not compared


def test_a_wrong_rule_differs_alone_and_in_a_batch() -> None:
    toy = SpeculativeDecoder("toy", "toy:2")
    params = SamplingParams(max_tokens=24)
    wrong = toy.using("model", num_draft_tokens=4, acceptance=load_wrong_rule("first-mismatch-kept"))
    assert summarize(list(compare(wrong, PROMPTS, params)))["arms"][SPECULATIVE]["different"] == 2
    comparisons = list(compare(toy, PROMPTS, params))
    assert compare_batch(toy, comparisons, params)["identical"] == 2
    assert compare_batch(wrong, comparisons, params)["different"] == 2


def test_arms_are_warmed_up_and_take_turns_in_both_orders() -> None:
    messages: list[str] = []
    params = SamplingParams(max_tokens=4)
    comparisons = list(compare(SpeculativeDecoder("toy"), PROMPTS, params, repeats=3, on_run=messages.append))
    assert len(messages) == num_runs(len(PROMPTS), 3)
    assert all(len(run.repeats) == 3 for comparison in comparisons for run in comparison.runs.values())
    assert messages[:2] == ["warming up plain", "warming up speculative"]
    order = [text.partition(": ")[2].partition(",")[0] for text in messages[2:]]
    forwards, backwards = [PLAIN, SPECULATIVE], [SPECULATIVE, PLAIN]
    assert order == [*forwards, *backwards, *forwards, *backwards, *forwards, *backwards]


def timed(plain: tuple[float, ...], fast: tuple[float, ...]) -> Comparison:
    runs = {PLAIN: Run([1] * 10, plain[0], repeats=plain), SPECULATIVE: Run([1] * 10, fast[0], repeats=fast)}
    return Comparison(NamedPrompt("A"), runs)


def test_the_interval_of_a_speed_up_comes_from_its_repeats() -> None:
    measured = speed_up([timed((2.0, 2.2, 1.8), (1.0, 1.1, 0.9))], SPECULATIVE)
    assert measured.value == pytest.approx(2.0) and measured.low == pytest.approx(2.0) == measured.high
    measured = speed_up([timed((1.0, 1.0, 1.0), (0.9, 1.1, 1.0))], SPECULATIVE)
    assert measured.low is not None and measured.high is not None and measured.low < measured.value < measured.high
    assert within_noise(measured)
    # two prompts whose speed-ups differ, each without scatter: no noise, whatever the difference between prompts
    measured = speed_up([timed((4.0, 4.0), (1.0, 1.0)), timed((1.0, 1.0), (1.0, 1.0))], SPECULATIVE)
    assert measured.value == pytest.approx(2.0) and not within_noise(measured)
    alone = speed_up([timed((2.0,), (1.0,))], SPECULATIVE)
    assert alone.value == pytest.approx(2.0) and alone.low is None and not within_noise(alone)


def test_two_equal_arms_are_called_different_in_5_percent_of_runs() -> None:
    """5 of 100 intervals of 95 % may miss the truth; three repeats, and noise as large as half the time."""
    rng, runs = np.random.default_rng(0), 2000
    missed = 0
    for _ in range(runs):
        plain, fast = (tuple(np.exp(rng.normal(0, 0.5, 3))) for _ in range(2))
        missed += not within_noise(speed_up([timed(plain, fast)], SPECULATIVE))
    assert 0.03 < missed / runs < 0.07


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042)])
def test_student_quantiles_equal_published_tables(freedom: int, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, abs=0.012)


def test_the_planners_estimate_is_held_against_what_was_measured() -> None:
    decoder = SpeculativeDecoder("toy", "toy:2")
    comparisons = list(compare(decoder, ["The heron, the heron", "A stone"], SamplingParams(max_tokens=40), repeats=2))
    for comparison in comparisons:
        estimate, fast, plain = comparison.estimate, *(comparison.runs[arm].stats for arm in (SPECULATIVE, PLAIN))
        assert estimate is not None and len(fast) == len(plain) == 2
        assert estimate.estimated == pytest.approx(np.prod([run.estimated_speed_up for run in fast]) ** 0.5)
        speeds = [
            [run.num_output_tokens / (run.total_seconds - run.prefill_seconds) for run in runs]
            for runs in (fast, plain)
        ]
        assert estimate.measured == pytest.approx((np.prod(speeds[0]) / np.prod(speeds[1])) ** 0.5)
        assert estimate.error == pytest.approx(estimate.estimated / estimate.measured - 1)
    summary = summarize(comparisons)
    errors = sorted(abs(comparison.estimate.error) for comparison in comparisons if comparison.estimate)
    assert summary["estimate"] == {"prompts": 2, "median_error": sum(errors) / 2, "largest_error": errors[1]}
    assert any("the planner's estimate of the speed-up is off by" in line for line in summary_lines(summary))
    assert "estimate" not in summarize(list(compare(pair(), PROMPTS, SamplingParams(max_tokens=8))))
