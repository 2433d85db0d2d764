"""What "auto" means: which drafter, how many tokens, and who stops early."""

from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.core.types import Row
from slipstream.draft_length.planner import Planner
from slipstream.draft_length.policies import Fixed, Heuristic
from slipstream.drafters.hybrid import HybridDrafter
from slipstream.drafters.model import ModelDrafter, PathBelow, TokenBelow, WhilePays
from slipstream.drafters.suffix import SuffixDrafter


def made(drafter: str = "auto", count: int | str = "auto", draft: str | None = "toy:2", **options: Any):
    return SpeculativeDecoder("toy", draft, drafter=drafter, num_draft_tokens=count, **options)


def test_without_a_draft_model_drafts_are_looked_up_and_cut_where_they_do_not_pay() -> None:
    decoder = made(draft=None)
    assert decoder.drafter_name == "suffix" and isinstance(decoder.drafter, SuffixDrafter)
    assert decoder.drafter.outputs > 0 and decoder.drafter.acceptance_model is not None
    assert isinstance(decoder._engine.policy, Planner) and not decoder._engine.policy.asks_model


def test_with_one_the_better_of_look_up_and_draft_model_is_taken() -> None:
    decoder = made()
    assert decoder.drafter_name == "hybrid" and isinstance(decoder.drafter, HybridDrafter)
    first, second = decoder.drafter.first, decoder.drafter.second
    assert isinstance(first, SuffixDrafter) and first.outputs == 0
    assert isinstance(second, ModelDrafter) and isinstance(second.stop, WhilePays)
    policy = decoder._engine.policy
    assert isinstance(policy, Planner) and policy is decoder.drafter.planner is second.stop.planner


def test_with_a_number_of_tokens_the_draft_model_drafts_as_many() -> None:
    decoder = made(count=4)
    assert decoder.drafter_name == "model" and isinstance(decoder.drafter, ModelDrafter)
    assert decoder.drafter.stop is None and decoder._engine.policy == Fixed(4)


def test_a_hybrid_of_a_fixed_length_goes_by_probabilities_alone() -> None:
    decoder = made("hybrid", 7)
    assert isinstance(decoder.drafter, HybridDrafter) and decoder.drafter.planner is None
    assert isinstance(decoder.drafter.second, ModelDrafter) and decoder.drafter.second.stop == PathBelow(0.4)


@pytest.mark.parametrize(("count", "stop"), [("auto", WhilePays), (4, type(None)), ("confidence:0.4", TokenBelow)])
def test_where_the_draft_model_stops(count: int | str, stop: type) -> None:
    decoder = made("model", count)
    assert isinstance(decoder.drafter, ModelDrafter) and isinstance(decoder.drafter.stop, stop)


@pytest.mark.parametrize("count", ["auto", 4])
def test_a_threshold_of_ones_own_holds_with_any_number(count: int | str) -> None:
    decoder = made("model:p=25", count)
    assert isinstance(decoder.drafter, ModelDrafter) and decoder.drafter.stop == PathBelow(0.25)
    looking = made("suffix:2+p=30", count, None)
    assert isinstance(looking.drafter, SuffixDrafter) and looking.drafter.acceptance_model is None


def test_schedules() -> None:
    assert isinstance(made("model", "heuristic")._engine.policy, Heuristic)
    policy = made("model", "heuristic:9")._engine.policy
    assert isinstance(policy, Heuristic) and policy.longest == 9
    confident = made("model", "confidence:0.4")
    assert isinstance(confident.drafter, ModelDrafter) and confident.drafter.stop == TokenBelow(0.4)


@pytest.mark.parametrize(
    "count", ["heuristic:", "heuristic:0", "heuristic:x", "confidence", "confidence:1", "fast", "0x2", "3x1", "3x", -1]
)
def test_other_lengths_are_refused(count: int | str) -> None:
    with pytest.raises(
        UsageError, match=r"num_draft_tokens=.*; allowed: 'auto', 'chain', a whole number from 0 to 64, 'heur"
    ):
        made("model", count)


@pytest.mark.parametrize(("acceptance", "samples"), [("auto", False), ("match", False), ("block", True)])
def test_drafts_share_the_targets_random_numbers_unless_a_rule_needs_their_distribution(
    acceptance: str, samples: bool
) -> None:
    decoder = made(acceptance=acceptance)
    policy = decoder._engine.policy
    assert isinstance(policy, Planner)
    sampled = Row(0, [1], SamplingParams(temperature=0.8, max_tokens=9), seed=0)
    assert policy.is_fixed(sampled) is samples
    assert isinstance(decoder.drafter, HybridDrafter) and decoder.drafter.samples is samples


@pytest.mark.parametrize("drafter", ["suffix", "ngram", "model:p=25"])
def test_confidence_needs_a_drafter_that_knows_its_own(drafter: str) -> None:
    with pytest.raises(
        UsageError,
        match=r"num_draft_tokens='confidence:0.4' with drafter=.*allowed: drafters cross_vocabulary, hybrid, l",
    ):
        made(drafter, "confidence:0.4")
    with pytest.raises(UsageError, match="allowed: drafters cross_vocabulary, hybrid, layer_skip, model"):
        made("auto", "confidence:0.4", draft=None)


def test_no_schedule_exceeds_what_forwards_hold() -> None:
    for count in (60, "heuristic:60"):
        with pytest.raises(UsageError, match=f"num_draft_tokens={count}; allowed: at most 24 in reproducible mode"):
            made("model", count, reproducible=True)
    with pytest.raises(UsageError, match=r"num_draft_tokens=heuristic:99; allowed: at most 64$"):
        made("model", "heuristic:99", reproducible=False)
