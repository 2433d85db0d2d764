"""Exact distributions of whole rounds, by enumeration of drafts, numbers kept and next tokens. Nothing is sampled.

A `Distribution` is a function from a context (a tuple of token ids) to the probabilities of VOCAB tokens. The
tokens that a round emits are continued by the target to HORIZON tokens, so that rounds of any length compare.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.acceptance import RULES, Distributions, match
from slipstream.core.limits import WITH_COUNT
from slipstream.core.types import Draft

VOCAB, WIDTH = 3, 3
HORIZON = WIDTH + 1
Context = tuple[int, ...]
Array = NDArray[np.float64]
Distribution = Callable[[Context], Array]
RuleFunction = Callable[[Tensor, Tensor, Draft], Distributions]


def rule_names(*, lossless: bool) -> list[str]:
    """The registered rules, those that need a count with one."""
    rules = sorted(rule.name for rule in RULES.values() if rule.lossless is lossless)
    return [f"{name}:2" if name in WITH_COUNT else name for name in rules]


def random_distribution(seed: int, tag: str, sharpness: float = 1.3) -> Distribution:
    """A distribution that depends on the whole context and on nothing else."""

    @cache
    def distribution(context: Context) -> Array:
        rng = np.random.default_rng(zlib.crc32(repr((seed, tag, context)).encode()))
        weights = np.exp(sharpness * rng.normal(size=VOCAB))
        return weights / weights.sum()

    return distribution


def without_least(distribution: Distribution) -> Distribution:
    """The distribution with its least likely token made impossible."""

    def truncated(context: Context) -> Array:
        weights = distribution(context).copy()
        weights[weights.argmin()] = 0.0
        return weights / weights.sum()

    return cache(truncated)


def one_hot(distribution: Distribution) -> Distribution:
    """The greedy distribution."""
    return cache(lambda context: np.eye(VOCAB)[distribution(context).argmax()])


def sharpened(distribution: Distribution, power: float) -> Distribution:
    """The distribution at temperature 1 / power."""
    return cache(lambda context: distribution(context) ** power / (distribution(context) ** power).sum())


@dataclass(frozen=True)
class Case:
    """A target, and drafts with the probability of each.

    q: the distribution that the rule takes the tokens to be drawn from, or None for one-hot drafts. raw: the target's
    distribution before the sampling options, if it is not p. proposals: (tokens, probability), in any order.
    """

    p: Distribution
    q: Distribution | None
    proposals: list[tuple[Context, float]]
    raw: Distribution | None = None

    def draft(self) -> Draft:
        """All proposals as one batch. Padding would change the result if it counted."""
        rows = [tokens for tokens, _ in self.proposals]
        tokens = torch.tensor([[*row, *[VOCAB - 1] * (WIDTH - len(row))] for row in rows])
        probs = None if self.q is None else self._table(self.q, WIDTH)
        return Draft(tokens, tuple(map(len, rows)), probs)

    def distributions(self, rule: RuleFunction) -> Distributions:
        """The distributions that the rule returns for the batch."""
        p = self._table(self.p, HORIZON)
        return rule(p, self._table(self.raw or self.p, HORIZON).log(), self.draft())

    def _table(self, distribution: Distribution, columns: int) -> Tensor:
        """[B, columns, VOCAB]: the distribution after each row's first j draft tokens; another at unused ones."""
        foreign = np.array([0.9, 0.1, 0.0])
        last = columns - WIDTH  # p has one position more than the draft has tokens
        rows = [
            [distribution(tokens[:j]) if j < len(tokens) + last else foreign for j in range(columns)]
            for tokens, _ in self.proposals
        ]
        return torch.tensor(np.array(rows), dtype=torch.float32)


def drawn(q: Distribution, stop: Callable[[Context], bool] = lambda context: False) -> list[tuple[Context, float]]:
    """All drafts drawn from q, each ended where `stop` holds for what has been drawn so far."""

    def grow(context: Context, weight: float) -> Iterator[tuple[Context, float]]:
        if len(context) == WIDTH or stop(context):
            yield context, weight
            return
        for token in range(VOCAB):
            if q(context)[token] > 0:
                yield from grow((*context, token), weight * q(context)[token])

    return list(grow((), 1.0))


def likeliest(q: Distribution) -> Context:
    """The draft that takes the most likely token at every step."""
    context: Context = ()
    while len(context) < WIDTH:
        context = (*context, int(q(context).argmax()))
    return context


def joint(p: Distribution) -> Array:
    """The target's distribution of HORIZON tokens, an array with one axis per token."""
    return _continuation(p, ())


def emitted(case: Case, distributions: Distributions) -> Array:
    """[B, VOCAB, ..., VOCAB]: for each proposal, the distribution of HORIZON tokens when it was drafted."""
    result = np.zeros((len(case.proposals), *[VOCAB] * HORIZON))
    for kept in range(WIDTH + 1):
        following = distributions.next_token(torch.full((len(case.proposals),), kept)).double().numpy()
        for row, (tokens, _) in enumerate(case.proposals):
            weight = float(distributions.keep[row, kept])
            if weight == 0:
                continue
            assert kept <= len(tokens), f"{kept} tokens kept of a draft of {len(tokens)}"
            for token in range(VOCAB):
                prefix = (*tokens[:kept], token)
                result[(row, *prefix)] += weight * following[row, token] * _continuation(case.p, prefix)
    return result


def error(case: Case, rule: RuleFunction) -> float:
    """Largest difference between what is emitted and the target's distribution. Each one-hot draft counts by itself."""
    by_draft = emitted(case, case.distributions(rule))
    if case.q is None:
        return float(abs(by_draft - joint(case.p)).max())
    weights = np.array([weight for _, weight in case.proposals])
    return float(abs(np.tensordot(weights, by_draft, axes=1) - joint(case.p)).max())


def mean_accepted(case: Case, distributions: Distributions) -> float:
    """Expected number of draft tokens kept."""
    weights = torch.tensor([weight for _, weight in case.proposals], dtype=torch.float64)
    return float((weights[:, None] * distributions.keep * torch.arange(WIDTH + 1)).sum())


def match_error(case: Case) -> float:
    """The error of `match` for each draft by itself, over all choices that the target may make along it."""
    choices = list(product(range(VOCAB), repeat=HORIZON))
    rows = [(tokens, choice) for tokens, _ in case.proposals for choice in choices]
    lengths = tuple(len(tokens) for tokens, _ in rows)
    padded = torch.tensor([[*tokens, *[0] * (WIDTH - len(tokens))] for tokens, _ in rows])
    verdict = match(torch.tensor([choice for _, choice in rows]), Draft(padded, lengths))
    by_draft: dict[Context, Array] = {}
    for (tokens, choice), kept, last in zip(rows, verdict.accepted.tolist(), verdict.next_token.tolist(), strict=True):
        weight = choice_probability(case.p, tokens, choice)
        prefix = (*tokens[:kept], last)
        distribution = by_draft.setdefault(tokens, np.zeros([VOCAB] * HORIZON))
        distribution[prefix] += weight * _continuation(case.p, prefix)
    return max(float(abs(distribution - joint(case.p)).max()) for distribution in by_draft.values())


def choice_probability(p: Distribution, draft: Context, choice: Sequence[int]) -> float:
    """The probability of the target choosing `choice`; position j sees the first j draft tokens. Padding is uniform."""
    distributions = [p(draft[:j]) if j <= len(draft) else np.full(VOCAB, 1 / VOCAB) for j in range(HORIZON)]
    return float(np.prod([distribution[token] for distribution, token in zip(distributions, choice, strict=True)]))


@cache
def _continuation(p: Distribution, prefix: Context) -> Array:
    """The distribution of the tokens from `prefix` to HORIZON, with an axis for each."""
    if len(prefix) == HORIZON:
        return np.array(1.0)
    tails = [_continuation(p, (*prefix, token)) for token in range(VOCAB)]
    return np.stack([weight * tail for weight, tail in zip(p(prefix), tails, strict=True)])
