"""Wrong acceptance rules and wrong drafters found in real projects, each with the error its distribution has.

They are negative controls: a test of exactness that does not catch every one of them is worth nothing. `WRONG` maps a
name to a function from a seed to the error; run as a script, this file prints them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from slipstream.certificate.sampled_law import bonus_from_raw_logits, first_mismatch_kept
from slipstream.core.acceptance import Distributions, Rule, load_rule, rejection
from slipstream.core.types import Draft
from tests.support.enumeration import (
    VOCAB,
    Array,
    Case,
    Context,
    Distribution,
    RuleFunction,
    drawn,
    error,
    likeliest,
    one_hot,
    random_distribution,
    rule_names,
    sharpened,
)

UNLIKELY = 0.35
SEEDS = range(20)


def residual_of_one_token(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    """Subtracts q only at the rejected token instead of everywhere."""
    if draft.probs is None or draft.width == 0:  # one-hot drafts: the same as the right rule
        return rejection(p, scores, draft)
    probs = draft.probs

    def next_token(accepted: Tensor) -> Tensor:
        column = accepted.clamp(max=draft.width - 1)
        rejected = draft.tokens.gather(1, column[:, None])
        distribution = _at(p, accepted).clone()
        less = (distribution.gather(1, rejected) - _at(probs, column).gather(1, rejected)).clamp(min=0)
        cut = distribution.scatter(1, rejected, less)
        return torch.where((accepted < draft.width)[:, None], cut / cut.sum(-1, keepdim=True), distribution)

    return Distributions(rejection(p, scores, draft).keep, next_token)


def recovered_from_p(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    """Samples the token after a rejection from p instead of the residual."""
    return Distributions(rejection(p, scores, draft).keep, partial(_at, p))


def greedy_by_softmax(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    """Pretends to be greedy: takes the argmax after a rejection, but accepts with softmax p / q."""
    right = rejection(scores.softmax(-1), scores, draft)
    best = torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(p.dtype)
    return Distributions(right.keep, partial(_at, best))


def options_twice(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    """Divides by the temperature (here 1/2) twice."""
    return rejection((2 * p.log()).softmax(-1), scores, draft)


def distribution_of_next_position(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    """Tests token i with the target's distribution of position i + 1."""
    return rejection(torch.cat([p[:, 1:], p[:, -1:]], dim=1), scores, draft)


def _at(distributions: Tensor, position: Tensor) -> Tensor:
    return distributions[torch.arange(len(distributions)), position]


WRONG_RULES: dict[str, Callable[[Tensor, Tensor, Draft], Distributions]] = {
    "first-mismatch-kept": first_mismatch_kept,
    "residual-of-one-token": residual_of_one_token,
    "recovered-from-p": recovered_from_p,
    "greedy-by-softmax": greedy_by_softmax,
    "bonus-from-raw-logits": bonus_from_raw_logits,
    "options-twice": options_twice,
    "distribution-of-next-position": distribution_of_next_position,
}


def load_wrong_rule(name: str) -> Rule:
    """A wrong rule that claims to be lossless, as in the projects it comes from."""
    return Rule(name, True, WRONG_RULES[name])


def dropped_if_unlikely(q: Distribution) -> list[tuple[Context, float]]:
    """Drafts drawn from q, without the first unlikely token and all after it."""
    shortened = []
    for tokens, weight in drawn(q):
        likely = [q(tokens[:i])[tokens[i]] >= UNLIKELY for i in range(len(tokens))]
        shortened.append((tokens[: [*likely, False].index(False)], weight))
    return shortened


def tree_without_renormalizing(p: Distribution, q: Distribution) -> float:
    """The error of two candidates drawn without replacement, the second tested with the distribution of the first."""
    distribution, first_q = np.zeros(VOCAB), q(())
    for first in range(VOCAB):
        second_q = np.where(np.arange(VOCAB) == first, 0.0, first_q)
        second_q /= second_q.sum()
        for second in range(VOCAB):
            distribution += first_q[first] * second_q[second] * _two_candidates(p(()), first_q, (first, second))
    return float(abs(distribution - p(())).max())


def _two_candidates(p: Array, q: Array, candidates: tuple[int, int]) -> Array:
    """Recursive rejection of candidates that are all tested with the same q (right only for independent draws)."""
    distribution, target, weight = np.zeros(VOCAB), p, 1.0
    for token in candidates:
        accepted = min(1.0, target[token] / q[token])
        distribution[token] += weight * accepted
        weight *= 1 - accepted
        residual = np.maximum(target - q, 0)
        target = residual / residual.sum() if residual.sum() > 0 else target
    return distribution + weight * target


def _distributions(seed: int) -> tuple[Distribution, Distribution]:
    return random_distribution(seed, "p"), random_distribution(seed, "q")


def _error_of(rule: RuleFunction, seed: int) -> float:
    p, q = _distributions(seed)
    return error(Case(p, q, drawn(q)), rule)


def _error_at_half_temperature(rule: RuleFunction, seed: int) -> float:
    raw, q = _distributions(seed)
    return error(Case(sharpened(raw, 2), q, drawn(q), raw), rule)


def _error_of_greedy(seed: int) -> float:
    raw, q = _distributions(seed)
    return error(Case(one_hot(raw), q, drawn(q), raw), greedy_by_softmax)


def _error_of_argmax_draft(seed: int) -> float:
    p, q = _distributions(seed)
    return error(Case(p, q, [(likeliest(q), 1.0)]), rejection)


def _error_of_dropping(seed: int) -> float:
    p, q = _distributions(seed)
    return error(Case(p, q, dropped_if_unlikely(q)), rejection)


def _error_of_other_temperature(seed: int) -> float:
    p, q = _distributions(seed)
    return error(Case(p, q, drawn(sharpened(q, 2))), rejection)


WRONG: dict[str, Callable[[int], float]] = {
    "draft by argmax, tested with q = softmax": _error_of_argmax_draft,
    "draft drawn at another temperature than q says": _error_of_other_temperature,
    "first mismatching draft token kept": partial(_error_of, first_mismatch_kept),
    "sampled token dropped because q(x) < threshold": _error_of_dropping,
    "residual subtracts only q(x) at x": partial(_error_of, residual_of_one_token),
    "recovered token drawn from p": partial(_error_of, recovered_from_p),
    "position j tested with the distribution of position j + 1": partial(_error_of, distribution_of_next_position),
    "greedy that accepts with softmax p / q": _error_of_greedy,
    "bonus token drawn from raw logits": partial(_error_at_half_temperature, bonus_from_raw_logits),
    "sampling options applied twice": partial(_error_at_half_temperature, options_twice),
    "tree draws without replacement, un-renormalized q": lambda seed: tree_without_renormalizing(*_distributions(seed)),
}


def largest(errors: Callable[[int], float]) -> float:
    """The largest error over the seeds."""
    return max(map(errors, SEEDS))


def table() -> list[tuple[str, float]]:
    """Every lossless rule and every wrong one with its largest error."""
    rules = [(name, load_rule(name).distributions) for name in rule_names(lossless=True)]
    right = [
        (f"lossless: {name}", largest(partial(_error_of, distributions)))
        for name, distributions in rules
        if distributions is not None
    ]
    return right + [(f"wrong: {name}", largest(errors)) for name, errors in WRONG.items()]


if __name__ == "__main__":
    print(f"largest error of the joint distribution, {len(SEEDS)} random pairs of models")
    for name, value in table():
        print(f"{name:60s} {value:8.1e}")
