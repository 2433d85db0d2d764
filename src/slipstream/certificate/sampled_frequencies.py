"""Compares the frequencies of many sampled texts with the distribution computed from the target's own logits.

A test that passes wrong rules shows nothing, so two of them are here for it to catch. They are not registered: no user
can choose one by accident.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from slipstream.core.acceptance import Distributions, Rule, rejection
from slipstream.core.rng import Race
from slipstream.core.types import Draft, Row
from slipstream.decoder import SpeculativeDecoder
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import Sampler

FALSE_ALARM = 1e-4  # a right rule fails the test with this probability
TOKENS, TOP_K = 4, 3  # of each sampled text; the first token is never drafted, since it comes with the prompt
FEWEST_EXPECTED = 5  # cells of smaller expectation are pooled
PARAMS = SamplingParams(temperature=1.5, top_k=TOP_K, max_tokens=TOKENS, ignore_eos=True)

Text = tuple[int, ...]


@dataclass(frozen=True)
class DistributionTest:
    """Outcome of a chi-square test of sampled texts against the target's distribution.

    impossible: texts that the target gives probability 0; distance: total variation; acceptance_rate: None if nothing
    was drafted.
    """

    p_value: float
    runs: int
    impossible: int
    distance: float
    acceptance_rate: float | None

    @property
    def passed(self) -> bool:
        """Whether no text was impossible and the frequencies are likely enough under the target's distribution."""
        return self.impossible == 0 and self.p_value >= FALSE_ALARM

    def __str__(self) -> str:
        if self.impossible:
            return f"{self.impossible} of {self.runs} texts cannot come from the target at all"
        rate = "nothing drafted" if self.acceptance_rate is None else f"acceptance rate {self.acceptance_rate:.0%}"
        return f"{self.runs} texts, chi-square p = {self.p_value:.2g}, total variation {self.distance:.3f}, {rate}"


@dataclass(frozen=True)
class Target:
    """A prompt and the target's own distribution of the next TOKENS tokens, whose support TOP_K keeps small."""

    prompt: list[int]
    distribution: Mapping[Text, float]

    @classmethod
    def of(cls, decoder: SpeculativeDecoder, prompt: list[int]) -> Target:
        return cls(prompt, exact_distribution(decoder, prompt))


def distribution_test(decoders: Sequence[SpeculativeDecoder], targets: Sequence[Target], runs: int) -> DistributionTest:
    """Chi-square of sampled texts against the target's distributions, over all prompts together.

    decoders: those that should sample from these distributions; they take turns. runs: texts in all, the same number
    for each prompt, rounded up; each has its own seed.
    """
    runs_each = -(-runs // len(targets))
    impossible, distance, statistic, degrees = 0, 0.0, 0.0, 0
    drafted = accepted = 0
    for target in targets:
        seeds = [range(1 + i, runs_each + 1, len(decoders)) for i in range(len(decoders))]
        parts = [sample(decoder, target.prompt, row_seeds) for decoder, row_seeds in zip(decoders, seeds, strict=True)]
        counts, distribution = Counter(text for part in parts for text in part.texts), target.distribution
        impossible += sum(count for text, count in counts.items() if distribution.get(text, 0.0) == 0.0)
        distance += sum(abs(counts[text] / runs_each - p) for text, p in distribution.items()) / 2 / len(targets)
        cells = _cells(counts, distribution, runs_each)
        statistic += sum((count - expectation) ** 2 / expectation for count, expectation in cells)
        degrees += max(0, len(cells) - 1)
        drafted += sum(part.drafted for part in parts)
        accepted += sum(part.accepted for part in parts)
    half = torch.tensor([max(1, degrees) / 2, statistic / 2], dtype=torch.float64)
    p_value = float(torch.special.gammaincc(half[0], half[1]))
    return DistributionTest(
        p_value, runs_each * len(targets), impossible, distance, accepted / drafted if drafted else None
    )


def _cells(counts: Mapping[Text, int], distribution: Mapping[Text, float], runs: int) -> list[tuple[int, float]]:
    """Counts and expectations of the likely texts, and of all others that are possible as one cell."""
    likely = {text: p * runs for text, p in distribution.items() if p * runs >= FEWEST_EXPECTED}
    cells = [(counts[text], expectation) for text, expectation in likely.items()]
    possible = sum(count for text, count in counts.items() if distribution.get(text, 0.0) > 0)
    pooled = possible - sum(count for count, _ in cells), runs - sum(expectation for _, expectation in cells)
    return [*cells, pooled] if pooled[1] >= 1 else cells


@dataclass(frozen=True)
class Sampled:
    """Sampled texts, and how many tokens were drafted and accepted for them."""

    texts: list[Text]
    drafted: int
    accepted: int


def sample(decoder: SpeculativeDecoder, prompt: list[int], seeds: range) -> Sampled:
    """The texts of these seeds."""
    results = decoder.generate([prompt] * len(seeds), [replace(PARAMS, seed=seed) for seed in seeds])
    drafted = sum(r.stats.num_draft_tokens for r in results)
    accepted = sum(r.stats.num_accepted_tokens for r in results)
    return Sampled([tuple(r.token_ids) for r in results], drafted, accepted)


def exact_distribution(decoder: SpeculativeDecoder, prompt: list[int]) -> dict[Text, float]:
    """The target's own distribution of the next TOKENS tokens, from its logits after every possible beginning."""
    backend = decoder.target.backend
    race = Race(backend.vocab_size, backend.device)
    distribution: dict[Text, float] = {(): 1.0}
    for _ in range(TOKENS):
        longer: dict[Text, float] = {}
        for text, weight in distribution.items():
            tokens = [*prompt, *text]
            sampler = Sampler([Row(0, tokens, PARAMS, 0)], race, backend.vocab_size, backend.device)
            logits = decoder.next_logits(tokens)[None, None]
            probs = sampler.probs(sampler.scores(logits, torch.empty(1, 0, dtype=torch.int64, device=logits.device)))
            for token in probs[0, 0].nonzero()[:, 0].tolist():
                longer[*text, token] = weight * float(probs[0, 0, token])
        distribution = longer
    return distribution


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
        bonus = (accepted == draft.width) & (draft.width > 0)
        return torch.where(bonus[:, None], raw, right.next_token(accepted))

    return Distributions(right.keep, next_token)


def _at(distributions: Tensor, position: Tensor) -> Tensor:
    return distributions[torch.arange(len(distributions)), position]


# a crude rule, and a subtle one that is wrong only where all drafts were accepted; both claim to be lossless
WRONG_RULES = {
    "first-mismatch-kept": Rule("first-mismatch-kept", True, first_mismatch_kept),
    "bonus-from-raw-logits": Rule("bonus-from-raw-logits", True, bonus_from_raw_logits),
}
