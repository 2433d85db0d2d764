"""Tests whether sampled tokens have the target's distribution, at every depth of a draft and under every filter.

Each sampled token is compared with the distribution that the target's logits gave it after the tokens before it. The
differences "happened minus probability" of any event sum to a martingale, whose large values are bounded without
approximation (Freedman 1975, "On tail probabilities for martingales"). The filters here are a second implementation,
so that a fault of the engine's shows. A token that the filters exclude fails at once.

A test that passes wrong rules shows nothing, so a few are here for it to catch. They are not registered: no user can
choose one by accident.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, log

import torch
from torch import Tensor

from slipstream.core.acceptance import Distributions, Rule, rejection
from slipstream.core.interfaces import Sampler
from slipstream.core.types import Draft, Row, Verdict
from slipstream.decoder import SpeculativeDecoder
from slipstream.sampling.params import SamplingParams

FALSE_ALARM = 1e-6  # a right rule fails a test with at most this probability
SLACK = 1e-4  # rounding at the edge of top-p and min-p makes no token impossible
RATES = [
    0.01 * 2**step for step in range(9)
]  # of the exponential bounds; the best of them is used, and they are counted
QUARTERS = 4
OPTIONS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 1.5, top_k 3": SamplingParams(temperature=1.5, top_k=3),
    "temperature 0.7, top_p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "temperature 1.2, min_p 0.1": SamplingParams(temperature=1.2, min_p=0.1),
}

Option = tuple[float, int, float, float]
Place = tuple[tuple[int, ...], Option]  # a prompt and its sampling options


def option_of(params: object) -> Option:
    """What of the options the filters read."""
    assert isinstance(params, SamplingParams)
    return params.temperature, params.top_k, params.top_p, params.min_p


def place_of(row: Row) -> Place:
    """A row's prompt and sampling options."""
    return tuple(row.tokens[: row.prompt_length]), option_of(row.params)


def filtered(logits: Tensor, option: Option, slack: float = 0.0) -> Tensor:
    """The distribution [V] of a token under these options, in float64. slack: widens top-p and min-p."""
    temperature, top_k, top_p, min_p = option
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
    return scores.softmax(-1)


@dataclass(frozen=True)
class SampledToken:
    """Events of one sampled token: whether each happened, and its probability before."""

    option: Option
    position: int
    events: Mapping[str, tuple[bool, float]]


@dataclass
class SampledTexts:
    """Observes rounds, and keeps of each sampled token what the test needs.

    near: the drafter's distributions, if it is `LikelyDrafts`.
    """

    near: Mapping[Place, Sequence[Tensor]] = field(default_factory=dict)
    texts: dict[Row, list[SampledToken]] = field(default_factory=dict)
    starts: dict[Row, list[int]] = field(default_factory=dict)  # positions at which rounds began
    sampler: Sampler | None = None  # the engine's, of the round
    impossible: int = 0
    error: float = 0.0  # the largest difference between the engine's probabilities and those of the options
    drafted: int = 0
    accepted: Counter[int] = field(default_factory=Counter)  # drafts by the number of tokens accepted

    def observe(self, rows: Sequence[Row], draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        counts, following = verdict.accepted.tolist(), verdict.next_token.tolist()
        paths = None if verdict.path is None else verdict.path.tolist()
        engine = self._engine_probs(rows, logits[:, :1])
        for i, (row, count, last) in enumerate(zip(rows, counts, following, strict=True)):
            if draft.lengths[i]:
                self.drafted += draft.lengths[i]
                self.accepted[count] += 1
            nodes = list(range(count)) if paths is None else paths[i][:count]
            tokens = [*draft.tokens[i, nodes].tolist(), last][: row.remaining]
            self.starts.setdefault(row, []).append(row.num_output_tokens)
            for offset, (token, column) in enumerate(zip(tokens, [0, *(node + 1 for node in nodes)], strict=False)):
                q = None
                if draft.probs is not None and draft.lengths[i] and offset == 0:
                    q = draft.probs[i, 0]  # later ones are known only after drafts that were accepted
                probs = filtered(logits[i, column].cpu(), option_of(row.params))
                if engine is not None and offset == 0:
                    edge = float(probs[probs == probs[probs > 0].min()].sum())  # which rounding may exclude
                    difference = float((engine[i] - probs).abs().max())
                    self.error = max(self.error, difference if difference > edge + SLACK else 0.0)
                if (
                    probs[token] == 0.0
                    and filtered(logits[i, column].cpu(), option_of(row.params), SLACK)[token] == 0.0
                ):
                    self.impossible += 1
                self._add(row, row.num_output_tokens + offset, token, probs, q)

    def _engine_probs(self, rows: Sequence[Row], logits: Tensor) -> Tensor | None:
        """[B, V] the engine's own distributions of the rows' next tokens; None in rounds without a draft."""
        if self.sampler is None or self.sampler.rows != list(rows):
            return None
        nothing = torch.zeros(len(rows), 0, dtype=torch.int64, device=logits.device)
        return self.sampler.probs(self.sampler.scores(logits, nothing))[:, 0].cpu()

    def _add(self, row: Row, position: int, token: int, probs: Tensor, q: Tensor | None) -> None:
        chosen = float(probs[token])
        best = int(probs.argmax())
        events = {"likeliest token": (token == best, float(probs[best]))}
        # the token's place among all, the likeliest first, is uniform; a random number divides what one token covers
        generator = torch.Generator().manual_seed(row.seed * 1000 + position)
        width = float(probs[probs == chosen].sum())
        place = float(probs[probs > chosen].sum()) + width * float(torch.rand((), generator=generator))
        for quarter in range(QUARTERS):
            events[f"quarter {quarter + 1}"] = int(place * QUARTERS) == quarter, 1 / QUARTERS
        near = self.near.get(place_of(row))
        if q is None and near is not None and position < len(near):
            q = near[position]
        if q is not None:
            # where drafts are accepted too easily, tokens come too often that the drafter likes more than the target
            q = q.to(probs)
            more, drafted = q > probs, int(q.argmax())
            events["tokens drafted too often"] = bool(more[token]), float(probs[more].sum())
            events["drafter's likeliest token"] = token == drafted, float(probs[drafted])
        self.texts.setdefault(row, []).append(SampledToken(option_of(row.params), position, events))

    def outcome(self) -> LawTest:
        """The test of all tokens so far: at each depth after the beginning of a round, under each option, together."""
        sums: dict[tuple[str, str], list[float]] = {}
        for row, tokens in self.texts.items():
            starts = set(self.starts[row])
            for token in tokens:
                # every round that began at or before a token, for the target's distribution holds from there on
                depths = {f"depth {token.position - start}" for start in starts if start <= token.position}
                for group in ("all tokens", f"options {token.option}", *depths):
                    for event, (happened, probability) in token.events.items():
                        total = sums.setdefault((group, event), [0.0, 0.0])
                        total[0] += happened - probability
                        total[1] += probability * (1 - probability)
        tests = [(_bound(*total), f"{group}, {event}") for (group, event), total in sums.items()]
        least, where = min(tests, default=(1.0, ""))
        num_tokens = sum(map(len, self.texts.values()))
        return LawTest(
            min(1.0, least * len(tests)),
            where,
            len(self.texts),
            num_tokens,
            self.impossible,
            self.error,
            self.drafted,
            self.accepted,
        )


def _bound(total: float, variance: float) -> float:
    """The probability of a sum of differences as far from 0, at most: P <= exp(-(rate |S| - (e^rate - 1 - rate) V))."""
    best = min((exp(rate) - 1 - rate) * variance - rate * abs(total) for rate in RATES)
    return exp(min(0.0, best + log(2 * len(RATES))))


@dataclass(frozen=True)
class LawTest:
    """Outcome of a test of sampled tokens against the target's distributions."""

    p_value: float  # at most this probable under the target's distributions, all comparisons counted
    where: str  # the comparison that is least probable
    texts: int
    tokens: int
    impossible: int  # tokens that the target gives probability 0
    error: float  # of the probabilities that the engine computed
    drafted: int
    accepted: Mapping[int, int]  # drafts by the number of tokens accepted

    @property
    def passed(self) -> bool:
        """Whether no token was impossible and the frequencies are likely enough under the target's distribution."""
        return self.impossible == 0 and self.error == 0 and self.p_value >= FALSE_ALARM

    def __str__(self) -> str:
        if self.impossible:
            return f"{self.impossible} of {self.tokens} tokens cannot come from the target at all"
        if self.error:
            return f"the engine's probabilities are wrong by up to {self.error:.2g}"
        if not self.passed:
            return f"{self.tokens} tokens, p <= {self.p_value:.1g} ({self.where})"
        if not self.drafted:
            return f"{self.tokens} tokens, nothing drafted"
        rate = sum(count * number for count, number in self.accepted.items()) / self.drafted
        deepest = max(self.accepted)
        detail = f"{self.tokens} tokens of {self.texts} texts, p <= {self.p_value:.2g}, acceptance rate {rate:.0%}"
        return f"{detail}, up to {deepest} accepted ({self.accepted[deepest]} times)"


def sample(
    decoder: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    tokens: int,
    seeds: range,
) -> None:
    """Sample a text of every prompt under every option for each seed, in mixed batches of unequal lengths."""
    pairs = [(prompt, option) for prompt in prompts for option in params]
    texts = [
        # every text has a seed of its own: the same random numbers twice would count as more evidence than there is
        (prompt, replace(option, seed=seed * len(pairs) + place, max_tokens=tokens - place % 2, ignore_eos=True))
        for seed in seeds
        for place, (prompt, option) in enumerate(pairs)
    ]
    decoder.generate([prompt for prompt, _ in texts], [option for _, option in texts])


def near_distributions(
    logits: Mapping[tuple[int, ...], Sequence[Tensor]], params: Sequence[SamplingParams]
) -> dict[Place, list[Tensor]]:
    """Distributions near the target's along a text, for `LikelyDrafts`. logits: of each prompt's text, [V] each."""
    return {
        (prompt, option_of(option)): [_near(filtered(row, option_of(option))) for row in rows]
        for prompt, rows in logits.items()
        for option in params
    }


def _near(probs: Tensor) -> Tensor:
    """Another distribution over the likeliest tokens: they exchange a little of their probability."""
    values, order = probs.topk(min(4, len(probs)))
    return probs.mul(0.95).index_add(0, order, 0.05 * values.roll(1) / values.sum()).float()


def deep_temperature(logits: Sequence[Sequence[Tensor]], length: int) -> float:
    """The temperature at which the target follows a likely text for `length` tokens about half the time."""

    def reached(temperature: float) -> float:
        chances = [
            torch.stack([(row.double() / temperature).softmax(-1).max() for row in rows[1 : length + 1]]).prod()
            for rows in logits
        ]
        return float(torch.stack(chances).mean())

    low, high = 0.01, 1.0
    for _ in range(12):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if reached(middle) > 0.5 else (low, middle)
    return low


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
    """The right rule up to `depth` tokens; of a draft of which so many are accepted, it keeps all that follow."""

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
