"""Whether and how far to draft: what pays is drafted, what does not is left, and tried again now and then."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from slipstream import Draft, SamplingParams
from slipstream.core.loop import draft_lengths
from slipstream.core.rounds import Round, Seconds
from slipstream.core.types import Row
from slipstream.draft_length.acceptance_model import FIRST, DraftNote, DraftYields, Yield, bin_of
from slipstream.draft_length.costs import CostModel
from slipstream.draft_length.planner import DraftController, awaited_together
from slipstream.draft_length.policies import Auto, Heuristic
from slipstream.draft_length.row_history import LATEST, SOONEST, Backoff, LeftToModel

CPU = torch.device("cpu")
numbers = itertools.count()
ALONE = {1: 16.0, 8: 16.0, 32: 40.0}  # milliseconds
TOGETHER = {8: 16.0, 32: 40.0}


def row(index: int = 0, **options: int) -> Row:
    return Row(index, [1, 2], SamplingParams(max_tokens=200, **options), seed=0)


def controller(column: float = 0.05, step: float = 0.25) -> DraftController:
    """A forward costs 1 and `column` for every further token of the batch; a step of the draft model costs `step`."""
    cost_model = CostModel()
    cost_model.verify = lambda rows, longest, drafted=None: 1 + column * (rows * (longest + 1) - 1)  # type: ignore[method-assign]
    cost_model.optimistic = cost_model.verify  # type: ignore[method-assign]
    cost_model.step = lambda rows: step  # type: ignore[method-assign]
    return DraftController(cost_model)


def draft(*acceptance_probs: Sequence[float] | None, lengths: Sequence[int] = ()) -> Draft:
    sizes = [
        len(acceptance_prob) if acceptance_prob is not None else n
        for acceptance_prob, n in itertools.zip_longest(acceptance_probs, lengths, fillvalue=0)
    ]
    made = Draft.from_lists([[3] * n for n in sizes], CPU)
    return Draft(made.tokens, made.lengths, None, acceptance_probs)


def happened(of: Row, drafted: int, kept: int, steps: int = 0, note: object = None) -> None:
    done = Round(0, next(numbers), 1, len(of.tokens), (3,) * drafted, (3,) * (kept + 1), kept, kept < drafted)
    of.rounds.append(
        Round(*[getattr(done, name) for name in list(done.__dataclass_fields__)[:9]], Seconds(), steps, note)
    )
    of.tokens.extend(done.tokens)


def judged(one: DraftController, of: Row, proposed: Draft, *, right: bool) -> int:
    """A round of one row: how much of a draft is verified, all of which then is right or wrong."""
    cut = one.cut([of], proposed)
    length = cut.lengths[0]
    happened(of, length, length if right else 0, note=cut.notes and cut.notes[0])
    one.observe([of])
    return length


def in_vain(one: DraftController, of: Row) -> int:
    """A round of one row for which a draft model drafts at most two tokens, both wrong: how many it was asked for."""
    decision = one.stepping([of])
    asked = decision.lengths[0]
    happened(of, min(asked, 2), 0, min(asked, 2), decision.notes[0])
    one.observe([of])
    return asked


@pytest.mark.parametrize(("column", "kept"), [(0.01, 5), (0.1, 2), (0.8, 0)])
def test_a_retrieval_draft_is_verified_as_far_as_it_pays(column: float, kept: int) -> None:
    cut = controller(column).cut([row()], draft([0.6, 0.3, 0.1, 0.05, 0.02]))
    assert cut.lengths == (kept,) and cut.width == kept


def test_rows_of_a_batch_share_the_width_so_the_sum_of_acceptance_probabilities_counts() -> None:
    acceptance_probs = [0.5, 0.3, 0.2]
    alone = controller(0.3).cut([row()], draft(acceptance_probs)).lengths
    together = (
        controller(0.3)
        .cut([row(i) for i in range(4)], draft(acceptance_probs, [0.9] * 3, [0.9] * 3, [0.9] * 3))
        .lengths
    )
    assert alone[0] < together[0]


def test_rows_of_a_batch_share_what_a_round_may_retrieve() -> None:
    free = controller()
    policy = Auto(free, reproducible_length=3)
    assert [policy.lengths([row(i) for i in range(count)])[0] for count in (1, 2, 4, 8)] == [63, 31, 15, 15]
    free.longest = 7  # no wider forward is allowed
    assert policy.lengths([row(0), row(1)]) == [7, 7]


def test_a_draft_that_does_not_seem_to_pay_is_tried_in_part() -> None:
    dear, of, forty = controller(column=0.9), row(), Draft.from_lists([[3] * 40], CPU)
    assert {judged(dear, of, forty, right=False) for _ in range(60)} == {0, 15}


def test_a_request_that_said_how_many_tokens_gets_them_verified() -> None:
    cut = controller(0.8).cut([row(num_draft_tokens=3), row(1)], draft([0.1] * 3, [0.1] * 3))
    assert cut.lengths == (3, 3)  # the width is paid for, so the other row may use it
    assert controller(0.8).cut([row()], draft([0.1] * 3)).lengths == (0,)


def test_drafts_that_say_nothing_of_a_row_leave_it_whole() -> None:
    assert controller(0.8).cut([row(), row(1)], draft(None, [0.1] * 5, lengths=[2, 5])).lengths == (2, 2)
    sampled_draft = Draft(torch.zeros(1, 3, dtype=torch.int64), (3,), torch.full((1, 3, 4), 0.25))
    assert controller(0.8).cut([row()], sampled_draft) is sampled_draft


def test_retrieval_drafts_without_probabilities_are_judged_by_position() -> None:
    one, of = controller(0.2), row()
    untold = Draft.from_lists([[3] * 6], CPU)
    lengths = []
    for _ in range(40):
        lengths.append(judged(one, of, untold, right=False))
    assert lengths[0] > 0 and sum(n > 0 for n in lengths[-20:]) <= 2
    for _ in range(LATEST + 8):
        lengths.append(judged(one, of, untold, right=True))
    assert lengths[-1] > 0


def test_a_draft_model_that_brings_nothing_is_left_alone() -> None:
    one, of = controller(), row()
    asked = []
    for _ in range(60):
        asked.append(in_vain(one, of))
    assert asked[0] == one.steps
    rested = asked[asked.index(0) :]
    assert set(rested) == {0, 1} and rested.count(1) <= 4
    other = row(1)
    assert one.stepping([other]).lengths == [one.steps]  # a new row gets its chance, for a time


def test_all_rows_teach_what_to_expect_of_a_new_one() -> None:
    one = controller()
    for index in range(12):
        of = row(index)
        for _ in range(30):
            in_vain(one, of)
    assert one.stepping([row(99)]).lengths[0] <= 1


def test_a_draft_model_goes_on_while_another_step_pays() -> None:
    dear, cheap, of = controller(step=0.3), controller(step=0.1), row()
    for sure, costs, extend in ((0.9, dear, True), (0.5, dear, False), (0.5, cheap, True), (0.05, cheap, False)):
        assert costs.another_step([of], [[sure]], 1) is extend
    assert not cheap.another_step([], [], 1)
    chances = [[0.9] * n for n in range(1, 12)]
    assert [cheap.another_step([of], [one], 1) for one in chances] == sorted(
        (cheap.another_step([of], [one], 1) for one in chances), reverse=True
    )


def test_a_step_for_some_rows_has_to_pay_for_the_others_that_wait() -> None:
    one, of = controller(column=0.0, step=0.05), row()
    assert one.another_step([of], [[0.5]], 1) and not one.another_step([of], [[0.5]], 8)
    assert one.another_step([of], [[0.9]], 8)


def test_the_model_is_preferred_for_the_rows_it_serves_better() -> None:
    of = [row(i) for i in range(3)]
    assert controller().prefer_model(of, [[0.9, 0.85, 0.8], [], [0.2]], [7, 7, 7]).lengths == [0, 7, 7]
    assert controller(step=9.0).prefer_model(of, [[0.9, 0.85, 0.8], [], [0.2]], [7, 7, 7]).lengths == [0] * 3
    assert controller().prefer_model(of[:1], [[]], [0]).lengths == [0]


def test_yields_follow_the_row_and_the_rows_together() -> None:
    draft_yields, of = DraftYields(8), row()
    assert draft_yields.of(of) == Yield(*FIRST)
    for _ in range(40):
        happened(of, 6, 5)  # two tokens came from elsewhere
        assert draft_yields.learn(of, DraftNote(8, 4)) == 4
    assert draft_yields.of(of).accepted == pytest.approx(4, abs=0.1) == draft_yields.of(of).drafted
    assert FIRST[1] < draft_yields.of(row(1)).accepted < 4
    assert draft_yields.learn(of, DraftNote()) is None
    assert draft_yields.of(of).cut(2).drafted == pytest.approx(2)


def test_pauses_become_longer_and_end_with_a_success() -> None:
    backoff, of = Backoff(), row()

    def pause() -> int:
        for rounds in itertools.count(1):
            due = backoff.due(of)
            assert backoff.due(of) == due  # asking changes nothing
            backoff.waited(of)
            if due:
                return rounds
        raise AssertionError

    assert [pause() for _ in range(6)] == [SOONEST, 8, 16, 32, LATEST, LATEST]
    backoff.tried(of, 0)
    assert pause() == LATEST
    backoff.tried(of, 1)
    assert pause() == LATEST // 4
    backoff.reset(of)
    assert pause() == SOONEST


def test_the_policy_leaves_sampled_rows_to_reproducible_lengths_where_drafts_are_sampled() -> None:
    sampled = Row(0, [1, 2], SamplingParams(max_tokens=200, temperature=0.7), seed=0)
    policy = Auto(controller(0.8), 6, samples=True, stepwise=True)
    policy.controller.cost_model.step = lambda rows: 9.0  # type: ignore[method-assign]
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
    assert draft_lengths(policy, [row(1, num_draft_tokens=2)]) == [2]


def test_kinds_by_probability() -> None:
    assert [bin_of(chance) for chance in (0.0, 0.049, 0.05, 0.5, 0.9999, 1.0)] == [0, 0, 1, 10, 19, 19]


def test_a_text_is_read_by_the_draft_model_if_that_is_made_up_for() -> None:
    of = row()
    for each, read in ((0.0, True), (1.0, True), (50.0, False)):  # seconds per token, of a text of two tokens
        one = controller()
        one.cost_model.reading = lambda tokens, each=each: tokens * each  # type: ignore[method-assign]
        for _ in range(2):  # asking changes nothing
            assert one.prefer_model([of], [[]], [7]).lengths == [7 if read else 0]
            assert one.stepping([of]).lengths == [one.steps if read else 0]
        one._read.add(of)
        assert one.prefer_model([of], [[]], [7]).lengths == [7]  # what is read is read


def reads_after(found: Sequence[Sequence[float]], reading: float) -> bool:
    """Whether a draft model reads a text where retrieval finds nothing, after rounds with these drafts, all right."""
    one, of = controller(), row()
    one.cost_model.reading = lambda tokens: 1e9  # type: ignore[method-assign]
    for known in found:
        decision = one.prefer_model([of], [known], [7])
        assert decision.lengths == [0]
        happened(of, len(known), len(known), note=decision.notes[0])
        one.observe([of])
    one.cost_model.reading = lambda tokens: reading  # type: ignore[method-assign]
    return one.prefer_model([of], [[]], [7]).lengths == [7]


def test_a_text_that_retrieval_drafts_is_not_read_for_the_rest_of_it() -> None:
    nothing, found = [[]] * 20, [[0.95, 0.9, 0.9, 0.85]] * 4  # 20 tokens each
    assert reads_after(nothing, 20.0) and not reads_after(found, 20.0)
    assert reads_after(found, 2.0)  # what little it leaves is enough for that


def test_what_reading_takes_is_doubted_once_for_a_text_that_stays_unread() -> None:
    one, of, doubts = controller(), row(), list[int]()
    one.cost_model.reading = lambda tokens: 1e9  # type: ignore[method-assign]
    one.cost_model.doubt_drafting = lambda: doubts.append(1)  # type: ignore[method-assign]
    for text, times in ((of, 3), (row(1), 2)):
        for _ in range(times):
            decision = one.prefer_model([text], [[]], [7])
            happened(text, 0, 0, note=decision.notes[0])
            one.observe([text])
    assert len(doubts) == 2


def test_texts_that_retrieval_drafts_say_what_it_leaves_of_the_next() -> None:
    one = LeftToModel()
    assert one.share(row()) == 1.0
    for number in range(40):
        one.learn(row(number), 10, left=False)
    new = row(50)
    assert one.share(new) < 0.1
    for _ in range(10):
        one.learn(new, 4, left=True)
    assert one.share(new) > 0.8  # its own tokens count more


def test_a_draft_model_that_was_left_alone_gets_another_chance_with_later_texts() -> None:
    one = controller()
    one.draft_yields._all = Yield(2.0, 0.1)
    one.cost_model.reading = lambda tokens: 0.1  # type: ignore[method-assign]
    rounds = next(n for n in itertools.count() if in_vain(one, row(n)))
    assert 30 < rounds < 3000


def test_what_a_draft_model_read_in_a_round_is_noted_though_it_has_it_cached_then() -> None:
    one, of = controller(), row()
    cached = list[Row]()
    one.has_cached = lambda asked: asked in cached
    policy = Auto(one, 6, stepwise=True)
    assert policy.lengths([of]) == [one.steps]
    cached.append(of)  # as proposing does
    made = policy.worth_verifying([of], replace(draft([0.9, 0.8]), steps=2))
    assert made.notes is not None and isinstance(made.notes[0], DraftNote)
    assert made.notes[0].reading == len(of.tokens) and made.notes[0].decided == "paid"


def test_a_token_is_useful_by_what_it_costs_beside_a_row() -> None:
    one = DraftController(
        CostModel(ragged=lambda rows, drafted: rows + drafted, measured=ALONE, together=TOGETHER, most=8)
    )
    eight, four = ([row(i) for i in range(count)] for count in (8, 4))
    assert one.least_useful(eight) == pytest.approx([0.5] * 8)  # one more costs 1 ms, a row of eight 2
    assert one.least_useful(four) == pytest.approx([0.0] * 4)  # up to eight cost nothing
    assert controller().least_useful(eight) == [0.0] * 8  # all rows are as wide as the widest


def test_a_draft_ends_where_its_row_would_be_ahead_of_those_it_is_awaited_with() -> None:
    one = DraftController(
        CostModel(ragged=lambda rows, drafted: rows + drafted, measured=ALONE, together=TOGETHER, most=8)
    )
    rows = [row(i) for i in range(8)]
    for of in rows:
        of.tokens += [3] * 150  # the limit is near
        happened(of, 0, 0)
    sure, nothing = [0.95**n for n in range(1, 16)], list[float]()
    alone, all_alike = draft(sure, *[nothing] * 7), draft(*[sure] * 8)
    on_their_own = one.cut(rows, alone).lengths[0]
    with awaited_together(rows):
        ahead, level = one.cut(rows, alone).lengths[0], one.cut(rows, all_alike).lengths
    assert on_their_own > 8 and 0 < ahead < on_their_own / 2
    assert min(level) > 2 * ahead  # what all rows have puts none of them ahead
