"""What "auto" means: which drafter, how many tokens, and where drafts stop early."""

from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.core.types import Row
from slipstream.draft_length.planner import Planner
from slipstream.draft_length.policies import Fixed, Heuristic
from slipstream.drafters._predictions import PredictionDrafter
from slipstream.drafters.model import ModelDrafter, PathBelow, TokenBelow, WhilePays
from slipstream.drafters.suffix import SuffixDrafter


def decoder_of(drafter: str = "auto", count: int | str = "auto", draft: str | None = "toy:2", **options: Any):
    return SpeculativeDecoder("toy", draft, drafter=drafter, num_draft_tokens=count, **options)


def test_auto_without_a_draft_model_takes_suffix_and_cuts_drafts_that_do_not_pay() -> None:
    decoder = decoder_of(draft=None)
    assert decoder.drafter_name == "suffix" and isinstance(decoder.drafter, SuffixDrafter)
    assert decoder.drafter.outputs > 0 and decoder.drafter.acceptance_model is not None
    assert isinstance(decoder._engine.policy, Planner) and not decoder._engine.policy.only_model


def test_auto_with_a_draft_model_takes_hybrid() -> None:
    decoder = decoder_of()
    assert decoder.drafter_name == "hybrid"
    predictions, first, second = (source.drafter for source in decoder._engine.sources)
    assert isinstance(predictions, PredictionDrafter)
    assert isinstance(first, SuffixDrafter) and first.outputs == 0
    assert isinstance(second, ModelDrafter) and isinstance(second.stop, WhilePays)
    policy = decoder._engine.policy
    assert isinstance(policy, Planner) and policy is second.stop.planner


def test_a_number_of_tokens_takes_the_draft_model_at_that_length() -> None:
    decoder = decoder_of(count=4)
    assert decoder.drafter_name == "model" and isinstance(decoder.drafter, ModelDrafter)
    assert decoder.drafter.stop is None and decoder._engine.policy == Fixed(4)


def test_hybrid_with_a_fixed_length_decides_by_probabilities_not_costs() -> None:
    decoder = decoder_of("hybrid", 7)
    assert decoder._engine.policy == Fixed(7)
    assert isinstance(decoder.drafter, ModelDrafter) and decoder.drafter.stop == PathBelow(0.4)


@pytest.mark.parametrize(("count", "stop"), [("auto", WhilePays), (4, type(None)), ("confidence:0.4", TokenBelow)])
def test_the_spelling_decides_where_the_draft_model_stops(count: int | str, stop: type) -> None:
    decoder = decoder_of("model", count)
    assert isinstance(decoder.drafter, ModelDrafter) and isinstance(decoder.drafter.stop, stop)
    assert stop is not TokenBelow or decoder.drafter.stop == TokenBelow(0.4)


@pytest.mark.parametrize("count", ["auto", 4])
def test_a_threshold_in_the_drafters_name_holds_for_any_length(count: int | str) -> None:
    decoder = decoder_of("model:p=25", count)
    assert isinstance(decoder.drafter, ModelDrafter) and decoder.drafter.stop == PathBelow(0.25)
    suffix = decoder_of("suffix:2+p=30", count, None)
    assert isinstance(suffix.drafter, SuffixDrafter) and suffix.drafter.acceptance_model is None


def test_a_heuristic_is_read_from_its_spelling() -> None:
    assert isinstance(decoder_of("model", "heuristic")._engine.policy, Heuristic)
    policy = decoder_of("model", "heuristic:9")._engine.policy
    assert isinstance(policy, Heuristic) and policy.longest == 9


@pytest.mark.parametrize(
    "count", ["heuristic:", "heuristic:0", "heuristic:x", "confidence", "confidence:1", "fast", "0x2", "3x1", "3x", -1]
)
def test_an_unknown_spelling_of_a_length_is_refused(count: int | str) -> None:
    with pytest.raises(
        UsageError, match=r"num_draft_tokens=.*; allowed: 'auto', 'chain', a whole number from 0 to 64, 'heur"
    ):
        decoder_of("model", count)


@pytest.mark.parametrize(("acceptance", "samples"), [("auto", False), ("match", False), ("block", True)])
def test_drafts_share_the_targets_random_numbers_unless_a_rule_needs_their_distribution(
    acceptance: str, samples: bool
) -> None:
    decoder = decoder_of(acceptance=acceptance)
    policy = decoder._engine.policy
    assert isinstance(policy, Planner)
    sampled = Row(0, [1], SamplingParams(temperature=0.8, max_tokens=9), seed=0)
    assert policy.is_fixed(sampled) is samples
    assert isinstance(decoder.drafter, ModelDrafter) and decoder.drafter.coupled is not samples


@pytest.mark.parametrize("drafter", ["suffix", "ngram", "model:p=25"])
def test_confidence_is_refused_for_drafters_that_report_none(drafter: str) -> None:
    with pytest.raises(
        UsageError,
        match=r"num_draft_tokens='confidence:0.4' with drafter=.*allowed: drafters cross_vocabulary, hybrid, l",
    ):
        decoder_of(drafter, "confidence:0.4")
    with pytest.raises(UsageError, match="allowed: drafters cross_vocabulary, hybrid, layer_skip, model"):
        decoder_of("auto", "confidence:0.4", draft=None)


def test_a_length_beyond_the_widest_forward_is_refused() -> None:
    for count in (60, "heuristic:60"):
        with pytest.raises(UsageError, match=f"num_draft_tokens={count}; allowed: at most 24 in reproducible mode"):
            decoder_of("model", count, reproducible=True)
    with pytest.raises(UsageError, match=r"num_draft_tokens=heuristic:99; allowed: at most 64$"):
        decoder_of("model", "heuristic:99", reproducible=False)
