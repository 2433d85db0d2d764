"""The predicted speed-up follows the published formula over the calibrated costs of rounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import SpeculativeDecoder, Stats, UsageError
from slipstream.bench.speed_formula import (
    best_length,
    break_even,
    expected_tokens,
    independent,
    recorded,
    roofline,
    simulate,
    speed_up,
)
from slipstream.draft_length.costs import CostModel

ALPHAS = st.floats(0.0, 1.0)
LENGTHS = st.integers(0, 12)


def linear(per_token: float = 0.5, step: float = 1.0) -> CostModel:
    """A forward takes 10 ms and `per_token` for each of its tokens, rows unpadded."""
    forwards = {tokens: 10 + per_token * tokens for tokens in range(1, 200)}
    return CostModel(
        ragged=lambda rows, drafted: rows + drafted,
        measured=forwards,
        together=forwards,
        max_batch_size=8,
        steps={1: step, 8: step},
    )


@given(ALPHAS, LENGTHS)
def test_a_constant_alpha_gives_leviathans_equation(alpha: float, length: int) -> None:
    tokens = expected_tokens(independent(alpha), length)
    assert tokens == pytest.approx(sum(alpha**i for i in range(length + 1)))
    if alpha < 0.99:
        assert tokens == pytest.approx((1 - alpha ** (length + 1)) / (1 - alpha))


def test_the_speed_up_follows_the_published_formula() -> None:
    """(1 - a^(g+1)) / ((1 - a)(g c + v)), with c the cost of a draft step and v of the forward relative to plain."""
    costs = CostModel(measured={1: 10.0, 5: 12.0}, steps={1: 2.5})
    assert speed_up(costs, independent(0.7), 4) == pytest.approx((1 - 0.7**5) / (0.3 * (4 * 0.25 + 1.2)))


@settings(max_examples=40)
@given(ALPHAS, ALPHAS, st.integers(1, 12), st.integers(1, 8))
def test_more_acceptance_is_never_slower_and_costlier_drafts_never_faster(first, second, length, rows) -> None:
    low, high = (independent(alpha) for alpha in sorted((first, second)))
    assert speed_up(linear(), low, length, rows) <= speed_up(linear(), high, length, rows) + 1e-12
    assert best_length(linear(), low, range(1, 13), rows) <= best_length(linear(), high, range(1, 13), rows)
    assert speed_up(linear(step=2.0), low, length, rows) <= speed_up(linear(), low, length, rows)


@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(1, 8), st.floats(0.1, 20))
def test_at_the_break_even_acceptance_drafts_are_as_fast_as_plain_decoding(length, rows, step) -> None:
    costs = linear(step=step)
    alpha = break_even(costs, length, rows)
    if alpha is None:
        assert speed_up(costs, independent(1.0), length, rows) < 1
    else:
        assert speed_up(costs, independent(alpha), length, rows) == pytest.approx(1, abs=1e-6)


def test_a_run_is_taken_as_it_was_accepted_by_position() -> None:
    stats = Stats(num_rounds=10, num_draft_tokens=14, accepted_per_position=[6, 3], drafted_per_position=[8, 6])
    assert recorded(stats) == [0.6, 0.3] and expected_tokens(recorded(stats), 2) == pytest.approx(1.9)
    with pytest.raises(UsageError, match="draft length 3; allowed: up to 2"):
        simulate(linear(), recorded(stats), [3], [1])
    with pytest.raises(UsageError, match="stats of draft trees"):
        recorded(Stats(num_rounds=10, num_draft_tokens=15, drafted_per_position=[8, 6]))
    with pytest.raises(UsageError, match="without drafts"):
        recorded(Stats(num_rounds=10))


def test_the_roofline_is_bound_by_bandwidth_and_by_compute() -> None:
    costs = roofline(1e9, 1e8, bandwidth=1e12, flops=1e14)
    assert costs.verify(1, 0) == pytest.approx(2e-3)  # 2 GB at 1 TB/s
    assert costs.verify(64, 15) == pytest.approx(1024 * 2e9 / 1e14)
    assert costs.step(1) == pytest.approx(2e-4) and roofline(1e9, 0, 1e12, 1e14).step(4) == 0
    simulation = simulate(costs, independent(0.3), range(1, 9), (1, 64))
    assert simulation.best[1] > simulation.best[64] == 0 and simulation.stops_at is not None
    with pytest.raises(UsageError, match="batch size 65; allowed: up to 64"):
        simulate(costs, independent(0.3), [1], [65])


def test_a_decoder_tells_what_its_calibration_measured() -> None:
    decoder = SpeculativeDecoder("toy", "toy:2", max_batch_size=4)
    calibration, costs = decoder.calibration, decoder.costs
    assert calibration is not None and costs.measured == calibration.milliseconds
    assert costs.steps and costs.step(1) > 0 and costs.max_batch_size == 4
    assert decoder.using("ngram").costs.step(4) == 0  # a lookup takes no forward
    with pytest.raises(UsageError, match="reproducible=False for 'toy': how long its forwards take was not measured"):
        SpeculativeDecoder("toy", reproducible=False).costs  # noqa: B018
