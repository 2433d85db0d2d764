"""The certificate: does this pair of models, with this drafter and rule, say exactly what the target alone would?

Three kinds of evidence. Texts: greedy and seeded speculative decoding against plain decoding, one by one, in a batch
and option by option. Laws: the frequencies of many sampled runs against the law computed from the target's own
logits. Power: the same law test on a deliberately wrong rule, which must be caught, or the test shows nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any

import torch

from slipstream.calibration import calibrate
from slipstream.compare import Referee, count_differences
from slipstream.decoder import SpeculativeDecoder
from slipstream.negative_controls import load_wrong_rule
from slipstream.noise import Race
from slipstream.params import SamplingParams
from slipstream.parity import Difference
from slipstream.prompts import NamedPrompt
from slipstream.sampling import Sampler
from slipstream.types import Row

FALSE_ALARM = 1e-4  # a right rule fails the law test with this probability
POWER_RULE = "first-mismatch-kept"
LAW_TOKENS, LAW_TOP_K = 3, 3
LAW_PARAMS = SamplingParams(temperature=1.5, top_k=LAW_TOP_K, max_tokens=LAW_TOKENS, ignore_eos=True)
FEWEST_RUNS, MOST_RUNS = 400, 4000
OPTION_TOKENS, SHORTEST = 32, 8
SHARE_OF_TEXTS = 0.6  # of the budget; the law tests get the rest

# texts in which a lookup finds something to draft; the law test takes the one on which drafts are accepted about half
# the time, since a rule shows its faults where it refuses as well as accepts
PATTERN = "red green blue, red green blue, red green blue, red green"
LAW_TEXTS = (
    PATTERN,
    "The heron was slow. The heron was quick. The heron was",
    "one two, two three, one two, three four, two three, one two, three",
    "A dog is an animal. A rose is a plant. A cat is an animal. A tulip is a",
    "def add(a, b): return a + b\ndef sub(a, b): return a - b\ndef mul(a, b): return a",
)

OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.3},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "presence_penalty": {"presence_penalty": 0.8},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {0: -5.0, 5: 3.0}},
    "bad_words": {"bad_words": ["red", "green blue"]},
    "min_tokens": {"min_tokens": SHORTEST},
    "stop": {"stop": ["e,", "blue"]},
    "all together": {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1},
}


@dataclass(frozen=True)
class Check:
    """One line of the certificate."""

    name: str
    passed: bool
    detail: str
    seconds: float


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


@dataclass
class Verifier:
    """Runs the checks on a decoder.

    max_tokens: length of the compared texts, less where the budget does not allow it. budget: seconds to aim for; the
    law tests take FEWEST_RUNS texts each whatever it is.
    """

    decoder: SpeculativeDecoder
    prompts: Sequence[NamedPrompt]
    max_tokens: int = 48
    budget: float = 120.0

    def __post_init__(self) -> None:
        self._referee = Referee(self.decoder)
        self._plain = self.decoder.using("none")
        self._right = self.decoder.using(acceptance="auto") if self.decoder.rule is not None else self.decoder
        # seeded text is the drafter's business unless draws are coupled, so texts under sampling are compared that way
        coupled = self.decoder.rule is None and self.decoder.config.acceptance == "auto"
        self._coupled = self.decoder.using(acceptance="match") if coupled else self.decoder
        self._started = perf_counter()

    @property
    def num_checks(self) -> int:
        """How many checks `run` makes."""
        return len(self._checks())

    def run(self) -> Iterator[Check]:
        """All checks, one after another."""
        for name, check in self._checks():
            started = perf_counter()
            passed, detail = check()
            yield Check(name, passed, detail, perf_counter() - started)

    def _checks(self) -> list[tuple[str, Callable[[], tuple[bool, str]]]]:
        checks: list[tuple[str, Callable[[], tuple[bool, str]]]] = []
        if self.decoder.reproducible:
            checks.append(("forward shapes agree", self._shapes))
        checks += [
            ("greedy text, one by one", self._greedy),
            ("greedy text, in a batch", self._batch),
            ("seeded text, one by one", self._seeded),
            *((f"option {name}", lambda given=given: self._option(given)) for name, given in OPTIONS.items()),
            ("law of sampled text", self._law),
            (f"power: {POWER_RULE} is caught", self._power),
        ]
        return checks

    def _shapes(self) -> tuple[bool, str]:
        found, used = (
            calibrate(self.decoder.target.backend, self.decoder.config.max_batch_size),
            self.decoder.calibration,
        )
        assert used is not None
        self.decoder.forget()
        passed = set(used.widths) <= set(found.widths) and used.view % found.view == 0
        return passed, f"widths {', '.join(map(str, used.widths))}; views in multiples of {used.view}"

    def _greedy(self) -> tuple[bool, str]:
        params = SamplingParams(max_tokens=self._length(self.max_tokens))
        return self._texts([self._pair(self.decoder, [p.prompt], [params]) for p in self.prompts])

    def _batch(self) -> tuple[bool, str]:
        texts = [p.prompt for p in self.prompts]
        params = [SamplingParams(max_tokens=self._length(self.max_tokens) - i % 7) for i in range(len(texts))]
        return self._texts([self._pair(self.decoder, texts, params)])

    def _seeded(self) -> tuple[bool, str]:
        if not self._is_coupled():
            return True, "not applicable: this rule does not couple draws"
        params = SamplingParams(temperature=0.8, max_tokens=self._length(self.max_tokens))
        pairs = [self._pair(self._coupled, [p.prompt], [replace(params, seed=i)]) for i, p in enumerate(self.prompts)]
        return self._texts(pairs)

    def _option(self, given: dict[str, Any]) -> tuple[bool, str]:
        if given.get("temperature") and not self._is_coupled():
            return True, "not applicable: this rule does not couple draws"
        params = SamplingParams(**{"max_tokens": self._length(OPTION_TOKENS), "seed": 7, **given})
        if self.decoder.tokenizer is None:
            return True, "not applicable: no tokenizer"
        return self._texts([self._pair(self._coupled, [PATTERN], [params], chat=False)])

    def _length(self, wanted: int) -> int:
        """As many tokens as asked for, or the share of them that the budget allows."""
        return max(min(wanted, SHORTEST), int(wanted * self._affordable))

    @cached_property
    def _affordable(self) -> float:
        """The share of the planned tokens there is time for, by the speed of plain decoding."""
        ids = self.decoder.encode(PATTERN, chat=False) if self.decoder.tokenizer else [1, 2, 3]
        self._plain.generate(ids, SamplingParams(max_tokens=2))
        started = perf_counter()
        self._plain.generate(ids, SamplingParams(max_tokens=SHORTEST, ignore_eos=True))
        each = (perf_counter() - started) / SHORTEST
        planned = 6 * len(self.prompts) * self.max_tokens + 2 * len(OPTIONS) * OPTION_TOKENS
        return min(1.0, SHARE_OF_TEXTS * self.budget / (planned * each))

    def _is_coupled(self) -> bool:
        return self._coupled.config.acceptance in ("match", "gumbel")

    def _pair(
        self, decoder: SpeculativeDecoder, prompts: list[str], params: list[SamplingParams], *, chat: bool = True
    ) -> tuple[list[Difference | None], int]:
        """Differences between plain and speculative texts, and how many tokens were drafted."""
        ids = [decoder.encode(prompt, chat=chat) for prompt in prompts]
        got = decoder.generate(ids, params)
        expected = [self._plain.generate(prompt, one) for prompt, one in zip(ids, params, strict=True)]
        greedy = all(p == SamplingParams(max_tokens=p.max_tokens) for p in params)
        differences = [
            self._referee.judge(prompt, a.token_ids, b.token_ids, greedy=greedy)
            for prompt, a, b in zip(ids, expected, got, strict=True)
        ]
        return differences, sum(result.stats.num_draft_tokens for result in got)

    def _texts(self, pairs: Sequence[tuple[list[Difference | None], int]]) -> tuple[bool, str]:
        differences = [d for found, _ in pairs for d in found]
        counted = count_differences(differences)
        allowed_ties = 0 if self.decoder.reproducible else counted["ties"]
        passed = counted["different"] == 0 and counted["ties"] <= allowed_ties
        detail = f"{counted['identical']} of {len(differences)} identical"
        if counted["ties"]:
            detail += f", {counted['ties']} ties"
        first = next((d for d in differences if d is not None and (not d.tie or not passed)), None)
        if first is not None:
            detail += f"; position {first.position}: plain {first.expected}, speculative {first.got}"
        return passed, f"{detail}, {sum(drafted for _, drafted in pairs)} tokens drafted"

    def _law(self) -> tuple[bool, str]:
        outcome = law_test(self.decoder, self._law_prompt, self._runs())
        return outcome.passed, str(outcome)

    def _power(self) -> tuple[bool, str]:
        wrong = self.decoder.using(acceptance=load_wrong_rule(POWER_RULE))
        outcome = law_test(wrong, self._law_prompt, FEWEST_RUNS)
        return not outcome.passed, str(outcome)

    @cached_property
    def _law_prompt(self) -> list[int]:
        if self.decoder.tokenizer is None:
            return [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]
        candidates = [self.decoder.encode(text, chat=False) for text in LAW_TEXTS]
        rates = [sample(self._right, prompt, range(32))[1] for prompt in candidates]
        distances = [1.0 if rate is None else abs(rate - 0.5) for rate in rates]
        return candidates[distances.index(min(distances))]

    def _runs(self) -> int:
        """As many runs as the budget allows, judged by a first few."""
        started = perf_counter()
        few = 2 * self.decoder.config.max_batch_size
        sample(self.decoder, self._law_prompt, range(few))
        each = (perf_counter() - started) / few
        left = self.budget - (perf_counter() - self._started) - each * FEWEST_RUNS  # which the power test takes
        return int(min(max(left / each, FEWEST_RUNS), MOST_RUNS))


def law_test(decoder: SpeculativeDecoder, prompt: list[int], runs: int) -> LawTest:
    """Chi-square of the texts of `runs` seeds against the target's law of LAW_TOKENS tokens after the prompt.

    Cells of expectation below 5 are pooled. The support is small because LAW_PARAMS keeps LAW_TOP_K tokens.
    """
    law = exact_law(decoder, prompt)
    texts, rate = sample(decoder, prompt, range(1, runs + 1))
    counts = Counter(texts)
    impossible = sum(count for text, count in counts.items() if law.get(text, 0.0) == 0.0)
    distance = sum(abs(counts[text] / runs - p) for text, p in law.items()) / 2
    cells = [(counts[text], p * runs) for text, p in law.items() if p * runs >= 5]
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
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LAW_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for text, weight in law.items():
            tokens = [*prompt, *text]
            sampler = Sampler([Row(0, tokens, LAW_PARAMS, 0)], race, backend.vocab_size, backend.device)
            logits = decoder.next_logits(tokens)[None, None]
            probs = sampler.probs(sampler.scores(logits, torch.empty(1, 0, dtype=torch.int64, device=logits.device)))
            for token in probs[0, 0].nonzero()[:, 0].tolist():
                longer[*text, token] = weight * float(probs[0, 0, token])
        law = longer
    return law
