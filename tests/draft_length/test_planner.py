"""Chooses whether and how far to draft: what does not pay is dropped, and tried again now and then."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import Draft, SamplingParams, SpeculativeDecoder
from slipstream.core.interfaces import Policy, Source
from slipstream.core.rounds import MODEL, RETRIEVAL, RowDraft, Seconds
from slipstream.core.types import Row
from slipstream.draft_length import planner as planning
from slipstream.draft_length.acceptance_model import FIRST_YIELD, ModelDrafts, bin_of
from slipstream.draft_length.costs import CostModel
from slipstream.draft_length.planner import (
    LATEST,
    PACED,
    SOONEST,
    STEPS,
    TRIAL,
    Pause,
    Planner,
    Worth,
    awaited_together,
    worth_of_tokens,
)
from slipstream.draft_length.policies import Heuristic
from tests.support.rounds import add_round

CPU = torch.device("cpu")
ALONE = {1: 16.0, 8: 16.0, 32: 40.0}  # milliseconds
TOGETHER = {8: 16.0, 32: 40.0}
SEARCHING = Seconds(draft=0.05, verify=1.0, total=1.05)


def row(index: int = 0, **options: int) -> Row:
    return Row(index, [1, 2], SamplingParams(max_tokens=200, **options), seed=0)


def planner_of(column: float = 0.05, step: float = 0.25, **options: bool) -> Planner:
    """A forward costs 1 and `column` for every further token of the batch; a step of the draft model costs `step`."""
    cost_model = CostModel()
    cost_model.verify = lambda rows, longest, drafted=None: 1 + column * (rows * (longest + 1) - 1)  # type: ignore[method-assign]
    cost_model.drafting = lambda rows: (step, 0.0)  # type: ignore[method-assign]
    return Planner(cost_model, **({"has_model": True} | options))  # type: ignore[arg-type]


def draft(*acceptance_probs: Sequence[float] | None, lengths: Sequence[int] = ()) -> Draft:
    sizes = [
        len(acceptance_prob) if acceptance_prob is not None else n
        for acceptance_prob, n in itertools.zip_longest(acceptance_probs, lengths, fillvalue=0)
    ]
    batch_draft = Draft.from_lists([[3] * n for n in sizes], CPU, acceptance_probs)
    rows = tuple(replace(record, source="" if record.acceptance_probs else MODEL) for record in batch_draft.records)
    return replace(batch_draft, rows=rows)


def verified_length(planner: Planner, running: Row, proposed: Draft, *, right: bool) -> int:
    """A round of one row: how many draft tokens are verified, all of which are accepted or all rejected."""
    length = planner.worth_verifying([running], proposed).lengths[0]
    add_round(running, length, length if right else 0)
    planner.observe([running])
    return length


def lengths_of(policy: Policy, rows: Sequence[Row]) -> list[int]:
    """How many tokens the policy's only source is asked for."""
    takes_forwards = isinstance(policy, Planner) and policy.only_model
    source = Source(None, takes_forwards)  # type: ignore[arg-type]
    return policy.lengths(rows, source, Draft.empty(len(rows), CPU), [64] * len(rows))


def asked_in_vain(planner: Planner, running: Row) -> int:
    """A round of one row whose draft model drafts at most two tokens, all wrong: how many it was asked for."""
    asked = lengths_of(planner, [running])[0]
    add_round(running, min(asked, 2), num_draft_steps=min(asked, 2), origin=RowDraft(MODEL if asked else ""))
    planner.observe([running])
    return asked


@pytest.mark.parametrize(("column", "kept"), [(0.01, 5), (0.1, 2), (0.8, 0)])
def test_a_retrieval_draft_is_verified_as_far_as_it_pays(column: float, kept: int) -> None:
    cut = planner_of(column).worth_verifying([row()], draft([0.6, 0.3, 0.1, 0.05, 0.02]))
    assert cut.lengths == (kept,) and cut.width == kept


def test_a_draft_is_verified_further_where_other_rows_need_the_width() -> None:
    acceptance_probs = [0.5, 0.3, 0.2]
    alone = planner_of(0.3).worth_verifying([row()], draft(acceptance_probs)).lengths
    together = (
        planner_of(0.3)
        .worth_verifying([row(i) for i in range(4)], draft(acceptance_probs, [0.9] * 3, [0.9] * 3, [0.9] * 3))
        .lengths
    )
    assert alone[0] < together[0]


def test_rows_of_a_batch_share_the_number_of_tokens_a_round_may_retrieve() -> None:
    planner = planner_of()
    assert [lengths_of(planner, [row(i) for i in range(count)])[0] for count in (1, 2, 4, 8)] == [63, 31, 15, 15]
    planner.longest = 7  # no wider forward is allowed
    assert lengths_of(planner, [row(0), row(1)]) == [7, 7]


def test_a_draft_that_does_not_seem_to_pay_is_tried_in_part_now_and_then() -> None:
    expensive, running, forty = planner_of(column=0.9), row(), Draft.from_lists([[3] * 40], CPU)
    assert {verified_length(expensive, running, forty, right=False) for _ in range(60)} == {0, 15}


def test_the_draft_length_of_a_request_is_verified_whatever_it_costs() -> None:
    cut = planner_of(0.8).worth_verifying([row(num_draft_tokens=3), row(1)], draft([0.1] * 3, [0.1] * 3))
    assert cut.lengths == (3, 3)  # the width is paid for, so the other row may use it
    assert planner_of(0.8).worth_verifying([row()], draft([0.1] * 3)).lengths == (0,)


def test_drafts_without_acceptance_probabilities_are_verified_whole() -> None:
    assert planner_of(0.8).worth_verifying([row(), row(1)], draft(None, [0.1] * 5, lengths=[2, 5])).lengths == (2, 2)
    sampled_draft = Draft(torch.zeros(1, 3, dtype=torch.int64), (3,), torch.full((1, 3, 4), 0.25))
    assert planner_of(0.8).worth_verifying([row()], sampled_draft) is sampled_draft


def test_retrieval_drafts_without_probabilities_are_judged_by_position() -> None:
    planner, running = planner_of(0.2), row()
    unrated = Draft.from_lists([[3] * 6], CPU)
    lengths = []
    for _ in range(40):
        lengths.append(verified_length(planner, running, unrated, right=False))
    assert lengths[0] > 0 and sum(n > 0 for n in lengths[-20:]) <= 2
    for _ in range(LATEST + 8):
        lengths.append(verified_length(planner, running, unrated, right=True))
    assert lengths[-1] > 0


def test_a_draft_model_whose_drafts_are_rejected_is_rarely_asked() -> None:
    planner, running = planner_of(only_model=True), row()
    asked = []
    for _ in range(60):
        asked.append(asked_in_vain(planner, running))
    assert asked[0] == STEPS
    rested = asked[asked.index(0) :]
    assert set(rested) == {0, STEPS} and rested.count(STEPS) <= 4
    other = row(1)
    assert lengths_of(planner, [other]) == [STEPS]  # a new row is drafted for, at first


def test_a_new_row_starts_from_what_all_rows_have_shown() -> None:
    planner = planner_of(only_model=True)
    for index in range(12):
        running = row(index)
        for _ in range(30):
            asked_in_vain(planner, running)
    assert lengths_of(planner, [row(99)])[0] == 0


def test_next_step_pays_depends_on_probability_and_cost() -> None:
    expensive, cheap, running = planner_of(step=0.3), planner_of(step=0.1), row()
    for chance, costs, extend in (
        (0.9, expensive, True),
        (0.5, expensive, False),
        (0.5, cheap, True),
        (0.05, cheap, False),
    ):
        assert costs.next_step_pays([running], [[chance]], 1) is extend
    assert not cheap.next_step_pays([], [], 1)
    chances = [[0.9] * n for n in range(1, 12)]
    assert [cheap.next_step_pays([running], [row_chances], 1) for row_chances in chances] == sorted(
        (cheap.next_step_pays([running], [row_chances], 1) for row_chances in chances), reverse=True
    )


def test_a_draft_step_has_to_pay_for_the_rows_that_wait_for_it() -> None:
    planner, running = planner_of(column=0.0, step=0.05), row()
    assert planner.next_step_pays([running], [[0.5]], 1) and not planner.next_step_pays([running], [[0.5]], 8)
    assert planner.next_step_pays([running], [[0.9]], 8)


def test_the_model_is_preferred_for_the_rows_it_serves_better() -> None:
    running = [row(i) for i in range(3)]
    assert planner_of().model_lengths(running, [[0.9, 0.85, 0.8], [], [0.2]], [7, 7, 7]) == [0, 7, 7]
    assert planner_of(step=9.0).model_lengths(running, [[0.9, 0.85, 0.8], [], [0.2]], [7, 7, 7]) == [0] * 3
    assert planner_of().model_lengths(running[:1], [[]], [0]) == [0]


def test_the_yield_of_a_draft_model_is_learned_per_row_and_for_all_rows() -> None:
    learned, running = ModelDrafts(8), row()
    assert learned.of(running) == FIRST_YIELD
    for _ in range(40):
        add_round(running, 6, 5, origin=RowDraft(MODEL, None, (10,) * 4))  # two of the six came from another drafter
        learned.learn(running, running.rounds[-1])
    assert learned.of(running).accepted == pytest.approx(4, abs=0.1) == learned.of(running).drafted
    assert FIRST_YIELD.accepted < learned.of(row(1)).accepted < 4
    assert learned.of(running).cut(2).drafted == pytest.approx(2)
    before = learned.of(running)
    add_round(running, 0, 0)
    learned.learn(running, running.rounds[-1])
    assert learned.of(running) == before  # an empty draft teaches nothing


def test_pauses_become_longer_and_end_with_a_success() -> None:
    pause = Pause()

    def rounds(accepted: int) -> int:
        for waited in itertools.count():
            if pause.is_due:
                pause.observe(drafted=True, accepted=accepted)
                return waited + 1
            pause.observe(drafted=False, accepted=0)
        raise AssertionError

    assert [rounds(0) for _ in range(6)] == [SOONEST, 8, 16, 32, LATEST, LATEST]
    assert [rounds(1), rounds(0)] == [LATEST, SOONEST]
    pause.observe(drafted=True, accepted=0)  # a second success in a row
    assert rounds(0) == SOONEST


def test_retrieval_that_saves_less_than_it_takes_is_skipped() -> None:
    planner, running = planner_of(has_model=False), row()
    searched = []
    for number in range(500):
        searched.append(lengths_of(planner, [running])[0] > 0)
        accepted = 4 * (number >= 250)
        drafted = accepted * searched[-1]
        add_round(running, drafted, drafted, origin=RowDraft(RETRIEVAL if searched[-1] else ""), seconds=SEARCHING)
        planner.observe([running])
    assert all(searched[:20]) and sum(searched[150:250]) < 24 and all(searched[400:])
    cheap, other_row = planner_of(has_model=False), row()
    for _ in range(100):
        assert lengths_of(cheap, [other_row])[0]
        add_round(other_row, 1, 1, origin=RowDraft(RETRIEVAL), seconds=SEARCHING)
        cheap.observe([other_row])


@pytest.mark.parametrize("count", [1, 2])
def test_failed_drafts_count_against_searches_only_in_batches(count: int) -> None:
    """Alone, drafts that are not worth verifying are cut in any case."""
    planner, rows = planner_of(column=0.5, has_model=False), [row(index) for index in range(count)]
    searched = []
    for number in range(200):
        searched.append(any(lengths_of(planner, rows)))
        drafted, accepted = (8, 0) if number % 4 == 0 else (1, 1)
        for running in rows:
            facts = {"origin": RowDraft(RETRIEVAL), "seconds": SEARCHING, "num_rows": count, "step": number}
            add_round(running, drafted, accepted, **facts if searched[-1] else {"num_rows": count, "step": number})
        planner.observe(rows)
    assert all(searched) if count == 1 else sum(searched[100:]) < 50


def test_rows_with_sampled_drafts_keep_a_fixed_length() -> None:
    sampled = Row(0, [1, 2], SamplingParams(max_tokens=200, temperature=0.7), seed=0)
    policy = planner_of(0.8, only_model=True)
    policy.fixed_length, policy.is_fixed = 6, lambda running: running.params.temperature > 0
    policy.costs.drafting = lambda rows: (9.0, 0.0)  # type: ignore[method-assign]
    assert lengths_of(policy, [sampled, row(1)]) == [6, 0]
    unlikely = draft([0.1] * 3, [0.1] * 3)
    assert policy.worth_verifying([sampled, row(1)], unlikely).lengths == unlikely.lengths
    assert policy.worth_verifying([row(1)], draft([0.1] * 3)).lengths == (0,)


def test_the_heuristic_schedule_grows_after_full_acceptance_and_shrinks_otherwise() -> None:
    policy, running = Heuristic(8), row()
    seen = []
    for drafted, kept in [(5, 5), (7, 7), (8, 3), (7, 0), (0, 0)] + [(3, 1)] * 8:
        seen.append(lengths_of(policy, [running])[0])
        add_round(running, drafted, kept)
        policy.observe([running])
    assert seen == [5, 7, 8, 7, 6, 6, 5, 4, 3, 2, 1, 1, 1]


def test_bins_of_probability_are_a_twentieth_wide() -> None:
    assert [bin_of(chance) for chance in (0.0, 0.049, 0.05, 0.5, 0.9999, 1.0)] == [0, 0, 1, 10, 19, 19]


def test_the_draft_model_reads_a_text_if_its_drafts_make_up_for_it() -> None:
    running = row()
    for seconds_per_token, is_read in ((0.0, True), (1.0, True), (50.0, False)):  # the text has two tokens
        planner = planner_of()
        planner.costs.reading = lambda tokens, cost=seconds_per_token: tokens * cost  # type: ignore[method-assign]
        for _ in range(2):  # asking changes nothing
            assert planner.model_lengths([running], [[]], [7]) == [7 if is_read else 0]
        planner._read.add(running)
        assert planner.model_lengths([running], [[]], [7]) == [7]  # it has read the text already


def reads_after(round_probs: Sequence[Sequence[float]], reading: float) -> bool:
    """Whether a draft model reads a text without a retrieval draft, after rounds whose drafts were all accepted."""
    planner, running = planner_of(), row()
    planner.costs.reading = lambda tokens: 1e9  # type: ignore[method-assign]
    for probs in round_probs:
        assert planner.model_lengths([running], [probs], [7]) == [0]
        add_round(running, len(probs), len(probs))
        planner.observe([running])
    planner.costs.reading = lambda tokens: reading  # type: ignore[method-assign]
    return planner.model_lengths([running], [[]], [7]) == [7]


def test_the_draft_model_does_not_read_a_text_that_retrieval_drafts_well() -> None:
    no_drafts, good_drafts = [[]] * 20, [[0.95, 0.9, 0.9, 0.85]] * 4  # 20 tokens each
    assert reads_after(no_drafts, 12.0) and not reads_after(good_drafts, 12.0)
    assert reads_after(good_drafts, 1.0)  # the few tokens that retrieval leaves make up for this


def test_the_share_that_retrieval_leaves_is_learned_from_earlier_texts() -> None:
    planner = planner_of()
    for number in range(40):
        running = row(number)
        add_round(running, 6, 6)
        planner.observe([running])
    assert planner._plan_of(row(50)).share_left < 0.7
    new = row(51)
    for _ in range(30):
        add_round(new, 0, 0)
        planner.observe([new])
    assert planner._plan_of(new).share_left > 0.8  # its own rounds count more


@pytest.mark.parametrize("reading_seconds", [0.5, 2.0])
def test_reading_that_does_not_seem_to_pay_is_tried_when_it_takes_little_of_the_time(reading_seconds: float) -> None:
    planner, waited = planner_of(only_model=True), [0.0]
    planner.costs.reading = lambda tokens: reading_seconds  # type: ignore[method-assign]
    planner.costs.rate = lambda *others: 1.0  # type: ignore[method-assign]  # so that it never pays
    for number in range(400):
        running = row(number)
        asked = min(lengths_of(planner, [running])[0], 2)
        origin = RowDraft(MODEL if asked else "")
        add_round(running, asked, num_draft_steps=asked, origin=origin, seconds=Seconds(total=1.0))
        running.finish_reason = "stop"
        planner.observe([running])
        if asked:
            waited.append(0.0)
        else:
            waited[-1] += 1.0
    assert len(waited) > 2
    assert {seconds for seconds in waited[:-1]} == {1 + reading_seconds / TRIAL}


def test_a_draft_is_cut_where_its_row_would_get_ahead_of_the_rows_it_is_awaited_with() -> None:
    planner = Planner(
        CostModel(ragged=lambda rows, drafted: rows + drafted, measured=ALONE, together=TOGETHER, max_batch_size=8)
    )
    rows = [row(i) for i in range(8)]
    for running in rows:
        running.params = SamplingParams(max_tokens=60)
        add_round(running, 0, 0)
    likely, empty = [0.95**n for n in range(1, 16)], list[float]()
    single, all_alike = draft(likely, *[empty] * 7), draft(*[likely] * 8)
    independent = planner.worth_verifying(rows, single).lengths[0]
    with awaited_together(rows):
        ahead, even = planner.worth_verifying(rows, single).lengths[0], planner.worth_verifying(rows, all_alike).lengths
    assert independent > 8 and 0 < ahead < independent / 2
    assert min(even) > 2 * ahead  # drafts that all rows have put none of them ahead


def rows_of(remaining: Sequence[int]) -> list[Row]:
    rows = []
    for index, tokens_left in enumerate(remaining):
        row = Row(index, [1], SamplingParams(max_tokens=64), seed=0)
        row.tokens += [2] * (64 - tokens_left)
        row.rounds = [None]  # type: ignore[list-item]  # one round has happened
        rows.append(row)
    return rows


def seconds(count: int, longest: int) -> float:
    assert longest == 0
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


def test_the_limit_of_a_row_matters_less_if_texts_end_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of([60, 60, 30, 1])
    for row in rows:
        row.rounds *= row.num_output_tokens  # a round for each token
    with awaited_together(rows):
        by_limit = [worth.of(0) for worth in worth_of_tokens(rows, seconds)]
        monkeypatch.setattr(planning, "TYPICAL", 20)
        open_ends = [worth.of(0) for worth in worth_of_tokens(rows, seconds)]
    assert by_limit[0] > open_ends[0] > 1 > by_limit[2]
    assert open_ends[2] == pytest.approx(open_ends[0]) and 1 > open_ends[3] > 2 * by_limit[3]


def test_open_ended_rows_may_each_be_the_last_and_fast_ones_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of([24] * 4)  # of 64 tokens, 40 are there
    for row, num_rounds in zip(rows, [20, 30, 25, 38], strict=True):
        row.rounds *= num_rounds
        row.params = SamplingParams(max_tokens=1000)
    with awaited_together(rows):
        worth = [worth_of_row.of(0) for worth_of_row in worth_of_tokens(rows, seconds)]
        monkeypatch.setattr(planning, "TYPICAL", 1e9)
        ended = worth_of_tokens(rows, seconds)
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
