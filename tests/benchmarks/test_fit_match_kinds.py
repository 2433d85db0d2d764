"""The fit of the match kinds recovers the probabilities by which drafts were accepted."""

from __future__ import annotations

import random

import fit_match_kinds as fitting
import pytest

pytestmark = pytest.mark.exhaustive


def test_the_fit_recovers_the_constants_that_generated_the_data() -> None:
    chances, draws = fitting.prior(), random.Random(0)
    seen = [(kind, draws.random() < chance) for kind, chance in enumerate(chances) for _ in range(4000)]
    fitted = fitting.fit([seen])
    assert list(fitted.by_length) == pytest.approx(fitting.BY_LENGTH, abs=0.15)
    assert list(fitted.by_agreement) == pytest.approx(fitting.BY_AGREEMENT, abs=0.15)


def test_drafts_of_a_text_that_repeats_its_prompt_are_accepted() -> None:
    seen = fitting.observe(fitting.Recorded([*range(20)], [*range(20)]), 20, 4)
    assert len(seen) >= 15 and all(came for _, came in seen)
    assert fitting.log_loss(fitting.prior(), [seen]) < 0.4


def test_runners_up_are_observed_where_the_first_choice_was_wrong() -> None:
    text = fitting.Recorded([1, 2, 1, 2, 1, 3, 4], [1, 2, 5, 1, 3])  # after 1: 2 each time, then 3
    assert [came for _, came in fitting.observe_beside(text)] == [True]
