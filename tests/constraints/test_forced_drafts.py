"""Drafts under a grammar keep the target's constrained distribution, by enumeration; an obvious shortcut does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from slipstream import Constraint, Draft, SamplingParams, SpeculativeDecoder
from slipstream.constraints.forced_drafts import ForcedDrafts
from slipstream.core.acceptance import load_rule
from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.sampling.sampler import Sampler
from tests.support.enumeration import VOCAB, WIDTH, Case, Context, Distribution, drawn, error, random_distribution
from tests.support.structured_outputs import TableGrammar
from tests.support.tiny_models import HashBackend

RULES = ["rejection", "block"]
EXACT, WRONG_BY = 1e-6, 0.01


def legal(context: Context) -> frozenset[int]:
    """Some tokens are illegal, by the context; no token is forced."""
    return frozenset((0, 1, 2)) - {sum(context) % VOCAB if len(context) % 2 else 2}


def forcing(context: Context) -> frozenset[int]:
    """After a 1 a 2 must follow."""
    return frozenset((2,)) if context and context[-1] == 1 else frozenset((0, 1))


def masked(distribution: Distribution, grammar: object) -> Distribution:
    def within(context: Context) -> np.ndarray:
        weights = distribution(context) * [token in grammar(context) for token in range(VOCAB)]
        return weights / weights.sum()

    return within


def edited(tokens: Sequence[Context], grammar: object, q: Distribution | None) -> Draft:
    """These drafts, one per row, after the grammar was applied."""
    target = Session(HashBackend(VOCAB))
    rows = [Row(i, [0], SamplingParams(max_tokens=50), seed=i) for i in range(len(tokens))]
    for row in rows:
        row.constraint = TableGrammar(grammar)
        row.prompt_length = 1
        row.rounds.append(None)
    width = max(map(len, tokens))
    draft = Draft.from_lists(tokens, torch.device("cpu"))
    if q is not None:
        table = [
            [q(draft_tokens[:j]) if j < len(draft_tokens) else np.eye(VOCAB)[0] for j in range(width)]
            for draft_tokens in tokens
        ]
        draft = replace(draft, probs=torch.tensor(np.array(table), dtype=torch.float32))
    grammar = ForcedDrafts(target)
    forced = grammar.forced(rows)
    return grammar.around(rows, forced, draft.cut(grammar.room_after(rows, forced)))


def lines(draft: Draft) -> list[Context]:
    return [tuple(draft.tokens[i, :length].tolist()) for i, length in enumerate(draft.lengths)]


@pytest.mark.parametrize("rule", RULES)
def test_a_sampled_draft_that_ends_with_its_first_illegal_token_keeps_the_distribution(rule: str) -> None:
    for seed in range(5):
        p, q = masked(random_distribution(seed, "p"), legal), random_distribution(seed, "q")
        proposals = drawn(q)
        kept = lines(edited([tokens for tokens, _ in proposals], legal, q))
        assert any(len(draft) < WIDTH for draft in kept)
        case = Case(p, q, [(draft, weight) for draft, (_, weight) in zip(kept, proposals, strict=True)])
        assert error(case, load_rule(rule).distributions) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_dropping_the_illegal_token_of_a_sampled_draft_is_caught(rule: str) -> None:
    worst = 0.0
    for seed in range(5):
        p, q = masked(random_distribution(seed, "p"), legal), random_distribution(seed, "q")
        cut = [(tokens[: TableGrammar(legal).num_legal((), tokens)], weight) for tokens, weight in drawn(q)]
        worst = max(worst, error(Case(p, q, cut), load_rule(rule).distributions))
    assert worst > WRONG_BY


def test_three_tokens_show_why_the_illegal_token_must_stay() -> None:
    p, q = np.array([0.9, 0.1, 0.0]), np.array([0.2, 0.2, 0.6])

    def once(drafts: list[tuple[Context, float]]) -> np.ndarray:
        total = np.zeros(VOCAB)
        for tokens, weight in drafts:
            draft = Draft.from_lists([tokens], torch.device("cpu"))
            if tokens:
                draft = replace(draft, probs=torch.tensor(q, dtype=torch.float32)[None, None])
            table = torch.tensor(p, dtype=torch.float32).expand(1, len(tokens) + 1, VOCAB)
            distributions = load_rule("rejection").distributions(table, table.log(), draft)
            after = distributions.next_token(torch.zeros(1, dtype=torch.int64))[0].double().numpy()
            keep = distributions.keep[0].double().numpy()
            total += weight * keep[0] * after
            if tokens:
                total[tokens[0]] += weight * keep[1]
        return total

    whole = [((token,), float(q[token])) for token in range(VOCAB)]
    dropped = [*whole[:2], ((), 0.6)]
    assert once(whole) == pytest.approx([0.9, 0.1, 0.0], abs=1e-6)
    assert once(dropped) == pytest.approx([0.84, 0.16, 0.0], abs=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_forced_tokens_after_a_sampled_draft_keep_the_distribution(rule: str) -> None:
    for seed in range(5):
        p, q = (masked(random_distribution(seed, tag), forcing) for tag in "pq")
        short = [(tokens, weight) for tokens, weight in drawn(q, stop=lambda context: len(context) == 2)]
        made = edited([tokens for tokens, _ in short], forcing, q)
        kept = lines(made)
        assert any(row.forced[1] for row in made.rows)
        assert all(len(draft) <= WIDTH for draft in kept)
        for i, draft in enumerate(kept):  # a forced token is certain in the draft as well
            for place in range(len(short[i][0]), len(draft)):
                assert made.probs[i, place].tolist() == np.eye(VOCAB)[draft[place]].tolist()
        case = Case(p, q, [(draft, weight) for draft, (_, weight) in zip(kept, short, strict=True)])
        assert error(case, load_rule(rule).distributions) < EXACT


def test_a_one_hot_draft_is_cut_before_its_first_illegal_token_and_extended_by_forced_ones() -> None:
    made = edited([(0, 1, 0), (0, 0, 2), (1, 2, 0), (2, 0, 0)], forcing, None)
    assert lines(made) == [(0, 1, 2), (0, 0), (1, 2, 0), ()]
    assert [row.forced for row in made.rows] == [(0, 1), (0, 0), (0, 0), (0, 0)]


def test_forced_tokens_are_proposed_first_and_the_drafter_continues_from_them() -> None:
    row = Row(0, [0, 1], SamplingParams(max_tokens=50), seed=0)
    row.prompt_length, row.constraint = 1, TableGrammar(forcing)
    row.rounds.append(None)
    grammar = ForcedDrafts(Session(HashBackend(VOCAB)))
    forced = grammar.forced([row])
    assert forced == [[2]] and grammar.room_after([row], forced) == [63]
    made = grammar.around([row], forced, Draft.from_lists([[0, 0]], torch.device("cpu")))
    assert lines(made) == [(2, 0, 0)] and made.rows[0].forced == (1, 0)


def test_the_drafter_reads_forced_tokens_as_if_they_had_been_committed() -> None:
    texts = []

    class Reader:
        def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
            texts.append((rows[0].tokens[len(prompt) :], lengths[0]))
            return Draft.empty(1, sampler.device)

    decoder = SpeculativeDecoder("toy", drafter=Reader(), num_draft_tokens=8)
    prompt = decoder.encode("a")
    result = decoder.generate(prompt, max_tokens=20, constraint=Constraint(regex="xyz[ab]{3}zyx"))
    assert result.text.startswith("xyz") and result.text.endswith("zyx")
    first, length = texts[0]
    assert bytes(first) == b"xyz"[: len(first)] and len(first) >= 2 and length == 8
    assert all(row_text == list(result.text.encode())[: len(row_text)] for row_text, _ in texts)


def test_a_tree_is_attached_after_the_forced_tokens() -> None:
    row = Row(0, [0, 1], SamplingParams(max_tokens=50), seed=0)
    row.prompt_length, row.constraint = 1, TableGrammar(forcing)
    row.rounds.append(None)
    tree = replace(Draft.from_lists([[0, 1, 0]], torch.device("cpu")), parents=((-1, -1, 0),))
    grammar = ForcedDrafts(Session(HashBackend(VOCAB)))
    made = grammar.around([row], grammar.forced([row]), tree)
    assert lines(made) == [(2, 0, 1, 0)] and made.parents == ((-1, 0, 0, 1),) and made.rows[0].forced == (1, 0)


@pytest.mark.parametrize("options", [{"num_draft_tokens": 0}, {"max_tokens": 1}])
def test_a_row_without_drafts_gets_no_forced_tokens(options: dict[str, int]) -> None:
    row = Row(0, [0, 1], SamplingParams(**{"max_tokens": 50, **options}), seed=0)
    row.prompt_length, row.constraint = 1, TableGrammar(forcing)
    row.rounds.append(None)
    assert ForcedDrafts(Session(HashBackend(VOCAB))).forced([row]) == [[]]
