"""The distributions of the acceptance rules, by enumeration; every wrong rule is caught by the same enumeration."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from slipstream.core import acceptance
from slipstream.core.acceptance import RULES, Distributions, Rule, accept, load_rule, match, rejection, rule_for
from slipstream.core.limits import RULE_NAMES
from slipstream.core.rng import Race
from slipstream.core.types import Draft, Row
from slipstream.errors import UsageError
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import Sampler
from tests.support.enumeration import (
    HORIZON,
    VOCAB,
    WIDTH,
    Case,
    Context,
    Distribution,
    choice_probability,
    drawn,
    emitted,
    error,
    likeliest,
    match_error,
    mean_accepted,
    random_distribution,
    rule_names,
)
from tests.support.markers import subcases
from tests.support.round_cases import (
    CASES,
    EVERY_DRAFT,
    RAGGED,
    MakeCase,
    after_unlikely,
    disjoint_distributions,
    ended_after_an_unlikely_token,
    equal_distributions,
    greedy_target,
    probs_of,
    sampled,
    truncated_drafter,
    truncated_target,
)
from tests.support.wrong_acceptance_rules import SEEDS, WRONG, largest

EXACT, WRONG_BY = 1e-6, 0.01  # p is float32
LOSSLESS = [name for name in rule_names(lossless=True) if load_rule(name).distributions is not None]


@pytest.mark.pairwise
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_rule_keeps_the_distribution_of_the_target(name: str, make: MakeCase) -> None:
    distributions = load_rule(name).distributions
    assert distributions is not None
    assert largest(lambda seed: error(make(seed), distributions)) < EXACT


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_match_keeps_the_distribution_of_the_target_whatever_was_drafted(make: MakeCase) -> None:
    assert max(match_error(make(seed)) for seed in range(2)) < 1e-12


def test_match_emits_what_plain_decoding_emits_from_the_same_random_draws() -> None:
    """One draw of four values per position, looked up in a table of the context; every draw and every draft."""
    tables = [(0, 0, 1, 2), (2, 0, 1, 2), (1, 1, 1, 0)]

    def choose(context: Context, face: int) -> int:
        return tables[sum(context) % 3][face]

    pairs = [(roll, tokens) for roll in product(range(4), repeat=HORIZON) for tokens, _ in EVERY_DRAFT]
    choices = [[choose(tokens[:j], roll[j]) for j in range(HORIZON)] for roll, tokens in pairs]
    verdict = match(torch.tensor(choices), Draft(torch.tensor([t for _, t in pairs]), (WIDTH,) * len(pairs)))
    kept_counts = verdict.accepted.tolist()
    assert set(kept_counts) == set(range(WIDTH + 1))
    for (roll, tokens), kept, last in zip(pairs, kept_counts, verdict.next_token.tolist(), strict=True):
        plain: Context = ()
        for face in roll:
            plain = (*plain, choose(plain, face))
        assert (*tokens[:kept], last) == plain[: kept + 1]


@pytest.mark.each_value
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", [*LOSSLESS, *rule_names(lossless=False)])
def test_every_rule_returns_distributions_that_sum_to_one(name: str, make: MakeCase) -> None:
    rule = load_rule(name).distributions
    assert rule is not None
    case = make(0)
    distributions, draft = case.distributions(rule), case.draft()
    assert distributions.keep.dtype == torch.float64
    assert torch.allclose(distributions.keep.sum(-1), torch.ones(len(draft.lengths), dtype=torch.float64), atol=1e-12)
    assert bool((distributions.keep >= 0).all())
    for kept in range(WIDTH + 1):
        distribution = distributions.next_token(torch.full((len(draft.lengths),), kept))
        used = distributions.keep[:, kept] > 0
        assert bool((distribution >= 0).all())
        assert torch.allclose(distribution[used].sum(-1), torch.ones(int(used.sum())), atol=1e-6)


@pytest.mark.parametrize("name", [*LOSSLESS, *rule_names(lossless=False)])
def test_every_rule_judges_a_row_as_if_it_were_alone(name: str) -> None:
    rule = load_rule(name).distributions
    assert rule is not None
    p, q = probs_of(3)
    proposals = drawn(q, after_unlikely(q))
    together = Case(p, q, proposals).distributions(rule)
    for row, proposal in enumerate(proposals):
        alone = Case(p, q, [proposal]).distributions(rule)
        assert torch.equal(alone.keep[0], together.keep[row])
        for kept in range(len(proposal[0]) + 1):
            single_row, all_rows = torch.tensor([kept]), torch.full((len(proposals),), min(kept, WIDTH))
            assert torch.equal(alone.next_token(single_row)[0], together.next_token(all_rows)[row])


@pytest.mark.parametrize("name", [*LOSSLESS, *rule_names(lossless=False)])
def test_without_a_draft_every_rule_returns_the_distribution_of_the_target(name: str) -> None:
    rule = load_rule(name).distributions
    assert rule is not None
    p = torch.tensor([[[0.2, 0.5, 0.3]], [[0.0, 1.0, 0.0]]])
    distributions = rule(p, p.log(), Draft.empty(2, torch.device("cpu")))
    assert torch.equal(distributions.keep, torch.ones(2, 1, dtype=torch.float64))
    assert torch.equal(distributions.next_token(torch.zeros(2, dtype=torch.int64)), p[:, 0])


def overlap(p: Distribution, q: Distribution) -> float:
    """Expected number kept by rejection sampling: the sum over all prefixes of the product of min(p, q)."""
    total, alive = 0.0, {(): 1.0}
    for _ in range(WIDTH):
        alive = {
            (*context, token): weight * min(p(context)[token], q(context)[token])
            for context, weight in alive.items()
            for token in range(VOCAB)
        }
        total += sum(alive.values())
    return total


@pytest.mark.parametrize("make", [sampled, truncated_drafter, truncated_target, greedy_target, disjoint_distributions])
def test_rejection_keeps_the_overlap_of_p_and_q_at_each_position(make: MakeCase) -> None:
    for seed in SEEDS:
        case = make(seed)
        assert case.q is not None
        assert mean_accepted(case, case.distributions(rejection)) == pytest.approx(overlap(case.p, case.q), abs=1e-6)


def likeliest_draft(seed: int) -> Case:
    p, q = probs_of(seed)
    return Case(p, None, [(likeliest(q), 1.0)])


@pytest.mark.parametrize(
    ("make", "published"),
    [
        (sampled, 1.1055),
        (ended_after_an_unlikely_token, 0.8732),
        (truncated_drafter, 0.9183),
        (likeliest_draft, 0.5864),
    ],
)
def test_rejection_keeps_as_many_tokens_as_an_independent_enumeration(make: MakeCase, published: float) -> None:
    """The numbers are means over the same 40 pairs of models, computed in numpy by other code."""
    kept = [mean_accepted(case, case.distributions(rejection)) for case in map(make, range(40))]
    assert np.mean(kept) == pytest.approx(published, abs=6e-5)


def test_equal_models_keep_every_token() -> None:
    for seed in SEEDS:
        case = equal_distributions(seed)
        assert mean_accepted(case, case.distributions(rejection)) == pytest.approx(WIDTH, abs=1e-6)


def test_rejection_of_a_fixed_draft_accepts_as_often_as_match() -> None:
    for seed in SEEDS:
        case = Case(random_distribution(seed, "p"), None, [(likeliest(random_distribution(seed, "q")), 1.0)])
        draft, by_match = case.draft(), 0.0
        for choice in product(range(VOCAB), repeat=HORIZON):
            kept = int(match(torch.tensor([choice]), draft).accepted)
            by_match += kept * choice_probability(case.p, case.proposals[0][0], choice)
        assert mean_accepted(case, case.distributions(rejection)) == pytest.approx(by_match, abs=1e-6)


@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_rule_is_caught(name: str) -> None:
    assert largest(WRONG[name]) > WRONG_BY


@pytest.mark.parametrize("name", rule_names(lossless=False))
def test_lossy_rule_is_declared_lossy_and_changes_the_distribution(name: str) -> None:
    rule = load_rule(name)
    assert rule.distributions is not None and not rule.lossless
    assert largest(lambda seed: error(sampled(seed), rule.distributions)) > WRONG_BY  # type: ignore[arg-type]


@pytest.mark.parametrize("name", rule_names(lossless=False))
def test_lossy_rule_never_keeps_a_token_the_options_forbid(name: str) -> None:
    rule = load_rule(name).distributions
    assert rule is not None
    scores = torch.tensor([[[0.0, float("-inf"), float("-inf")], [0.0, 0.0, 0.0]]])
    distributions = rule(scores.softmax(-1), scores, Draft(torch.tensor([[1]]), (1,)))
    assert distributions.keep.tolist() == [[1.0, 0.0]]


def test_rejection_never_keeps_a_token_that_both_distributions_exclude() -> None:
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]])
    distributions = rejection(p, p.log(), Draft(torch.tensor([[2]]), (1,), torch.tensor([[[1.0, 0.0, 0.0]]])))
    assert distributions.keep.tolist() == [[1.0, 0.0]]


def test_topk_keeps_exactly_the_tokens_among_the_k_likeliest() -> None:
    p, _ = probs_of(1)
    rule = load_rule("topk:2").distributions
    assert rule is not None
    case = Case(p, None, RAGGED)
    for (tokens, _), keep in zip(RAGGED, case.distributions(rule).keep.tolist(), strict=True):
        among = [p(tokens[:i]).argmin() != tokens[i] for i in range(len(tokens))]
        assert keep.index(1.0) == [*among, False].index(False)
    assert emitted(case, case.distributions(rule)).sum() == pytest.approx(len(RAGGED), abs=1e-5)


@subcases(
    "text",
    ["", "reject", "topk", "topk:", "topk:0", "topk:-1", "topk:x", "topk:1.5", "topk:²", "rejection:2", "match:1"],
)
def test_unknown_rule_is_refused_with_the_list_of_rules(text: str) -> None:
    with pytest.raises(UsageError) as refusal:
        load_rule(text)
    message = str(refusal.value)
    assert message.startswith(f"acceptance={text!r}; allowed: ") and "\n" not in message
    assert "topk:K" in message


def test_rule_names_listed_without_pytorch_are_those_of_the_rules() -> None:
    assert sorted(RULE_NAMES) == sorted(RULES)


def test_auto_takes_match_for_one_hot_drafts_and_block_for_sampled_ones() -> None:
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    assert rule_for("auto", Draft(tokens, (1,))).name == "match"
    assert rule_for("auto", Draft(tokens, (1,), torch.ones(1, 1, VOCAB) / VOCAB)).name == "block"
    assert rule_for("topk:2", Draft(tokens, (1,))).name == "topk:2"


# `accept` draws as the rule's distributions say

DRAWS = 2000


@pytest.fixture
def set_uniforms(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float]], None]:
    """Sets the uniform numbers that `accept` draws, one per row."""

    def replace_uniforms(values: list[float]) -> None:
        numbers = iter(values)
        monkeypatch.setattr(acceptance, "uniform", lambda _bits: next(numbers))

    return replace_uniforms


def verdicts(keep: list[float], rows: int) -> list[int]:
    """How many tokens `accept` keeps in each of `rows` equal rows; the rule keeps j tokens with probability keep[j]."""
    distributions = Distributions(
        torch.tensor([keep] * rows, dtype=torch.float64), lambda accepted: torch.ones(rows, VOCAB)
    )
    params = SamplingParams(temperature=1.0)
    batch = [Row(i, [0], params, seed=i) for i in range(rows)]
    sampler = Sampler(batch, Race(VOCAB, torch.device("cpu")), VOCAB, torch.device("cpu"))
    width = len(keep) - 1
    draft = Draft(torch.zeros(rows, width, dtype=torch.int64), (width,) * rows)
    logits = torch.zeros(rows, width + 1, VOCAB)
    return accept(Rule("fixed", True, lambda p, scores, draft: distributions), logits, draft, sampler).accepted.tolist()


@pytest.mark.parametrize(
    "keep", [[0.1, 0.2, 0.3, 0.4], [0.0, 0.5, 0.0, 0.5], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
)
def test_accept_keeps_each_number_of_tokens_with_the_probability_of_the_rule(
    keep: list[float], set_uniforms: Callable[[list[float]], None]
) -> None:
    set_uniforms([(i + 0.5) / DRAWS for i in range(DRAWS)])
    counts = np.bincount(verdicts(keep, DRAWS), minlength=len(keep))
    assert (counts / DRAWS).tolist() == pytest.approx(keep, abs=1e-9)


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 1 - 2.0**-53])
def test_accept_never_keeps_an_impossible_number(u: float, set_uniforms: Callable[[list[float]], None]) -> None:
    for keep in ([0.0, 0.5, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0], [0.3, 0.3 + 4e-16, 0.4, 0.0], [0.0, 0.0, 1 - 1e-16, 0.0]):
        set_uniforms([u])
        assert keep[verdicts(keep, 1)[0]] > 0
