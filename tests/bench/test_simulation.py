"""The formula agrees with simulated rounds, and the table shows it."""

from __future__ import annotations

import json

import pytest

from slipstream.apps.cli.consoles import out
from slipstream.apps.cli.tables import print_simulation, simulation_table
from slipstream.bench.speed_model.accepted_lengths import Acceptance
from slipstream.bench.speed_model.formula import (
    best_length,
    break_even_acceptance,
    pays_until,
    predicted_speed_up,
    simulate,
)
from slipstream.bench.speed_model.round_costs import Costs
from tests.support.cost_cases import RAGGED, linear_costs
from tests.support.simulated_rounds import Load, play

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("acceptance", [0.7, RAGGED], ids=["alpha", "by position"])
@pytest.mark.parametrize("batch", [1, 4])
def test_simulated_rounds_agree_with_the_formula(acceptance: Acceptance | float, batch: int) -> None:
    """About 12,000 rounds: the sampling error of the speed-up is about 1 %; the ends of the texts add little."""
    costs, load = linear_costs(), Load(rows=8 * batch, batch=batch, tokens=4000 // batch)
    plain = play(costs, acceptance, 0, load, seed=0)
    played = plain / play(costs, acceptance, 4, load, seed=1)
    assert played == pytest.approx(predicted_speed_up(costs, acceptance, 4, batch), rel=0.025)
    wrong = predicted_speed_up(costs, acceptance, 2, batch)
    assert abs(played / wrong - 1) > 0.025  # the tolerance can tell one draft length from another


def test_a_simulated_run_is_a_function_of_its_seed() -> None:
    costs, load = linear_costs(), Load(rows=5, batch=2, tokens=50)
    once, again, other = (play(costs, RAGGED, 4, load, seed) for seed in (7, 7, 8))
    assert once == again != other


@pytest.mark.parametrize(("alpha", "taken"), [(1.0, 5 + 5 + 3), (0.0, 9 * 5 + 4 + 3 + 2 + 1)])
def test_simulated_rows_draft_no_further_than_their_end(alpha: float, taken: int) -> None:
    """13 tokens at 1 ms a column: every round drafts 4 tokens as long as 5 or more are left, whatever is drawn."""
    costs = Costs({1: {1: 1.0, 5: 5.0}}, {1: {1: 0.0, 5: 0.0}}, {1: 0.0}, {1: 0.0})
    assert play(costs, alpha, 4, Load(rows=1, batch=1, tokens=13), seed=0) == taken


def test_unfinished_rows_take_the_places_of_finished_ones() -> None:
    costs = linear_costs()
    together = play(costs, 0.0, 0, Load(rows=3, batch=2, tokens=10), seed=0)
    assert together == pytest.approx(10 * costs.plain(2, 1) + 10 * costs.plain(1, 1))


def test_the_simulation_table_equals_the_single_functions() -> None:
    costs = linear_costs(per_token=2.0, step=4.0)
    table = simulate(costs, 0.75, range(1, 7), (1, 4))
    assert table.speed_ups[4][3] == predicted_speed_up(costs, 0.75, 3, 4)
    assert table.best == {b: best_length(costs, 0.75, batch=b) for b in (1, 4)}
    assert table.stops == pays_until(costs, 0.75)
    assert table.break_even[1][2] == break_even_acceptance(costs, 2, 1)
    assert simulate(costs, RAGGED).lengths == (1, 2, 3, 4)
    assert simulate(costs, 0.5).batches == (1, 2, 4, 8)
    json.dumps(table.to_dict())


def test_the_printed_table_marks_the_best_length_and_slower_ones() -> None:
    with out.capture() as captured:
        printed = print_simulation(out, linear_costs(), 0.75, simulate(linear_costs(), 0.75))
    text = captured.get()
    simulation = printed["simulation"]
    slower = sum(value < 1 for column in simulation["speed_ups"].values() for value in column.values())
    assert text.count("x*") == len(simulation["batches"]) and text.count("x-") == slower > 0
    assert f"batch 1: best draft length {simulation['best'][1]}" in text
    assert len(simulation_table(simulate(linear_costs(), 0.75)).table.rows) == 16
