"""The predicted speed-up agrees with enumeration, limits and observed statistics."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.bench.speed_model.accepted_lengths import Acceptance
from slipstream.bench.speed_model.formula import (
    best_length,
    break_even_acceptance,
    expected_tokens,
    pays_until,
    predict_from_stats,
    predicted_speed_up,
    round_milliseconds,
    simulate,
)
from slipstream.bench.speed_model.round_costs import Costs
from slipstream.text.results import Stats
from tests.support.cost_cases import RAGGED, linear_costs
from tests.support.markers import subcases

ALPHAS = st.floats(0.0, 1.0)
LENGTHS = st.integers(0, 12)
modest = settings(max_examples=40)


def enumerated(alphas: list[float], lengths: list[float], batch: int, costs: Costs) -> tuple[float, float]:
    """Expected tokens of one row and milliseconds of a round, over every outcome of every row.

    lengths[n]: probability that a row proposes n tokens.
    """
    fates = []  # (probability, proposed, accepted) of one row
    for proposed, share in enumerate(lengths):
        reached = share
        for accepted in range(proposed + 1):
            stops = 1 - alphas[accepted] if accepted < proposed else 1.0
            fates.append((reached * stops, proposed, accepted))
            if accepted < proposed:
                reached *= alphas[accepted]
    tokens = milliseconds = 0.0
    for rows in itertools.product(fates, repeat=batch):
        chance = 1.0
        for share, _, _ in rows:
            chance *= share
        longest = max(proposed for _, proposed, _ in rows)
        tokens += chance * (1 + rows[0][2])
        milliseconds += chance * (costs.plain(batch, longest + 1) + costs.drafting(batch, longest))
    return tokens, milliseconds


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_the_formula_equals_the_enumeration_of_every_fate(batch: int) -> None:
    costs, shares = linear_costs(), [0.2, 0.0, 0.2, 0.6]  # proposals of 0, 1, 2 and 3 tokens
    acceptance = Acceptance.by_position([0.9, 0.7, 0.8], [0.8, 0.8, 0.6])
    tokens, milliseconds = enumerated([0.9, 0.7, 0.8], shares, batch, costs)
    assert expected_tokens(acceptance, 3) == pytest.approx(tokens)
    assert round_milliseconds(costs, acceptance, 3, batch) == pytest.approx(milliseconds)
    plain = costs.plain(batch, 1)
    assert predicted_speed_up(costs, acceptance, 3, batch) == pytest.approx(tokens / milliseconds * plain)


@modest
@given(ALPHAS, LENGTHS)
def test_a_constant_alpha_gives_leviathans_equation(alpha: float, n: int) -> None:
    closed = n + 1 if alpha == 1 else sum(alpha**i for i in range(n + 1))
    assert expected_tokens(alpha, n) == pytest.approx(closed)
    if alpha < 0.99:
        assert expected_tokens(alpha, n) == pytest.approx((1 - alpha ** (n + 1)) / (1 - alpha))


def test_the_speed_up_follows_the_published_formula() -> None:
    """(1 - a^(g+1)) / ((1 - a)(g c + v)), with c the cost of a draft step and v of the forward relative to plain."""
    costs = Costs({1: {1: 10.0, 5: 12.0}}, {1: {1: 0.0, 5: 0.0}}, {1: 2.5}, {1: 0.0})
    assert predicted_speed_up(costs, 0.7, 4) == pytest.approx((1 - 0.7**5) / (0.3 * (4 * 0.25 + 1.2)))


@modest
@given(LENGTHS, st.integers(1, 8))
def test_no_acceptance_gives_one_token_and_full_acceptance_gives_all(n: int, batch: int) -> None:
    costs = linear_costs()
    assert expected_tokens(0.0, n) == 1
    assert expected_tokens(1.0, n) == n + 1
    assert predicted_speed_up(costs, 1.0, 0, batch) == pytest.approx(1)
    if n:
        assert predicted_speed_up(costs, 0.0, n, batch) < 1


@modest
@given(ALPHAS, ALPHAS, st.integers(1, 12), st.integers(1, 8))
def test_a_higher_acceptance_is_never_slower(first: float, second: float, n: int, batch: int) -> None:
    costs, (low, high) = linear_costs(), sorted((first, second))
    assert predicted_speed_up(costs, low, n, batch) <= predicted_speed_up(costs, high, n, batch) + 1e-12
    assert best_length(costs, low, batch) <= best_length(costs, high, batch)


@modest
@given(ALPHAS, st.integers(1, 12), st.floats(0, 5), st.floats(0, 5))
def test_a_costlier_draft_is_never_faster(alpha: float, n: int, first: float, second: float) -> None:
    cheap, dear = (linear_costs(step=step) for step in sorted((first, second)))
    assert predicted_speed_up(dear, alpha, n) <= predicted_speed_up(cheap, alpha, n) + 1e-12


@modest
@given(ALPHAS, st.integers(1, 7))
def test_larger_batches_gain_less_if_tokens_cost_time(alpha: float, batch: int) -> None:
    costs = linear_costs()
    assert predicted_speed_up(costs, alpha, 4, batch + 1) <= predicted_speed_up(costs, alpha, 4, batch) + 1e-12


def test_a_batch_waits_for_its_longest_proposal() -> None:
    costs = linear_costs()
    rare = Acceptance.by_position([0.5] * 4, [0.1] * 4)
    alone, eight = (round_milliseconds(costs, rare, 4, b) - (costs.plain(b, 1) + costs.drafting(b, 0)) for b in (1, 8))
    full = [costs.plain(b, 5) + costs.drafting(b, 4) - (costs.plain(b, 1) + costs.drafting(b, 0)) for b in (1, 8)]
    assert alone / full[0] == pytest.approx(0.1)
    assert eight / full[1] == pytest.approx(1 - 0.9**8)


@subcases("alpha", [0.0, 0.3, 0.6, 0.8, 0.95, 1.0])
def test_the_best_length_has_the_highest_speed_up(alpha: float) -> None:
    costs = linear_costs()
    speed_ups = [predicted_speed_up(costs, alpha, n) for n in range(17)]
    assert best_length(costs, alpha) == speed_ups.index(max(speed_ups))


def test_among_equally_fast_lengths_the_shortest_is_best() -> None:
    free_drafts = linear_costs(per_token=0.0, step=0.0, draft_round=dict.fromkeys((1, 2, 4, 8), 0.0))
    assert best_length(free_drafts, 0.0) == 0
    assert best_length(free_drafts, Acceptance((0.5, 0.0, 0.0), (1.0, 1.0, 1.0))) == 1


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("n", [1, 4, 9])
def test_at_break_even_the_speed_up_is_one(n: int, batch: int) -> None:
    alpha = break_even_acceptance(linear_costs(), n, batch)
    assert alpha is not None and 0 < alpha < 1
    assert predicted_speed_up(linear_costs(), alpha, n, batch) == pytest.approx(1)


def test_break_even_is_none_if_never_reached_and_zero_if_always() -> None:
    assert break_even_acceptance(linear_costs(step=100.0), 4) is None
    faster = Costs({1: {1: 10.0, 2: 5.0}}, {1: {1: 0.0, 2: 0.0}}, {1: 0.0}, {1: 0.0})  # wider forwards can be cheaper
    assert break_even_acceptance(faster, 1) == 0.0


def test_speculation_stops_paying_at_the_smallest_batch_with_best_length_zero() -> None:
    costs = linear_costs(per_token=2.0, step=4.0)
    stops = pays_until(costs, 0.75)
    assert stops is not None and stops > 1
    assert best_length(costs, 0.75, batch=stops) == 0 < best_length(costs, 0.75, batch=stops - 1)
    assert pays_until(linear_costs(step=0.1), 0.9) is None


def test_widths_are_padded_to_the_reproducible_shapes() -> None:
    padded = linear_costs(padded=(2, 4, 8))
    assert [padded.width_for(w) for w in (1, 2, 3, 8, 9)] == [2, 2, 4, 8, 9]
    assert round_milliseconds(padded, 0.5, 4) == pytest.approx(4 * 1.0 + 0.5 + 10 + 0.5 * 8 + 0.25)


def test_acceptance_is_read_from_statistics() -> None:
    stats = Stats(num_rounds=10, accepted_per_position=[6, 3], drafted_per_position=[8, 5]).to_dict()
    acceptance = Acceptance.from_stats(stats)
    assert acceptance == Acceptance((0.6, 0.3), (0.8, 0.5))
    assert expected_tokens(acceptance, 2) == pytest.approx(1.9)
    assert expected_tokens(acceptance, 1) == pytest.approx(1.6)


def test_expected_tokens_equal_those_of_a_run() -> None:
    decoder = SpeculativeDecoder("toy", "toy:2", num_draft_tokens=5)
    stats = decoder.generate("The heron", SamplingParams(max_tokens=120, ignore_eos=True)).stats
    acceptance = Acceptance.from_stats(stats.to_dict())
    assert expected_tokens(acceptance, 5) == pytest.approx(stats.block_efficiency)


@subcases(
    "build, message",
    [
        (lambda: Acceptance.constant(1.5), "acceptance 1.5; allowed: from 0 to 1"),
        (lambda: Acceptance.constant(float("nan")), "acceptance nan"),
        (lambda: Acceptance((0.5,), (0.4,)), "allowed: at most proposed"),
        (lambda: Acceptance((0.5, 0.6), (1.0, 1.0)), "never rise"),
        (lambda: Acceptance((0.5,), (1.0, 1.0)), "the same number"),
        (lambda: Acceptance.by_position([0.5, 0.5], [1.0]), "the same number"),
        (lambda: Acceptance.from_stats(Stats().to_dict()), "num_rounds=0"),
        (lambda: Acceptance.from_stats({}), "num_rounds is missing"),
        (lambda: Acceptance.from_stats(Stats().to_dict() | {"num_rounds": "9"}), "num_rounds='9'; allowed: a number"),
        (
            lambda: Acceptance.from_stats(Stats(num_rounds=1).to_dict() | {"accepted_per_position": None}),
            "accepted_per_position=None; allowed: a list of whole numbers",
        ),
        (lambda: expected_tokens(0.5, -1), "num_draft_tokens=-1"),
        (lambda: expected_tokens(RAGGED, 5), "num_draft_tokens=5; allowed: at most 4"),
        (lambda: expected_tokens(0.5, 65), "at most 64"),
        (lambda: break_even_acceptance(linear_costs(), 0), "num_draft_tokens=0"),
        (lambda: simulate(linear_costs(), 0.5, []), "lengths=[]"),
        (lambda: predict_from_stats(Stats(num_rounds=2, num_steps=1).to_dict(), linear_costs()), "more than 0 of both"),
    ],
)
def test_invalid_acceptances_and_lengths_are_refused(build: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        build()
    assert message in str(error.value)


def test_a_prediction_from_statistics_stands_beside_the_measured_run() -> None:
    costs = linear_costs()
    stats = Stats(
        num_rounds=20,
        num_steps=10,
        num_output_tokens=56,
        accepted_per_position=[20, 16],
        drafted_per_position=[20, 20],
        prefill_seconds=1.0,
        total_seconds=1.2,
    )
    plain = Stats(num_rounds=20, num_steps=10, num_output_tokens=20, prefill_seconds=1.0, total_seconds=1.15)
    prediction = predict_from_stats(stats.to_dict(), costs, plain=plain.to_dict())
    assert prediction.predicted_tokens == prediction.observed_tokens == pytest.approx(2.8)
    assert prediction.observed_ms == pytest.approx(20)
    assert prediction.predicted_ms == pytest.approx(2 * 1.0 + 0.5 + 10 + 0.5 * 2 * 3 + 0.25)
    assert prediction.observed == pytest.approx(2.8 * 15 / 20)
    assert prediction.predicted == pytest.approx(2.8 * (10 + 0.5 * 2 + 0.25) / prediction.predicted_ms)
    assert prediction.to_dict()["deviation"] == pytest.approx(prediction.predicted / prediction.observed - 1)
    without = predict_from_stats(stats.to_dict(), costs)
    assert without.observed == pytest.approx(2.8 * (10 + 0.5 * 2 + 0.25) / 20)


def test_a_run_with_exactly_the_tables_costs_is_predicted_exactly() -> None:
    costs = linear_costs()
    acceptance = Acceptance.by_position([0.75, 0.5])
    milliseconds = round_milliseconds(costs, acceptance, 2)
    stats = Stats(
        num_rounds=800,
        num_steps=800,
        num_output_tokens=round(800 * expected_tokens(acceptance, 2)),
        accepted_per_position=[600, 300],
        drafted_per_position=[800, 800],
        total_seconds=0.8 * milliseconds,
    )
    assert predict_from_stats(stats.to_dict(), costs).deviation == pytest.approx(0)


def test_statistics_of_trees_are_refused() -> None:
    stats = Stats(num_rounds=4, num_draft_tokens=12, accepted_per_position=[3, 2], drafted_per_position=[4, 4])
    with pytest.raises(UsageError, match="stats: 12 draft tokens in 8 places, which were trees; allowed"):
        Acceptance.from_stats(stats.to_dict())
    assert Acceptance.from_stats(replace(stats, num_draft_tokens=8).to_dict()).longest == 2
