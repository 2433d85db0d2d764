"""Acceptance probabilities of draft tokens: priors, what rows and kinds teach, and what is not learned."""

import random

import pytest

from slipstream import SamplingParams
from slipstream.core.types import Row
from slipstream.draft_length.acceptance_model import AcceptanceModel


def row(temperature: float = 0.0) -> Row:
    return Row(0, [1], SamplingParams(max_tokens=10, temperature=temperature), seed=0)


def told(acceptance_model: AcceptanceModel, of: Row, kind: int, chance: float, times: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(times):
        acceptance_model.learn(of, [kind], [1], [1 if rng.random() < chance else 0])


def test_the_prior_holds_until_something_is_learned() -> None:
    acceptance_model = AcceptanceModel([0.2, 0.9])
    assert [acceptance_model.chance(row(), kind) for kind in (0, 1)] == pytest.approx([0.2, 0.9])


@pytest.mark.parametrize("chance", [0.05, 0.5, 0.9])
def test_a_rows_acceptance_probabilities_become_what_the_row_shows(chance: float) -> None:
    acceptance_model, one, seen = AcceptanceModel([0.5], shared=False), row(), []
    for seed in range(400):
        told(acceptance_model, one, 0, chance, 1, seed)
        seen.append(acceptance_model.chance(one, 0))
    assert sum(seen[100:]) / 300 == pytest.approx(chance, abs=0.07)
    assert acceptance_model.chance(row(), 0) == pytest.approx(0.5)  # other rows have learned nothing


def test_rows_learn_from_each_other_about_the_kind_only() -> None:
    acceptance_model = AcceptanceModel([0.5, 0.5])
    for seed in range(20):
        told(acceptance_model, row(), 0, 0.9, 20, seed)
    assert acceptance_model.chance(row(), 0) > 0.7
    assert acceptance_model.chance(row(), 1) == 0.5


def test_what_a_row_shows_about_one_kind_tells_about_the_others() -> None:
    acceptance_model, one = AcceptanceModel([0.5, 0.8]), row()
    told(acceptance_model, one, 0, 0.0, 20)
    assert acceptance_model.chance(one, 1) < 0.65


@pytest.mark.parametrize("prior", [0.975, 0.025])
def test_a_prior_that_is_certain_and_wrong_is_given_up_within_a_text(prior: float) -> None:
    """Negative control: it takes many texts to move a prior that was right."""
    wrong, right = AcceptanceModel([prior]), AcceptanceModel([prior])
    for seed in range(8):
        told(wrong, row(), 0, 0.6, 8, seed)
        told(right, row(), 0, prior, 8, seed)
    assert 0.4 < wrong.chance(row(), 0) < 0.8
    assert right.chance(row(), 0) == pytest.approx(prior, abs=0.05)


def test_tokens_after_the_first_wrong_one_say_nothing() -> None:
    acceptance_model, one = AcceptanceModel([0.5, 0.5, 0.5], shared=True), row()
    acceptance_model.learn(one, [0, 1, 2], [7, 8, 9], [7, 0, 9])
    assert acceptance_model.chance(row(), 0) > 0.5 > acceptance_model.chance(row(), 1)
    assert acceptance_model.chance(row(), 2) == 0.5
    acceptance_model.learn(one, [0], [7, 8], [])  # a text that has ended says nothing


def test_nothing_is_certain_and_all_can_be_forgotten() -> None:
    acceptance_model, one = AcceptanceModel([0.99]), row()
    told(acceptance_model, one, 0, 1.0, 3000)
    assert 0.995 < acceptance_model.chance(one, 0) < 1
    acceptance_model.forget()
    assert acceptance_model.chance(one, 0) == pytest.approx(0.99)


def test_rows_are_not_kept_alive() -> None:
    acceptance_model = AcceptanceModel([0.5])
    told(acceptance_model, row(), 0, 1.0, 3)
    assert len(acceptance_model._rows) == 0
