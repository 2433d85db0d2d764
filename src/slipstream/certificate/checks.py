"""The certificate: does this pair of models, with this drafter and rule, generate exactly what the target alone would?

Three kinds of evidence. Texts: greedy and seeded speculative decoding against plain decoding, one by one, in a batch
and option by option. Distributions: frequencies of many sampled texts against the distribution computed from the
target's own logits. Power: the same test on deliberately wrong rules, which it must catch, or it shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from time import perf_counter
from typing import Any, Literal

from slipstream import drafters
from slipstream.certificate.parity import Difference, TieJudge, count_differences
from slipstream.certificate.sampled_frequencies import WRONG_RULES, Target, distribution_test, sample
from slipstream.decoder import SpeculativeDecoder
from slipstream.draft_length.choice import LengthChoice
from slipstream.reproducibility.calibration import calibrate
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompt_sets import NamedPrompt

FEWEST_RUNS, MOST_RUNS = 480, 4000
# prompts after which drafts are accepted often, sometimes and rarely, and the target is more or less certain: every
# wrong rule shows on some of them
TEXTS = (
    "The heron was slow. The heron was quick. The heron was",
    "A dog is an animal. A rose is a plant. A cat is an animal. A tulip is a",
    "def add(a, b): return a + b\ndef sub(a, b): return a - b\ndef mul(a, b): return a",
)
OPTION_TOKENS, SHORTEST = 32, 16  # tokens of the text of an option; of any text on a small budget
PATTERN = "red green blue, red green blue, red green blue, red green"  # in which every drafter finds something
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.3},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "presence_penalty": {"presence_penalty": 0.8},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {},
    "bad_words": {},
    "min_tokens": {"min_tokens": 12},
    "stop": {},
    "all together": {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1},
}
# added to these options, from the token ids of the text without them: a fixed list might name no token of that text
COMPUTED_OPTIONS: dict[str, Callable[[SpeculativeDecoder, list[int]], dict[str, Any]]] = {
    "logit_bias": lambda _, text: {"logit_bias": dict.fromkeys(text[2::5], -30.0)},
    "bad_words": lambda _, text: {"bad_words": [text[start : start + 2] for start in range(1, len(text) - 1, 4)]},
    "min_tokens": lambda _, text: {"stop_token_ids": sorted(set(text[8:]))},
    # most of the text, which thus ends late, after drafts
    "stop": lambda decoder, text: {"stop": decoder.decode(text[: 3 * len(text) // 4]) or PATTERN},
}
SHARE_OF_TEXTS = 0.6  # of the budget; the tests of distributions get the rest
Outcome = Literal["pass", "FAIL", "not applicable"]


@dataclass(frozen=True)
class Finding:
    """The outcome of a check and the evidence for it, or why it does not apply."""

    outcome: Outcome
    detail: str

    @classmethod
    def of(cls, passed: bool, detail: str) -> Finding:
        return cls("pass" if passed else "FAIL", detail)


def not_applicable(reason: str) -> Finding:
    """The finding of a check that finds nothing to check on this decoder."""
    return Finding("not applicable", reason)


@dataclass(frozen=True)
class Check:
    """One line of the certificate."""

    name: str
    outcome: Outcome
    detail: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether the check was made and found nothing wrong."""
        return self.outcome == "pass"

    @property
    def failed(self) -> bool:
        """Whether the check was made and found something wrong."""
        return self.outcome == "FAIL"

    def to_dict(self) -> dict[str, Any]:
        """The check as JSON values; `passed` is null if it does not apply."""
        return vars(self) | {"passed": None if self.outcome == "not applicable" else self.passed}


@dataclass
class DistributionChecks:
    """Tests sampled text. deadline: a `perf_counter` time; each test makes at least FEWEST_RUNS texts, even past it."""

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
            drafting.using(acceptance=WRONG_RULES[rule], num_draft_tokens=_chain(drafting.config.num_draft_tokens))
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
        """How many runs there is time for, judged by a first few."""
        few, started = 2 * self.decoder.config.max_batch_size, perf_counter()
        sample(self._drafting[0], self._targets[0].prompt, range(few))
        seconds_each = (perf_counter() - started) / few
        remaining = self.deadline - perf_counter() - seconds_each * FEWEST_RUNS * len(WRONG_RULES)
        return int(min(max(remaining / seconds_each, FEWEST_RUNS), MOST_RUNS))


def always_drafting(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """A copy of the decoder that drafts whether it pays or not: without drafts there is nothing to test."""
    if decoder.config.num_draft_tokens != "auto":
        return decoder
    if decoder.config.drafter == "auto" and decoder.draft is not None:  # of its two drafters the one that always drafts
        return decoder.using("model", num_draft_tokens=drafters.traits("model").default_length)
    return decoder.using(num_draft_tokens=decoder.traits.default_length)


def _chain(length: int | str) -> int | str:
    """The number of draft tokens as a chain: wrong rules do not take trees."""
    choice = LengthChoice.parse(length)
    return choice.count if choice.siblings > 0 and choice.count is not None else length


@dataclass
class Pair:
    """Differences between plain and speculative texts of the same prompts, and how many tokens were drafted."""

    differences: list[Difference | None] = field(default_factory=list)
    drafted: int = 0


@dataclass
class TextChecks:
    """Compares plain and speculative texts of `max_tokens` tokens; shorter ones if `budget` seconds do not suffice."""

    decoder: SpeculativeDecoder
    prompts: Sequence[NamedPrompt]
    max_tokens: int
    budget: float

    def __post_init__(self) -> None:
        self._judge = TieJudge(self.decoder)
        self._plain = self.decoder.using("none", num_draft_tokens="auto")
        # "auto" verifies drafts that a drafter object has sampled by `block`; "match" shows the same loop coupled
        auto = self.decoder.rule is None and self.decoder.config.acceptance == "auto"
        self._seeded = self.decoder.using(acceptance="match") if auto and not self.decoder.coupled else self.decoder

    def greedy(self) -> Finding:
        """Greedy text of every prompt alone."""
        params = SamplingParams(max_tokens=self._length(self.max_tokens))
        return self._finding([self._pair(self.decoder, [p.prompt], [params]) for p in self.prompts])

    def batch(self) -> Finding:
        """Greedy text of all prompts in a batch, of different lengths."""
        texts = [p.prompt for p in self.prompts]
        params = [SamplingParams(max_tokens=self._length(self.max_tokens) - i % 7) for i in range(len(texts))]
        return self._finding([self._pair(self.decoder, texts, params)])

    def seeded(self) -> Finding:
        """Sampled text of every prompt alone, each with its own seed."""
        if not self._seeded.coupled:
            return not_applicable("this rule does not couple draws")
        params = SamplingParams(temperature=0.8, max_tokens=self._length(self.max_tokens))
        pairs = [self._pair(self._seeded, [p.prompt], [replace(params, seed=i)]) for i, p in enumerate(self.prompts)]
        return self._finding(pairs)

    def option(self, name: str) -> Finding:
        """One text under a sampling option."""
        option = OPTIONS[name]
        if option.get("temperature") and not self._seeded.coupled:
            return not_applicable("this rule does not couple draws")
        if self.decoder.tokenizer is None:
            return not_applicable("no tokenizer")
        params = SamplingParams(max_tokens=self._length(OPTION_TOKENS), seed=7)
        if name in COMPUTED_OPTIONS:
            text = self._plain.generate(PATTERN, params, chat=False).token_ids
            option = option | COMPUTED_OPTIONS[name](self.decoder, text)
        return self._finding([self._pair(self._seeded, [PATTERN], [replace(params, **option)], chat=False)])

    def _length(self, planned: int) -> int:
        return max(min(planned, SHORTEST), int(planned * self._affordable))

    @cached_property
    def _affordable(self) -> float:
        """The share of the planned tokens there is time for, by the speed of plain decoding."""
        ids = self.decoder.encode(PATTERN, chat=False) if self.decoder.tokenizer else [1, 2, 3]
        self._plain.generate(ids, SamplingParams(max_tokens=2))
        started = perf_counter()
        self._plain.generate(ids, SamplingParams(max_tokens=SHORTEST, ignore_eos=True))
        each = (perf_counter() - started) / SHORTEST
        texts = 2 * len(OPTIONS) + len(COMPUTED_OPTIONS)
        planned = 6 * len(self.prompts) * self.max_tokens + texts * OPTION_TOKENS
        return min(1.0, self.budget / (planned * each))

    def _pair(
        self, decoder: SpeculativeDecoder, prompts: list[str], params: list[SamplingParams], *, chat: bool = True
    ) -> Pair:
        ids = [decoder.encode(prompt, chat=chat) for prompt in prompts]
        got = decoder.generate(ids, params)
        expected = [self._plain.generate(prompt, text_params) for prompt, text_params in zip(ids, params, strict=True)]
        differences = [
            self._judge.judge(prompt, a.token_ids, b.token_ids, text_params, same_bits=decoder.reproducible)
            for prompt, text_params, a, b in zip(ids, params, expected, got, strict=True)
        ]
        return Pair(differences, sum(result.stats.num_draft_tokens for result in got))

    def _finding(self, pairs: Sequence[Pair]) -> Finding:
        """Ties are allowed where the decoder is not reproducible."""
        differences = [d for pair in pairs for d in pair.differences]
        counted = count_differences(differences)
        allowed_ties = 0 if self.decoder.reproducible else counted["ties"]
        passed = counted["different"] == 0 and counted["ties"] <= allowed_ties
        detail = f"{counted['identical']} of {len(differences)} identical"
        for name, text in (
            ("ties", "ties"),
            ("not_compared", "not compared: rounding at an edge of top-k, top-p, min-p"),
        ):
            detail += f", {counted[name]} {text}" if counted[name] else ""
        first = next((d for d in differences if d is not None and (not passed or not d.tie)), None)
        if first is not None:
            detail += f"; position {first.position}: plain {first.expected}, speculative {first.got}"
        return Finding.of(passed, f"{detail}, {sum(pair.drafted for pair in pairs)} tokens drafted")


@dataclass
class Verifier:
    """Runs the checks on a decoder.

    max_tokens: length of the compared texts, less where the budget does not allow it. budget: seconds to aim for; the
    tests of distributions make at least FEWEST_RUNS texts each, even if that takes longer.
    """

    decoder: SpeculativeDecoder
    prompts: Sequence[NamedPrompt]
    max_tokens: int = 48
    budget: float = 120.0

    def __post_init__(self) -> None:
        texts = TextChecks(self.decoder, self.prompts, self.max_tokens, SHARE_OF_TEXTS * self.budget)
        distributions = DistributionChecks(self.decoder, perf_counter() + self.budget)
        self._checks: dict[str, Callable[[], Finding]] = {}
        if self.decoder.reproducible:
            self._checks["forward shapes agree"] = self._shapes
        self._checks |= {
            "greedy text, one by one": texts.greedy,
            "greedy text, in a batch": texts.batch,
            "seeded text, one by one": texts.seeded,
            **{f"option {name}": partial(texts.option, name) for name in OPTIONS},
            "distribution of sampled text": distributions.sampled,
            **{f"power: {rule} is caught": partial(distributions.power, rule) for rule in WRONG_RULES},
        }

    @property
    def num_checks(self) -> int:
        return len(self._checks)

    def run(self) -> Iterator[Check]:
        """All checks, one after another."""
        for name, check in self._checks.items():
            started = perf_counter()
            finding = check()
            yield Check(name, finding.outcome, finding.detail, perf_counter() - started)

    def _shapes(self) -> Finding:
        """Whether a new calibration finds the shapes in use to agree bit for bit."""
        used = self.decoder.calibration
        assert used is not None
        renewed = calibrate(self.decoder.target.backend, self.decoder.config.max_batch_size)
        self.decoder.forget()
        agree = set(used.widths) <= set(renewed.widths) and set(used.together) <= {*renewed.widths, *renewed.together}
        agree = agree and set(used.attended_lengths) <= set(renewed.attended_lengths)
        passed = agree and used.attended_unit % renewed.attended_unit == 0 and renewed.prompts >= used.prompts
        several = f"; of several rows {', '.join(map(str, used.together))} as well" if used.together else ""
        lengths = used.attended_lengths
        shorter = f" or {len(lengths)} shorter ones up to {lengths[-1]}" if lengths else ""
        prompts = "prompt chunks as well" if used.prompts else "prompt chunks differ and are kept whole"
        widths = f"widths {', '.join(map(str, used.widths))}{several}"
        return Finding.of(
            passed, f"{widths}; attended lengths in multiples of {used.attended_unit}{shorter}; {prompts}"
        )
