"""Whether and how far to draft: what pays is drafted, what does not is left, and tried again now and then."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from slipstream import Draft, SamplingParams
from slipstream.core.rounds import MODEL, RETRIEVAL, Round, RowDraft, Seconds
from slipstream.core.types import Row
from slipstream.draft_length.acceptance_model import FIRST_YIELD, ModelDrafts, bin_of
from slipstream.draft_length.costs import CostModel
from slipstream.draft_length.planner import LATEST, SOONEST, STEPS, Pause, Planner, awaited_together
from slipstream.draft_length.policies import Heuristic

CPU = torch.device("cpu")
numbers = itertools.count()
ALONE = {1: 16.0, 8: 16.0, 32: 40.0}  # milliseconds
TOGETHER = {8: 16.0, 32: 40.0}


def row(index: int = 0, **options: int) -> Row:
    return Row(index, [1, 2], SamplingParams(max_tokens=200, **options), seed=0)


def planner_of(column: float = 0.05, step: float = 0.25, **options: bool) -> Planner:
    """A forward costs 1 and `column` for every further token of the batch; a step of the draft model costs `step`."""
    cost_model = CostModel()
    cost_model.verify = lambda rows, longest, drafted=None: 1 + column * (rows * (longest + 1) - 1)  # type: ignore[method-assign]
    cost_model.step = lambda rows: step  # type: ignore[method-assign]
    return Planner(cost_model, **({"has_model": True} | options))  # type: ignore[arg-type]


def draft(*acceptance_probs: Sequence[float] | None, lengths: Sequence[int] = ()) -> Draft:
    sizes = [
        len(acceptance_prob) if acceptance_prob is not None else n
        for acceptance_prob, n in itertools.zip_longest(acceptance_probs, lengths, fillvalue=0)
    ]
    made = Draft.from_lists([[3] * n for n in sizes], CPU, acceptance_probs)
    rows = tuple(replace(one, source="" if one.acceptance_probs else MODEL) for one in made.records)
    return replace(made, rows=rows)


def happened(of: Row, drafted: int, kept: int, steps: int = 0, source: str = "", seconds: float = 0.0) -> None:
    of.rounds.append(
        Round(
            of.index,
            next(numbers),
            1,
            len(of.tokens),
            (3,) * drafted,
            (3,) * (kept + 1),
            kept,
            kept < drafted,
            None,
            Seconds(draft=seconds, verify=1.0, total=1.0 + seconds),
            steps,
            RowDraft(source),
        )
    )
    of.tokens.extend(of.rounds[-1].tokens)


def judged(one: Planner, of: Row, proposed: Draft, *, right: bool) -> int:
    """A round of one row: how much of a draft is verified, all of which then is right or wrong."""
    length = one.worth_verifying([of], proposed).lengths[0]
    happened(of, length, length if right else 0)
    one.observe([of])
    return length


def in_vain(one: Planner, of: Row) -> int:
    """A round of one row for which a draft model drafts at most two tokens, both wrong: how many it was asked for."""
    asked = one.lengths([of])[0]
    happened(of, min(asked, 2), 0, min(asked, 2), MODEL if asked else "")
    one.observe([of])
    return asked


@pytest.mark.parametrize(("column", "kept"), [(0.01, 5), (0.1, 2), (0.8, 0)])
def test_a_retrieval_draft_is_verified_as_far_as_it_pays(column: float, kept: int) -> None:
    cut = planner_of(column).worth_verifying([row()], draft([0.6, 0.3, 0.1, 0.05, 0.02]))
    assert cut.lengths == (kept,) and cut.width == kept


def test_rows_of_a_batch_share_the_width_so_the_sum_of_acceptance_probabilities_counts() -> None:
    acceptance_probs = [0.5, 0.3, 0.2]
    alone = planner_of(0.3).worth_verifying([row()], draft(acceptance_probs)).lengths
    together = (
        planner_of(0.3)
        .worth_verifying([row(i) for i in range(4)], draft(acceptance_probs, [0.9] * 3, [0.9] * 3, [0.9] * 3))
        .lengths
    )
    assert alone[0] < together[0]


def test_rows_of_a_batch_share_what_a_round_may_retrieve() -> None:
    free = planner_of()
    assert [free.lengths([row(i) for i in range(count)])[0] for count in (1, 2, 4, 8)] == [63, 31, 15, 15]
    free.longest = 7  # no wider forward is allowed
    assert free.lengths([row(0), row(1)]) == [7, 7]


def test_a_draft_that_does_not_seem_to_pay_is_tried_in_part() -> None:
    dear, of, forty = planner_of(column=0.9), row(), Draft.from_lists([[3] * 40], CPU)
    assert {judged(dear, of, forty, right=False) for _ in range(60)} == {0, 15}


def test_a_request_that_said_how_many_tokens_gets_them_verified() -> None:
    cut = planner_of(0.8).worth_verifying([row(num_draft_tokens=3), row(1)], draft([0.1] * 3, [0.1] * 3))
    assert cut.lengths == (3, 3)  # the width is paid for, so the other row may use it
    assert planner_of(0.8).worth_verifying([row()], draft([0.1] * 3)).lengths == (0,)


def test_drafts_that_say_nothing_of_a_row_leave_it_whole() -> None:
    assert planner_of(0.8).worth_verifying([row(), row(1)], draft(None, [0.1] * 5, lengths=[2, 5])).lengths == (2, 2)
    sampled_draft = Draft(torch.zeros(1, 3, dtype=torch.int64), (3,), torch.full((1, 3, 4), 0.25))
    assert planner_of(0.8).worth_verifying([row()], sampled_draft) is sampled_draft


def test_retrieval_drafts_without_probabilities_are_judged_by_position() -> None:
    one, of = planner_of(0.2), row()
    untold = Draft.from_lists([[3] * 6], CPU)
    lengths = []
    for _ in range(40):
        lengths.append(judged(one, of, untold, right=False))
    assert lengths[0] > 0 and sum(n > 0 for n in lengths[-20:]) <= 2
    for _ in range(LATEST + 8):
        lengths.append(judged(one, of, untold, right=True))
    assert lengths[-1] > 0


def test_a_draft_model_that_brings_nothing_is_left_alone() -> None:
    one, of = planner_of(asks_model=True), row()
    asked = []
    for _ in range(60):
        asked.append(in_vain(one, of))
    assert asked[0] == STEPS
    rested = asked[asked.index(0) :]
    assert set(rested) == {0, STEPS} and rested.count(STEPS) <= 4
    other = row(1)
    assert one.lengths([other]) == [STEPS]  # a new row gets its chance, for a time


def test_all_rows_teach_what_to_expect_of_a_new_one() -> None:
    one = planner_of(asks_model=True)
    for index in range(12):
        of = row(index)
        for _ in range(30):
            in_vain(one, of)
    assert one.lengths([row(99)])[0] == 0


def test_a_draft_model_goes_on_while_next_step_pays_pays() -> None:
    dear, cheap, of = planner_of(step=0.3), planner_of(step=0.1), row()
    for sure, costs, extend in ((0.9, dear, True), (0.5, dear, False), (0.5, cheap, True), (0.05, cheap, False)):
        assert costs.next_step_pays([of], [[sure]], 1) is extend
    assert not cheap.next_step_pays([], [], 1)
    chances = [[0.9] * n for n in range(1, 12)]
    assert [cheap.next_step_pays([of], [one], 1) for one in chances] == sorted(
        (cheap.next_step_pays([of], [one], 1) for one in chances), reverse=True
    )


def test_a_step_for_some_rows_has_to_pay_for_the_others_that_wait() -> None:
    one, of = planner_of(column=0.0, step=0.05), row()
    assert one.next_step_pays([of], [[0.5]], 1) and not one.next_step_pays([of], [[0.5]], 8)
    assert one.next_step_pays([of], [[0.9]], 8)


def test_the_model_is_preferred_for_the_rows_it_serves_better() -> None:
    of = [row(i) for i in range(3)]
    assert planner_of().model_lengths(of, [[0.9, 0.85, 0.8], [], [0.2]], [7, 7, 7]) == [0, 7, 7]
    assert planner_of(step=9.0).model_lengths(of, [[0.9, 0.85, 0.8], [], [0.2]], [7, 7, 7]) == [0] * 3
    assert planner_of().model_lengths(of[:1], [[]], [0]) == [0]


def test_yields_follow_the_row_and_the_rows_together() -> None:
    learned, of = ModelDrafts(8), row()
    assert learned.of(of) == FIRST_YIELD
    for _ in range(40):
        happened(of, 6, 5, source=MODEL)
        of.rounds[-1] = replace(of.rounds[-1], origin=RowDraft(MODEL, None, (10,) * 4))  # two came from elsewhere
        learned.learn(of)
    assert learned.of(of).accepted == pytest.approx(4, abs=0.1) == learned.of(of).drafted
    assert FIRST_YIELD.accepted < learned.of(row(1)).accepted < 4
    assert learned.of(of).cut(2).drafted == pytest.approx(2)
    before = learned.of(of)
    happened(of, 0, 0)
    learned.learn(of)
    assert learned.of(of) == before  # an empty draft says nothing


def test_pauses_become_longer_and_end_with_a_success() -> None:
    pause = Pause()

    def rounds(brought: int) -> int:
        for waited in itertools.count():
            if pause.is_due:
                pause.observe(drafted=True, accepted=brought)
                return waited + 1
            pause.observe(drafted=False, accepted=0)
        raise AssertionError

    assert [rounds(0) for _ in range(6)] == [SOONEST, 8, 16, 32, LATEST, LATEST]
    assert [rounds(1), rounds(0)] == [LATEST, SOONEST]
    pause.observe(drafted=True, accepted=0)  # twice in a row: it is not passed over any more
    assert rounds(0) == SOONEST


def test_searches_that_save_less_than_they_take_are_passed_over() -> None:
    one, of = planner_of(has_model=False), row()
    found = []
    for number in range(500):
        found.append(one.lengths([of])[0] > 0)
        brought = 4 * (number >= 250)
        happened(of, brought * found[-1], brought * found[-1], source=RETRIEVAL if found[-1] else "", seconds=0.05)
        one.observe([of])
    assert all(found[:20]) and sum(found[150:250]) < 24 and all(found[400:])
    cheap, other = planner_of(has_model=False), row()
    for _ in range(100):
        assert cheap.lengths([other])[0]
        happened(other, 1, 1, source=RETRIEVAL, seconds=0.05)
        cheap.observe([other])


def test_the_policy_leaves_sampled_rows_to_reproducible_lengths_where_drafts_are_sampled() -> None:
    sampled = Row(0, [1, 2], SamplingParams(max_tokens=200, temperature=0.7), seed=0)
    policy = planner_of(0.8, asks_model=True)
    policy.fixed_length, policy.is_fixed = 6, lambda of: of.params.temperature > 0
    policy.costs.step = lambda rows: 9.0  # type: ignore[method-assign]
    assert policy.lengths([sampled, row(1)]) == [6, 0]
    unlikely = draft([0.1] * 3, [0.1] * 3)
    assert policy.worth_verifying([sampled, row(1)], unlikely).lengths == unlikely.lengths
    assert policy.worth_verifying([row(1)], draft([0.1] * 3)).lengths == (0,)


def test_the_heuristic_schedule() -> None:
    policy, of = Heuristic(8), row()
    seen = []
    for drafted, kept in [(5, 5), (7, 7), (8, 3), (7, 0), (0, 0)] + [(3, 1)] * 8:
        seen.append(policy.lengths([of])[0])
        happened(of, drafted, kept)
        policy.observe([of])
    assert seen == [5, 7, 8, 7, 6, 6, 5, 4, 3, 2, 1, 1, 1]


def test_kinds_by_probability() -> None:
    assert [bin_of(chance) for chance in (0.0, 0.049, 0.05, 0.5, 0.9999, 1.0)] == [0, 0, 1, 10, 19, 19]


def test_a_text_is_read_by_the_draft_model_if_that_is_made_up_for() -> None:
    of = row()
    for each, read in ((0.0, True), (1.0, True), (50.0, False)):  # seconds per token, of a text of two tokens
        one = planner_of()
        one.costs.reading = lambda tokens, each=each: tokens * each  # type: ignore[method-assign]
        for _ in range(2):  # asking changes nothing
            assert one.model_lengths([of], [[]], [7]) == [7 if read else 0]
        one._read.add(of)
        assert one.model_lengths([of], [[]], [7]) == [7]  # what is read is read


def reads_after(found: Sequence[Sequence[float]], reading: float) -> bool:
    """Whether a draft model reads a text where retrieval finds nothing, after rounds with these drafts, all right."""
    one, of = planner_of(), row()
    one.costs.reading = lambda tokens: 1e9  # type: ignore[method-assign]
    for known in found:
        assert one.model_lengths([of], [known], [7]) == [0]
        happened(of, len(known), len(known))
        one.observe([of])
    one.costs.reading = lambda tokens: reading  # type: ignore[method-assign]
    return one.model_lengths([of], [[]], [7]) == [7]


def test_a_text_that_retrieval_drafts_is_not_read_for_the_rest_of_it() -> None:
    nothing, found = [[]] * 20, [[0.95, 0.9, 0.9, 0.85]] * 4  # 20 tokens each
    assert reads_after(nothing, 20.0) and not reads_after(found, 20.0)
    assert reads_after(found, 2.0)  # what little it leaves is enough for that


def test_texts_that_retrieval_drafts_say_what_it_leaves_of_the_next() -> None:
    one = planner_of()
    for number in range(40):
        of = row(number)
        happened(of, 6, 6)
        one.observe([of])
    assert one._plan_of(row(50)).share_left < 0.7
    new = row(51)
    for _ in range(30):
        happened(new, 0, 0)
        one.observe([new])
    assert one._plan_of(new).share_left > 0.8  # its own tokens count more


def test_a_text_is_read_now_and_then_though_that_does_not_seem_to_pay() -> None:
    one, read = planner_of(asks_model=True), []
    one.costs.reading = lambda tokens: 1e9  # type: ignore[method-assign]
    for number in range(40):
        of = row(number)
        asked = one.lengths([of])[0]
        read.append(asked > 0)
        happened(of, min(asked, 2), 0, min(asked, 2), MODEL if asked else "")
        of.finish_reason = "stop"
        one.observe([of])
    assert [number for number, is_read in enumerate(read) if is_read] == [3, 11, 27]


def test_a_draft_ends_where_its_row_would_be_ahead_of_those_it_is_awaited_with() -> None:
    one = Planner(
        CostModel(ragged=lambda rows, drafted: rows + drafted, measured=ALONE, together=TOGETHER, max_batch_size=8)
    )
    rows = [row(i) for i in range(8)]
    for of in rows:
        of.tokens += [3] * 150  # the limit is near
        happened(of, 0, 0)
    sure, nothing = [0.95**n for n in range(1, 16)], list[float]()
    alone, all_alike = draft(sure, *[nothing] * 7), draft(*[sure] * 8)
    on_their_own = one.worth_verifying(rows, alone).lengths[0]
    with awaited_together(rows):
        ahead, level = one.worth_verifying(rows, alone).lengths[0], one.worth_verifying(rows, all_alike).lengths
    assert on_their_own > 8 and 0 < ahead < on_their_own / 2
    assert min(level) > 2 * ahead  # what all rows have puts none of them ahead
