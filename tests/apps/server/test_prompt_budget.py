"""How many prompt tokens a step reads follows what they cost, and never a single measurement."""

from __future__ import annotations

import pytest

from slipstream.apps.server.engine_thread import FIRST_TOKENS, MAX_TOKENS, MIN_TOKENS, PROMPT_SECONDS, PromptBudget


def test_before_anything_is_known_it_is_a_guess() -> None:
    assert PromptBudget().tokens == FIRST_TOKENS


@pytest.mark.parametrize("tokens", [MIN_TOKENS, 77, 500, MAX_TOKENS])
def test_it_is_what_the_rows_under_way_may_wait_for(tokens: int) -> None:
    budget = PromptBudget()
    budget.learn(100, 100 * PROMPT_SECONDS / tokens)
    assert budget.tokens == tokens


@pytest.mark.parametrize(("cost", "tokens"), [(PROMPT_SECONDS, MIN_TOKENS), (1e-9, MAX_TOKENS)])
def test_it_is_bounded_on_slow_and_fast_machines(cost: float, tokens: int) -> None:
    budget = PromptBudget()
    budget.learn(1000, 1000 * cost)
    assert budget.tokens == tokens


def test_one_slow_step_moves_it_a_little_and_many_move_it_all_the_way() -> None:
    budget = PromptBudget()
    budget.learn(100, PROMPT_SECONDS)
    budget.learn(100, 4 * PROMPT_SECONDS)
    assert 50 <= budget.tokens < 100
    for _ in range(40):
        budget.learn(100, 4 * PROMPT_SECONDS)
    assert budget.tokens == MIN_TOKENS


def test_steps_that_read_next_to_nothing_say_nothing() -> None:
    budget = PromptBudget()
    budget.learn(MIN_TOKENS - 1, 1.0)
    budget.learn(0, 0.001)
    assert budget.tokens == FIRST_TOKENS
