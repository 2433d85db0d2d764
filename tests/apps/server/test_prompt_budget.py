"""How many prompt tokens a step reads follows what they cost, and never a single measurement."""

from __future__ import annotations

import pytest

from slipstream.apps.server.engine_thread import FIRST, LEAST, MOST, PAUSE, PromptBudget


def test_before_anything_is_known_it_is_a_guess() -> None:
    assert PromptBudget().tokens == FIRST


@pytest.mark.parametrize("tokens", [LEAST, 77, 500, MOST])
def test_it_is_what_the_rows_under_way_may_wait_for(tokens: int) -> None:
    budget = PromptBudget()
    budget.learn(100, 100 * PAUSE / tokens)
    assert budget.tokens == tokens


@pytest.mark.parametrize(("cost", "tokens"), [(PAUSE, LEAST), (1e-9, MOST)])
def test_it_is_bounded_on_slow_and_fast_machines(cost: float, tokens: int) -> None:
    budget = PromptBudget()
    budget.learn(1000, 1000 * cost)
    assert budget.tokens == tokens


def test_one_slow_step_moves_it_a_little_and_many_move_it_all_the_way() -> None:
    budget = PromptBudget()
    budget.learn(100, PAUSE)
    budget.learn(100, 4 * PAUSE)
    assert 50 <= budget.tokens < 100
    for _ in range(40):
        budget.learn(100, 4 * PAUSE)
    assert budget.tokens == LEAST


def test_steps_that_read_next_to_nothing_say_nothing() -> None:
    budget = PromptBudget()
    budget.learn(LEAST - 1, 1.0)
    budget.learn(0, 0.001)
    assert budget.tokens == FIRST
