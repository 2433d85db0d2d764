"""How many more tokens a text is expected to have, judged by where earlier texts ended."""

from __future__ import annotations

import pytest

from slipstream import SamplingParams
from slipstream.core.rounds import FinishReason, Round
from slipstream.core.types import Row
from slipstream.draft_length.planner import PRIOR_TOKENS, TextLengths


def row_of(max_tokens: int = 1000) -> Row:
    return Row(0, [1], SamplingParams(max_tokens=max_tokens), seed=0)


def add_text(lengths: TextLengths, row: Row, tokens: int, reason: FinishReason | None = None) -> None:
    for tokens_left in range(tokens, 0, -1):
        row.rounds.append(Round(0, len(row.rounds), 1, 1, (), (5,), 0, False))
        row.finish_reason = reason if tokens_left == 1 else None
        lengths.learn([row])


def test_the_prior_holds_at_first_and_no_text_is_expected_to_exceed_its_limit() -> None:
    lengths = TextLengths()
    assert lengths.expected(row_of()) == PRIOR_TOKENS
    assert lengths.expected(row_of(10)) == 10


def test_the_expected_length_follows_that_of_earlier_texts() -> None:
    lengths = TextLengths()
    for _ in range(100):
        add_text(lengths, row_of(), 20, "stop")
    assert lengths.expected(row_of()) == pytest.approx(20, rel=0.1)
    for _ in range(100):
        add_text(lengths, row_of(), 200, "stop")  # longer texts from now on
    assert lengths.expected(row_of()) == pytest.approx(200, rel=0.1)


def test_texts_that_were_cut_off_are_forgotten_in_time() -> None:
    lengths = TextLengths()
    for _ in range(200):
        add_text(lengths, row_of(), 300, "length")
    for _ in range(200):
        add_text(lengths, row_of(), 20, "stop")
    assert lengths.expected(row_of()) == pytest.approx(20, rel=0.2)


def test_a_text_cut_off_at_its_limit_raises_the_expected_length() -> None:
    lengths = TextLengths()
    add_text(lengths, row_of(), 300, "length")
    assert lengths.typical > 300


def test_a_row_that_failed_before_its_first_round_teaches_nothing() -> None:
    lengths, row = TextLengths(), row_of()
    row.finish_reason = "error"
    lengths.learn([row])
    assert lengths.typical == PRIOR_TOKENS
