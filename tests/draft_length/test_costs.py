"""What rounds cost: learned from rounds; before, guessed from a calibration or, without one, by a rule of thumb."""

import itertools
import random
from math import log

import pytest

from slipstream import SamplingParams
from slipstream.core.rounds import Round, Seconds
from slipstream.core.types import Row
from slipstream.draft_length.costs import COLUMN, ROW, STEP, CostModel, best_lengths

step_numbers = itertools.count()
PARAMS = SamplingParams(max_tokens=100)


def rows(count: int = 1) -> list[Row]:
    """Rows after their first round."""
    running = [Row(i, [1], PARAMS, seed=0) for i in range(count)]
    for row in running:
        row.rounds.append(Round(row.index, -1, count, 1, (), (5,), 0, False))
    return running


def add_round(
    cost_model: CostModel, running: list[Row], drafted: int, verify: float, draft: float = 0.0, steps: int = 0
) -> None:
    seconds, step = Seconds(draft=draft, verify=verify, total=verify + draft), next(step_numbers)
    for row in running:
        round = Round(row.index, step, len(running), 2, (3,) * drafted, (5,), 0, False, None, seconds, steps)
        row.rounds.append(round)
    cost_model.learn(running)


def test_the_cost_of_a_shape_follows_the_speed_of_the_machine() -> None:
    cost_model, running = CostModel(), rows()
    for seconds in (0.3, 0.3, 5.0, 0.3, 0.3):
        add_round(cost_model, running, 3, seconds)
    assert cost_model.verify(1, 3) == pytest.approx(0.3, rel=0.4)  # a single slow round changes little
    for _ in range(20):
        add_round(cost_model, running, 3, 0.6)
    assert cost_model.verify(1, 3) == pytest.approx(0.6, rel=0.1)


def test_shapes_measured_at_different_machine_speeds_are_comparable() -> None:
    cost_model, running = CostModel(measured={1: 10.0, 8: 20.0}), rows()
    for _ in range(3):
        add_round(cost_model, running, 0, 0.010)
        add_round(cost_model, running, 7, 0.020)
    for _ in range(6):
        add_round(cost_model, running, 0, 0.020)  # the machine is busy: everything takes twice as long
    for _ in range(12):
        add_round(cost_model, running, 7, 0.020)  # and now it is not
    assert cost_model.verify(1, 0) / cost_model.verify(1, 7) == pytest.approx(0.5, rel=0.35)


def test_measured_rounds_outweigh_the_calibration_in_time() -> None:
    cost_model, running = CostModel(measured={1: 10.0, 8: 20.0}), rows()
    for _ in range(60):
        add_round(cost_model, running, 0, 0.010)
        add_round(cost_model, running, 7, 0.040)  # twice as slow as the calibration measured
    assert cost_model.verify(1, 7) / cost_model.verify(1, 0) == pytest.approx(4, rel=0.3)


def test_a_busy_machine_does_not_make_drafts_look_expensive() -> None:
    cost_model, running = CostModel(measured={1: 10.0, 16: 13.0}), rows()
    for drafted in (0, 10, 0, 10):
        add_round(cost_model, running, drafted, 0.010 + 0.0002 * drafted)
    for drafted in (10, 10, 10, 0, 10, 10, 0):  # everything takes twice as long
        add_round(cost_model, running, drafted, 0.020 + 0.0004 * drafted)
    assert cost_model.verify(1, 10) / cost_model.verify(1, 0) == pytest.approx(1.2, rel=0.08)
    assert cost_model.verify(1, 0) == pytest.approx(0.020, rel=0.06)


def test_a_step_is_learned_once_however_often_learn_is_called() -> None:
    cost_model, running = CostModel(), rows(2)
    add_round(cost_model, running, 0, 0.4)
    cost_model.learn(running)
    cost_model.learn(running)
    assert cost_model._speed == pytest.approx(log(0.4 / (1 + COLUMN)))


def test_unseen_shapes_follow_the_calibration_at_the_speed_of_those_seen() -> None:
    cost_model, running = CostModel(measured={1: 10.0, 2: 11.0, 4: 12.0, 8: 20.0}), rows()
    add_round(cost_model, running, 0, 0.020)
    assert cost_model.verify(1, 3) == pytest.approx(0.024)
    assert cost_model.verify(1, 5) == pytest.approx(0.032)  # between four and eight tokens
    assert cost_model.verify(2, 3) == pytest.approx(0.040)  # eight tokens in all
    assert cost_model.verify(4, 3) == pytest.approx(0.072)  # beyond, on the slope from four to eight


def test_two_measurements_are_extrapolated_linearly() -> None:
    cost_model = CostModel(measured={1: 10.0, 2: 11.0})
    assert cost_model.verify(1, 7) == pytest.approx(0.017)


def test_without_a_calibration_tokens_cost_little() -> None:
    cost_model, running = CostModel(), rows()
    add_round(cost_model, running, 0, 1.0)
    assert cost_model.verify(1, 5) == pytest.approx(1 + 5 * COLUMN)
    assert cost_model.step(1) == pytest.approx(STEP)


def test_widths_that_are_padded_alike_cost_the_same() -> None:
    cost_model, running = CostModel(pad=lambda width, rows: 4 if width <= 4 else 16), rows()
    add_round(cost_model, running, 1, 1.0)
    assert cost_model.verify(1, 0) == cost_model.verify(1, 3) == pytest.approx(1.0)
    assert cost_model.verify(1, 3) < cost_model.verify(1, 4) == cost_model.verify(1, 15)


def test_the_cost_of_draft_steps_is_learned_per_number_of_rows() -> None:
    cost_model, running = CostModel(), rows()
    add_round(cost_model, running, 4, 1.0, draft=0.8, steps=4)
    assert cost_model.step(1) == pytest.approx(0.2) and cost_model.step(5) == pytest.approx(0.2 * (1 + 4 * ROW))
    running = rows(5)
    add_round(cost_model, running, 4, 1.0, draft=1.6, steps=4)
    assert cost_model.step(5) == pytest.approx(0.4) and cost_model.step(1) == pytest.approx(0.2)
    assert cost_model.beginning(5) == pytest.approx(0)


def test_the_time_a_draft_takes_besides_its_steps_is_counted_once() -> None:
    cost_model, running = CostModel(measured={1: 10.0, 8: 20.0}, steps={1: 1.0, 2: 1.0}), rows()
    add_round(cost_model, running, 0, 0.010)
    for steps in (1, 3, 1):
        add_round(cost_model, running, steps, 0.010, draft=0.002 + 0.001 * steps, steps=steps)
    assert cost_model.step(1) == pytest.approx(0.001, rel=0.2)
    assert cost_model.beginning(1) == pytest.approx(0.002, rel=0.2)


def test_steps_and_reading_start_from_the_timing_of_the_draft_model() -> None:
    cost_model, running = CostModel(measured={1: 10.0, 8: 20.0}, steps={1: 4.0, 2: 5.0, 8: 11.0}, token=0.5), rows()
    assert cost_model.step(1) == pytest.approx(4e-3) and cost_model.step(5) == pytest.approx(8e-3)
    assert cost_model.reading(100) == pytest.approx(0.05)
    add_round(cost_model, running, 0, 0.020)  # the machine is half as fast as it was then
    assert cost_model.step(2) == pytest.approx(10e-3) and cost_model.reading(100) == pytest.approx(0.1)
    add_round(cost_model, running, 4, 0.020, draft=0.024, steps=4)  # measured rounds replace the calibration
    assert cost_model.step(1) == pytest.approx(6e-3) and cost_model.step(8) == pytest.approx(6e-3 * 11 / 4)


def test_drafting_time_of_a_first_round_is_not_learned() -> None:
    cost_model = CostModel()
    row = Row(0, [1], PARAMS, seed=0)
    add_round(cost_model, [row], 4, 1.0, draft=50.0, steps=4)  # this includes reading the prompt
    assert cost_model.verify(1, 0) == pytest.approx(1e-3) and cost_model.step(1) == pytest.approx(STEP * 1e-3)
    add_round(cost_model, [row], 0, 0.5)
    assert cost_model.verify(1, 0) == pytest.approx(0.5)


def test_draft_and_verify_times_are_separated_where_only_whole_rounds_are_timed() -> None:
    cost_model, running = CostModel(timed=False), rows()
    add_round(cost_model, running, 0, 1.0)
    add_round(cost_model, running, 0, 0.0, draft=1.0)  # issued while drafting, spent on verifying
    assert cost_model.verify(1, 0) == pytest.approx(1.0)
    add_round(cost_model, running, 4, 0.1, draft=2.0 + 4 * COLUMN - 0.1, steps=4)
    assert cost_model.step(1) == pytest.approx(0.25)


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


def test_a_ragged_forward_costs_what_its_total_of_tokens_costs() -> None:
    totals = (8, 16, 24)
    cost_model = CostModel(
        ragged=lambda rows, drafted: next((n for n in totals if n >= rows + drafted), None),
        measured={1: 10.0, 8: 12.0},
        together={8: 26.0, 16: 30.0, 24: 40.0},
        max_batch_size=8,
    )
    assert not cost_model.even and CostModel().even
    assert cost_model.verify(8, 15, 8) == pytest.approx(0.030)  # not as if all rows had 15
    assert cost_model.verify(8, 1) == cost_model.verify(8, 15, 3) == pytest.approx(0.030)
    assert cost_model.verify(8, 15, 30) == pytest.approx(cost_model.verify(8, 15))  # no ragged forward takes so many
    assert cost_model.verify(4, 4, 8) == pytest.approx(0.030 - 4 * 0.002)  # each row beside the first costs 2 ms
    assert cost_model.verify(4, 0) == pytest.approx((10 + 2 * 3 / 7 + 3 * 2) / 1e3)
    running = rows(8)
    for _ in range(30):
        for row in running:
            drafted = (3,) * 8 if row is running[0] else ()
            round = Round(
                row.index,
                10_000 + len(row.rounds),
                8,
                2,
                drafted,
                (5,),
                0,
                False,
                None,
                Seconds(verify=0.06, total=0.06),
            )
            row.rounds.append(round)
        cost_model.learn(running)
    assert cost_model.verify(8, 8, 8) == pytest.approx(0.060, rel=0.1)


def test_the_time_of_reading_is_separated_from_that_of_drafting() -> None:
    cost_model, running = CostModel(measured={1: 1.0, 8: 8.0}), rows()
    for _ in range(3):
        add_round(cost_model, running, 2, 3.0, draft=0.4, steps=2)
    assert cost_model.reading(10) == pytest.approx(10 * STEP * 1.0, rel=0.1)  # a quarter of the target's column
    seconds, step = Seconds(draft=5.4, verify=3.0, total=8.4), next(step_numbers)
    running[0].rounds.append(Round(0, step, 1, 2, (3, 3), (5,), 0, False, None, seconds, 2))
    cost_model._has_read = True
    cost_model.learn(running, read=100)
    assert cost_model.reading(10) == pytest.approx(0.5) and cost_model.step(1) == pytest.approx(0.2)


def test_one_very_slow_reading_does_not_prevent_reading_for_good() -> None:
    cost_model, running = CostModel(measured={1: 1.0, 8: 8.0}), rows()
    for _ in range(3):
        add_round(cost_model, running, 2, 3.0, draft=0.4, steps=2)
    guessed = cost_model.reading(100)

    def read(draft: float) -> None:
        seconds, step = Seconds(draft=draft, verify=3.0, total=3.0 + draft), next(step_numbers)
        running[0].rounds.append(Round(0, step, 1, 2, (3, 3), (5,), 0, False, None, seconds, 2))
        cost_model.learn(running, read=100)

    read(500.0)
    assert cost_model.reading(100) == guessed  # the first reading also allocates memory and compiles kernels
    read(500.4)
    assert cost_model.reading(100) == pytest.approx(500.0)
    read(5.4)
    assert cost_model.reading(100) == pytest.approx(
        5.0
    )  # the shorter time counts: other work on the machine only adds to it
