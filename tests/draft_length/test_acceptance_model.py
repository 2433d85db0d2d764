"""Acceptance probabilities of draft tokens: priors, what is learned per row and per kind, and what is not learned."""

import random

import pytest

from slipstream import SamplingParams
from slipstream.core.types import Row
from slipstream.draft_length.acceptance_model import AcceptanceModel


def row(temperature: float = 0.0) -> Row:
    return Row(0, [1], SamplingParams(max_tokens=10, temperature=temperature), seed=0)


def learn(acceptance_model: AcceptanceModel, running: Row, kind: int, chance: float, times: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(times):
        acceptance_model.learn(running, [kind], [1], [1 if rng.random() < chance else 0])


def test_the_prior_holds_until_something_is_learned() -> None:
    acceptance_model = AcceptanceModel([0.2, 0.9])
    assert [acceptance_model.chance(row(), kind) for kind in (0, 1)] == pytest.approx([0.2, 0.9])


@pytest.mark.parametrize("chance", [0.05, 0.5, 0.9])
def test_the_acceptance_probability_of_a_row_approaches_its_observed_rate(chance: float) -> None:
    acceptance_model, running, seen = AcceptanceModel([0.5], shared=False), row(), []
    for seed in range(400):
        learn(acceptance_model, running, 0, chance, 1, seed)
        seen.append(acceptance_model.chance(running, 0))
    assert sum(seen[100:]) / 300 == pytest.approx(chance, abs=0.07)
    assert acceptance_model.chance(row(), 0) == pytest.approx(0.5)  # other rows have learned nothing


def test_rows_learn_from_each_other_about_the_same_kind_only() -> None:
    acceptance_model = AcceptanceModel([0.5, 0.5])
    for seed in range(20):
        learn(acceptance_model, row(), 0, 0.9, 20, seed)
    assert acceptance_model.chance(row(), 0) > 0.7
    assert acceptance_model.chance(row(), 1) == 0.5


def test_low_acceptance_of_one_kind_lowers_that_of_the_rows_other_kinds() -> None:
    acceptance_model, running = AcceptanceModel([0.5, 0.8]), row()
    learn(acceptance_model, running, 0, 0.0, 20)
    assert acceptance_model.chance(running, 1) < 0.65


@pytest.mark.parametrize("prior", [0.975, 0.025])
def test_a_confident_wrong_prior_is_corrected_within_a_text(prior: float) -> None:
    """Negative control: the same texts do not move a prior that is right."""
    wrong, right = AcceptanceModel([prior]), AcceptanceModel([prior])
    for seed in range(8):
        learn(wrong, row(), 0, 0.6, 8, seed)
        learn(right, row(), 0, prior, 8, seed)
    assert 0.4 < wrong.chance(row(), 0) < 0.8
    assert right.chance(row(), 0) == pytest.approx(prior, abs=0.05)


def test_tokens_after_the_first_wrong_one_teach_nothing() -> None:
    acceptance_model, running = AcceptanceModel([0.5, 0.5, 0.5], shared=True), row()
    acceptance_model.learn(running, [0, 1, 2], [7, 8, 9], [7, 0, 9])
    assert acceptance_model.chance(row(), 0) > 0.5 > acceptance_model.chance(row(), 1)
    assert acceptance_model.chance(row(), 2) == 0.5
    acceptance_model.learn(running, [0], [7, 8], [])  # a text that has ended teaches nothing


def test_probabilities_stay_below_one_and_can_be_forgotten() -> None:
    acceptance_model, running = AcceptanceModel([0.99]), row()
    learn(acceptance_model, running, 0, 1.0, 3000)
    assert 0.995 < acceptance_model.chance(running, 0) < 1
    acceptance_model.forget()
    assert acceptance_model.chance(running, 0) == pytest.approx(0.99)


def test_rows_are_not_kept_alive() -> None:
    acceptance_model = AcceptanceModel([0.5])
    learn(acceptance_model, row(), 0, 1.0, 3)
    assert len(acceptance_model._rows) == 0
