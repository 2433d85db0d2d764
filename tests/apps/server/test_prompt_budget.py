"""The number of prompt tokens per step follows their measured cost, smoothed over many steps."""

from __future__ import annotations

import pytest

from slipstream.apps.server.engine_thread import FIRST_TOKENS, MAX_TOKENS, MIN_TOKENS, PROMPT_SECONDS, PromptBudget


def test_the_budget_starts_as_a_guess() -> None:
    assert PromptBudget().tokens == FIRST_TOKENS


@pytest.mark.parametrize("tokens", [MIN_TOKENS, 77, 500, MAX_TOKENS])
def test_the_budget_is_what_can_be_read_while_running_rows_wait(tokens: int) -> None:
    budget = PromptBudget()
    budget.learn(100, 100 * PROMPT_SECONDS / tokens)
    assert budget.tokens == tokens


@pytest.mark.parametrize(("cost", "tokens"), [(PROMPT_SECONDS, MIN_TOKENS), (1e-9, MAX_TOKENS)])
def test_the_budget_is_bounded_on_slow_and_fast_machines(cost: float, tokens: int) -> None:
    budget = PromptBudget()
    budget.learn(1000, 1000 * cost)
    assert budget.tokens == tokens


def test_one_slow_step_lowers_the_budget_a_little_and_many_lower_it_to_the_minimum() -> None:
    budget = PromptBudget()
    budget.learn(100, PROMPT_SECONDS)
    budget.learn(100, 4 * PROMPT_SECONDS)
    assert 50 <= budget.tokens < 100
    for _ in range(40):
        budget.learn(100, 4 * PROMPT_SECONDS)
    assert budget.tokens == MIN_TOKENS


def test_steps_that_read_few_tokens_do_not_change_the_budget() -> None:
    budget = PromptBudget()
    budget.learn(MIN_TOKENS - 1, 1.0)
    budget.learn(0, 0.001)
    assert budget.tokens == FIRST_TOKENS
