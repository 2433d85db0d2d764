"""Pairs of target and drafter whose rounds are enumerated, each a function of a seed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np

from tests.support.enumeration import (
    VOCAB,
    WIDTH,
    Array,
    Case,
    Context,
    Distribution,
    drawn,
    one_hot,
    random_distribution,
    sharpened,
    without_least,
)

MakeCase = Callable[[int], Case]

EVERY_DRAFT = [(tokens, 1.0) for tokens in product(range(VOCAB), repeat=WIDTH)]
RAGGED = [(tokens, 1.0) for width in range(WIDTH + 1) for tokens in product(range(VOCAB), repeat=width)]


def probs_of(seed: int) -> tuple[Distribution, Distribution]:
    return random_distribution(seed, "p"), random_distribution(seed, "q")


def disjoint(p: Distribution, q: Distribution) -> tuple[Distribution, Distribution]:
    """Distributions that share no token in some contexts."""

    def only(distribution: Distribution, tokens: Callable[[Context], list[int]]) -> Distribution:
        def restricted(context: Context) -> Array:
            weights = np.where(np.isin(np.arange(VOCAB), tokens(context)), distribution(context), 0.0)
            return weights / weights.sum()

        return restricted

    return only(p, lambda c: [0] if sum(c) % 2 else [0, 1]), only(q, lambda c: [1, 2] if sum(c) % 2 else [1])


def unsure(q: Distribution) -> Callable[[Context], bool]:
    """Stops before a token is drawn from an uncertain distribution."""
    return lambda context: q(context).max() < 0.5


def after_unlikely(q: Distribution) -> Callable[[Context], bool]:
    """Stops after a token that was unlikely; the token stays in the draft."""
    return lambda context: bool(context) and q(context[:-1])[context[-1]] < 0.35


def sampled(seed: int) -> Case:
    p, q = probs_of(seed)
    return Case(p, q, drawn(q))


def truncated_drafter(seed: int) -> Case:
    p, q = probs_of(seed)
    return Case(p, without_least(q), drawn(without_least(q)))


def no_token_left(seed: int) -> Case:
    """The options leave the drafter no token in some contexts: its distribution is zero there, and it proposes 0."""
    p, q = probs_of(seed)

    def restricted_q(context: Context) -> Array:
        return np.zeros(VOCAB) if sum(context) % 2 else q(context)

    return Case(p, restricted_q, drawn(lambda context: np.eye(VOCAB)[0] if sum(context) % 2 else q(context)))


def truncated_target(seed: int) -> Case:
    p, q = probs_of(seed)
    return Case(without_least(p), q, drawn(q), raw=p)


def greedy_target(seed: int) -> Case:
    p, q = probs_of(seed)
    return Case(one_hot(p), q, drawn(q), raw=p)


def greedy_drafter_with_its_distribution(seed: int) -> Case:
    p, q = probs_of(seed)
    return Case(p, one_hot(q), drawn(one_hot(q)))


def equal_distributions(seed: int) -> Case:
    p, _ = probs_of(seed)
    return Case(p, p, drawn(p))


def disjoint_distributions(seed: int) -> Case:
    p, q = disjoint(*probs_of(seed))
    return Case(p, q, drawn(q))


def near_greedy_distributions(seed: int) -> Case:
    p, q = probs_of(seed)
    return Case(sharpened(p, 30), sharpened(q, 30), drawn(sharpened(q, 30)))


def ended_before_drawing(seed: int) -> Case:
    p, q = probs_of(seed)
    return Case(p, q, drawn(q, unsure(q)))


def ended_after_an_unlikely_token(seed: int) -> Case:
    p, q = probs_of(seed)
    return Case(p, q, drawn(q, after_unlikely(q)))


def fixed_draft(seed: int) -> Case:
    return Case(random_distribution(seed, "p"), None, EVERY_DRAFT)


def fixed_draft_of_any_length(seed: int) -> Case:
    return Case(random_distribution(seed, "p"), None, RAGGED)


def fixed_draft_greedy_target(seed: int) -> Case:
    p = random_distribution(seed, "p")
    return Case(one_hot(p), None, RAGGED, raw=p)


def fixed_draft_truncated_target(seed: int) -> Case:
    p = random_distribution(seed, "p")
    return Case(without_least(p), None, RAGGED, raw=p)


FIXED = [fixed_draft, fixed_draft_of_any_length, fixed_draft_greedy_target, fixed_draft_truncated_target]
CASES = [
    sampled,
    truncated_drafter,
    no_token_left,
    truncated_target,
    greedy_target,
    greedy_drafter_with_its_distribution,
    equal_distributions,
    disjoint_distributions,
    near_greedy_distributions,
    ended_before_drawing,
    ended_after_an_unlikely_token,
    *FIXED,
]
