"""The certificate: does this pair of models, with this drafter and rule, say exactly what the target alone would?

Three kinds of evidence. Texts: greedy and seeded speculative decoding against plain decoding, one by one, in a batch
and option by option. Laws: the frequencies of many sampled runs against the law computed from the target's own
logits. Power: the same law test on a deliberately wrong rule, which must be caught, or the test shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any

from slipstream import drafters
from slipstream.bench.comparison import Referee, count_differences
from slipstream.certificate.parity import Difference
from slipstream.certificate.sampled_frequencies import distribution_test, sample
from slipstream.certificate.wrong_rules import load_wrong_rule
from slipstream.decoder import SpeculativeDecoder
from slipstream.reproducibility.calibration import calibrate
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompts import NamedPrompt

POWER_RULE = "first-mismatch-kept"
FEWEST_RUNS, MOST_RUNS = 400, 4000
OPTION_TOKENS, SHORTEST = 32, 16
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
    "min_tokens": {"min_tokens": 12},
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
        self._drafting = _drafting(self.decoder)
        self._right = self._drafting.using(acceptance="auto") if self.decoder.rule is not None else self._drafting
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
            ("law of sampled text", self._distribution),
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
        agree = set(used.widths) <= set(found.widths) and set(used.together) <= {*found.widths, *found.together}
        agree = agree and set(used.attended_lengths) <= set(found.attended_lengths)
        passed = agree and used.attended_unit % found.attended_unit == 0 and found.prompts >= used.prompts
        prompts = "prompt chunks as well" if used.prompts else "prompt chunks differ and are kept whole"
        several = f"; of several rows {', '.join(map(str, used.together))} as well" if used.together else ""
        widths = ", ".join(map(str, used.widths)) + several
        shorter = (
            f" or {len(used.attended_lengths)} shorter ones up to {used.attended_lengths[-1]}"
            if used.attended_lengths
            else ""
        )
        return passed, f"widths {widths}; attended lengths in multiples of {used.attended_unit}{shorter}; {prompts}"

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

    def _distribution(self) -> tuple[bool, str]:
        outcome = distribution_test(self._drafting, self._law_prompt, self._runs())
        return outcome.passed, str(outcome)

    def _power(self) -> tuple[bool, str]:
        wrong = self._drafting.using(acceptance=load_wrong_rule(POWER_RULE))
        outcome = distribution_test(wrong, self._law_prompt, FEWEST_RUNS)
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
        sample(self._drafting, self._law_prompt, range(few))
        each = (perf_counter() - started) / few
        left = self.budget - (perf_counter() - self._started) - each * FEWEST_RUNS  # which the power test takes
        return int(min(max(left / each, FEWEST_RUNS), MOST_RUNS))


def _drafting(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """The same, drafting whether it pays or not: a law test sees nothing where nothing is drafted."""
    if decoder.config.num_draft_tokens != "auto":
        return decoder
    if decoder.config.drafter == "auto" and decoder.draft is not None:  # of its two drafters the one that samples
        return decoder.using("model", num_draft_tokens=drafters.traits("model").default_length)
    return decoder.using(num_draft_tokens=decoder.traits.default_length)
