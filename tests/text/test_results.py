"""Statistics against numbers worked out by hand."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from slipstream import Result, Round, SlipstreamError, Stats
from slipstream.core.rounds import Seconds, TokenLogprobs


def make_round(draft: int, accepted: int, tokens: int, *, rejected: bool, step: int = 0, row: int = 0) -> Round:
    seconds = Seconds(prefill=0.5, draft=1.0, verify=2.0, accept=0.25, total=4.0)
    return Round(row, step, 1, 0, tuple(range(draft)), tuple(range(tokens)), accepted, rejected, None, seconds)


ROUNDS = [
    make_round(4, 4, 5, rejected=False, step=0),  # all kept, and a bonus token
    make_round(4, 2, 3, rejected=True, step=1),  # two kept, the third rejected, one recovered
    make_round(0, 0, 1, rejected=False, step=2),  # plain
    make_round(3, 0, 1, rejected=True, step=3),  # the first rejected
    make_round(4, 2, 2, rejected=False, step=4),  # ended inside the draft, by length
]


def test_totals_are_summed_over_rounds() -> None:
    stats = Stats.of(ROUNDS)
    assert stats.num_rounds == stats.num_steps == 5
    assert stats.num_output_tokens == 5 + 3 + 1 + 1 + 2
    assert stats.num_draft_tokens == 4 + 4 + 0 + 3 + 4
    assert stats.num_accepted_tokens == 4 + 2 + 0 + 0 + 2
    assert stats.num_rejected_rounds == 2


def test_ratios_follow_their_definitions() -> None:
    stats = Stats.of(ROUNDS)
    assert stats.acceptance_rate == pytest.approx(8 / 15)  # accepted / drafted
    assert stats.alpha == pytest.approx(8 / 10)  # accepted / (accepted + rounds that ended in a rejection)
    assert stats.block_efficiency == pytest.approx(12 / 5)  # output tokens per target forward


def test_counts_per_position_add_up_to_the_totals() -> None:
    stats = Stats.of(ROUNDS)
    assert stats.drafted_per_position == [4, 4, 4, 3]
    assert stats.accepted_per_position == [3, 3, 1, 1]
    assert sum(stats.drafted_per_position) == stats.num_draft_tokens
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens


def test_counts_per_position_grow_with_a_longer_draft_that_comes_later() -> None:
    stats = Stats.of([make_round(1, 1, 2, rejected=False), make_round(3, 1, 2, rejected=True, step=1)])
    assert stats.drafted_per_position == [2, 1, 1]
    assert stats.accepted_per_position == [2, 0, 0]


def test_rounds_are_counted_by_the_tokens_they_accepted() -> None:
    stats = Stats.of(ROUNDS)  # the plain round is not counted, as it drafted nothing
    assert stats.accepted_lengths == [1, 0, 2, 0, 1]
    assert sum(n * count for n, count in enumerate(stats.accepted_lengths)) == stats.num_accepted_tokens


def test_statistics_add_up() -> None:
    parts = [Stats.of(ROUNDS[:2]), Stats.of(ROUNDS[2:]), Stats()]
    assert parts[0] + parts[1] == sum(parts) == Stats.of(ROUNDS)
    lossy = replace(parts[0], lossless=False, accepted_prediction_tokens=3)
    assert not (parts[1] + lossy).lossless and (lossy + parts[1]).accepted_prediction_tokens == 3
    assert (parts[0] + parts[1]).accepted_prediction_tokens is None
    with pytest.raises(TypeError):
        parts[0] + 1  # type: ignore[operator]


def test_statistics_become_a_row_of_pandas_if_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = Stats.of(ROUNDS)
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    assert stats.to_dataframe() == [stats.to_dict()]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(SlipstreamError, match="to_dataframe needs pandas; run: pip install pandas"):
        stats.to_dataframe()


def test_the_time_of_a_step_is_counted_once_for_all_its_rows() -> None:
    rounds = [make_round(2, 1, 2, rejected=True, step=step, row=row) for step in (7, 9) for row in range(3)]
    stats = Stats.of(rounds)
    assert (stats.num_rounds, stats.num_steps) == (6, 2)
    assert stats.total_seconds == pytest.approx(8.0)
    assert (stats.prefill_seconds, stats.draft_seconds) == pytest.approx((1.0, 2.0))
    assert (stats.verify_seconds, stats.accept_seconds) == pytest.approx((4.0, 0.5))
    assert stats.overhead_seconds == pytest.approx(8.0 - 7.5)
    assert stats.tokens_per_second == pytest.approx(12 / 8.0)
    assert stats.block_efficiency == pytest.approx(2.0)  # per round of a row, not per step


def test_experts_are_averaged_over_the_forwards_that_counted_them() -> None:
    assert Stats.of(ROUNDS).experts_per_round is None and Stats.of(ROUNDS).to_dict()["experts_per_round"] is None
    read = ((0, None), (1, 8.0), (1, 8.0), (2, 12.5))  # step 0 reads the prompt, two rows share step 1
    rounds = [replace(make_round(0, 0, 1, rejected=False, step=step), experts_read=count) for step, count in read]
    assert Stats.of(rounds).to_dict()["experts_per_round"] == pytest.approx(10.25)


def test_statistics_of_rows_add_up_to_those_of_the_batch() -> None:
    rows = [[make_round(4, row, row + 1, rejected=True, step=step, row=row) for step in range(3)] for row in range(4)]
    whole = Stats.of(round for row in rows for round in row)
    parts = [Stats.of(row) for row in rows]
    for name in ("num_rounds", "num_output_tokens", "num_draft_tokens", "num_accepted_tokens", "num_rejected_rounds"):
        assert getattr(whole, name) == sum(getattr(part, name) for part in parts)
    assert whole.total_seconds == parts[0].total_seconds


def test_ratios_are_none_or_zero_if_nothing_was_drafted_or_decoded() -> None:
    plain, nothing = Stats.of([make_round(0, 0, 1, rejected=False)]), Stats.of([])
    assert plain.acceptance_rate is None and plain.alpha is None
    assert plain.block_efficiency == 1.0
    assert nothing.block_efficiency == nothing.tokens_per_second == nothing.overhead_seconds == 0.0


def test_overhead_is_never_negative() -> None:
    round = Round(0, 0, 1, 0, (), (1,), 0, False, None, Seconds(draft=2.0, total=1.0))
    assert Stats.of([round]).overhead_seconds == 0.0


def test_statistics_of_a_lossy_rule_say_so() -> None:
    assert Stats.of(ROUNDS).lossless
    assert not Stats.of(ROUNDS, lossless=False).to_dict()["lossless"]


def test_a_probability_of_zero_is_null_in_json() -> None:
    entry = TokenLogprobs(0, -math.inf, ((5, -0.5), (0, -math.inf)))
    round = replace(make_round(0, 0, 1, rejected=False), logprobs=(entry,))
    result = Result("", [0], "length", Stats.of([round]), [round], 0, [1])
    (written,) = json.loads(json.dumps(result.to_dict(), allow_nan=False))["logprobs"]
    assert written["logprob"] is None and written["top"] == [[5, -0.5], [0, None]]


def test_the_dictionary_has_every_total_and_ratio_and_is_json() -> None:
    stats = Stats.of(ROUNDS)
    values = json.loads(json.dumps(stats.to_dict()))
    assert values["alpha"] == stats.alpha and values["acceptance_rate"] == stats.acceptance_rate
    for name in ("block_efficiency", "overhead_seconds", "tokens_per_second", "num_rounds", "accepted_per_position"):
        assert values[name] == getattr(stats, name)


@pytest.mark.parametrize(
    ("round", "origins"),
    [
        (ROUNDS[0], ["accepted"] * 4 + ["bonus"]),
        (ROUNDS[1], ["accepted"] * 2 + ["recovered"]),
        (ROUNDS[2], ["plain"]),
        (ROUNDS[3], ["recovered"]),
        (ROUNDS[4], ["accepted"] * 2),
    ],
)
def test_origins_say_where_each_token_came_from(round: Round, origins: list[str]) -> None:
    assert list(round.origins) == origins
