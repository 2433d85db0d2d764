"""Trees of the retrieval drafters: what is known after a text, where it may branch, and whose text it stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream import Draft, SamplingParams, SpeculativeDecoder, UsageError, Verdict
from slipstream.core import acceptance
from slipstream.core.rng import Race
from slipstream.core.trees import arranged, match_tree, path_to
from slipstream.core.types import Row
from slipstream.drafters import Setup, load
from slipstream.drafters.ngram_table import NgramTableDrafter
from slipstream.drafters.suffix.automaton import SuffixAutomaton
from slipstream.models.toy import FABLE
from slipstream.sampling.sampler import Sampler
from tests.support.markers import mostly_slow

CPU = torch.device("cpu")
SIZE = 256
PARAMS = SamplingParams(max_tokens=1000)
TWICE = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2]  # after 1 2: 3 twice, 4 once
PROMPTS = [list(FABLE[at : at + 40].encode()) for at in range(0, 500, 60)]
STEADY = settings(max_examples=200)
token_lists = st.integers(2, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), min_size=1, max_size=40))


def row_of(tokens: Sequence[int]) -> Row:
    return Row(0, list(tokens), PARAMS, seed=0)


def made(name: str, siblings: int = 1, *, fixed_tree: bool = False, told: bool = True) -> Any:
    return load(name, Setup(CPU, SIZE, acceptance_probs=told, siblings=siblings, fixed_tree=fixed_tree))


def propose(drafter: Any, row: Row, length: int, *, branching: bool = True) -> Draft:
    sampler = Sampler([row], Race(SIZE, CPU), SIZE, CPU)
    sampler.branching = branching
    draft: Draft = drafter.propose([row], [length], sampler)
    return draft


def paths(draft: Draft) -> list[list[int]]:
    tokens = draft.tokens[0, : draft.lengths[0]].tolist()
    parents = range(-1, len(tokens) - 1) if draft.parents is None else draft.parents[0]
    return [[tokens[node] for node in path_to(parents, at)] for at in range(len(tokens))]


# what is known after a match


def followers(text: Sequence[int], context: Sequence[int]) -> Counter[int]:
    size = len(context)
    return Counter(text[at] for at in range(size, len(text)) if list(text[at - size : at]) == list(context))


def occurrences(text: Sequence[int], context: Sequence[int]) -> int:
    size = len(context)
    return sum(list(text[at - size : at]) == list(context) for at in range(size, len(text) + 1))


@STEADY
@given(token_lists)
def test_what_followed_is_told_from_the_longest_context_down_each_token_once(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.learn(text)
    match = automaton.followed(automaton.end)
    found = [step for step, _ in automaton.alternatives(match, automaton.count(match))]
    told: list[int] = []
    for size in range(match.length, 0, -1):
        context = text[len(text) - size :]
        counted, left = followers(text, context), occurrences(text, context)
        left -= sum(counted[token] for token in told)
        new = {token: n for token, n in counted.items() if token not in told}
        steps = found[len(told) : len(told) + len(new)]
        assert {step.token: step.followed for step in steps} == new
        assert [step.followed for step in steps] == sorted(new.values(), reverse=True)
        for step in steps:
            assert (step.context_length, step.occurrences) == (size, left)
            left -= step.followed
        told += [step.token for step in steps]
    assert len(told) == len(found)


@STEADY
@given(token_lists)
def test_the_first_of_them_is_the_chains_and_leads_where_it_does(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.learn(text)
    match = automaton.followed(automaton.end)
    place = match, automaton.count(match)
    for step, _ in zip(automaton.walk(*place), range(6), strict=False):
        first, after = next(automaton.alternatives(automaton.followed(place[0]), automaton.count(place[0])))
        assert first.token == step.token
        place = after, automaton.count(after)


# where drafts branch


def test_a_suffix_draft_branches_only_where_the_user_spelled_a_tree() -> None:
    assert propose(made("suffix"), row_of(TWICE), 6).parents is None
    found = paths(propose(made("suffix", fixed_tree=True), row_of(TWICE), 6))
    assert found[0] == [3] and [4] in found


@pytest.mark.parametrize("name", ["suffix", "ngram_table"])
def test_a_draft_is_as_long_as_a_chain_where_one_continuation_is_known(name: str) -> None:
    text = [*range(20, 60), *range(20, 30)]
    tree, chain = propose(made(name), row_of(text), 7), propose(made(name, siblings=0), row_of(text), 7)
    assert tree.parents is None and tree.tokens.tolist() == chain.tokens.tolist() == [[*range(30, 37)]]


@pytest.mark.parametrize("name", ["suffix", "ngram_table:fill", "token_recycling"])
def test_no_branches_where_a_request_takes_none(name: str) -> None:
    """It costs no tokens of the chain."""
    alone = propose(made(name), row_of(TWICE), 6, branching=False)
    assert alone.parents is None and alone.lengths[0] == propose(made(name, siblings=0), row_of(TWICE), 6).lengths[0]


def test_a_spelled_shape_is_a_chain_with_leaves() -> None:
    for told in (True, False):
        draft = arranged(propose(made("suffix", fixed_tree=True, told=told), row_of(TWICE), 4))
        assert draft.parents == ((-1, 0, 0, -1),) and draft.tokens.tolist() == [[3, 9, 7, 4]]


def test_a_threshold_of_the_user_keeps_chains() -> None:
    assert propose(made("suffix:p=5"), row_of(TWICE), 6).parents is None
    with pytest.raises(UsageError, match="drafter='suffix:p=5' with a tree; allowed: arguments other than p=PERCENT"):
        made("suffix:p=5", fixed_tree=True)


def test_a_branch_that_came_true_is_believed_more() -> None:
    def beside(row: Row, drafter: Any) -> float:
        draft = propose(drafter, row, 8)
        return max(
            p for path, p in zip(paths(draft), (draft.acceptance_probs or ((),))[0] or (), strict=True) if path == [4]
        )

    drafter, row = made("suffix", fixed_tree=True), row_of(TWICE)
    before = beside(row, drafter)
    for _ in range(3):  # 3 is drafted, 4 comes, and 3 so that it stays the likelier
        row.tokens += [4, 6, 5, 1, 2]
        propose(drafter, row, 6)
        row.tokens += [3, 6, 5, 1, 2]
        propose(drafter, row, 6)
    assert beside(row, drafter) > before


def told(drafter: NgramTableDrafter, row: Row, draft: Draft, rankings: list[list[int]], verdict: Verdict) -> None:
    logits = torch.zeros(1, len(rankings), SIZE)
    for place, ranking in enumerate(rankings):
        logits[0, place, ranking] = torch.arange(len(ranking), 0, -1.0)
    drafter.observe([row], draft, logits, verdict)


def test_a_filled_draft_branches_into_what_the_target_ranked() -> None:
    drafter, row = made("ngram_table:fill"), row_of([1, 2, 3])
    assert propose(drafter, row, 4).lengths == (0,)
    told(drafter, row, Draft.empty(1, CPU), [[7, 8, 9]], Verdict(torch.tensor([0]), torch.tensor([7])))
    assert paths(propose(drafter, row, 4)) == [[7], [8], [9]]


def test_a_filling_table_learns_along_the_accepted_branch() -> None:
    drafter, row = made("ngram_table:fill"), row_of([1, 2])
    propose(drafter, row, 4)
    tree = Draft(torch.tensor([[7, 8, 5]]), (3,), parents=((-1, -1, 1),))
    verdict = Verdict(torch.tensor([2]), torch.tensor([6]), torch.tensor([[1, 2]]))
    told(drafter, row, tree, [[8], [20], [5], [6]], verdict)  # after 2, 7, 8 and 5
    row.tokens += [8, 5, 6, 8]
    assert paths(propose(drafter, row, 1)) == [[5]]
    row.tokens += [9, 7]
    assert propose(drafter, row, 1).lengths == (0,)  # behind 7, which was rejected, nothing was learned


# the text stays the target's


def texts_of(drafter: str, batch: int, params: list[SamplingParams], count: int | str) -> tuple[list[list[int]], int]:
    decoder = SpeculativeDecoder(
        "toy", drafter=drafter, num_draft_tokens=count, max_batch_size=batch, acceptance="match"
    )
    results = decoder.generate(PROMPTS, params)
    return [one.token_ids for one in results], sum(done.parents is not None for one in results for done in one.rounds)


def params_of(temperature: float) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, seed=i, max_tokens=60) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("drafter", "count"),
    mostly_slow([(name, n) for name in ("suffix", "ngram_table:fill") for n in ("auto", "3x3")], ("suffix", "3x3")),
)
def test_texts_are_those_of_plain_decoding(drafter: str, count: int | str, temperature: float) -> None:
    params = params_of(temperature)
    plain = SpeculativeDecoder("toy", drafter="none").generate(PROMPTS, params)
    for batch in (1, 3):
        texts, trees = texts_of(drafter, batch, params, count)
        assert texts == [one.token_ids for one in plain]
        # costs decide about "auto", and three such trees need not fit the forwards that agree bit for bit
        assert trees or count == "auto" or batch > 1


def test_a_walk_that_leaves_the_targets_choice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_child(choice: Tensor, draft: Draft) -> tuple[Tensor, Tensor, Tensor]:
        accepted, _, path = match_tree(choice, draft)
        return accepted.clamp(min=1), choice[:, 1], path.clamp(min=0)

    plain = SpeculativeDecoder("toy", drafter="none").generate(PROMPTS, params_of(0.9))
    monkeypatch.setattr(acceptance, "match_tree", first_child)
    assert texts_of("suffix", 3, params_of(0.9), "3x3")[0] != [one.token_ids for one in plain]
