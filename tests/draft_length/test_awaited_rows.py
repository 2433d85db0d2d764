"""Among rows that one caller waits for, drafts go to those that finish last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.types import Row
from slipstream.draft_length.planner import PACED, Worth, awaited_together, worth_of_tokens


def rows_of(remaining: Sequence[int]) -> list[Row]:
    rows = []
    for index, tokens_left in enumerate(remaining):
        row = Row(index, [1], SamplingParams(max_tokens=64), seed=0)
        row.tokens += [2] * (64 - tokens_left)
        row.rounds = [None]  # type: ignore[list-item]  # one round has happened
        rows.append(row)
    return rows


def seconds(count: int) -> float:
    return 10.0 + 0.5 * count


def test_rows_that_are_ahead_gain_only_what_a_row_costs() -> None:
    rows = rows_of([60, 60, 30, 1])
    with awaited_together(rows):
        worths = worth_of_tokens(rows, seconds)
    worth, least = [worth_of_row.of(0) for worth_of_row in worths], 0.5 * 4 / 12
    assert worth[:2] == pytest.approx([least + (1 - least) * 2] * 2, abs=1e-3)  # either may finish last
    assert worth[2:] == pytest.approx([least, least], abs=2e-3)
    assert sum(worth) == pytest.approx(4)
    later = [worths[0].of(ahead) for ahead in range(40)]
    assert later == sorted(later, reverse=True) and later[0] > 2 * later[4]  # by then the other row is last
    assert later[-1] == pytest.approx(least, abs=2e-3)


def test_drafts_are_worth_less_for_a_row_whose_drafts_are_accepted() -> None:
    rows = rows_of([40, 40])
    rows[1].rounds *= 24  # its 24 tokens took a round each; those of the other row took one round
    with awaited_together(rows):
        fast, slow = worth_of_tokens(rows, seconds)
    assert slow.of(0) > 1 > fast.of(0)


def test_the_limit_of_a_row_matters_less_if_texts_end_before_it() -> None:
    rows = rows_of([60, 60, 30, 1])
    for row in rows:
        row.rounds *= row.num_output_tokens  # a round for each token
    with awaited_together(rows):
        by_limit = [worth.of(0) for worth in worth_of_tokens(rows, seconds)]
        open_ends = [worth.of(0) for worth in worth_of_tokens(rows, seconds, typical=20)]
    assert by_limit[0] > open_ends[0] > 1 > by_limit[2]
    assert open_ends[2] == pytest.approx(open_ends[0]) and 1 > open_ends[3] > 2 * by_limit[3]


def test_open_ended_rows_may_each_be_the_last_and_fast_ones_a_little_less_often() -> None:
    rows = rows_of([24] * 4)  # of 64 tokens, 40 are there
    for row, num_rounds in zip(rows, [20, 30, 25, 38], strict=True):
        row.rounds *= num_rounds
        row.params = SamplingParams(max_tokens=1000)
    with awaited_together(rows):
        worth = [worth_of_row.of(0) for worth_of_row in worth_of_tokens(rows, seconds, typical=64)]
        ended = worth_of_tokens(rows, seconds, typical=1e9)
    paces = np.array([(len(row.rounds) + PACED) / (row.num_output_tokens + PACED) for row in rows])
    rounds_left = np.random.default_rng(0).exponential(64, (20_000, 4)) * paces  # each token may end its text
    is_last, least = np.bincount(rounds_left.argmax(1), minlength=4) / 20_000, 0.5 * 4 / 12
    assert worth == pytest.approx(least + (1 - least) * 4 * is_last, abs=0.15)
    assert ended[3].of(0) > 2 > 1 > ended[0].of(0)  # if all texts go on to their limits, the slowest is the last


def test_all_tokens_are_worth_the_same_unless_one_caller_waits_for_running_rows() -> None:
    rows = rows_of([60, 30])
    assert worth_of_tokens(rows, seconds) == [Worth(), Worth()]  # rows without a call
    others = rows_of([50, 20])
    with awaited_together(rows), awaited_together(others):
        assert worth_of_tokens([rows[0], others[1]], seconds) == [Worth(), Worth()]  # rows of two callers
    with awaited_together([*rows, *others]):
        others[1].rounds = []  # it waits for a place in the batch, which a row that ends early frees
        assert worth_of_tokens(rows, seconds) == [Worth(), Worth()]
    with awaited_together(rows[:1]):
        assert worth_of_tokens(rows[:1], seconds) == [Worth()]


def test_rows_do_not_refer_to_each_other_after_their_call() -> None:
    rows = rows_of([5, 5])
    with pytest.raises(RuntimeError), awaited_together(rows):
        assert rows[0].call_rows is rows
        raise RuntimeError
    assert not rows[0].call_rows and not rows[1].call_rows


def test_rows_of_a_call_are_awaited_together_and_have_the_texts_they_have_alone() -> None:
    prompts = ["The heron and the heron and the", "A sparrow", "and the sparrow was"]
    decoder = SpeculativeDecoder("toy", drafter="suffix", max_batch_size=3)
    call_rows: list[Sequence[Row]] = []
    choose_lengths = decoder._engine.policy.lengths

    def lengths(rows: Sequence[Row], *others: Any) -> list[int]:
        call_rows.append(rows[0].call_rows)
        return choose_lengths(rows, *others)

    decoder._engine.policy.lengths = lengths  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=24)
    texts = [result.token_ids for result in decoder.generate(prompts, params)]
    assert {len(together) for together in call_rows} == {3}
    assert texts == [decoder.generate(prompt, params).token_ids for prompt in prompts]


def test_nodes_of_a_tree_put_a_row_ahead_by_their_depth() -> None:
    worth = Worth(0.5, 1.0, spread=2.0)
    chain, tree = worth.of_draft([0.9, 0.8, 0.3], [0, 1, 2], 0), worth.of_draft([0.9, 0.8, 0.3], [0, 1, 0], 0)
    assert chain[:2] == tree[:2] and chain[2] < tree[2] == pytest.approx(0.3 * worth.of(1))
    assert worth.of_draft([0.9, 0.9], [5, 0], 0)[1] == 0.9 * worth.of(6)  # a later token is never worth more
    assert worth.of_draft([0.9, 0.8], [0, 1], 2) == [0.9 * worth.of(0), 0.8 * worth.of(0)]  # all rows gain these
