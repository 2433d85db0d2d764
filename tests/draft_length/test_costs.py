"""The cost model predicts seconds from a calibration, or without one from a rule of thumb, and learns from rounds."""

import itertools
import random
from collections.abc import Sequence

import pytest

from slipstream import SamplingParams
from slipstream.core.rounds import Seconds
from slipstream.core.types import Row
from slipstream.draft_length.costs import CostModel, best_lengths
from tests.support.rounds import add_round, step_numbers

PARAMS = SamplingParams(max_tokens=100)


def rows(count: int = 1) -> list[Row]:
    """Rows after their first round."""
    running = [Row(i, [1], PARAMS, seed=0) for i in range(count)]
    for row in running:
        add_round(row, step=-1, num_rows=count)
    return running


def observe(
    costs: CostModel,
    running: list[Row],
    drafted: int | Sequence[int],
    verify: float,
    draft: float = 0.0,
    steps: int = 0,
    read: int = 0,
) -> None:
    """A round that took these seconds, with as many draft tokens in each row."""
    facts = {"step": next(step_numbers), "num_rows": len(running), "num_draft_steps": steps}
    seconds = Seconds(draft=draft, verify=verify, total=verify + draft)
    for row, count in zip(running, [drafted] * len(running) if isinstance(drafted, int) else drafted, strict=True):
        add_round(row, count, seconds=seconds, **facts)
    costs.learn(running, read)


def test_the_cost_of_a_shape_follows_the_speed_of_the_machine() -> None:
    costs, running = CostModel(), rows()
    for seconds in (0.3, 0.3, 5.0, 0.3, 0.3):
        observe(costs, running, 3, seconds)
    assert costs.verify(1, 3) == pytest.approx(0.3, rel=0.4)  # a single slow round changes little
    for _ in range(20):
        observe(costs, running, 3, 0.6)
    assert costs.verify(1, 3) == pytest.approx(0.6, rel=0.1)


def test_measured_rounds_outweigh_the_calibration_in_time() -> None:
    costs, running = CostModel(measured={1: 10.0, 8: 20.0}), rows()
    for _ in range(60):
        observe(costs, running, 0, 0.010)
        observe(costs, running, 7, 0.040)  # twice as slow as the calibration measured
    assert costs.verify(1, 7) / costs.verify(1, 0) == pytest.approx(4, rel=0.3)


def test_a_busy_machine_does_not_make_drafts_look_expensive() -> None:
    costs, running = CostModel(measured={1: 10.0, 16: 13.0}), rows()
    for drafted in (0, 10, 0, 10):
        observe(costs, running, drafted, 0.010 + 0.0002 * drafted)
    for drafted in (10, 10, 10, 0, 10, 10, 0):  # everything takes twice as long
        observe(costs, running, drafted, 0.020 + 0.0004 * drafted)
    assert costs.verify(1, 10) / costs.verify(1, 0) == pytest.approx(1.2, rel=0.08)
    assert costs.verify(1, 0) == pytest.approx(0.020, rel=0.06)


def test_a_step_is_learned_once_however_often_learn_is_called() -> None:
    costs, running = CostModel(), rows(2)
    observe(costs, running, 0, 0.4)
    observe(costs, running, 0, 0.6)
    once = costs.verify(2, 0)
    costs.learn(running)
    assert costs.verify(2, 0) == once


@pytest.mark.parametrize(
    ("measured", "rows_and_draft", "milliseconds"),
    [
        ({1: 10.0, 2: 11.0, 4: 12.0, 8: 20.0}, (1, 3), 12),
        ({1: 10.0, 2: 11.0, 4: 12.0, 8: 20.0}, (1, 5), 16),  # between four and eight tokens
        ({1: 10.0, 2: 11.0, 4: 12.0, 8: 20.0}, (2, 3), 20),  # eight tokens in all
        ({1: 10.0, 2: 11.0, 4: 12.0, 8: 20.0}, (4, 3), 36),  # beyond, on the slope from four to eight
        ({1: 10.0, 2: 11.0}, (1, 7), 17),
    ],
)
def test_unseen_shapes_follow_the_calibration_at_the_speed_of_those_seen(
    measured: dict[int, float], rows_and_draft: tuple[int, int], milliseconds: float
) -> None:
    costs = CostModel(measured=measured)
    assert costs.verify(*rows_and_draft) == pytest.approx(milliseconds / 1e3)
    observe(costs, rows(), 0, 0.020)  # the machine is half as fast as it was then
    assert costs.verify(*rows_and_draft) == pytest.approx(2 * milliseconds / 1e3)


def test_without_a_calibration_a_token_and_a_step_cost_less_than_a_forward() -> None:
    costs = CostModel()
    observe(costs, rows(), 0, 1.0)
    assert costs.verify(1, 0) == pytest.approx(1.0)
    assert 1 < costs.verify(1, 5) < 1.5 and 0 < costs.step(1) < costs.step(5) < 1 and costs.drafting(1)[1] == 0
    assert 0 < costs.reading(1) < costs.step(1)


def test_widths_that_are_padded_alike_cost_the_same() -> None:
    costs = CostModel(pad=lambda width, rows: 4 if width <= 4 else 16)
    observe(costs, rows(), 1, 1.0)
    assert costs.verify(1, 0) == costs.verify(1, 3) == pytest.approx(1.0)
    assert costs.verify(1, 3) < costs.verify(1, 4) == costs.verify(1, 15)


def test_the_cost_of_draft_steps_is_learned_per_number_of_rows() -> None:
    costs = CostModel()
    observe(costs, rows(), 4, 1.0, draft=0.8, steps=4)
    assert costs.step(1) == pytest.approx(0.2) and costs.step(5) > 0.3  # more rows are assumed to take longer
    observe(costs, rows(5), 4, 1.0, draft=1.6, steps=4)
    assert costs.step(5) == pytest.approx(0.4) and costs.step(1) == pytest.approx(0.2)
    assert costs.drafting(5)[1] == pytest.approx(0)


def test_the_time_a_draft_takes_besides_its_steps_is_counted_once() -> None:
    costs, running = CostModel(measured={1: 10.0, 8: 20.0}, steps={1: 1.0, 2: 1.0}), rows()
    observe(costs, running, 0, 0.010)
    for steps in (1, 3, 1):
        observe(costs, running, steps, 0.010, draft=0.002 + 0.001 * steps, steps=steps)
    assert costs.step(1) == pytest.approx(0.001, rel=0.2) and costs.drafting(1)[1] == pytest.approx(0.002, rel=0.2)


def test_steps_and_reading_start_from_the_timing_of_the_draft_model() -> None:
    costs, running = CostModel(measured={1: 10.0, 8: 20.0}, steps={1: 4.0, 2: 5.0, 8: 11.0}, token=0.5), rows()
    assert (costs.step(1), costs.step(5), costs.reading(100)) == pytest.approx((4e-3, 8e-3, 0.05))
    observe(costs, running, 0, 0.020)  # the machine is half as fast as it was then
    assert (costs.step(2), costs.reading(100)) == pytest.approx((10e-3, 0.1))
    observe(costs, running, 4, 0.020, draft=0.024, steps=4)  # measured rounds replace the calibration
    assert (costs.step(1), costs.step(8)) == pytest.approx((6e-3, 6e-3 * 11 / 4))


def test_the_times_of_a_first_round_are_not_learned() -> None:
    costs, row = CostModel(), Row(0, [1], PARAMS, seed=0)
    before = costs.verify(1, 0), costs.step(1)
    observe(costs, [row], 4, 1.0, draft=50.0, steps=4)  # this includes reading the prompt
    assert (costs.verify(1, 0), costs.step(1)) == before
    observe(costs, [row], 0, 0.5)
    assert costs.verify(1, 0) == pytest.approx(0.5)


def test_draft_and_verify_times_are_separated_where_only_whole_rounds_are_timed() -> None:
    costs, running = CostModel(timed=False), rows()
    observe(costs, running, 0, 1.0)
    observe(costs, running, 0, 0.0, draft=1.0)  # issued while drafting, spent on verifying
    assert costs.verify(1, 0) == pytest.approx(1.0)
    observe(costs, running, 4, 0.1, draft=0.9 + costs.verify(1, 4), steps=4)
    assert costs.step(1) == pytest.approx(0.25)


def test_a_ragged_forward_costs_what_its_total_of_tokens_costs() -> None:
    totals = (8, 16, 24)
    costs = CostModel(
        ragged=lambda rows, drafted: next((n for n in totals if n >= rows + drafted), None),
        measured={1: 10.0, 8: 12.0},
        together={8: 26.0, 16: 30.0, 24: 40.0},
        max_batch_size=8,
    )
    assert not costs.even and CostModel().even
    assert costs.verify(8, 15, 8) == pytest.approx(0.030)  # not as if all rows had 15
    assert costs.verify(8, 1) == costs.verify(8, 15, 3) == pytest.approx(0.030)
    assert costs.verify(8, 15, 30) == pytest.approx(costs.verify(8, 15))  # no ragged forward takes so many
    assert costs.verify(4, 4, 8) == pytest.approx(0.030 - 4 * 0.002)  # each row after the first costs 2 ms
    assert costs.verify(4, 0) == pytest.approx((10 + 2 * 3 / 7 + 3 * 2) / 1e3)
    running = rows(8)
    for _ in range(30):
        observe(costs, running, [8] + 7 * [0], 0.06)
    assert costs.verify(8, 8, 8) == pytest.approx(0.060, rel=0.1)


def test_the_time_of_reading_is_separated_from_that_of_drafting_without_the_first_and_slow_ones() -> None:
    costs, running = CostModel(measured={1: 1.0, 8: 8.0}), rows()
    for _ in range(3):
        observe(costs, running, 2, 3.0, draft=0.4, steps=2)
    guessed = costs.reading(100)
    for seconds, expected in ((500.0, guessed), (500.0, 500.0), (5.0, 5.0)):
        observe(costs, running, 2, 3.0, draft=0.4 + seconds, steps=2, read=100)
        # the first reading also allocates memory; later, the shorter time counts: other work only adds to it
        assert costs.reading(100) == pytest.approx(expected) and costs.step(1) == pytest.approx(0.2)


def random_acceptance_probs(rng: random.Random, rows: int, longest: int) -> list[list[float]]:
    chances = [[rng.random() ** 0.5 for _ in range(rng.randint(0, longest))] for _ in range(rows)]
    return [list(itertools.accumulate(row, lambda a, b: a * b)) for row in chances]


def test_best_lengths_finds_the_best_common_length() -> None:
    rng = random.Random(0)
    for _ in range(200):
        acceptance_probs = random_acceptance_probs(rng, rng.randint(1, 4), 6)
        costs = [rng.random()]
        for _ in range(6):
            costs.append(costs[-1] + rng.random() / 3)
        rates = [
            (len(acceptance_probs) + sum(sum(row[:n]) for row in acceptance_probs)) / costs[n]
            for n in range(max(map(len, acceptance_probs)) + 1)
        ]
        lengths, rate = best_lengths(
            acceptance_probs, lambda longest, drafted, costs=costs: costs[longest], len(acceptance_probs)
        )
        assert rate == pytest.approx(max(rates)) and rates[max(lengths)] == pytest.approx(max(rates))
        assert lengths == [min(max(lengths), len(row)) for row in acceptance_probs]


def test_best_lengths_finds_the_best_length_of_each_row() -> None:
    rng = random.Random(1)
    for _ in range(60):
        acceptance_probs = random_acceptance_probs(rng, rng.randint(2, 3), 3)
        total = sum(map(len, acceptance_probs))
        costs = list(itertools.accumulate([rng.random(), *(rng.random() / 3 for _ in range(total))]))
        choices = list(itertools.product(*(range(len(row) + 1) for row in acceptance_probs)))
        rates = {
            chosen: (2 + sum(sum(row[:n]) for row, n in zip(acceptance_probs, chosen, strict=True)))
            / costs[sum(chosen)]
            for chosen in choices
        }
        lengths, rate = best_lengths(
            acceptance_probs, lambda longest, drafted, costs=costs: costs[drafted], 2, even=False
        )
        assert rate == pytest.approx(max(rates.values())) == rates[tuple(lengths)]


def test_a_step_without_drafts_costs_its_share_of_the_forward_and_all_that_is_no_draft() -> None:
    costs = CostModel(measured={1: 10.0, 2: 11.0, 5: 14.0}, together={4: 13.0, 20: 29.0}, max_batch_size=4)
    took = Seconds(prefill=1.0, draft=0.5, verify=0.28, accept=0.01, total=1.82)  # twice as slow as calibrated
    assert costs.plain_seconds([4], took) == pytest.approx(0.04 + 0.20)
    assert costs.plain_seconds([4, 0, 4, 0], took) == pytest.approx(0.04 + 0.28 * 13 / costs.verify(4, 4, 8) / 1000)
    assert CostModel().plain_seconds([4], took) is None  # nothing was measured
    on_gpu = CostModel(measured={1: 10.0, 5: 14.0}, timed=False)
    assert on_gpu.plain_seconds([4], took) == pytest.approx(0.010)
