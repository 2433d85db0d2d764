"""Drafters that propose trees: which siblings stand beside their tokens, and that no text changes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.bench.records import compact
from slipstream.bench.report.report_data import restored
from slipstream.core.rng import Race, Stream
from slipstream.core.rounds import Round, RowDraft
from slipstream.core.session import Session
from slipstream.core.trees import arranged, path_to
from slipstream.core.types import Draft, Row, Verdict
from slipstream.draft_length.acceptance_model import ModelDrafts, bin_of, sibling_bin
from slipstream.draft_length.choice import LengthChoice
from slipstream.drafters import Setup, load
from slipstream.drafters.model.model_drafter import comb
from slipstream.drafters.token_recycling import TokenRecyclingDrafter
from slipstream.models.toy import VOCAB_SIZE, ToyBackend, load_toy
from slipstream.sampling.sampler import Sampler
from slipstream.text.results import Stats
from slipstream.text.round_view import views
from tests.support.markers import mostly_exhaustive
from tests.support.tiny_models import fresh, perturbed, prompts, shared
from tests.support.vocabularies import decoder_of, fable_model

CPU = torch.device("cpu")
RACE = Race(VOCAB_SIZE, CPU)
PROMPTS = [list(range(3 + i, 16 + 2 * i)) for i in range(4)]
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
OPTIONS = {
    "greedy": GREEDY,
    "sampled": replace(GREEDY, temperature=0.9, seed=3),
    "penalised": replace(GREEDY, temperature=0.6, repetition_penalty=1.3, seed=3),
}


BRANCHING = ("model", "hybrid", "token_recycling", "suffix", "ngram_table:fill")


@cache
def decoder() -> SpeculativeDecoder:
    target, draft = fresh("llama"), perturbed("llama", 0.3)
    return SpeculativeDecoder(target, draft, drafter="none", acceptance="match", fast=True, max_batch_size=4)


@cache
def plain_texts(options: str) -> list[list[int]]:
    return [result.token_ids for result in decoder().generate(PROMPTS, OPTIONS[options])]


COUNTS = ("auto", "chain", 6, "3x2", "2x4")
DRAFTED = [(name, n, way) for name in BRANCHING for n in COUNTS for way in (OPTIONS if n == "3x2" else ("sampled",))]
OF_THE_MODEL = [("model", "3x2", "greedy"), ("model", "3x2", "penalised"), ("model", "auto", "sampled")]
OF_EACH_DRAFTER = [(name, "3x2", "sampled") for name in BRANCHING]


@pytest.mark.slow
@pytest.mark.usefixtures("cache_audit")
@pytest.mark.parametrize(("drafter", "count", "options"), mostly_exhaustive(DRAFTED, *OF_THE_MODEL, *OF_EACH_DRAFTER))
def test_drafts_with_branches_change_no_text(drafter: str, count: int | str, options: str) -> None:
    branching = decoder().using(drafter, num_draft_tokens=count)
    results = branching.generate(PROMPTS, OPTIONS[options])
    assert [result.token_ids for result in results] == plain_texts(options)
    trees = [round for result in results for round in result.rounds if round.parents is not None]
    assert bool(trees) or count in ("auto", "chain", 6)
    if count in ("chain", 6):
        assert not trees


@pytest.mark.slow
def test_trees_accept_more_tokens_per_round_the_more_siblings_they_have() -> None:
    def accepted(count: int | str) -> float:
        results = decoder().using("model", num_draft_tokens=count).generate(PROMPTS, OPTIONS["sampled"])
        return sum(result.stats.num_accepted_tokens for result in results) / sum(
            result.stats.num_rounds for result in results
        )

    assert accepted("3x4") > accepted("3x2") > accepted(3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_siblings_are_the_runners_up_of_the_targets_race(temperature: float) -> None:
    """The children of a node are the first places of a sort by speed."""
    session = Session(ToyBackend(2))
    session.reserve(1, 300)
    row = Row(0, list(b"The heron was s"), SamplingParams(temperature=temperature, max_tokens=99), seed=5)
    sampler = Sampler([row], RACE, VOCAB_SIZE, CPU)
    drafter = load("model", Setup(CPU, VOCAB_SIZE, session, coupled=True, siblings=3, fixed_tree=True))
    with torch.inference_mode():
        draft = drafter.propose([row], [8], sampler)
        chain = draft.tokens[:, [0, 1]]
        logits = session.score([row], chain, [2])[0]
    assert draft.parents == ((-1, 0, -1, -1, -1, 0, 0, 0),)
    for depth in range(2):
        probs = (logits[depth].float() / (temperature or 1)).softmax(-1)
        key = RACE.bits(sampler._keys(Stream.TOKEN, range(depth, depth + 1)))[0, 0]
        speed = probs / RACE.noise(int(key)) if temperature else probs
        children = [node for node, parent in enumerate(draft.parents[0]) if parent == depth - 1]
        assert draft.tokens[0, children].tolist() == speed.topk(4).indices.tolist()


@pytest.mark.slow
def test_a_spelled_tree_counts_its_siblings_as_draft_tokens() -> None:
    assert LengthChoice.parse("4x2") == LengthChoice("fixed", 8, siblings=1)
    assert LengthChoice.parse("auto").siblings == -1 and LengthChoice.parse("chain") == LengthChoice("auto")
    results = decoder().using("model", num_draft_tokens="3x2").generate(PROMPTS, GREEDY)
    first = [result.rounds[1] for result in results]
    assert {(round.num_draft_tokens, round.num_levels, round.num_draft_steps) for round in first} == {(6, 3, 3)}


@pytest.mark.parametrize(
    ("drafter", "options", "message"),
    [
        (
            "ngram",
            {},
            "num_draft_tokens='4x2' with drafter='ngram'; allowed: trees with drafters hybrid, model, ngram_t",
        ),
        ("model", {"acceptance": "block"}, "with acceptance='block'; allowed: trees with acceptance 'match' or 'auto'"),
    ],
)
def test_trees_are_refused_for_chain_drafters_and_other_rules(
    drafter: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as error:
        decoder().using(drafter, num_draft_tokens="4x2", **options)
    assert message in str(error.value)


@pytest.mark.slow
def test_trees_are_refused_where_forwards_or_draft_models_take_none() -> None:
    with pytest.raises(UsageError, match="num_draft_tokens='40x9', a tree of 360 tokens; allowed: at most"):
        decoder().using("model", num_draft_tokens="40x9")
    decoder_of_chains = SpeculativeDecoder(shared("llama"), perturbed("llama"), drafter="model", reproducible=True)
    with pytest.raises(UsageError, match="'4x2' with a target whose forwards take no trees; allowed: a number of"):
        decoder_of_chains.using("model", num_draft_tokens="4x2")
    assert decoder_of_chains.generate(PROMPTS[0], GREEDY).token_ids  # auto then drafts chains
    other_vocabulary = decoder_of(load_toy("toy"), fable_model("bytes"), drafter="model")
    with pytest.raises(UsageError, match="'4x2' with a draft model of another vocabulary; allowed: a number of"):
        other_vocabulary.using("model", num_draft_tokens="4x2")
    with pytest.raises(UsageError, match="drafter='model:p=40' with a tree; allowed: 'model'"):
        decoder().using("model:p=40", num_draft_tokens="4x2")


def test_nodes_are_sorted_by_probability_with_the_chain_before_its_siblings() -> None:
    tokens, parents, probs = comb([5, 6, 7], [0.9, 0.5, 0.1], [(0, 1, 0.06), (1, 2, 0.3), (2, 3, 0.2)])
    assert tokens == [5, 6, 2, 7, 3, 1] and parents == [-1, 0, 0, 1, 1, -1]
    assert probs == [0.9, 0.5, 0.3, 0.1, 0.1, 0.06]
    assert comb([8], [0.2], [(0, 4, 0.7)]) == ([8, 4], [-1, -1], [0.2, 0.2])
    tree = replace(Draft.from_lists([tokens], CPU, [probs]), parents=(tuple(parents),))
    assert arranged(tree.cut([3])).tokens.tolist() == [[5, 6, 2]]
    assert comb([5, 6], [0.9, 0.5], [])[1] == [-1, 0]


def test_trees_of_token_recycling_grow_where_tokens_are_likely() -> None:
    drafter, row = TokenRecyclingDrafter(VOCAB_SIZE, branches=2), Row(0, [1, 2], GREEDY, seed=0)
    for token, ranking in ((2, [7, 8, 9]), (8, [5, 6]), (7, [3])):
        for _ in range(3):
            logits = torch.full((1, 1, VOCAB_SIZE), -9.0)
            logits[0, 0, ranking] = -torch.arange(len(ranking)).float()
            taught = Row(1, [4, token], GREEDY, seed=0)
            drafter.observe([taught], Draft.empty(1, CPU), logits, Verdict(torch.tensor([0]), torch.tensor([0])))
    draft = arranged(drafter.propose([row], [6], Sampler([row], RACE, VOCAB_SIZE, CPU)))
    assert draft.parents is not None
    paths = [[draft.tokens[0, n].item() for n in path_to(draft.parents[0], node)] for node in range(draft.lengths[0])]
    assert paths[:2] == [[7], [7, 3]] and [8] in paths and [8, 5] in paths and [9] in paths
    chain = TokenRecyclingDrafter(VOCAB_SIZE).propose([row], [6], Sampler([row], RACE, VOCAB_SIZE, CPU))
    assert chain.parents is None


def test_token_recycling_learns_after_every_node_of_a_tree() -> None:
    drafter = TokenRecyclingDrafter(VOCAB_SIZE)
    row, tree = Row(0, [1, 2], GREEDY, seed=0), Draft.from_lists([[7, 8, 5]], CPU)
    tree = replace(tree, parents=((-1, -1, 1),))  # either 7, or 8 followed by 5
    logits = torch.full((1, 4, VOCAB_SIZE), -9.0)
    for place, following in enumerate((8, 3, 5, 6)):
        logits[0, place, following] = 0.0
    drafter.observe([row], tree, logits, Verdict(torch.tensor([2]), torch.tensor([6]), torch.tensor([[1, 2]])))
    drafts = {token: drafter.propose([Row(1, [9, token], GREEDY, seed=0)], [1], _sampler()) for token in (7, 8, 5)}
    assert {token: draft.tokens.tolist() for token, draft in drafts.items()} == {7: [[3]], 8: [[5]], 5: [[6]]}


def _sampler() -> Sampler:
    return Sampler([Row(1, [9], GREEDY, seed=0)], RACE, VOCAB_SIZE, CPU)


@pytest.mark.slow
def test_statistics_count_depths_and_the_view_shows_accepted_branches() -> None:
    result = decoder().using("model", num_draft_tokens="3x4").generate(PROMPTS[1], OPTIONS["sampled"])
    stats = Stats.of(result.rounds)
    assert len(stats.drafted_per_position) == 3 and stats.accepted_per_position[0] <= stats.drafted_per_position[0]
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens
    round_views = list(views(result.rounds, None))
    pieces = [piece for view in round_views for piece in view.pieces]
    branched = sum(len(round.path or ()) - round.num_accepted_on_chain for round in result.rounds)
    assert sum(piece.kind == "branch" for piece in pieces) == branched > 0
    # as a report restores it
    restored_rounds = restored([compact(round) for round in result.rounds], result.rounds[0].row, 1)
    assert [(round.parents, round.path) for round in restored_rounds] == [
        (round.parents, round.path) for round in result.rounds
    ]
    assert sum(piece.kind == "rejected" for piece in pieces) == stats.num_draft_tokens - stats.num_accepted_tokens


def test_the_probability_of_a_runner_up_is_learned() -> None:
    learned, row = ModelDrafts(8), Row(0, [1], GREEDY, seed=0)
    before = learned.runner_up_probs(row, [0.5], [0.2])[0]
    assert before == pytest.approx(0.475 * 0.425, abs=0.1)
    origin = RowDraft("model", None, (bin_of(0.5),), ((9, sibling_bin(0.5, 0.2)),))
    for _ in range(40):  # the draft is 8 with the sibling 9; the text has 9
        row.rounds.append(Round(0, 0, 1, 1, (8, 9), (9, 4), 1, False, origin=origin, parents=(-1, -1), path=(1,)))
        learned.learn(row, row.rounds[-1])
    drafted, runner_up = learned.acceptance_probs(row, [0.5])[0], learned.runner_up_probs(row, [0.5], [0.2])[0]
    assert drafted < 0.2 and runner_up > 0.7


@pytest.mark.slow
def test_a_tree_takes_no_more_rounds_than_its_chain() -> None:
    models = fresh("llama"), fresh("llama")  # a draft model that is always right
    chain = SpeculativeDecoder(*models, drafter="model", num_draft_tokens=4, fast=True)
    tree = chain.using("model", num_draft_tokens="4x2")
    for max_tokens in (11, 12):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        with_chain, with_tree = (decoder.generate(prompts((9,))[0], params) for decoder in (chain, tree))
        assert with_tree.token_ids == with_chain.token_ids
        assert len(with_tree.rounds) == len(with_chain.rounds)
        assert any(round.parents for round in with_tree.rounds)
        for round in with_tree.rounds:
            assert len(round.draft) <= max(0, max_tokens + 9 - round.start - 1)
