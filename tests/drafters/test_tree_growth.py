"""Trees grown from the likeliest nodes, and what the acceptance model learns from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
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
from slipstream.draft_length.acceptance_model import AcceptanceModel
from slipstream.drafters import Setup, load
from slipstream.drafters._tree_growth import (
    MAX_GROUPS,
    UNLIKELY,
    Alternatives,
    Follower,
    LearnedByGroup,
    Node,
    grown,
    learn,
)
from slipstream.drafters.ngram_table import NgramTableDrafter
from slipstream.drafters.suffix.automaton import SuffixAutomaton
from slipstream.models.toy import FABLE
from slipstream.sampling.sampler import Sampler
from tests.support.markers import mostly_exhaustive

STEADY = settings(max_examples=200)
DEPTH = 4  # paths end there
Path = tuple[int, ...]
shares = st.lists(st.floats(0.01, 0.99), min_size=1, max_size=3)


def likely(chances: list[list[float]], path: Path, prob: float) -> Iterator[Follower]:
    """Tokens 0, 1, ... after each path, with the chances given for its depth."""
    if len(path) < DEPTH:
        at_most = prob
        for token, chance in enumerate(chances[len(path)]):
            at_most = min(at_most, prob * chance)
            yield Follower(token, 0, at_most, (*path, token))


def everything(chances: list[list[float]], path: Path = (), prob: float = 1.0) -> Iterator[tuple[Path, float]]:
    for follower in likely(chances, path, prob):
        yield follower.place, follower.prob
        yield from everything(chances, follower.place, follower.prob)


@pytest.mark.slow
@STEADY
@given(st.lists(shares, min_size=DEPTH, max_size=DEPTH), st.integers(1, 20))
def test_a_tree_consists_of_the_likeliest_nodes(chances: list[list[float]], length: int) -> None:
    nodes, prob_of_path = grown(lambda path, prob: likely(chances, path, prob), (), length), dict(everything(chances))
    probs = sorted((prob for prob in prob_of_path.values() if prob >= UNLIKELY), reverse=True)
    assert [node.prob for node in nodes] == probs[:length]
    paths: list[Path] = []
    for node in nodes:
        paths.append((*(paths[node.parent] if node.parent >= 0 else ()), node.token))
    assert len(set(paths)) == len(paths) and [prob_of_path[path] for path in paths] == [node.prob for node in nodes]


def test_a_tree_of_a_given_shape_is_a_chain_with_leaves() -> None:
    nodes = grown(lambda path, prob: likely([[0.5, 0.4]] * DEPTH, path, prob), (), 6, deepest=3)
    assert [(node.parent, node.token) for node in nodes] == [(-1, 0), (-1, 1), (0, 0), (0, 1), (2, 0), (2, 1)]


def test_chances_of_runners_up_are_shares_of_the_remaining_probability() -> None:
    chances = {0: 0.5, 1: 0.4, 2: 0.9}
    ranked = [(7, 0, "a"), (8, 0, "b"), (9, 0, "c")]
    followers = [*Alternatives(chances.__getitem__, 3, 1, ranks=3).followers(ranked, 0.8)]
    assert [follower.token for follower in followers] == [7, 8, 9]
    assert [follower.kind for follower in followers] == [0, 1, 2]
    # the last would be 0.24 * 0.9, but none exceeds the one before
    assert [round(follower.prob, 3) for follower in followers] == [0.4, 0.16, 0.16]
    assert len([*Alternatives(chances.__getitem__, 2, 1, ranks=2).followers(ranked, 0.8)]) == 2
    # too little probability is left for a second
    assert len([*Alternatives({0: 0.95, 1: 0.5}.__getitem__, 3, 1, ranks=2).followers(ranked, 0.8)]) == 1


def test_a_tree_teaches_along_the_accepted_path_up_to_its_first_wrong_token() -> None:
    model, row = AcceptanceModel([0.5] * 4, shared=True), Row(0, [1], SamplingParams(), seed=0)
    nodes = [Node(-1, 5, 0, 0.5), Node(-1, 6, 1, 0.25), Node(0, 7, 2, 0.2), Node(1, 8, 3, 0.1)]
    fresh = Row(1, [1], SamplingParams(), seed=0)
    row.tokens += [6, 9]
    learn(model, row, 1, nodes)
    wrong, right, unreached, next_wrong = (model.chance(fresh, kind) for kind in range(4))
    assert wrong < 0.5 < right and next_wrong < 0.5 and unreached == 0.5


PROMPT = "zq zq the wind"  # does not predict the output


def make_decoder(drafter: str) -> SpeculativeDecoder:
    return SpeculativeDecoder("toy", drafter=drafter, num_draft_tokens=6)


def drafted(decoder: SpeculativeDecoder, group: str) -> int:
    """Tokens accepted in a text of this group."""
    row: Row = decoder.rows([PROMPT], SamplingParams(max_tokens=60), chat=False)[0]
    row.group = group
    return sum(round.num_accepted_tokens for round in decoder.run([row]))


@pytest.mark.parametrize("drafter", ["suffix", "token_recycling"])
def test_texts_of_another_group_are_not_drafted_from(drafter: str) -> None:
    decoder = make_decoder(drafter)
    first = drafted(decoder, "ann")
    assert drafted(decoder, "ann") > first  # it has learned
    assert drafted(decoder, "bob") == first == drafted(decoder, "") == drafted(make_decoder(drafter), "bob")
    decoder.forget_learned()
    assert drafted(decoder, "ann") == first


def test_only_texts_of_the_default_group_are_saved(tmp_path: Any) -> None:
    decoder = make_decoder("suffix")
    drafted(decoder, "ann")
    drafter: Any = decoder.drafter
    assert drafter.num_stored_tokens == 0
    drafted(decoder, "")
    assert drafter.num_stored_tokens > 60


def test_tokens_cached_for_another_group_are_read_again() -> None:
    decoder = make_decoder("none")

    def read(group: str) -> int:
        before = decoder.num_prefilled_tokens
        row = decoder.rows([PROMPT * 9], SamplingParams(max_tokens=2), chat=False)[0]
        row.group = group
        list(decoder.run([row]))
        return decoder.num_prefilled_tokens - before

    whole = read("ann")
    assert read("ann") < whole // 4 and read("bob") == whole == read("ann")


def test_the_least_recently_used_group_is_forgotten_but_never_the_default() -> None:
    stores: LearnedByGroup[list[int]] = LearnedByGroup(list)
    stores.of("").append(1)
    stores.of("first").append(1)
    stores.of("second").append(1)
    stores.of("first")
    for number in range(MAX_GROUPS - 1):
        stores.of(f"other {number}")
    assert stores.of("first") and stores.of("") and not stores.of("second")


CPU = torch.device("cpu")
SIZE = 256
PARAMS = SamplingParams(max_tokens=1000)
TWICE = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2]  # after 1 2: 3 twice, 4 once
PROMPTS = [list(FABLE[start : start + 40].encode()) for start in range(0, 500, 60)]
token_lists = st.integers(2, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), min_size=1, max_size=40))


def row_of(tokens: Sequence[int]) -> Row:
    return Row(0, list(tokens), PARAMS, seed=0)


def drafter_of(name: str, siblings: int = 1, *, fixed_tree: bool = False, acceptance_probs: bool = True) -> Any:
    return load(name, Setup(CPU, SIZE, acceptance_probs=acceptance_probs, siblings=siblings, fixed_tree=fixed_tree))


def propose(drafter: Any, row: Row, length: int, *, branching: bool = True) -> Draft:
    sampler = Sampler([row], Race(SIZE, CPU), SIZE, CPU)
    sampler.branching = branching
    draft: Draft = drafter.propose([row], [length], sampler)
    return draft


def paths(draft: Draft) -> list[list[int]]:
    tokens = draft.tokens[0, : draft.lengths[0]].tolist()
    parents = range(-1, len(tokens) - 1) if draft.parents is None else draft.parents[0]
    return [[tokens[i] for i in path_to(parents, node)] for node in range(len(tokens))]


# continuations after a match


def followers(text: Sequence[int], context: Sequence[int]) -> Counter[int]:
    size = len(context)
    return Counter(text[i] for i in range(size, len(text)) if list(text[i - size : i]) == list(context))


def occurrences(text: Sequence[int], context: Sequence[int]) -> int:
    size = len(context)
    return sum(list(text[i - size : i]) == list(context) for i in range(size, len(text) + 1))


@pytest.mark.slow
@STEADY
@given(token_lists)
def test_alternatives_go_from_the_longest_context_down_and_name_each_token_once(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.learn(text)
    match = automaton.followed(automaton.end)
    continuations = [step for step, _ in automaton.alternatives(match, automaton.count(match))]
    tokens_so_far: list[int] = []
    for size in range(match.length, 0, -1):
        context = text[len(text) - size :]
        counts, occurrences_left = followers(text, context), occurrences(text, context)
        occurrences_left -= sum(counts[token] for token in tokens_so_far)
        new = {token: n for token, n in counts.items() if token not in tokens_so_far}
        steps = continuations[len(tokens_so_far) : len(tokens_so_far) + len(new)]
        assert {step.token: step.followed for step in steps} == new
        assert [step.followed for step in steps] == sorted(new.values(), reverse=True)
        for step in steps:
            assert (step.context_length, step.occurrences) == (size, occurrences_left)
            occurrences_left -= step.followed
        tokens_so_far += [step.token for step in steps]
    assert len(tokens_so_far) == len(continuations)


@pytest.mark.slow
@STEADY
@given(token_lists)
def test_the_first_alternative_is_the_next_token_of_the_chain(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.learn(text)
    match = automaton.followed(automaton.end)
    state = match, automaton.count(match)
    for step, _ in zip(automaton.walk(*state), range(6), strict=False):
        first, after = next(automaton.alternatives(automaton.followed(state[0]), automaton.count(state[0])))
        assert first.token == step.token
        state = after, automaton.count(after)


# where drafts branch


def test_a_suffix_draft_branches_only_where_the_user_spelled_a_tree() -> None:
    assert propose(drafter_of("suffix"), row_of(TWICE), 6).parents is None
    tree_paths = paths(propose(drafter_of("suffix", fixed_tree=True), row_of(TWICE), 6))
    assert tree_paths[0] == [3] and [4] in tree_paths


@pytest.mark.parametrize("name", ["suffix", "ngram_table"])
def test_a_draft_with_one_known_continuation_is_a_whole_chain(name: str) -> None:
    text = [*range(20, 60), *range(20, 30)]
    tree, chain = propose(drafter_of(name), row_of(text), 7), propose(drafter_of(name, siblings=0), row_of(text), 7)
    assert tree.parents is None and tree.tokens.tolist() == chain.tokens.tolist() == [[*range(30, 37)]]


@pytest.mark.parametrize("name", ["suffix", "ngram_table:fill", "token_recycling"])
def test_a_request_that_takes_no_branches_gets_a_whole_chain(name: str) -> None:
    """Leaving out branches does not shorten the chain."""
    alone = propose(drafter_of(name), row_of(TWICE), 6, branching=False)
    assert alone.parents is None
    assert alone.lengths[0] == propose(drafter_of(name, siblings=0), row_of(TWICE), 6).lengths[0]


def test_a_spelled_tree_is_a_chain_with_leaves() -> None:
    for acceptance_probs in (True, False):
        draft = arranged(
            propose(drafter_of("suffix", fixed_tree=True, acceptance_probs=acceptance_probs), row_of(TWICE), 4)
        )
        assert draft.parents == ((-1, 0, 0, -1),) and draft.tokens.tolist() == [[3, 9, 7, 4]]


def test_a_threshold_in_the_drafters_name_keeps_drafts_chains() -> None:
    assert propose(drafter_of("suffix:p=5"), row_of(TWICE), 6).parents is None
    with pytest.raises(UsageError, match="drafter='suffix:p=5' with a tree; allowed: arguments other than p=PERCENT"):
        drafter_of("suffix:p=5", fixed_tree=True)


def test_an_accepted_branch_becomes_more_probable() -> None:
    def branch_probability(row: Row, drafter: Any) -> float:
        draft = propose(drafter, row, 8)
        return max(
            p for path, p in zip(paths(draft), (draft.acceptance_probs or ((),))[0] or (), strict=True) if path == [4]
        )

    drafter, row = drafter_of("suffix", fixed_tree=True), row_of(TWICE)
    before = branch_probability(row, drafter)
    for _ in range(3):  # 3 is drafted and 4 accepted, then 3 so that it stays likelier
        row.tokens += [4, 6, 5, 1, 2]
        propose(drafter, row, 6)
        row.tokens += [3, 6, 5, 1, 2]
        propose(drafter, row, 6)
    assert branch_probability(row, drafter) > before


def observe_round(
    drafter: NgramTableDrafter, row: Row, draft: Draft, rankings: list[list[int]], verdict: Verdict
) -> None:
    logits = torch.zeros(1, len(rankings), SIZE)
    for place, ranking in enumerate(rankings):
        logits[0, place, ranking] = torch.arange(len(ranking), 0, -1.0)
    drafter.observe([row], draft, logits, verdict)


def test_a_filled_draft_branches_into_the_tokens_the_target_ranked_highest() -> None:
    drafter, row = drafter_of("ngram_table:fill"), row_of([1, 2, 3])
    assert propose(drafter, row, 4).lengths == (0,)
    observe_round(drafter, row, Draft.empty(1, CPU), [[7, 8, 9]], Verdict(torch.tensor([0]), torch.tensor([7])))
    assert paths(propose(drafter, row, 4)) == [[7], [8], [9]]


def test_a_filling_table_learns_along_the_accepted_branch() -> None:
    drafter, row = drafter_of("ngram_table:fill"), row_of([1, 2])
    propose(drafter, row, 4)
    tree = Draft(torch.tensor([[7, 8, 5]]), (3,), parents=((-1, -1, 1),))
    verdict = Verdict(torch.tensor([2]), torch.tensor([6]), torch.tensor([[1, 2]]))
    observe_round(drafter, row, tree, [[8], [20], [5], [6]], verdict)  # after 2, 7, 8 and 5
    row.tokens += [8, 5, 6, 8]
    assert paths(propose(drafter, row, 1)) == [[5]]
    row.tokens += [9, 7]
    assert propose(drafter, row, 1).lengths == (0,)  # nothing was learned after 7, which was rejected


# the text stays the target's


def texts_of(drafter: str, batch: int, params: list[SamplingParams], count: int | str) -> tuple[list[list[int]], int]:
    decoder = SpeculativeDecoder(
        "toy", drafter=drafter, num_draft_tokens=count, max_batch_size=batch, acceptance="match"
    )
    results = decoder.generate(PROMPTS, params)
    return [result.token_ids for result in results], sum(
        round.parents is not None for result in results for round in result.rounds
    )


def params_of(temperature: float) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, seed=i, max_tokens=60) for i in range(len(PROMPTS))]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("drafter", "count"),
    [
        *[("suffix", "3x3"), ("ngram_table:fill", "auto")],
        *mostly_exhaustive([("suffix", "auto"), ("ngram_table:fill", "3x3")]),
    ],
)
def test_texts_are_those_of_plain_decoding(drafter: str, count: int | str, temperature: float) -> None:
    params = params_of(temperature)
    plain = SpeculativeDecoder("toy", drafter="none").generate(PROMPTS, params)
    for batch in (1, 3):
        texts, trees = texts_of(drafter, batch, params, count)
        assert texts == [result.token_ids for result in plain]
        # "auto" may find that trees do not pay, and trees of three rows need not fit a reproducible forward
        assert trees or count == "auto" or batch > 1


@pytest.mark.slow
def test_accepting_a_branch_the_target_did_not_choose_changes_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_child(choice: Tensor, draft: Draft) -> tuple[Tensor, Tensor, Tensor]:
        accepted, _, path = match_tree(choice, draft)
        return accepted.clamp(min=1), choice[:, 1], path.clamp(min=0)

    plain = SpeculativeDecoder("toy", drafter="none").generate(PROMPTS, params_of(0.9))
    monkeypatch.setattr(acceptance, "match_tree", first_child)
    assert texts_of("suffix", 3, params_of(0.9), "3x3")[0] != [result.token_ids for result in plain]
