"""When no draft is looked for: where looking takes time and has brought nothing lately."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.rounds import Round, Seconds
from slipstream.core.types import Row
from slipstream.draft_length.row_history import AFTER, MOST, QuietRounds
from tests.support.tiny_models import prompts, shared


def rows_of(count: int) -> list[Row]:
    return [Row(i, [1], SamplingParams(max_tokens=1000), seed=0) for i in range(count)]


def happen(
    quiet: QuietRounds, rows: Sequence[Row], looking: float, drafted: int = 0, accepted: int = 0, steps: int = 0
) -> None:
    seconds = Seconds(draft=looking, verify=1 - looking, total=1.0)
    for row in rows:
        made = Round(row.index, 0, len(rows), 1, (5,) * drafted, (5,), accepted, False, None, seconds, steps)
        row.rounds.append(made)
    quiet.learn(rows)


def test_looking_that_takes_much_pauses_after_rounds_that_bring_nothing() -> None:
    quiet, rows = QuietRounds(), rows_of(4)
    happen(quiet, rows, 0.0)  # their first
    for _ in range(AFTER):
        assert not quiet.left
        happen(quiet, rows, 0.065)
    assert quiet.left == 6  # one round in seven looks: a hundredth of the time
    for left in (5, 4, 3, 2, 1, 0):
        happen(quiet, rows, 0.0)
        assert quiet.left == left
    happen(quiet, rows, 0.065)
    assert quiet.left == 6  # still nothing
    happen(quiet, rows, 0.9)
    assert quiet.left <= MOST


def test_looking_that_takes_little_never_pauses() -> None:
    quiet, rows = QuietRounds(), rows_of(1)
    for _ in range(20):
        happen(quiet, rows, 0.015)
        assert not quiet.left


@pytest.mark.parametrize(("accepted", "pauses"), [(0, True), (1, True), (2, False), (4, False)])
def test_drafts_that_are_accepted_keep_it_awake(accepted: int, pauses: bool) -> None:
    quiet, rows = QuietRounds(), rows_of(2)
    happen(quiet, rows, 0.0)
    for _ in range(AFTER):
        happen(quiet, rows, 0.07, drafted=4, accepted=accepted)
    assert bool(quiet.left) == pauses


def test_rounds_in_which_nothing_was_looked_for_or_a_draft_model_drafted_say_nothing() -> None:
    quiet, rows = QuietRounds(), rows_of(1)
    for _ in range(5 * AFTER):
        happen(quiet, rows, 0.0)  # the first round of a row, which reading its prompt gives
        assert quiet.left == 0
    for _ in range(5 * AFTER):
        happen(quiet, rows, 0.4, drafted=2, accepted=0, steps=2)
        assert quiet.left == 0


def test_other_rows_begin_anew() -> None:
    quiet, rows = QuietRounds(), rows_of(3)
    for _ in range(1 + AFTER):
        happen(quiet, rows, 0.07)
    assert quiet.left
    happen(quiet, rows[:2], 0.0)
    assert not quiet.left


def test_texts_do_not_depend_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, params = SpeculativeDecoder(shared("llama"), max_batch_size=3), SamplingParams(max_tokens=40)
    expected = [result.token_ids for result in decoder.using("none").generate(prompts((9, 20, 5)), params)]
    asked = list[int]()

    def always(self: QuietRounds, rows: Sequence[Row]) -> None:
        self.left = (self.left + 1) % 3
        asked.append(self.left)

    monkeypatch.setattr(QuietRounds, "learn", always)
    results = decoder.using("suffix").generate(prompts((9, 20, 5)), params)
    assert [result.token_ids for result in results] == expected
    assert {0, 1, 2} <= set(asked) and any(done.draft for result in results for done in result.rounds)
