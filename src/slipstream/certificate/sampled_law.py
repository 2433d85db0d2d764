"""Tests whether sampled tokens have the target's distribution, and drafted tokens the one that their draft carries.

Each token is compared with its distribution after the tokens before it. If an event of probability p happens (x = 1) or
not (x = 0), e^(rate x) / (1 + p (e^rate - 1)) has mean 1, so the product over all tokens is a martingale, which ever
exceeds 1 / a with probability a at most (Ville 1939). The filters here are a second implementation, so that
a fault of the engine's shows. A token that the filters exclude fails at once.

A test that passes wrong rules shows nothing, so a few are here for it to catch. They are not registered: no user can
choose one by accident.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import exp, prod

import torch
from torch import Tensor

from slipstream.core.acceptance import Distributions, Rule, rejection
from slipstream.core.interfaces import Sampler, Source
from slipstream.core.rng import WarpOptions
from slipstream.core.types import Draft, Row, Traits, Verdict
from slipstream.draft_length.planner import lengths_without_costs
from slipstream.sampling.processors import params_of
from slipstream.sampling.sampler import warp_options

FALSE_ALARM = 1e-6  # a right rule fails a test with at most this probability
SLACK = 1e-4  # rounding at the edge of top-p and min-p makes no token impossible
# of the martingales; the best is used, and they are counted
RATES = torch.tensor([sign * 0.01 * 2**step for step in range(9) for sign in (-1, 1)], dtype=torch.float64)
QUARTERS = 4
EVENTS = ["likeliest token", *(f"quarter {quarter + 1}" for quarter in range(QUARTERS))]
EVENTS += ["tokens drafted too often", "drafter's likeliest token"]
UNLIKELY = [2.0**-octave for octave in range(1, 9)]  # drafted tokens of smaller probabilities are counted
Place = tuple[tuple[int, ...], WarpOptions]  # a prompt and its sampling options


def place_of(row: Row) -> Place:
    """A row's prompt and sampling options."""
    return tuple(row.tokens[: row.prompt_length]), warp_options(params_of(row))


def filtered(logits: Tensor, option: WarpOptions, slack: float = 0.0) -> Tensor:
    """The distribution [V] of a token under these options, in float64. slack: widens top-p and min-p."""
    temperature, top_k, top_p, min_p = vars(option).values()  # fails for an option that is not computed here
    scores = logits.double() / temperature
    if top_k:
        least = scores.topk(min(top_k, len(scores))).values[-1]
        scores = scores.where(scores >= least, -torch.inf)
    if top_p < 1:
        probs, order = scores.softmax(-1).sort(descending=True)
        count = int((probs.cumsum(-1) - probs < top_p + slack).sum())
        scores = scores.where(scores >= scores[order[count - 1]], -torch.inf)
    if min_p:
        probs = scores.softmax(-1)
        scores = scores.where(probs >= min_p * (1 - slack) * probs.max(), -torch.inf)
    result: Tensor = scores.softmax(-1)
    return result


@dataclass
class SampledTexts:
    """A drafter that tests its drafts, and the tokens that the target chooses after them."""

    sources: Sequence[Source]  # the drafter's
    traits: Traits
    near: Mapping[Place, Sequence[Tensor]] = field(default_factory=dict)  # the drafter's distributions, where known
    are_drafts_sampled: bool = False  # sampled again in each round; not where the target's noise chooses them
    impossible: int = 0  # tokens that the target gives probability 0
    error: float = 0.0  # the largest difference between the engine's probabilities and those of the options
    tokens: int = 0
    drafted: int = 0
    accepted: Counter[int] = field(default_factory=Counter)  # drafts by the number of tokens accepted
    _starts: dict[Row, list[int]] = field(default_factory=dict)  # positions at which rounds began
    _evidence: dict[str, Tensor] = field(default_factory=dict)  # of each group of tokens, [events, rates]
    _sampler: Sampler | None = None  # the engine's, of the round

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        self._sampler = sampler
        draft = Draft.empty(len(rows), sampler.device)
        for source in self.sources:  # as in a round without costs
            wanted_lengths = lengths_without_costs(lengths, draft, lengths)
            if any(wanted_lengths):
                proposed = source.drafter.propose(rows, wanted_lengths, sampler)
                draft = Draft.where([not length for length in wanted_lengths], draft, proposed)
        return draft

    def observe(self, rows: Sequence[Row], draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        counts, following = verdict.accepted.tolist(), verdict.next_token.tolist()
        paths = None if verdict.path is None else verdict.path.tolist()
        engine = self._engine_probs(rows, logits[:, :1])
        if draft.probs is not None and self.are_drafts_sampled:
            self._compare_draft(draft, draft.probs)
        for i, (row, count, last) in enumerate(zip(rows, counts, following, strict=True)):
            length, place, first = draft.lengths[i], place_of(row), row.num_output_tokens
            near = self.near.get(place, ())
            self._starts.setdefault(row, []).append(first)
            if length:
                self.drafted += length
                self.accepted[count] += 1
            nodes = list(range(count)) if paths is None else paths[i][:count]
            tokens = [*draft.tokens[i, nodes].tolist(), last][: row.remaining]
            for position, token, column in zip(range(first, first + len(tokens)), tokens, [-1, *nodes], strict=False):
                probs = filtered(logits[i, column + 1].cpu(), place[1])
                q = near[position] if position < len(near) else None
                if position == first:
                    if engine is not None:
                        edge = float(probs[probs == probs[probs > 0].min()].sum())  # which rounding may exclude
                        difference = float((engine[i] - probs).abs().max())
                        self.error = max(self.error, difference if difference > edge + SLACK else 0.0)
                    if draft.probs is not None and length:  # later ones are known only after drafts that were accepted
                        q = draft.probs[i, 0]
                if probs[token] == 0 and filtered(logits[i, column + 1].cpu(), place[1], SLACK)[token] == 0:
                    self.impossible += 1
                self._compare(row, position, token, probs, q)

    def _engine_probs(self, rows: Sequence[Row], logits: Tensor) -> Tensor | None:
        """[B, V] the engine's own distributions of the rows' next tokens; None in rounds without a draft."""
        if self._sampler is None or self._sampler.rows != list(rows):
            return None
        nothing = torch.zeros(len(rows), 0, dtype=torch.int64, device=logits.device)
        return self._sampler.probs(self._sampler.scores(logits, nothing))[:, 0].cpu()

    def _compare(self, row: Row, position: int, token: int, probs: Tensor, q: Tensor | None) -> None:
        self.tokens += 1
        chosen, best = float(probs[token]), int(probs.argmax())
        events = [(token == best, float(probs[best]))]
        # the token's place among all, the likeliest first, is uniform; a random number divides what one token covers
        generator = torch.Generator().manual_seed(row.seed * 1000 + position)
        width = float(probs[probs == chosen].sum())
        place = float(probs[probs > chosen].sum()) + width * float(torch.rand((), generator=generator))
        events += [(int(place * QUARTERS) == quarter, 1 / QUARTERS) for quarter in range(QUARTERS)]
        if q is None:
            events += [(False, 0.0)] * 2
        else:
            # where drafts are accepted too easily, tokens come too often that the drafter likes more than the target
            q = q.to(probs)
            more, likeliest = q > probs, int(q.argmax())
            events += [(bool(more[token]), float(probs[more].sum())), (token == likeliest, float(probs[likeliest]))]
        evidence = evidence_of(*torch.tensor(events, dtype=torch.float64).T)
        # every round that began at or before a token, for the target's distribution holds from there on
        depths = [f"depth {position - start}" for start in self._starts[row]]
        for name in ("all tokens", str(warp_options(params_of(row))), *depths):
            self._evidence[name] = self._evidence.get(name, torch.zeros(1)) + evidence

    def _compare_draft(self, draft: Draft, probs: Tensor) -> None:
        """A drafter may stop after a token because of what it is, but not drop it: that makes such tokens rarer."""
        is_drafted = torch.arange(draft.width, device=probs.device) < draft.lengths_on_device
        q, tokens = probs[is_drafted].double(), draft.tokens[is_drafted][:, None]
        for limit in UNLIKELY:
            chances = q.where(q < limit, 0.0).sum(-1).clamp(max=1.0)
            evidence = evidence_of(q.gather(1, tokens)[:, 0] < limit, chances).sum(0, keepdim=True)
            name = f"drafted tokens with q < {limit:.2g}"
            self._evidence[name] = self._evidence.get(name, torch.zeros(1)) + evidence.cpu()

    def bound(self) -> tuple[float, str]:
        """An upper bound on the probability of the strongest evidence, all comparisons counted; and its comparison."""
        bounds = [
            (bound_of(evidence), f"{name}, {event}" if len(rows) > 1 else name)
            for name, rows in self._evidence.items()
            for event, evidence in zip(EVENTS, rows, strict=False)
        ]
        bound, where = min(bounds, default=(1.0, ""))
        return min(1.0, bound * len(bounds)), where

    @property
    def passed(self) -> bool:
        """True if no token was impossible and all frequencies are probable enough."""
        return self.impossible == 0 and self.error == 0 and self.bound()[0] >= FALSE_ALARM

    def __str__(self) -> str:
        bound, where = self.bound()
        if self.impossible:
            return f"{self.impossible} of {self.tokens} tokens cannot come from the target at all"
        if self.error:
            return f"the engine's probabilities are wrong by up to {self.error:.2g}"
        if not self.passed:
            return f"{self.tokens} tokens, p <= {bound:.1g} ({where})"
        if not self.drafted:
            return f"{self.tokens} tokens, nothing drafted"
        rate = sum(count * number for count, number in self.accepted.items()) / self.drafted
        deepest = max(self.accepted)
        detail = f"{self.tokens} tokens of {len(self._starts)} texts, p <= {bound:.2g}, acceptance rate {rate:.0%}"
        return f"{detail}, up to {deepest} accepted ({self.accepted[deepest]} times)"


def evidence_of(happened: Tensor, chances: Tensor) -> Tensor:
    """[N, rates] logarithms of the martingales' factors, of N events."""
    rates = RATES.to(chances.device)
    return happened.double()[:, None] * rates - (chances.double()[:, None] * rates.expm1()).log1p()


def bound_of(evidence: Tensor) -> float:
    """An upper bound on the probability of evidence [rates] this strong against the distribution under test."""
    return min(1.0, len(evidence) * exp(-float(evidence.max())))


def near(probs: Tensor) -> Tensor:
    """A distribution for `LikelyDrafts`: the likeliest tokens exchange a little of their probability."""
    values, order = probs.topk(min(4, len(probs)))
    return probs.mul(0.95).index_add(0, order, 0.05 * values.roll(1) / values.sum()).float()


def deep_temperature(logits: Sequence[Sequence[Tensor]], length: int) -> float:
    """The temperature at which the target follows a likely text for `length` tokens about half the time."""

    def reached(temperature: float) -> float:
        likeliest = [[float((row.double() / temperature).softmax(-1).max()) for row in rows[1:]] for rows in logits]
        return sum(prod(chances[:length]) for chances in likeliest) / len(likeliest)

    return max((chosen for step in range(25) if reached(chosen := 0.01 * 1.2**step) > 0.5), default=0.01)


def first_mismatch_kept(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    """Commits the rejected token as well, and continues after it."""
    right = rejection(p, scores, draft).keep
    keep = torch.zeros_like(right)
    keep[:, 1:] = right[:, :-1]
    keep[:, -1] += right[:, -1]
    return Distributions(keep, partial(_at, p))


def bonus_from_raw_logits(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    """Ignores the sampling options if all drafts were accepted: the bonus token comes from the raw logits."""
    right = rejection(p, scores, draft)

    def next_token(accepted: Tensor) -> Tensor:
        raw = _at(scores.softmax(-1), accepted)
        bonus = (accepted == draft.lengths_on_device[:, 0]) & (accepted > 0)
        return torch.where(bonus[:, None], raw, right.next_token(accepted))

    return Distributions(right.keep, next_token)


def kept_from(depth: int) -> Callable[..., Distributions]:
    """The right rule up to `depth` tokens; if that many are accepted, it keeps all that follow."""

    def rule(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
        right = rejection(p, scores, draft)
        if draft.width <= depth:
            return right
        keep = right.keep.clone()
        keep[:, depth:] = 0
        ends = draft.lengths_on_device.clamp(min=depth)
        keep.scatter_add_(1, ends, right.keep[:, depth:].sum(1, keepdim=True))
        return Distributions(keep, right.next_token)

    return rule


def _at(distributions: Tensor, position: Tensor) -> Tensor:
    return distributions[torch.arange(len(distributions)), position]


def wrong_rules(depth: int) -> dict[str, Rule]:
    """Rules that claim to be lossless: a crude one, one wrong after whole drafts, and one after `depth` tokens."""
    functions = {
        "first-mismatch-kept": first_mismatch_kept,
        "bonus-from-raw-logits": bonus_from_raw_logits,
        f"all-kept-after-{depth}": kept_from(depth),
    }
    return {name: Rule(name, True, function) for name, function in functions.items()}
