"""Acceptance rules: how much of a draft is accepted, and the distribution of the token that follows.

A rule is a pure function of the target's distributions p and of the draft with its distributions q. Random draws are
made in `accept` alone. `lossless` in a rule's decorator says whether the output has exactly the target's distribution.

Shapes: B rows, K the widest draft, V the vocabulary. p: [B, K + 1, V], position j follows draft token j - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from slipstream.core.interfaces import Sampler
from slipstream.core.limits import WITH_COUNT, check_rule
from slipstream.core.rng import Stream, uniform
from slipstream.core.trees import match_tree
from slipstream.core.types import Draft, Verdict
from slipstream.core.user_objects import user_object
from slipstream.errors import UsageError


@dataclass(frozen=True)
class Distributions:
    """The result of a rule. keep: [B, K + 1] float64, the probability that exactly i draft tokens are accepted.

    next_token: maps the number accepted [B] to the distribution of the token that follows them [B, V].
    """

    keep: Tensor
    next_token: Callable[[Tensor], Tensor]


RuleFunction = Callable[..., Distributions]


@dataclass(frozen=True)
class Rule:
    """A named acceptance rule. `distributions` is None for `match`, which takes the target's own draws."""

    name: str
    lossless: bool
    distributions: RuleFunction | None

    @property
    def coupled(self) -> bool:
        """True if every committed token is the target's own choice, so that a seed has one output for any drafter."""
        return self.distributions is None


RULES: dict[str, Rule] = {"match": Rule("match", True, None)}


def rule(name: str, *, lossless: bool) -> Callable[[RuleFunction], RuleFunction]:
    """Register the decorated f(p, scores, draft) as a rule. scores: [B, K + 1, V] logits before the temperature."""

    def register(function: RuleFunction) -> RuleFunction:
        RULES[name] = Rule(name, lossless, function)
        return function

    return register


@cache
def load_rule(text: str) -> Rule:
    """The rule called `text`: "rejection", "topk:10", or a user's "module:rule"; UsageError lists the known ones."""
    check_rule(text)
    name, _, count = text.partition(":")
    if name not in RULES:
        rule = user_object("acceptance", text)
        if not isinstance(rule, Rule):
            raise UsageError(
                f"acceptance={text!r} is of type {type(rule).__name__}; allowed: a Rule(name, lossless, distributions)"
            )
        return _checked(rule)
    rule = RULES[name]
    if rule.distributions is None or name not in WITH_COUNT:
        return rule
    return Rule(text, rule.lossless, partial(rule.distributions, k=int(count)))


def rule_for(choice: str | Rule, draft: Draft) -> Rule:
    """The rule to use on this draft; "auto" means `block` if its tokens were sampled (`draft.probs`), else `match`."""
    if isinstance(choice, Rule):
        return _checked(choice)
    if choice != "auto":
        return load_rule(choice)
    return load_rule("match" if draft.probs is None else "block")


def accept(choice: Rule, logits: Tensor, draft: Draft, sampler: Sampler) -> Verdict:
    """Apply a rule to a draft: the rule computes distributions, `sampler` draws from them.

    logits: [B, K + 1, V], the target's.
    """
    if choice.distributions is None:
        chosen = sampler.choose(logits, draft)
        return match(chosen, draft) if draft.parents is None else Verdict(*match_tree(chosen, draft))
    if draft.parents is not None:
        raise UsageError(f"acceptance={choice.name!r} with a draft tree; allowed: 'match', or drafts without branches")
    scores = sampler.scores(logits, draft.tokens).float()
    distributions = choice.distributions(sampler.probs(scores), scores, draft)
    u = torch.tensor([uniform(bits) for bits in sampler.round_keys(Stream.KEEP)], dtype=torch.float64)
    cumulative = distributions.keep.cumsum(-1)
    accepted = (u.to(cumulative.device, non_blocking=True)[:, None] * cumulative[:, -1:] >= cumulative).sum(-1)
    # a user's rule may accept more than a row's draft has
    accepted = torch.minimum(accepted, draft.lengths_on_device[:, 0])
    return Verdict(accepted, sampler.draw_at(distributions.next_token(accepted), accepted, draft.width))


def _checked(rule: Rule) -> Rule:
    """A user's rule, with what it returns checked."""
    function = rule.distributions
    if function is None:
        return rule

    def distributions(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
        has_tokens = (p.sum(-1) > 0).all(-1)  # not so where options forbid all tokens, or the logits are NaN
        rows, width, vocab_size = p.shape
        # copies of what the commit reads, so that a rule cannot change it
        returned = function(p, scores, replace(draft, tokens=draft.tokens.clone()))
        if not isinstance(returned, Distributions):
            raise UsageError(f"acceptance rule {rule.name} returned {type(returned).__name__}; allowed: Distributions")

        def next_token(accepted: Tensor) -> Tensor:
            probs = returned.next_token(accepted)
            return _probabilities(rule, "next_token", probs, (rows, vocab_size), has_tokens)

        return Distributions(_probabilities(rule, "keep", returned.keep, (rows, width), has_tokens), next_token)

    return replace(rule, distributions=distributions)


def _probabilities(rule: Rule, what: str, value: object, shape: Sequence[int], has_tokens: Tensor) -> Tensor:
    """What a user's rule returned, in float32 or float64; UsageError unless they are probabilities, of this shape.

    has_tokens: the rows that count.
    """
    returned = f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
    if not isinstance(value, Tensor) or value.shape != torch.Size(shape) or not value.is_floating_point():
        raise UsageError(
            f"acceptance rule {rule.name} returned {what} {returned}; allowed: a tensor {list(shape)} of probabilities"
        )
    weights = value if value.dtype == torch.float64 else value.float()
    sums = weights.sum(-1)
    wrong = ((weights < 0).any(-1) | ~sums.isfinite() | (sums == 0)) & has_tokens
    if wrong.any():
        raise UsageError(
            f"acceptance rule {rule.name} returned {what} with the sum {float(sums[wrong][0]):g}; "
            "allowed: none below 0, with the sum 1"
        )
    return weights


def match(choice: Tensor, draft: Draft) -> Verdict:
    """Sample and match: accept draft tokens up to the first that differs from the target's choice. choice: [B, K + 1].

    Exact for any draft, since every committed token is the target's own choice at its position. One-hot drafts are
    accepted as often as by rejection sampling. In greedy decoding the choice is the argmax.
    """
    agree = (choice[:, :-1] == draft.tokens) & _proposed(draft)
    accepted = agree.long().cumprod(-1).sum(-1)
    return Verdict(accepted, choice.gather(1, accepted[:, None])[:, 0])


@rule("rejection", lossless=True)
def rejection(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    """Keep token x_i with probability min(1, p(x_i) / q(x_i)), in order, up to the first refusal.

    Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.
    """
    px, qx = _drafted(p, draft)
    ratio = torch.where(qx > 0, (px / qx).clamp(max=1.0), 0.0) * _proposed(draft)
    survive = ratio.cumprod(-1)
    start = torch.ones(len(p), 1, dtype=torch.float64, device=p.device)
    keep = torch.cat([start, survive], -1) * torch.cat([1 - ratio, start], -1)
    return Distributions(keep, partial(_residual, p, draft, None))


@rule("block", lossless=True)
def block(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    """Judge the whole draft at once: keep the longest prefix that passes, even if a shorter one failed.

    Never fewer accepted tokens than `rejection` in expectation. Sun et al., ICLR 2025 (arXiv 2403.10444), algorithm 2.
    With one-hot drafts the two rules are one.
    """
    if draft.probs is None or draft.width == 0:
        return rejection(p, scores, draft)
    px, qx = _drafted(p, draft)
    ratio = torch.where(qx > 0, px / qx, 0.0)  # q is zero everywhere if no token was left to draft
    weight = [torch.ones_like(px[:, 0])]  # P_0 = 1, P_i = min(1, P_{i-1} p(x_i) / q(x_i))
    for j in range(draft.width):
        weight.append((weight[-1] * ratio[:, j]).clamp(max=1.0))
    scale = torch.stack(weight, dim=1)
    inner = scale[:, 1:-1]
    mass = p[:, 1:-1].double().mul_(inner[..., None]).sub_(draft.probs[:, 1:]).clamp_(min=0.0).sum(-1)
    room = mass + 1 - inner
    passes = torch.where(room > 0, mass / room.clamp(min=1e-300), 1.0)  # H_i for i < length
    lengths = draft.lengths_on_device
    index = torch.arange(1, draft.width + 1, device=p.device)
    passes = torch.where(index == lengths, scale[:, 1:], torch.cat([passes, scale[:, -1:]], dim=1))
    passes = passes * (index <= lengths)
    # the number kept is the last i that passes: H_i times the chance that all later ones fail
    fails = (1 - passes).flip(-1).cumprod(-1).flip(-1)
    start = torch.ones_like(passes[:, :1])
    keep = torch.cat([start, passes], -1) * torch.cat([fails, start], -1)
    return Distributions(keep, partial(_residual, p, draft, scale))


@rule("topk", lossless=False)
def topk(p: Tensor, scores: Tensor, draft: Draft, *, k: int) -> Distributions:
    """Lossy: keep a draft token iff it is among the target's k most likely; the next token is sampled from p."""
    if draft.width == 0:
        return Distributions(torch.ones_like(p[:, :1, 0], dtype=torch.float64), partial(_distribution_at, p))
    threshold = scores[:, :-1].topk(min(k, p.shape[-1]), dim=-1).values[..., -1]
    drafted = scores[:, :-1].gather(-1, draft.tokens[..., None])[..., 0]
    accepted = ((drafted >= threshold) & torch.isfinite(drafted) & _proposed(draft)).long().cumprod(-1).sum(-1)
    keep = torch.nn.functional.one_hot(accepted, draft.width + 1).double()
    return Distributions(keep, partial(_distribution_at, p))


@rule("typical", lossless=False)
def typical(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    """Lossy: accept a draft token iff p(x) > min(0.3, 0.09 exp(-H(p))), where H is the entropy of p.

    The next token is sampled from p. Greedy rows stay exact. Cai et al. 2024 (Medusa), section 2.3.1, with the
    thresholds of its code.
    """
    px, _ = _drafted(p, draft)
    entropy = torch.special.entr(p[:, : draft.width].double()).sum(-1)
    kept = (px > (0.09 * torch.exp(-entropy)).clamp(max=0.3)) & _proposed(draft)
    accepted = kept.long().cumprod(-1).sum(-1)
    keep = torch.nn.functional.one_hot(accepted, draft.width + 1).double()
    return Distributions(keep, partial(_distribution_at, p))


def _proposed(draft: Draft) -> Tensor:
    """[B, K] bool: which columns hold tokens, not padding."""
    return torch.arange(draft.width, device=draft.tokens.device) < draft.lengths_on_device


def _drafted(p: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """p(x_i) and q(x_i), float64 [B, K]."""
    px = p[:, :-1].gather(-1, draft.tokens[..., None])[..., 0].double()
    if draft.probs is None:
        return px, torch.ones_like(px)
    return px, draft.probs.gather(-1, draft.tokens[..., None])[..., 0].double()


def _distribution_at(p: Tensor, accepted: Tensor) -> Tensor:
    return p.gather(1, accepted[:, None, None].expand(-1, 1, p.shape[-1]))[:, 0]


def _residual(p: Tensor, draft: Draft, scale: Tensor | None, accepted: Tensor) -> Tensor:
    """[B, V] distribution of the next token: (scale p - q)+ normalized after a rejection, p where all were accepted.

    If rounding leaves the residual without mass, it is p itself. scale: [B, K + 1] or None for 1.
    """
    target = _distribution_at(p, accepted)
    if draft.width == 0:
        return target
    column = accepted.clamp(max=draft.width - 1)[:, None]
    if draft.probs is None:
        q = torch.zeros_like(target).scatter_(1, draft.tokens.gather(1, column), 1.0)
    else:
        q = _distribution_at(draft.probs, column[:, 0])
    weight = 1.0 if scale is None else scale.gather(1, accepted[:, None])
    residual = target.double().mul_(weight).sub_(q).clamp_(min=0.0)
    mass = residual.sum(-1, keepdim=True)
    rejected = (accepted[:, None] < draft.lengths_on_device) & (mass > 0)
    return torch.where(rejected, residual / mass.clamp(min=1e-300), target.double()).float()
