"""Checks of the certificate that count sampled texts: they have the target's distribution, and the test has power."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from time import perf_counter

from slipstream import drafters
from slipstream.certificate.finding import Finding
from slipstream.certificate.sampled_frequencies import Target, distribution_test, sample
from slipstream.certificate.wrong_rules import load_wrong_rule
from slipstream.decoder import SpeculativeDecoder
from slipstream.draft_length.choice import LengthChoice

# wrong rules that the test must catch: a crude one, and a subtle one that is wrong only where all drafts were accepted
POWER_RULES = ("first-mismatch-kept", "bonus-from-raw-logits")
FEWEST_RUNS, MOST_RUNS = 480, 4000

# prompts after which drafts are accepted often, sometimes and rarely, and the target is more or less certain: every
# wrong rule shows on some of them
TEXTS = (
    "The heron was slow. The heron was quick. The heron was",
    "A dog is an animal. A rose is a plant. A cat is an animal. A tulip is a",
    "def add(a, b): return a + b\ndef sub(a, b): return a - b\ndef mul(a, b): return a",
)


@dataclass
class DistributionChecks:
    """Tests sampled text. deadline: of `perf_counter`; FEWEST_RUNS texts are made for each test whatever it is."""

    decoder: SpeculativeDecoder
    deadline: float

    def __post_init__(self) -> None:
        self._drafting = [always_drafting(self.decoder)]
        if self.decoder.config.num_draft_tokens == "auto":  # short drafts end in a bonus token more often
            self._drafting.append(self._drafting[0].using(num_draft_tokens=1))

    def sampled(self) -> Finding:
        """Whether the frequencies of sampled texts are the target's."""
        outcome = distribution_test(self._drafting, self._targets, self._runs())
        return Finding.of(outcome.passed, str(outcome))

    def power(self, rule: str) -> Finding:
        """Whether the same test catches a wrong rule with the fewest runs."""
        wrong = [
            drafting.using(acceptance=load_wrong_rule(rule), num_draft_tokens=_chain(drafting.config.num_draft_tokens))
            for drafting in self._drafting
        ]
        outcome = distribution_test(wrong, self._targets, FEWEST_RUNS)
        return Finding.of(not outcome.passed, str(outcome))

    @cached_property
    def _targets(self) -> list[Target]:
        prompts = [[1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]]
        if self.decoder.tokenizer is not None:
            prompts = [self.decoder.encode(text, chat=False) for text in TEXTS]
        return [Target.of(self.decoder, prompt) for prompt in prompts]

    def _runs(self) -> int:
        """As many runs as the time allows, judged by a first few."""
        few, started = 2 * self.decoder.config.max_batch_size, perf_counter()
        sample(self._drafting[0], self._targets[0].prompt, range(few))
        each = (perf_counter() - started) / few
        left = self.deadline - perf_counter() - each * FEWEST_RUNS * len(POWER_RULES)
        return int(min(max(left / each, FEWEST_RUNS), MOST_RUNS))


def always_drafting(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """The same decoder, drafting whether it pays or not: a test sees nothing where nothing is drafted."""
    if decoder.config.num_draft_tokens != "auto":
        return decoder
    if decoder.config.drafter == "auto" and decoder.draft is not None:  # of its two drafters the one that always drafts
        return decoder.using("model", num_draft_tokens=drafters.traits("model").default_length)
    return decoder.using(num_draft_tokens=decoder.traits.default_length)


def _chain(wanted: int | str) -> int | str:
    """The length of a draft that may have been a tree, which wrong rules do not take."""
    choice = LengthChoice.parse(wanted)
    return choice.count if choice.siblings > 0 and choice.count is not None else wanted
