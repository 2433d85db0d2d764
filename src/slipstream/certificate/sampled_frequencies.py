"""The law of sampled text: frequencies of many seeded runs against the law computed from the target's own logits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch

from slipstream.core.rng import Race
from slipstream.core.types import Row
from slipstream.decoder import SpeculativeDecoder
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import Sampler

FALSE_ALARM = 1e-4  # a right rule fails the test with this probability
LAW_TOKENS, LAW_TOP_K = 4, 3  # the first token is the prompt's own and never drafted
LAW_PARAMS = SamplingParams(temperature=1.5, top_k=LAW_TOP_K, max_tokens=LAW_TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class LawTest:
    """Outcome of a chi-square test of the loop's law against the target's."""

    p_value: float
    runs: int
    impossible: int
    distance: float
    acceptance_rate: float | None

    @property
    def passed(self) -> bool:
        """Nothing impossible was said, and the frequencies are likely enough under the target's law."""
        return self.impossible == 0 and self.p_value >= FALSE_ALARM

    def __str__(self) -> str:
        if self.impossible:
            return f"{self.impossible} of {self.runs} texts cannot come from the target at all"
        rate = "nothing drafted" if self.acceptance_rate is None else f"acceptance rate {self.acceptance_rate:.0%}"
        return f"{self.runs} texts, chi-square p = {self.p_value:.2g}, total variation {self.distance:.3f}, {rate}"


def distribution_test(decoder: SpeculativeDecoder, prompt: list[int], runs: int) -> LawTest:
    """Chi-square of the texts of `runs` seeds against the target's law of LAW_TOKENS tokens after the prompt.

    Cells of expectation below 5 are pooled. The support is small because LAW_PARAMS keeps LAW_TOP_K tokens.
    """
    distribution = exact_law(decoder, prompt)
    texts, rate = sample(decoder, prompt, range(1, runs + 1))
    counts = Counter(texts)
    impossible = sum(count for text, count in counts.items() if distribution.get(text, 0.0) == 0.0)
    distance = sum(abs(counts[text] / runs - p) for text, p in distribution.items()) / 2
    cells = [(counts[text], p * runs) for text, p in distribution.items() if p * runs >= 5]
    rest = (runs - impossible - sum(c for c, _ in cells), runs - sum(e for _, e in cells))
    cells += [rest] if rest[1] >= 1 else []
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    degrees = max(1, len(cells) - 1)
    p_value = torch.special.gammaincc(torch.tensor(degrees / 2.0).double(), torch.tensor(statistic / 2).double())
    return LawTest(float(p_value), runs, impossible, distance, rate)


def sample(decoder: SpeculativeDecoder, prompt: list[int], seeds: range) -> tuple[list[tuple[int, ...]], float | None]:
    """The texts of these seeds, and the acceptance rate."""
    params = [replace(LAW_PARAMS, seed=seed) for seed in seeds]
    results = decoder.generate([prompt] * len(params), params)
    drafted = sum(r.stats.num_draft_tokens for r in results)
    accepted = sum(r.stats.num_accepted_tokens for r in results)
    return [tuple(r.token_ids) for r in results], accepted / drafted if drafted else None


def exact_law(decoder: SpeculativeDecoder, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """The target's own law of the next LAW_TOKENS tokens, from its logits after every possible beginning."""
    backend = decoder.target.backend
    race = Race(backend.vocab_size, backend.device)
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LAW_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for text, weight in distribution.items():
            tokens = [*prompt, *text]
            sampler = Sampler([Row(0, tokens, LAW_PARAMS, 0)], race, backend.vocab_size, backend.device)
            logits = decoder.next_logits(tokens)[None, None]
            probs = sampler.probs(sampler.scores(logits, torch.empty(1, 0, dtype=torch.int64, device=logits.device)))
            for token in probs[0, 0].nonzero()[:, 0].tolist():
                longer[*text, token] = weight * float(probs[0, 0, token])
        distribution = longer
    return distribution
