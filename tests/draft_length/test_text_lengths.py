"""How long texts are expected to go on, by how often texts have ended."""

from __future__ import annotations

import pytest

from slipstream import SamplingParams
from slipstream.core.rounds import FinishReason, Round
from slipstream.core.types import Row
from slipstream.draft_length.planner import PRIOR_TOKENS, TextLengths


def row_of(max_tokens: int = 1000) -> Row:
    return Row(0, [1], SamplingParams(max_tokens=max_tokens), seed=0)


def happen(lengths: TextLengths, row: Row, tokens: int, reason: FinishReason | None = None) -> None:
    for left in range(tokens, 0, -1):
        row.rounds.append(Round(0, len(row.rounds), 1, 1, (), (5,), 0, False))
        row.finish_reason = reason if left == 1 else None
        lengths.learn([row])


def test_nothing_is_known_at_first_and_no_text_exceeds_its_limit() -> None:
    lengths = TextLengths()
    assert lengths.expected(row_of()) == PRIOR_TOKENS
    assert lengths.expected(row_of(10)) == 10


def test_texts_that_end_after_twenty_tokens_are_expected_to() -> None:
    lengths = TextLengths()
    for _ in range(100):
        happen(lengths, row_of(), 20, "stop")
    assert lengths.expected(row_of()) == pytest.approx(20, rel=0.1)
    for _ in range(100):
        happen(lengths, row_of(), 200, "stop")  # others are asked for now
    assert lengths.expected(row_of()) == pytest.approx(200, rel=0.1)


def test_many_texts_that_were_cut_off_are_forgotten_too() -> None:
    lengths = TextLengths()
    for _ in range(200):
        happen(lengths, row_of(), 300, "length")
    for _ in range(200):
        happen(lengths, row_of(), 20, "stop")
    assert lengths.expected(row_of()) == pytest.approx(20, rel=0.2)


def test_a_text_that_is_cut_off_says_that_texts_are_longer() -> None:
    lengths = TextLengths()
    happen(lengths, row_of(), 300, "length")
    assert lengths.typical > 300


def test_a_row_that_failed_before_its_first_round_says_nothing() -> None:
    lengths, row = TextLengths(), row_of()
    row.finish_reason = "error"
    lengths.learn([row])
    assert lengths.typical == PRIOR_TOKENS
