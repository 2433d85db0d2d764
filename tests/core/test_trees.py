"""Draft trees: the text is that of plain decoding whatever tree is proposed; injected faults change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream import Draft, SamplingParams, SpeculativeDecoder, UsageError
from slipstream.core import kv_slots, session
from slipstream.core.rounds import depths
from slipstream.core.trees import TreeSegment, arranged, chain_lengths, main_chain, match_tree, segments_of
from slipstream.core.types import Row
from slipstream.models.cpu.kernel_libraries import kernels
from slipstream.models.hf.backend import HFBackend
from slipstream.models.toy import VOCAB_SIZE
from slipstream.sampling.sampler import Sampler
from tests.support.markers import mostly_exhaustive, mostly_slow, subcases
from tests.support.tiny_models import fresh, shared

RIGHT, DEEPER = 0.6, 0.5  # chances that a node continues a right path rightly, and that it follows the previous node


@dataclass
class RandomTrees:
    """Proposes trees in which a random beginning of the row's continuation is a path.

    texts: prompt -> its text. ordered: parents before their children.
    """

    texts: Mapping[tuple[int, ...], Sequence[int]]
    vocab_size: int
    seed: int = 0
    ordered: bool = False
    rows: set[Row] = field(default_factory=set)
    _random: Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        self.rows.update(rows)
        trees = [self._tree(row, length) for row, length in zip(rows, lengths, strict=True)]
        draft = Draft.from_lists([tokens for tokens, _ in trees], sampler.device)
        parents = tuple(tuple(parents) for _, parents in trees)
        return Draft(draft.tokens, draft.lengths, parents=parents)

    @property
    def verified(self) -> int:
        """The number of trees whose accepted tokens had to be moved to their positions."""
        rounds = [round for row in self.rows for round in row.rounds if round.path is not None]
        return sum(len(round.path or ()) > round.num_accepted_on_chain for round in rounds)

    def _tree(self, row: Row, length: int) -> tuple[list[int], list[int]]:
        continuation = self.texts[tuple(row.tokens[: row.prompt_length])][row.num_output_tokens :]
        tokens, parents, right = list[int](), list[int](), [0]  # right: depth up to which a node's path is right, or -1
        for node in range(length):
            parent = node - 1 if self._random.random() < DEEPER else self._random.randrange(-1, node)
            depth, token = right[parent + 1], self._random.randrange(self.vocab_size)
            if 0 <= depth < len(continuation) and self._random.random() < RIGHT:
                token = continuation[depth]
            tokens.append(token)
            parents.append(parent)
            right.append(depth + 1 if 0 <= depth < len(continuation) and token == continuation[depth] else -1)
        if self.ordered:
            return tokens, parents
        places = self._random.sample(range(length), length)
        number = {node: i for i, node in enumerate(places)} | {-1: -1}
        return [tokens[node] for node in places], [number[parents[node]] for node in places]


MODELS = ("toy", "llama", "llama-eager", "qwen2", "qwen3", "mistral", "gemma3", "gpt2")
COMPILED = "in bfloat16, with kernels"
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
}
QUEUE = [list(range(3 + i, 9 + 2 * i)) for i in range(5)]
GREEDY = [SamplingParams(max_tokens=12 + 3 * i, ignore_eos=True) for i in range(5)]
SAMPLED = [replace(params, temperature=0.9, top_p=0.95, seed=i) for i, params in enumerate(GREEDY)]
PENALISED = [
    replace(params, temperature=0.7 * (i % 2), repetition_penalty=2.0, seed=i) for i, params in enumerate(GREEDY)
]
OPTIONS = {"greedy": GREEDY, "sampled": SAMPLED, "penalised": PENALISED, "mixed": [*GREEDY[:2], *SAMPLED[2:]]}

pytestmark = pytest.mark.usefixtures("cache_audit")


@cache
def decoder_of(name: str, reproducible: bool = False) -> SpeculativeDecoder:
    if name == COMPILED:
        if kernels() is None:
            pytest.skip("Slipstream's own kernels cannot be used on this machine")
        model = fresh("gemma3", dtype=torch.bfloat16, **WIDE)
        return SpeculativeDecoder(model, drafter="none", reproducible=reproducible, fast=True, max_batch_size=3)
    if reproducible:
        return SpeculativeDecoder(fresh(name), drafter="none", reproducible=True, fast=True, max_batch_size=3)
    model = "toy" if name == "toy" else shared(name)
    return SpeculativeDecoder(model, drafter="none", reproducible=False, max_batch_size=3)


def tokens_of(decoder: SpeculativeDecoder, params: Sequence[SamplingParams]) -> list[list[int]]:
    return [result.token_ids for result in decoder.generate(QUEUE, list(params))]


@cache
def plain_texts(name: str, options: str, reproducible: bool = False) -> list[list[int]]:
    decoder = decoder_of(name, reproducible)
    alone = zip(QUEUE, OPTIONS[options], strict=True)
    return [decoder.generate(prompt, params).token_ids for prompt, params in alone]


def with_trees(name: str, options: str, seed: int = 0, count: int = 9, **settings: Any) -> list[list[int]]:
    decoder, texts = decoder_of(name, settings.get("reproducible", False)), plain_texts(name, options, **settings)
    text_of_prompt = {tuple(prompt): text for prompt, text in zip(QUEUE, texts, strict=True)}
    drafter = RandomTrees(text_of_prompt, decoder.target.backend.vocab_size, seed)
    texts_with_trees = tokens_of(decoder.using(drafter, num_draft_tokens=count), OPTIONS[options])
    assert count < 9 or drafter.verified
    return texts_with_trees


# the text


@pytest.mark.each_value
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", mostly_slow(MODELS, "toy", "llama"))
def test_random_trees_change_no_text(name: str, options: str) -> None:
    assert with_trees(name, options) == plain_texts(name, options)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("options", ["greedy", "penalised"])
@pytest.mark.parametrize("name", mostly_exhaustive(["llama", "qwen2", "gemma3", COMPILED], "gemma3", COMPILED))
def test_random_trees_change_no_text_in_reproducible_mode(name: str, options: str) -> None:
    assert decoder_of(name, True).reproducible
    assert with_trees(name, options, reproducible=True) == plain_texts(name, options, True)


@pytest.mark.slow
@settings(max_examples=30)
@given(seed=st.integers(0, 1 << 30), count=st.integers(2, 16), options=st.sampled_from(sorted(OPTIONS)))
def test_any_tree_of_the_toy_model_changes_no_text(seed: int, count: int, options: str) -> None:
    assert with_trees("toy", options, seed, count) == plain_texts("toy", options)


@pytest.mark.slow
@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 30), orders=st.lists(st.sampled_from(["add", "cancel", "step"]), max_size=30))
def test_trees_change_no_text_while_rows_enter_and_are_cancelled(seed: int, orders: list[str]) -> None:
    text_of_prompt = {tuple(prompt): text for prompt, text in zip(QUEUE, plain_texts("toy", "sampled"), strict=True)}
    decoder = decoder_of("toy").using(RandomTrees(text_of_prompt, VOCAB_SIZE, seed), num_draft_tokens=7)
    scheduler, waiting, rows = decoder.scheduler(), list(zip(QUEUE, SAMPLED, strict=True)), list[Row]()
    for order in [*orders, *["add"] * len(waiting)]:
        if order == "add" and waiting:
            prompt, params = waiting.pop()
            rows.append(Row(len(rows), list(prompt), params, seed=params.seed or 0))
            scheduler.add(rows[-1])
        elif order == "cancel" and rows:
            scheduler.cancel(rows[seed % len(rows)])
        else:
            scheduler.step()
    while scheduler.unfinished:
        scheduler.step()
    for row in rows:
        text = text_of_prompt[tuple(row.tokens[: row.prompt_length])]
        assert row.output == (text if row.finish_reason == "length" else text[: row.num_output_tokens])


# negative controls


def shared_slots(segment: TreeSegment) -> TreeSegment:
    """Siblings overwrite the main chain."""
    return replace(segment, place=segment.start, detour=())


def a_position_later(segment: TreeSegment) -> TreeSegment:
    return segment if segment.place == segment.start else replace(segment, start=segment.start + 1)


def without_detours(segment: TreeSegment) -> TreeSegment:
    """A branch of a branch sees the main chain's keys."""
    return replace(segment, detour=())


@pytest.mark.parametrize("wrong", [shared_slots, a_position_later, without_detours])
def test_wrong_segments_change_the_text(
    wrong: Callable[[TreeSegment], TreeSegment], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_texts("llama", "greedy")
    monkeypatch.setattr(session, "segments_of", lambda *args: [wrong(segment) for segment in segments_of(*args)])
    assert with_trees("llama", "greedy", count=16) != plain_texts("llama", "greedy")


def test_keys_of_the_wrong_branch_change_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_texts("llama", "greedy")
    monkeypatch.setattr(HFBackend, "move", lambda *_: None)
    assert with_trees("llama", "greedy", count=16) != plain_texts("llama", "greedy")


def test_penalties_that_count_a_siblings_token_change_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_texts("llama", "penalised")

    def along_the_numbers(self: Sampler, logits: Tensor, draft: Draft) -> Tensor:
        return self.scores(logits, draft.tokens)

    monkeypatch.setattr(Sampler, "_node_scores", along_the_numbers)
    assert any(with_trees("llama", "penalised", seed, 16) != plain_texts("llama", "penalised") for seed in range(20))


def test_random_draws_of_another_depth_change_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_texts("toy", "sampled")
    token_key = Sampler._token_key
    monkeypatch.setattr(Sampler, "_token_key", lambda self, row, depth: token_key(self, row, 2 * depth))
    assert with_trees("toy", "sampled", count=16) != plain_texts("toy", "sampled")


def test_choosing_everywhere_as_gpus_do_gives_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_texts("toy", "sampled")
    monkeypatch.setattr(Sampler, "_choose_on_path", Sampler._choose_everywhere)
    assert with_trees("toy", "sampled", count=16) == plain_texts("toy", "sampled")
    monkeypatch.setattr("slipstream.sampling.sampler.depths", lambda parents: list(range(len(parents))))
    assert with_trees("toy", "sampled", count=16) != plain_texts("toy", "sampled")


# the parts


def tree(tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> Draft:
    draft = Draft.from_lists(tokens, torch.device("cpu"))
    return replace(draft, parents=tuple(map(tuple, parents)))


def test_nodes_are_arranged_chain_by_chain() -> None:
    draft = arranged(tree([[5, 6, 7, 8, 9, 4], [1, 2]], [[3, -1, 3, 1, -1, 0], [-1, 0]]))
    assert draft.tokens.tolist() == [[6, 8, 5, 4, 7, 9], [1, 2, 1, 1, 1, 1]] and draft.lengths == (6, 2)
    assert draft.parents == ((-1, 0, 1, 2, 1, -1), (-1, 0))
    assert chain_lengths(draft) == (4, 2) and depths(draft.parents[0]) == [0, 1, 2, 3, 2, 0]
    assert main_chain(draft).tokens.tolist() == [[6, 8, 5, 4], [1, 2, 1, 1]] and main_chain(draft).parents is None
    assert segments_of(2, 8, 10, draft.parents[0]) == [
        TreeSegment(2, 8, 6, 8),
        TreeSegment(2, 12, 1, 14),
        TreeSegment(2, 10, 1, 15),
    ]
    assert segments_of(0, 3, 4, (-1, -1, 1, 2, 1)) == [
        TreeSegment(0, 3, 2, 3),
        TreeSegment(0, 4, 3, 5),
        TreeSegment(0, 5, 1, 8, (5,)),
    ]


def test_a_tree_without_branches_becomes_a_chain_and_cutting_a_node_drops_its_descendants() -> None:
    assert arranged(tree([[7, 5, 6]], [[2, -1, 1]])).parents is None
    assert arranged(tree([[7, 5, 6]], [[2, -1, 1]])).tokens.tolist() == [[5, 6, 7]]
    assert arranged(tree([[7, 5, 6]], [[2, -1, 1]]).cut([2])).tokens.tolist() == [[5]]


def test_the_walk_takes_the_first_child_that_was_chosen() -> None:
    draft = arranged(tree([[1, 2, 3, 3], [4, 4, 0, 0]], [[-1, -1, 1, 1], [-1, -1, 0, 0]]))
    assert draft.parents == ((-1, -1, 1, 1), (-1, 0, 0, -1))
    choice = torch.tensor([[2, 0, 3, 9, 8], [5, 0, 0, 0, 0]])
    accepted, following, path = match_tree(choice, draft)
    assert accepted.tolist() == [2, 0] and following.tolist() == [9, 5] and path[0, :2].tolist() == [1, 2]


class Proposes:
    def __init__(self, draft: Draft) -> None:
        self.draft = draft

    def propose(self, rows: Any, lengths: Any, sampler: Any) -> Draft:
        return self.draft


@subcases("parents", [[1, 0, -1], [-1, 0], [-1, 3, 0], [-1, 1, 0], [-2, 0, 1]])
def test_parents_that_form_no_tree_are_refused(parents: list[int]) -> None:
    decoder = decoder_of("toy").using(Proposes(tree([[1, 2, 3]], [parents])), num_draft_tokens=3)
    with pytest.raises(UsageError, match=r"drafter Proposes returned parents=\[.*for 3 tokens; allowed: for each"):
        decoder.generate([5, 6, 7])


def test_trees_are_one_hot_and_verified_by_match() -> None:
    draft = tree([[1, 2]], [[-1, -1]])
    decoder = decoder_of("toy").using(Proposes(draft), num_draft_tokens=2, acceptance="rejection")
    with pytest.raises(UsageError, match="acceptance='rejection' with a draft tree; allowed: 'match'"):
        decoder.generate([5, 6, 7])
    sampled = Proposes(replace(draft, probs=torch.full((1, 2, 257), 1 / 257)))
    with pytest.raises(UsageError, match="returned a tree with probs; allowed: trees of one-hot drafts"):
        decoder_of("toy").using(sampled, num_draft_tokens=2).generate([5, 6, 7])


def test_a_request_with_logits_processors_is_verified_along_the_main_chain() -> None:
    def never_seven(ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 7] = float("-inf")
        return scores

    params = replace(GREEDY[0], logits_processors=[never_seven])
    plain = decoder_of("toy").generate(QUEUE[0], params).token_ids
    drafter = RandomTrees({tuple(QUEUE[0]): plain}, 257)
    assert decoder_of("toy").using(drafter, num_draft_tokens=8).generate(QUEUE[0], params).token_ids == plain
    assert all(round.parents is None for row in drafter.rows for round in row.rounds)


def test_accepted_nodes_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round feeds only the newest token and its tree, whatever path was accepted before."""
    fed, forward = list[int](), HFBackend.forward_tree

    def counted(self: HFBackend, tokens: Tensor, segments: Sequence[TreeSegment], **options: Any) -> Tensor:
        fed.append(len(tokens))
        return forward(self, tokens, segments, **options)

    monkeypatch.setattr(HFBackend, "forward_tree", counted)
    with_trees("llama", "greedy")
    moved = sum(fed)
    monkeypatch.setattr(kv_slots.SlotTable, "_compact_accepted_path", lambda self, slot, state, row: state.valid(row))
    fed.clear()
    assert with_trees("llama", "greedy") == plain_texts("llama", "greedy") and sum(fed) > moved > 0
