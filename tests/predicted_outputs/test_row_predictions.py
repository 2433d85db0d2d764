"""The proposals of a row's prediction, and how it learns their acceptance."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import pytest

from slipstream import Round, SamplingParams
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.types import Row
from slipstream.predicted_outputs import predicted_drafts
from slipstream.predicted_outputs.predicted_drafts import FIRST_CREDIT, GUESSED, MIN_FIRST_PROB, NOTHING, RowPredictions

PROMPT = [500, 501]
OLD = list(range(250))


def row(prediction: Sequence[int] = OLD) -> Row:
    made = Row(0, [*PROMPT], SamplingParams(max_tokens=1000), seed=0)
    made.prediction = prediction
    return made


def predictions() -> RowPredictions:
    return RowPredictions(lambda token: token == 999)


def drafted(made: Row, source: RowPredictions, tokens: Sequence[int]) -> None:
    """Commit these tokens in a round that verifies the whole proposal."""
    draft, start = tuple(source.proposal(made).tokens), len(made.tokens)
    right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(draft, tokens, strict=False)))
    made.tokens += tokens
    round = Round(0, len(made.rounds), 1, start, draft, tuple(tokens), right, right < len(draft))
    made.rounds.append(replace(round, num_prediction_tokens=len(draft)))


def test_the_first_proposal_is_the_beginning_of_the_prediction() -> None:
    tokens, probs = predictions().proposal(row())
    assert tokens == OLD[: len(tokens)] and 0 < len(tokens) == len(probs) <= FIRST_CREDIT
    assert probs == sorted(probs, reverse=True) and MIN_FIRST_PROB <= probs[0] < 1


def test_a_prediction_counts_as_a_guess_until_a_proposal_was_right() -> None:
    made, source = row(), predictions()
    assert len(source.proposal(made).tokens) == GUESSED and source.only_guesses(made)
    made.tokens += [300]  # nothing was verified, and the text begins otherwise
    source.proposal(made)
    assert source.only_guesses(made)
    proven, other = row(), predictions()
    other.proposal(proven)
    proven.tokens += [*OLD[:4], 300]
    other.proposal(proven)
    assert not other.only_guesses(proven)


def test_a_row_without_a_prediction_gets_no_proposal() -> None:
    assert predictions().proposal(row([])) == NOTHING


def test_proposals_of_a_right_prediction_grow_to_the_longest_draft() -> None:
    made, source = row(), predictions()
    lengths = []
    for start in range(0, 168, 24):
        lengths.append(sum(source.proposal(made).acceptance_probs))
        made.tokens += OLD[start : start + 24]
    tokens, probs = source.proposal(made)
    assert tokens == OLD[168 : 168 + MAX_DRAFT_TOKENS] and probs[-1] > 0.5
    assert lengths == sorted(lengths)


def test_a_wrong_prediction_stops_proposing_until_it_is_right_again() -> None:
    made, source, asked = row(), predictions(), 0
    for at in range(60):
        asked += bool(source.proposal(made).tokens)
        made.tokens += [300 + at]
    assert asked <= 6
    assert source.proposal(made) == NOTHING
    made.tokens += OLD[50:70]
    again = source.proposal(made).tokens
    assert len(again) >= 4 and again == OLD[70 : 70 + len(again)]


def test_misleading_matches_lead_to_fewer_and_fewer_proposals() -> None:
    """Two tokens of the prediction match again and again, and the token after them never does."""
    made, source, asked = row(), predictions(), 0
    source.proposal(made)
    for at in range(40):
        made.tokens += [300 + at, 400 + at, 450 + at, 350 + at]
        source.proposal(made)
        made.tokens += OLD[4 * at : 4 * at + 1]
        source.proposal(made)
        made.tokens += OLD[4 * at + 1 : 4 * at + 2]
        asked += bool(source.proposal(made).tokens)
    assert asked <= 12


def test_what_one_row_learns_does_not_affect_another() -> None:
    source, wrong, right = predictions(), row(), row()
    before = source.proposal(right)
    for at in range(30):
        source.proposal(wrong)
        wrong.tokens += [300 + at]
    assert source.proposal(row()) == before


@pytest.mark.parametrize("step", [1, 3, 17])
def test_proposals_depend_only_on_the_text_and_its_rounds(step: int) -> None:
    """Rows with the same text and the same rounds get the same proposals, even if others are requested between."""
    text = [*OLD[:30], 300, 301, *OLD[31:60], *OLD[70:90]]
    first, other, first_source, second_source = row(), row(), predictions(), predictions()
    for start in range(0, len(text), step):
        assert first_source.proposal(first) == first_source.proposal(first) == second_source.proposal(other)
        first.tokens += text[start : start + step]
        other.tokens += text[start : start + step]


@pytest.mark.parametrize(("max_lost", "long"), [(predicted_drafts.MAX_LOST, True), (64.0, False)])
def test_an_edit_in_a_long_draft_shortens_the_next_ones_only_a_little(
    max_lost: float, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one draft that was cut off early would shorten the next ones, however good the prediction has been."""
    monkeypatch.setattr(predicted_drafts, "MAX_LOST", max_lost)
    made, source = row(), predictions()
    for start in range(0, 96, 24):
        drafted(made, source, OLD[start : start + 24])
    drafted(made, source, [300, *OLD[97:100]])  # of a draft of 64 tokens none is accepted
    assert (len(source.proposal(made).tokens) > 32) == long
