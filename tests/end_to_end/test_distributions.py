"""The whole loop: joint frequencies of tokens follow the target's distribution, and wrong rules are caught.

A correct loop fails one of these tests with probability SUSPICIOUS; every wrong rule, drafter and random draw found
in real projects fails the same test with the same number of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from slipstream import Draft, Drafter, SpeculativeDecoder
from slipstream.core.acceptance import RULES, Rule, load_rule
from slipstream.core.rng import Stream, Words, key, words
from slipstream.core.types import Row
from slipstream.sampling import processors as history
from slipstream.sampling.sampler import Sampler
from tests.support.chi_square import (
    OPTIONS,
    PROMPT,
    RUNS,
    SUSPICIOUS,
    Runs,
    close,
    counts,
    exact_distribution,
    model,
    observe,
    p_value,
)
from tests.support.markers import mostly_exhaustive, mostly_slow
from tests.support.wrong_acceptance_rules import WRONG_RULES

LOSSLESS = sorted(rule.name for rule in RULES.values() if rule.lossless)
DRAFTERS = ["ngram:1-3", "ngram_table:2-3+fill", "suffix:outputs=0", "other", "close", "hesitant", "mixed"]
WITH_MODEL = {"other": "model", "close": "model", "hesitant": "model:p=60", "mixed": "hybrid:2+outputs=0"}
WAYS = [("none", "auto"), *((drafter, rule) for drafter in DRAFTERS for rule in LOSSLESS)]
# the rule that is wrong for sampled drafts only
FOR_FIXED = [name for name in WRONG_RULES if name != "residual-of-one-token"]

# every rule with drafts that are fixed and with sampled ones, and every drafter
USUAL = [
    *(("close", "block"), ("other", "rejection"), ("ngram:1-3", "rejection"), ("close", "match")),
    *(("none", "auto"), ("ngram_table:2-3+fill", "match"), ("suffix:outputs=0", "block")),
    *(("hesitant", "block"), ("mixed", "rejection")),
]
# with the options of the other models
OTHERS = [(name, *way) for name in OPTIONS if name != "llama" for way in WAYS]
PENALIZED = ("gpt2", "close", "block")

SOME, LONGER = 12, 10  # rows and tokens of texts that are compared token by token

over_models = pytest.mark.parametrize("name", mostly_slow(OPTIONS, "llama"))


@cache
def plain_texts(name: str) -> list[list[int]]:
    params = [replace(OPTIONS[name], seed=seed, max_tokens=LONGER) for seed in range(SOME)]
    return [result.token_ids for result in decoder(name, "none", "auto").generate([PROMPT] * SOME, params)]


def decoder(name: str, drafter: str, rule: str, **options: Any) -> SpeculativeDecoder:
    """A decoder on the target `name`; "other" has another model as its draft, the rest of WITH_MODEL a similar one."""
    draft = None if drafter not in WITH_MODEL else model(name, 1) if drafter == "other" else close(name)
    options = {
        "num_draft_tokens": 2 if drafter != "none" else 0,
        "max_batch_size": 64,
        "reproducible": False,
        **options,
    }
    chosen = WITH_MODEL.get(drafter, drafter)
    return SpeculativeDecoder(model(name), draft, drafter=chosen, acceptance=rule, **options)


def seeds(drafter: str, rule: str) -> range:
    """Each way of decoding has random draws of its own, so that their texts are independent."""
    first = WAYS.index((drafter, rule)) * RUNS
    return range(first, first + RUNS)


@cache
def runs(name: str, drafter: str, rule: str) -> Runs:
    return observe(decoder(name, drafter, rule), name, seeds(drafter, rule))


def follow_the_target(name: str, drafter: str, rule: str) -> None:
    assert runs(name, drafter, rule).p_value > SUSPICIOUS
    rounds = runs(name, drafter, rule).rounds
    kept = sum(round.num_accepted_tokens for round in rounds)
    refused = sum(round.rejected for round in rounds)
    if drafter == "none":
        assert (kept, refused) == (0, 0)
    else:  # or the frequencies would say little about the rule
        assert kept > RUNS / 6 and refused > RUNS / 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "rule"),
    [*USUAL[:3], *mostly_exhaustive(USUAL[3:])],
)
def test_joint_frequencies_follow_the_target(drafter: str, rule: str) -> None:
    follow_the_target("llama", drafter, rule)


@pytest.mark.parametrize(
    ("name", "drafter", "rule"),
    [
        pytest.param(*PENALIZED, marks=pytest.mark.slow),
        *mostly_exhaustive(case for case in OTHERS if case != PENALIZED),
    ],
)
def test_joint_frequencies_of_other_models_follow_the_target(name: str, drafter: str, rule: str) -> None:
    follow_the_target(name, drafter, rule)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_joint_frequencies_over_all_drafters_and_rules_follow_the_target(name: str) -> None:
    texts = [text for way in WAYS for text in runs(name, *way).texts]
    assert len(texts) == len(WAYS) * RUNS
    assert p_value(counts(texts), exact_distribution(name)) > SUSPICIOUS


@pytest.mark.each_value
@over_models
@pytest.mark.parametrize("size", mostly_slow([1, 5], 5))
@pytest.mark.parametrize(
    ("drafter", "rule"),
    mostly_slow([("ngram:1-3", "rejection"), ("close", "block"), ("other", "match")], ("close", "block")),
)
def test_texts_are_the_same_in_any_batch(name: str, drafter: str, rule: str, size: int) -> None:
    first_seeds = seeds(drafter, rule)[:SOME]
    small = observe(decoder(name, drafter, rule, max_batch_size=size), name, first_seeds)
    assert small.texts == runs(name, drafter, rule).texts[: len(first_seeds)]


@pytest.mark.slow
@pytest.mark.each_value
@over_models
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("length", "size"), [(1, 64), (6, 5), (3, 1)])
def test_text_under_the_match_rule_equals_plain_decoding(name: str, drafter: str, length: int, size: int) -> None:
    params = [replace(OPTIONS[name], seed=seed, max_tokens=LONGER) for seed in range(SOME)]
    made = decoder(name, drafter, "match", num_draft_tokens=length, max_batch_size=size)
    results = made.generate([PROMPT] * SOME, params)
    assert [result.token_ids for result in results] == plain_texts(name)
    assert len(set(map(tuple, plain_texts(name)))) > SOME / 2
    assert any(round.num_accepted_tokens for result in results for round in result.rounds)


# Wrong rules and draws that must be caught

# the weakest wrong rule, `residual-of-one-token`, has p = 5e-4 in 400 runs, 1.7e-4 in 600 and 1.4e-8 in 800
MORE = range(2 * RUNS)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("drafter", "wrong"),
    mostly_exhaustive(  # tests/core/test_acceptance.py enumerates what each of them emits
        [*(("close", name) for name in WRONG_RULES), *(("ngram:1-3", name) for name in FOR_FIXED)],
        *(("close", "residual-of-one-token"), ("close", "first-mismatch-kept"), ("ngram:1-3", "bonus-from-raw-logits")),
    ),
)
def test_a_wrong_rule_is_caught(drafter: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Rule(wrong, True, WRONG_RULES[wrong])
    monkeypatch.setattr("slipstream.core.loop.rule_for", lambda choice, draft: rule)
    assert observe(decoder("llama", drafter, "block"), "llama", MORE).p_value < SUSPICIOUS


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", mostly_exhaustive(["topk:2", "typical"], "typical"))
def test_a_lossy_rule_is_caught(rule: str) -> None:
    assert not load_rule(rule).lossless
    assert observe(decoder("llama", "close", rule), "llama").p_value < SUSPICIOUS


Draw = Callable[[Sampler, Tensor, int], Tensor]


@dataclass
class OtherDraws:
    """A sampler whose draft tokens are drawn by the function `how`."""

    sampler: Sampler
    how: Draw

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.sampler, attribute)

    def draw(self, probs: Tensor, first: int = 0, stream: Stream = Stream.DRAFT) -> Tensor:
        return self.how(self.sampler, probs, first)


@dataclass
class DrawsOtherwise:
    """Drafts of another drafter whose tokens are drawn by the function `how`."""

    inner: Drafter
    how: Draw

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        return self.inner.propose(rows, lengths, OtherDraws(sampler, self.how))  # type: ignore[arg-type]


@dataclass
class StopsAfterUnlikely:
    """Drafts that end at the first token with a small q, either with or without that token."""

    inner: Drafter
    keeps: bool

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        draft = self.inner.propose(rows, lengths, sampler)
        if draft.probs is None:
            return draft
        unlikely = draft.probs.gather(-1, draft.tokens[..., None])[..., 0] < 0.35
        shorter = []
        for row, length in enumerate(draft.lengths):
            first = [*unlikely[row, :length].tolist(), True].index(True)
            shorter.append(min(first + self.keeps, length))
        return Draft(draft.tokens, tuple(shorter), draft.probs)


def likeliest(sampler: Sampler, probs: Tensor, first: int) -> Tensor:
    return probs.argmax(-1)


def colder(sampler: Sampler, probs: Tensor, first: int) -> Tensor:
    return sampler.draw(probs**2, first, Stream.DRAFT)


def as_stated(sampler: Sampler, probs: Tensor, first: int) -> Tensor:
    return sampler.draw(probs, first)


def drafting(rule: str, change: Callable[[Drafter], Drafter]) -> Runs:
    made = decoder("llama", "close", rule)
    return observe(made.using(change(made.drafter)), "llama")


@pytest.mark.exhaustive
@pytest.mark.each_value
@pytest.mark.parametrize("rule", mostly_slow(["block", "rejection"], "block"))
@pytest.mark.parametrize("how", mostly_slow([likeliest, colder], likeliest))
def test_drafts_not_drawn_from_their_declared_distribution_are_caught(how: Draw, rule: str) -> None:
    assert drafting(rule, lambda inner: DrawsOtherwise(inner, how)).p_value < SUSPICIOUS


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", mostly_exhaustive(["block", "rejection"], "block"))
def test_dropping_a_sampled_token_because_of_its_small_q_is_caught(rule: str) -> None:
    assert drafting(rule, lambda inner: StopsAfterUnlikely(inner, keeps=False)).p_value < SUSPICIOUS


@pytest.mark.slow
@pytest.mark.parametrize("rule", mostly_exhaustive(["block", "rejection"], "block"))
def test_ending_a_draft_after_an_unlikely_token_keeps_the_distribution(rule: str) -> None:
    seen = drafting(rule, lambda inner: StopsAfterUnlikely(inner, keeps=True))
    assert {0, 1, 2} <= {round.num_draft_tokens for round in seen.rounds}
    assert seen.p_value > SUSPICIOUS


@pytest.mark.exhaustive
def test_the_same_wrapper_with_the_right_draw_keeps_the_distribution() -> None:
    assert drafting("block", lambda inner: DrawsOtherwise(inner, as_stated)).p_value > SUSPICIOUS


@pytest.mark.exhaustive
@pytest.mark.parametrize("drafter", mostly_exhaustive(["none", "ngram:1-3", "close"], "close"))
def test_random_draws_that_forget_the_position_are_caught(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Sampler, stream: Stream, offsets: range) -> Words:
        return words([key(row.seed, stream) for row in self.rows for _ in offsets]).reshape(len(self.rows), -1)

    monkeypatch.setattr(Sampler, "_keys", forgetful)
    assert observe(decoder("llama", drafter, "block"), "llama", MORE).p_value < SUSPICIOUS


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", mostly_exhaustive(["llama", "gemma3"], "llama"))
def test_accepting_by_the_same_random_draw_in_every_round_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "round_keys", lambda self, stream: [key(row.seed, stream) for row in self.rows])
    assert observe(decoder(name, "ngram:1-3", "rejection"), name, MORE).p_value < SUSPICIOUS


@pytest.mark.exhaustive
def test_penalties_that_do_not_see_the_draft_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    blind = staticmethod(lambda ids, drafted: ids.new_zeros(len(ids), drafted.shape[1] + 1, ids.shape[1]))
    monkeypatch.setattr(history.Penalties, "_occurrences", blind)
    assert observe(decoder("gpt2", "close", "auto"), "gpt2").p_value < SUSPICIOUS
