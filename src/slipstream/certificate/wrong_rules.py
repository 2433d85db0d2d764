"""Deliberately wrong acceptance rules, as found in real projects.

The checks of the tests and of `slipstream verify` must fail on these, or they show nothing. They are not registered, so
no user can choose one by accident.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from slipstream.core.acceptance import Distributions, Rule, rejection
from slipstream.core.types import Draft
from slipstream.errors import UsageError


def first_mismatch_kept(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    """Commits the rejected token as well, and goes on behind it."""
    right = rejection(p, scores, draft).keep
    keep = torch.zeros_like(right)
    keep[:, 1:] = right[:, :-1]
    keep[:, -1] += right[:, -1]
    return Distributions(keep, partial(_at, p))


def residual_of_one_token(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    """Subtracts q only at the rejected token, and not everywhere."""
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
    """Samples the token after a rejection from p and not from the residual."""
    return Distributions(rejection(p, scores, draft).keep, partial(_at, p))


def greedy_by_softmax(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    """Means to be greedy: takes the argmax after a rejection, but accepts with softmax p / q."""
    right = rejection(scores.softmax(-1), scores, draft)
    best = torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(p.dtype)
    return Distributions(right.keep, partial(_at, best))


def bonus_from_raw_logits(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    """Forgets the sampling options where all drafts were accepted: the bonus token comes from the raw logits."""
    right = rejection(p, scores, draft)

    def next_token(accepted: Tensor) -> Tensor:
        raw = _at(scores.softmax(-1), accepted)
        bonus = (accepted == draft.width) & (draft.width > 0)
        return torch.where(bonus[:, None], raw, right.next_token(accepted))

    return Distributions(right.keep, next_token)


def options_twice(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    """Divides by the temperature (here 1/2) what has been divided by it before."""
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
    """A wrong rule that claims to be lossless, as they do."""
    if name not in WRONG_RULES:
        raise UsageError(f"wrong rule {name!r}; allowed: {', '.join(WRONG_RULES)}")
    return Rule(name, True, WRONG_RULES[name])
