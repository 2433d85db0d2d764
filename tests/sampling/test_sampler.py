"""Sampling options against transformers' own processors, one by one, combined, and inside `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from slipstream import SamplingParams
from slipstream.core.acceptance import accept, load_rule
from slipstream.core.rng import Race, Stream, key
from slipstream.core.types import Draft, Row
from slipstream.sampling.params import SAMPLED
from slipstream.sampling.sampler import NONE, Sampler, warp_options
from tests.support.markers import needs_transformers, subcases

VOCAB, EOS = 31, 2
CPU = torch.device("cpu")
PROMPT, OUTPUT, DRAFT = [5, 9, 5, 14, 3, 4], [7, 9, 3], [4, 7, 4, 20]
Case = tuple[dict[str, Any], Callable[[int], list[Any]]]

# options -> the processors `generate` makes of them; the argument is the length of the prompt
CASES: dict[str, Case] = {
    "temperature 0.7": ({"temperature": 0.7}, lambda n: [hf.TemperatureLogitsWarper(0.7)]),
    "temperature 3": ({"temperature": 3}, lambda n: [hf.TemperatureLogitsWarper(3.0)]),
    "top_k 1": ({"temperature": 1, "top_k": 1}, lambda n: [hf.TopKLogitsWarper(1)]),
    "top_k 5": ({"temperature": 1, "top_k": 5}, lambda n: [hf.TopKLogitsWarper(5)]),
    "top_k beyond the vocabulary": ({"temperature": 1, "top_k": 10**6}, lambda n: [hf.TopKLogitsWarper(10**6)]),
    "top_p 0.8": ({"temperature": 1, "top_p": 0.8}, lambda n: [hf.TopPLogitsWarper(0.8)]),
    "top_p tiny": ({"temperature": 1, "top_p": 1e-9}, lambda n: [hf.TopPLogitsWarper(1e-9)]),
    "min_p 0.1": ({"temperature": 1, "min_p": 0.1}, lambda n: [hf.MinPLogitsWarper(0.1)]),
    "min_p 1": ({"temperature": 1, "min_p": 1.0}, lambda n: [hf.MinPLogitsWarper(1.0)]),
    "repetition 1.7": (
        {"temperature": 1, "repetition_penalty": 1.7},
        lambda n: [hf.RepetitionPenaltyLogitsProcessor(1.7)],
    ),
    "repetition 0.5": (
        {"temperature": 1, "repetition_penalty": 0.5},
        lambda n: [hf.RepetitionPenaltyLogitsProcessor(0.5)],
    ),
    "logit_bias": (
        {"temperature": 1, "logit_bias": {4: 2.5, 7: -3, 11: float("-inf")}},
        lambda n: [hf.SequenceBiasLogitsProcessor({(4,): 2.5, (7,): -3.0, (11,): float("-inf")})],
    ),
    "bad words of one token": (
        {"temperature": 1, "bad_words": [[4], [20]]},
        lambda n: [hf.NoBadWordsLogitsProcessor([[4], [20]], EOS)],
    ),
    "bad words of several tokens": (
        {
            "temperature": 1,
            "bad_words": [[3, 4], [3, 4, 7], [7, 4, 20], [9, 9], [5, 9, 5, 14, 3, 4, 7, 9, 3, 4, 7, 4, 20, 1]],
        },
        lambda n: [
            hf.NoBadWordsLogitsProcessor(
                [[3, 4], [3, 4, 7], [7, 4, 20], [9, 9], [5, 9, 5, 14, 3, 4, 7, 9, 3, 4, 7, 4, 20, 1]], EOS
            )
        ],
    ),
    "bad words longer than the context": (
        {"temperature": 1, "bad_words": [[1] * 40]},
        lambda n: [hf.NoBadWordsLogitsProcessor([[1] * 40], EOS)],
    ),
    "min_tokens that end in the draft": (
        {"temperature": 1, "min_tokens": 5},
        lambda n: [hf.MinNewTokensLengthLogitsProcessor(n, 5, EOS)],
    ),
    "min_tokens beyond the draft": (
        {"temperature": 1, "min_tokens": 50},
        lambda n: [hf.MinNewTokensLengthLogitsProcessor(n, 50, EOS)],
    ),
    "a processor of the request": (
        {"temperature": 1, "logits_processors": [hf.NoRepeatNGramLogitsProcessor(2)]},
        lambda n: [hf.NoRepeatNGramLogitsProcessor(2)],
    ),
    "everything": (
        {
            "temperature": 0.8,
            "top_k": 12,
            "top_p": 0.9,
            "min_p": 0.05,
            "repetition_penalty": 1.4,
            "logit_bias": {4: 1.5, 7: -2.0, 9: 3.0},
            "bad_words": [[20], [3, 4]],
            "min_tokens": 5,
            "logits_processors": [hf.NoRepeatNGramLogitsProcessor(2)],
        },
        lambda n: [
            hf.SequenceBiasLogitsProcessor({(4,): 1.5, (7,): -2.0, (9,): 3.0}),
            hf.RepetitionPenaltyLogitsProcessor(1.4),
            hf.NoBadWordsLogitsProcessor([[20], [3, 4]], EOS),
            hf.MinNewTokensLengthLogitsProcessor(n, 5, EOS),
            hf.NoRepeatNGramLogitsProcessor(2),
            hf.TemperatureLogitsWarper(0.8),
            hf.TopKLogitsWarper(12),
            hf.TopPLogitsWarper(0.9),
            hf.MinPLogitsWarper(0.05),
        ],
    ),
}
BATCH = [SamplingParams(**options) for options, _ in CASES.values()] + [
    SamplingParams(),
    SamplingParams(top_k=3, repetition_penalty=1.4, min_tokens=4),
    SamplingParams(temperature=0.9, presence_penalty=0.7, frequency_penalty=-0.4),
]


def make_row(
    params: SamplingParams, output: Sequence[int] = OUTPUT, index: int = 0, prompt: Sequence[int] = PROMPT
) -> Row:
    row = Row(index, list(prompt), params, seed=index, end_ids=frozenset({EOS}))
    row.tokens.extend(output)
    return row


def make_sampler(rows: Sequence[Row], vocab: int = VOCAB) -> Sampler:
    return Sampler(rows, Race(vocab, CPU), vocab, CPU)


def random_logits(rows: int, positions: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return 3 * torch.randn(rows, positions, vocab, generator=torch.Generator().manual_seed(seed))


def distribution(row: Row, logits: Tensor, draft: Sequence[int], first: int = 0) -> Tensor:
    """[J, V]: the distribution at each position of one row. logits: [J, V]."""
    sampler = make_sampler([row], logits.shape[-1])
    tokens = torch.tensor([list(draft)], dtype=torch.int64)
    return sampler.probs(sampler.scores(logits[None], tokens, first))[0]


def reference(processors: Sequence[Any], context: Sequence[int], logits: Tensor) -> Tensor:
    """[V]: what the processors make of the logits after `context`."""
    ids, scores = torch.tensor([list(context)]), logits[None].clone()
    for processor in processors:
        scores = processor(ids, scores)
    return scores.softmax(-1)[0]


def assert_same_distribution(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == torch.float32
    assert torch.equal(ours > 0, theirs > 0)
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=0)


@needs_transformers("5.18", "bad words as long as the context and one token")
@subcases("name", CASES)
def test_option_does_what_the_processor_of_generate_does_at_every_position(name: str) -> None:
    options, processors = CASES[name]
    changed = False
    for seed in range(5):
        logits = random_logits(1, len(DRAFT) + 1, seed)[0]
        ours = distribution(make_row(SamplingParams(**options)), logits, DRAFT)
        for j in range(len(DRAFT) + 1):
            context = PROMPT + OUTPUT + DRAFT[:j]
            assert_same_distribution(ours[j], reference(processors(len(PROMPT)), context, logits[j]))
        changed |= not torch.allclose(ours, logits.softmax(-1), atol=1e-3)
    assert changed or name == "top_k beyond the vocabulary" or name == "bad words longer than the context"


@subcases("name", CASES)
def test_position_j_sees_the_committed_tokens_and_the_first_j_draft_tokens(name: str) -> None:
    params = SamplingParams(**CASES[name][0])
    logits = random_logits(1, len(DRAFT) + 1)[0]
    at_once = distribution(make_row(params), logits, DRAFT)
    for j in range(len(DRAFT) + 1):
        committed = distribution(make_row(params, OUTPUT + DRAFT[:j]), logits[j : j + 1], [])
        assert torch.equal(at_once[j], committed[0])


@subcases("params", BATCH)
def test_first_is_the_number_of_draft_tokens_before_position_0(params: SamplingParams) -> None:
    logits = random_logits(1, len(DRAFT) + 1)[0]
    at_once = distribution(make_row(params), logits, DRAFT)
    for first in range(len(DRAFT) + 1):
        assert torch.equal(distribution(make_row(params), logits[first:], DRAFT, first), at_once[first:])
        assert torch.equal(
            distribution(make_row(params), logits[first : first + 1], DRAFT[:first], first)[0], at_once[first]
        )


def test_rows_with_different_options_have_the_distributions_they_have_alone() -> None:
    rows = [make_row(params, index=i, output=OUTPUT[: i % 4]) for i, params in enumerate(BATCH)]
    logits = random_logits(len(rows), len(DRAFT) + 1)
    drafts = torch.randint(0, VOCAB, (len(rows), len(DRAFT)), generator=torch.Generator().manual_seed(1))
    sampler = make_sampler(rows)
    together = sampler.probs(sampler.scores(logits, drafts))
    for i, row in enumerate(rows):
        assert torch.equal(together[i], distribution(row, logits[i], drafts[i].tolist()))


@subcases("params", BATCH)
def test_an_advanced_sampler_equals_a_new_one(params: SamplingParams) -> None:
    logits, no_draft = random_logits(1, 1), torch.zeros(1, 0, dtype=torch.int64)
    row = make_row(params, [])
    advanced = make_sampler([row])
    for token in OUTPUT + DRAFT:
        row.tokens.append(token)
        advanced.advance(0, [token])
        fresh = make_sampler([row])
        assert torch.equal(
            advanced.probs(advanced.scores(logits, no_draft)), fresh.probs(fresh.scores(logits, no_draft))
        )


def openai_penalties(logits: Tensor, output: Sequence[int], presence: float, frequency: float) -> Tensor:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, c counting the output alone (OpenAI API reference)."""
    result = logits.clone()
    for token in range(logits.shape[-1]):
        count = sum(1 for other in output if other == token)
        result[token] -= count * frequency + (presence if count > 0 else 0.0)
    return result


@pytest.mark.parametrize(("presence", "frequency"), [(0.8, 0.0), (0.0, 0.6), (-0.5, 0.3), (1, 2)])
def test_presence_and_frequency_penalties_count_output_and_draft_but_not_the_prompt(
    presence: float, frequency: float
) -> None:
    params = SamplingParams(temperature=1.0, presence_penalty=presence, frequency_penalty=frequency)
    logits = random_logits(1, len(DRAFT) + 1)[0]
    ours = distribution(make_row(params), logits, DRAFT)
    for j in range(len(DRAFT) + 1):
        expected = openai_penalties(logits[j], OUTPUT + DRAFT[:j], presence, frequency)
        assert_same_distribution(ours[j], expected.softmax(-1))


@pytest.mark.parametrize("params", [p for p in BATCH if p.temperature == 0])
def test_greedy_is_one_hot_at_the_best_allowed_token_and_ignores_truncation(params: SamplingParams) -> None:
    row, logits = make_row(params), random_logits(1, len(DRAFT) + 1)
    sampler, draft = make_sampler([row]), torch.tensor([DRAFT])
    scores = sampler.scores(logits, draft)
    expected = torch.nn.functional.one_hot(scores.argmax(-1), VOCAB).float()
    assert torch.equal(sampler.probs(scores), expected)
    assert torch.equal(sampler.choose(logits, Draft.from_lists([DRAFT], CPU)), scores.argmax(-1))


def drawn(row: Row, probs: Tensor, position: int) -> int:
    """The token that the random draws of this position after the committed tokens choose from probs [V]."""
    draw_key = key(row.seed, Stream.TOKEN, len(row.tokens) + position)
    return int(Race(VOCAB, CPU).draw(probs[None], [draw_key])[0])


def test_choose_uses_the_random_draws_of_absolute_positions_along_the_accepted_path() -> None:
    rows = [make_row(params, index=i, output=OUTPUT[: i % 4]) for i, params in enumerate(BATCH)]
    logits = random_logits(len(rows), len(DRAFT) + 1)
    sampler = make_sampler(rows)
    tokens = [list(DRAFT) for _ in rows]
    for j in range(len(DRAFT) + 1):  # each row's draft is right up to position j
        drafts = Draft.from_lists(tokens, CPU)
        chosen, probs = sampler.choose(logits, drafts), sampler.probs(sampler.scores(logits, drafts.tokens))
        for i, row in enumerate(rows):
            assert chosen[i, j] == drawn(row, probs[i, j], j)
            assert probs[i, j, chosen[i, j]] > 0
            if j < len(DRAFT):
                tokens[i][j] = int(chosen[i, j])
    wrong = [[(row[0] + 1) % VOCAB, *row[1:]] for row in tokens]
    chosen = sampler.choose(logits, Draft.from_lists(wrong, CPU))
    for i, row in enumerate(rows):
        assert chosen[i, 0] == tokens[i][0]
        if row.params.temperature:  # nothing depends on what follows a wrong token, so it is not drawn
            assert set(chosen[i, 1:].tolist()) == {NONE}


def test_choose_follows_the_branch_of_a_tree_that_it_takes() -> None:
    row, logits = make_row(SamplingParams(temperature=1.0)), random_logits(1, 5)
    sampler = make_sampler([row])
    first = drawn(row, sampler.probs(logits)[0, 0], 0)
    # nodes: 0 and its child 1 are wrong, 2 is right, and 3 follows it
    after = drawn(row, sampler.probs(logits)[0, 3], 1)
    last = drawn(row, sampler.probs(logits)[0, 4], 2)
    wrong = (first + 1) % VOCAB
    tree = replace(Draft.from_lists([[wrong, after, first, after]], CPU), parents=((-1, 0, -1, 2),))
    assert sampler.choose(logits, tree).tolist() == [[first, NONE, NONE, after, last]]


def test_scores_do_not_change_the_logits() -> None:
    rows = [make_row(params) for params in BATCH]
    logits = random_logits(len(rows), len(DRAFT) + 1)
    before, sampler = logits.clone(), make_sampler(rows)
    sampler.probs(sampler.scores(logits, torch.tensor([DRAFT] * len(rows))))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_processed_in_float32(dtype: torch.dtype) -> None:
    logits = random_logits(1, len(DRAFT) + 1)[0].to(dtype)
    row = make_row(SamplingParams(**CASES["everything"][0]))
    assert torch.equal(distribution(row, logits, DRAFT), distribution(row, logits.float(), DRAFT))


ROWS, RACERS = 4000, 40


def batch(temperature: float) -> Sampler:
    params = SamplingParams(temperature=temperature)
    return Sampler([Row(i, [1, 2], params, seed=i) for i in range(ROWS)], Race(RACERS, CPU), RACERS, CPU)


def pair_of_distributions() -> tuple[Tensor, Tensor]:
    """Those of a target and of a draft model that resembles it, [ROWS, RACERS] each."""
    generator = torch.Generator().manual_seed(5)
    common = 3 * torch.randn(ROWS, RACERS, generator=generator)
    target, draft = (common + 0.7 * torch.randn(ROWS, RACERS, generator=generator) for _ in range(2))
    return target.softmax(-1), draft.softmax(-1)


def log_loss(certainty: Tensor, happened: Tensor) -> float:
    """Mean over all rows; each bin of the certainty predicts the rate observed in it."""
    bins = (certainty.clamp(max=0.999) * 20).long()
    rate = (
        torch.zeros(20).scatter_reduce_(0, bins, happened.float(), "mean", include_self=False)[bins].clamp(1e-3, 0.999)
    )
    return float(-torch.where(happened, rate, 1 - rate).log().mean())


def test_the_leader_is_the_token_that_is_sampled() -> None:
    target, _ = pair_of_distributions()
    sampler = batch(0.8)
    leaders, _ = sampler.leaders(0.8 * target.log(), 3, 1)
    assert torch.equal(leaders, sampler.draw(target[:, None], 3, Stream.TOKEN))
    assert not torch.equal(leaders, sampler.draw(target[:, None], 4, Stream.TOKEN))


def test_the_share_of_a_race_predicts_acceptance_better_than_the_probability() -> None:
    target, draft = pair_of_distributions()
    sampler = batch(0.8)
    leaders, shares = sampler.leaders(0.8 * draft.log(), 0, 1)
    accepted = leaders[:, 0] == sampler.draw(target[:, None], 0, Stream.TOKEN)[:, 0]
    probability = draft.gather(1, leaders)[:, 0]
    assert log_loss(shares[:, 0], accepted) < 0.95 * log_loss(probability, accepted)


def test_greedy_rows_run_without_noise() -> None:
    _, draft = pair_of_distributions()
    probs, likeliest = draft.sort(descending=True, stable=True)
    leaders, shares = batch(0.0).leaders(draft.log(), 0, 2)
    assert torch.equal(leaders, likeliest[:, :2])
    torch.testing.assert_close(shares, probs[:, :2])
    params = [SamplingParams(temperature=temperature) for temperature in (0.0, 50.0)]
    mixed = Sampler([Row(i, [1], options, seed=i) for i, options in enumerate(params)], Race(RACERS, CPU), RACERS, CPU)
    leaders, shares = mixed.leaders(torch.zeros(2, RACERS), 0, 2)
    assert leaders[0].tolist() == [0, 1] and leaders[1].tolist() != [0, 1]
    torch.testing.assert_close(shares[0], torch.full((2,), 1 / RACERS))
    assert float(shares[1].sum()) > 3 / RACERS


@pytest.mark.slow
def test_leaders_respect_options_that_drop_tokens() -> None:
    _, draft = pair_of_distributions()
    options = [SamplingParams(temperature=2.0, top_k=3), SamplingParams(temperature=2.0, top_p=0.5, min_p=0.1)]
    rows = [Row(i, [1], params, seed=i) for i, params in enumerate(options)]
    sampler = Sampler(rows, Race(RACERS, CPU), RACERS, CPU)
    for scores in (draft[i : i + 2].log() for i in range(0, ROWS, 2)):
        leaders, shares = sampler.leaders(scores, 1, 1)
        assert torch.equal(leaders, sampler.draw(sampler.probs(scores[:, None]), 1, Stream.TOKEN))
        assert bool((shares > 0.2).any())


def p_value(*streams: Stream) -> float:
    """Of the hypothesis that the first token of 20,000 rows is drawn from p, though its draft is drawn from q.

    streams: of the drafts' random numbers, if not the default one.
    """
    count = 20_000
    p, q = torch.tensor([0.4, 0.35, 0.15, 0.1]), torch.tensor([0.05, 0.15, 0.4, 0.4])
    rows = [Row(i, [0], SamplingParams(temperature=1.0), seed=i) for i in range(count)]
    sampler = Sampler(rows, Race(len(p), CPU), len(p), CPU)
    probs = q.expand(count, 1, -1)
    draft = Draft(sampler.draw(probs, 0, *streams), (1,) * count, probs)
    verdict = accept(load_rule("rejection"), p.log().expand(count, 2, -1), draft, sampler)
    first = draft.tokens[:, 0].where(verdict.accepted == 1, verdict.next_token)
    expected = (count * p).double()
    chi_square = ((torch.bincount(first, minlength=len(p)) - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor(1.5).double(), chi_square / 2))  # 3 degrees of freedom


@pytest.mark.slow
def test_draws_of_drafts_are_independent_of_the_targets() -> None:
    assert p_value() > 1e-3
    assert p_value(Stream.TOKEN) < 1e-6


def test_the_options_of_a_distribution_are_the_requests() -> None:
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1}
    assert vars(warp_options(SamplingParams(**options))) == options and options.keys() == set(SAMPLED)
