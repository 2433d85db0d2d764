"""The certificate: does this pair of models, with this drafter and rule, generate exactly what the target alone would?

Three kinds of evidence. Texts: greedy and seeded speculative decoding against plain decoding, one by one, in a batch
and option by option. Distributions: frequencies of many sampled texts against the distribution computed from the
target's own logits. Power: the same test on deliberately wrong rules, which it must catch, or it shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from time import perf_counter
from typing import Any, Literal

from torch import Tensor

from slipstream import drafters
from slipstream.certificate.parity import CEILING, Difference, TieJudge, count_differences
from slipstream.certificate.planned_drafts import LikelyDrafts, ObservedDrafter, PlannedDrafts, RecordedLogits
from slipstream.certificate.rule_enumeration import TOLERANCE, VOCAB, Case, error_of, first_fault
from slipstream.certificate.sampled_law import OPTIONS as SAMPLING
from slipstream.certificate.sampled_law import (
    LawTest,
    Place,
    SampledTexts,
    deep_temperature,
    kept_from,
    near_distributions,
    sample,
    wrong_rules,
)
from slipstream.core.acceptance import Rule, load_rule
from slipstream.core.kv_slots import CATCH_UP
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.decoder import SpeculativeDecoder
from slipstream.draft_length.choice import LengthChoice
from slipstream.reproducibility.calibration import calibrate
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompt_sets import NamedPrompt
from slipstream.text.results import Result

SEEDS_AT_ONCE, FEWEST_SEEDS, MOST_WRONG, MOST_SEEDS = (
    4,
    12,
    48,
    200,
)  # texts of each prompt under each of six sampling options
AFTER_DRAFT = 3  # tokens of a sampled text besides the longest draft: before it, its bonus token and the one after
MOST_PLANNED = 96  # tokens of a text with planned drafts, unless longer ones are asked for
PLANNED = 16  # tokens of planned drafts where measured costs decide how much is drafted
LONG_PROMPT = 600  # tokens: more than attention reads in one block
NUM_ALONE, ALONE_TOKENS = 3, 8  # prompts and tokens for which the target is compared with itself without a drafter
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
Verdict = Literal["VERIFIED", "FAILED", "LOSSY"]


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
class LawChecks:
    """Checks the acceptance rule and the distribution of sampled text, with drafts of up to `depth` tokens.

    deadline: a `perf_counter` time; each test takes at least FEWEST_SEEDS texts per prompt and option, even past it.
    """

    decoder: SpeculativeDecoder
    deadline: float

    def __post_init__(self) -> None:
        self._drafting = [always_drafting(self.decoder)]
        if self.decoder.config.num_draft_tokens == "auto":  # short drafts end in a bonus token more often
            self._drafting.append(self._drafting[0].using(num_draft_tokens=1))
        # a rule that takes the target's own draws is checked at greater depths by planned drafts, token for token
        self.depth = planned_length(self._drafting[0] if self.decoder.coupled else self.decoder)
        choice = LengthChoice.parse(self.decoder.config.num_draft_tokens)
        self.longest = self.depth if choice.kind == "fixed" else longest_draft(self.decoder)

    def enumerated(self) -> Finding:
        """The distribution that the rule itself gives, at every depth of drafts of every length."""
        if self.decoder.coupled:
            return not_applicable("every token is the target's own draw")
        rule = self.decoder.rule or load_rule(
            "block" if self.decoder.config.acceptance == "auto" else self.decoder.config.acceptance
        )
        try:
            fault = first_fault(rule, self.longest, self.decoder.target.backend.vocab_size)
        except Exception as error:  # a user's rule may raise anything
            return Finding.of(False, f"the rule raises {type(error).__name__}: {error} (on {VOCAB} tokens)")
        if fault is not None:
            return Finding.of(False, f"{fault[0]}: probabilities differ by {fault[1]:.2g}")
        return Finding.of(True, f"drafts of 1 to {self.longest} tokens, exact at every depth")

    def enumeration_power(self) -> Finding:
        """Rules that are wrong from one depth on; each must be caught."""
        if self.decoder.coupled:
            return not_applicable("every token is the target's own draw")
        missed = [
            depth
            for depth in range(self.longest)
            if not error_of(kept_from(depth), Case(depth + 1, "temperature 1", one_hot=False)) > TOLERANCE
        ]
        return Finding.of(
            not missed, f"missed at depths {missed}" if missed else f"caught at depths 1 to {self.longest}"
        )

    def sampled(self) -> Finding:
        """Texts with the decoder's own drafter."""
        acceptance = "match" if self.decoder.coupled else None
        texts = SampledTexts()
        decoders = [
            drafting.using(ObservedDrafter(drafting.drafter, drafting.traits, texts), acceptance=acceptance)
            for drafting in self._drafting
        ]
        outcome = self._test(decoders, texts)
        return Finding.of(outcome.passed and outcome.drafted > 0, str(outcome))

    def likely(self) -> Finding:
        """Texts with drafts that are accepted as deep as the check needs."""
        if self.decoder.coupled:
            return not_applicable("planned drafts show every depth, token for token")
        outcome = self._likely(None)
        whole = outcome.accepted.get(self.depth, 0)
        return Finding.of(outcome.passed, f"{outcome}" if whole or not outcome.passed else f"{outcome}, none whole")

    def power(self, rule: str) -> Finding:
        """The same test of a wrong rule."""
        outcome = self._likely(wrong_rules(self.depth // 2)[rule])
        return Finding.of(not outcome.passed, str(outcome))

    def _likely(self, rule: Rule | None) -> LawTest:
        texts = SampledTexts(self._near)
        drafter = ObservedDrafter(LikelyDrafts(self._near), LikelyDrafts.traits, texts)
        decoder = self.decoder.using(drafter, num_draft_tokens=self.depth, acceptance=rule)
        return self._test([decoder], texts, is_wrong=rule is not None)

    def _test(self, decoders: Sequence[SpeculativeDecoder], texts: SampledTexts, *, is_wrong: bool = False) -> LawTest:
        """Sample at least FEWEST_SEEDS, and on until the deadline; a wrong rule until it is caught, or MOST_WRONG."""
        for start in range(0, MOST_WRONG if is_wrong else MOST_SEEDS, SEEDS_AT_ONCE):
            for place, decoder in enumerate(decoders):
                seeds = range(start + place, start + SEEDS_AT_ONCE, len(decoders))
                sample(decoder, self._prompts, self._params, planned_length(decoder) + AFTER_DRAFT, seeds)
            is_enough = start + SEEDS_AT_ONCE >= FEWEST_SEEDS and perf_counter() > self.deadline
            if texts.impossible or (is_enough if not is_wrong else not texts.outcome().passed):
                break
        return texts.outcome()

    @cached_property
    def _prompts(self) -> list[list[int]]:
        if self.decoder.tokenizer is None:
            return [[1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 4, 5, 4]]
        return [self.decoder.encode(text, chat=False) for text in TEXTS]

    @cached_property
    def _likely_text(self) -> dict[tuple[int, ...], list[Tensor]]:
        """The logits along each prompt's greedy text."""
        params = SamplingParams(max_tokens=self.depth + AFTER_DRAFT, ignore_eos=True)
        return recorded_logits(self.decoder, self._prompts, params)

    @cached_property
    def _params(self) -> list[SamplingParams]:
        deep = deep_temperature(list(self._likely_text.values()), self.depth)
        return [*SAMPLING.values(), SamplingParams(temperature=deep), SamplingParams(temperature=deep, top_k=4)]

    @cached_property
    def _near(self) -> dict[Place, list[Tensor]]:
        return near_distributions(self._likely_text, self._params)


def recorded_logits(
    decoder: SpeculativeDecoder, prompts: Sequence[list[int]], params: SamplingParams
) -> dict[tuple[int, ...], list[Tensor]]:
    """The target's logits along the plain text of each prompt, computed from the first token on."""
    recorded = RecordedLogits()
    decoder.forget()
    decoder.using(recorded, num_draft_tokens=0, acceptance="match").generate(list(prompts), params)
    return {tuple(row.tokens[: row.prompt_length]): logits for row, logits in recorded.texts.items()}


def longest_draft(decoder: SpeculativeDecoder) -> int:
    """The longest draft of one row that the target can verify."""
    return min(MAX_DRAFT_TOKENS, *(width - CATCH_UP for width in decoder.shapes.widths[-1:]))


def planned_length(decoder: SpeculativeDecoder) -> int:
    """The draft length of planned drafts: as long as the settings allow, or PLANNED if measured costs decide."""
    choice = LengthChoice.parse(decoder.config.num_draft_tokens)
    length = choice.count if choice.count is not None else min(PLANNED, longest_draft(decoder))
    return max(1, length // (1 + max(0, choice.siblings)))


def always_drafting(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """A copy of the decoder that drafts whether it pays or not: without drafts there is nothing to test."""
    if decoder.config.num_draft_tokens != "auto":
        return decoder
    if decoder.config.drafter == "auto" and decoder.draft is not None:  # of its two drafters the one that always drafts
        return decoder.using("model", num_draft_tokens=drafters.traits("model").default_length)
    return decoder.using(num_draft_tokens=decoder.traits.default_length)


@dataclass
class Comparison:
    """Differences between plain and speculative texts of the same prompts, and how many tokens were drafted."""

    differences: list[Difference | None] = field(default_factory=list)
    drafted: int = 0

    def add(self, differences: Sequence[Difference | None], results: Sequence[Result]) -> None:
        self.differences += differences
        self.drafted += sum(result.stats.num_draft_tokens for result in results)


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
        self._ids = [self.decoder.encode(p.prompt, chat=True) for p in self.prompts]
        self._known: dict[tuple[tuple[int, ...], str], list[int]] = {}

    def greedy(self) -> Finding:
        """Greedy text of every prompt alone."""
        params = SamplingParams(max_tokens=self._length(self.max_tokens))
        comparison = Comparison()
        for ids in self._ids:
            self._compare(comparison, self.decoder, [ids], [params])
        return self._finding(comparison)

    def batch(self) -> Finding:
        """Greedy text of all prompts in a batch, of different lengths."""
        longest = SamplingParams(max_tokens=self._length(self.max_tokens))
        params = [replace(longest, max_tokens=longest.max_tokens - i % 7) for i in range(len(self._ids))]
        comparison = Comparison()
        self._compare(comparison, self.decoder, self._ids, params, longest)
        return self._finding(comparison)

    def seeded(self) -> Finding:
        """Sampled text of every prompt alone, each with its own seed."""
        if not self._seeded.coupled:
            return not_applicable("this rule does not couple draws")
        comparison = Comparison()
        for seed, ids in enumerate(self._ids):
            params = SamplingParams(temperature=0.8, max_tokens=self._length(self.max_tokens), seed=seed)
            self._compare(comparison, self._seeded, [ids], [params])
        return self._finding(comparison)

    def option(self, name: str) -> Finding:
        """One text under a sampling option, with the decoder's drafter and with planned drafts."""
        option = OPTIONS[name]
        if option.get("temperature") and not self._seeded.coupled:
            return not_applicable("this rule does not couple draws")
        if self.decoder.tokenizer is None:
            return not_applicable("no tokenizer")
        params = SamplingParams(max_tokens=self._length(OPTION_TOKENS), seed=7)
        ids = self.decoder.encode(PATTERN, chat=False)
        if name in COMPUTED_OPTIONS:
            text = self._plain_text(ids, params)
            option = option | COMPUTED_OPTIONS[name](self.decoder, text)
        params = replace(params, **option)
        comparison = Comparison()
        self._compare(comparison, self._seeded, [ids], [params])
        self._compare(comparison, self._planning({tuple(ids): self._plain_text(ids, params)})[0], [ids], [params])
        return self._finding(comparison)

    def planned(self, temperature: float) -> Finding:
        """Texts and logits with drafts that are right up to every depth, alone, in a batch and after a long prompt."""
        if temperature and not self._seeded.coupled:
            return not_applicable("this rule does not couple draws")
        levels = planned_length(self.decoder)
        needed = (levels + 1) * (levels + 2)  # tokens of texts in which every depth occurs
        length = max(self._length(self.max_tokens), min(MOST_PLANNED, needed // (2 * len(self._ids)) + levels))
        params = SamplingParams(temperature=temperature, max_tokens=length, seed=11, ignore_eos=True)
        prompts = [*self._ids, self._long_prompt(length)]
        plain = PlannedDrafts()
        recorded = self.decoder.using(plain, num_draft_tokens=0, acceptance="match")
        texts = {tuple(ids): recorded.generate(ids, params).token_ids for ids in prompts}
        self._known |= {(ids, repr(params)): text for ids, text in texts.items()}
        decoder, drafts = self._planning(texts)
        comparison = Comparison()
        self.decoder.forget()
        for ids in prompts:
            self._compare(comparison, decoder, [ids], [params])
        short = [replace(params, max_tokens=length - i % 7) for i in range(len(prompts))]
        alone = dict(drafts.logits)
        drafts.logits.clear()
        self._compare(comparison, decoder, prompts, short, params)
        finding = self._finding(comparison)
        missing = [depth for depth in range(levels + 1) if not drafts.accepted[depth]]
        absent = [length for length in range(1, max(drafts.lengths, default=0) + 1) if not drafts.lengths[length]]
        reached = f"drafts of 1 to {max(drafts.lengths, default=0)} tokens, accepted 0 to {levels} deep"
        for what, numbers in (("length", absent), ("depth", missing)):
            reached += f", without {what} {', '.join(map(str, numbers))}" if numbers else ""
        detail = f"{finding.detail}, {reached}"
        # a lossless rule may accept as little as it likes, but `match` accepts every token that is right
        passed = finding.outcome == "pass" and not (levels in missing and self._seeded.coupled)
        if not self.decoder.reproducible:
            return Finding.of(passed, detail)
        compared = [(place, bits) for logits in (alone, drafts.logits) for place, bits in logits.items()]
        different = [place for place, bits in compared if plain.logits.get(place) != bits]
        detail += f"; logits of {len(compared)} tokens " + (
            "bit-identical" if not different else f"differ at {len(different)}"
        )
        if different:
            prompt, position = different[0]
            detail += f", first at token {position} after a prompt of {len(prompt)}"
        return Finding.of(passed and not different, detail)

    def _planning(self, texts: Mapping[tuple[int, ...], list[int]]) -> tuple[SpeculativeDecoder, PlannedDrafts]:
        """The decoder with drafts of these texts, in a tree if its own are."""
        choice = LengthChoice.parse(self.decoder.config.num_draft_tokens)
        drafts = PlannedDrafts(texts, self.decoder.target.backend.vocab_size, max(0, choice.siblings))
        length = planned_length(self.decoder) * (1 + drafts.siblings)
        return self._seeded.using(drafts, num_draft_tokens=length), drafts

    def _long_prompt(self, room: int) -> list[int]:
        """The prompts one after another, as long as a text that attention reads in several blocks."""
        longest = min(LONG_PROMPT, self.decoder.target.backend.max_length - room - MAX_DRAFT_TOKENS)
        ids = [token for prompt in self._ids for token in prompt]
        return (ids * (1 + longest // len(ids)))[:longest] if longest > 0 else ids[:1]

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
        planned = 8 * len(self.prompts) * self.max_tokens + texts * OPTION_TOKENS
        return min(1.0, self.budget / (planned * each))

    def _plain_text(self, ids: list[int], params: SamplingParams) -> list[int]:
        """Plain decoding's text, computed once."""
        place = tuple(ids), repr(params)
        if place not in self._known:
            self._known[place] = self._plain.generate(ids, params).token_ids
        return self._known[place]

    def _compare(
        self,
        comparison: Comparison,
        decoder: SpeculativeDecoder,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        longest: SamplingParams | None = None,
    ) -> None:
        """Add texts of the decoder. longest: options of a longer plain text, of which these are beginnings."""
        results = decoder.generate(list(prompts), list(params))
        expected = [
            self._plain_text(ids, longest or text_params)[: text_params.max_tokens]
            for ids, text_params in zip(prompts, params, strict=True)
        ]
        differences = [
            self._judge.judge(ids, text, result.token_ids, text_params, same_bits=decoder.reproducible)
            for ids, text_params, text, result in zip(prompts, params, expected, results, strict=True)
        ]
        comparison.add(differences, results)

    def _finding(self, comparison: Comparison) -> Finding:
        """Ties are allowed where the decoder is not reproducible."""
        differences = comparison.differences
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
        return Finding.of(passed, f"{detail}, {comparison.drafted} tokens drafted")


@dataclass
class Verifier:
    """Runs the checks on a decoder.

    max_tokens: length of the compared texts, less where the budget does not allow it. budget: seconds to aim for; the
    tests of distributions sample at least FEWEST_SEEDS texts per prompt and option, even if that takes longer.
    alone: `target_logits` of a decoder that was loaded without a drafter; None where there is none to compare with.
    """

    decoder: SpeculativeDecoder
    prompts: Sequence[NamedPrompt]
    max_tokens: int = 48
    budget: float = 120.0
    alone: Sequence[Sequence[Tensor]] | None = None

    def __post_init__(self) -> None:
        texts = TextChecks(self.decoder, self.prompts, self.max_tokens, SHARE_OF_TEXTS * self.budget)
        laws = LawChecks(self.decoder, perf_counter() + self.budget)
        self.checks: dict[str, Callable[[], Finding]] = {}
        if self.decoder.reproducible:
            self.checks["forward shapes agree"] = self._shapes
        self.checks |= {
            "rule, by enumeration": laws.enumerated,
            "power: rules wrong at one depth": laws.enumeration_power,
            "greedy text, one by one": texts.greedy,
            "greedy text, in a batch": texts.batch,
            "seeded text, one by one": texts.seeded,
            "planned drafts, greedy": partial(texts.planned, 0.0),
            "planned drafts, seeded": partial(texts.planned, 0.9),
            **{f"option {name}": partial(texts.option, name) for name in OPTIONS},
            "distribution of sampled text": laws.sampled,
            "distribution, likely drafts": laws.likely,
            **{f"power: {rule} is caught": partial(laws.power, rule) for rule in wrong_rules(laws.depth // 2)},
        }
        if self.alone is not None:
            self.checks["target with and without drafter"] = self._unchanged

    @property
    def num_checks(self) -> int:
        return len(self.checks)

    def run(self) -> Iterator[Check]:
        """All checks, one after another."""
        for name, check in self.checks.items():
            started = perf_counter()
            finding = check()
            yield Check(name, finding.outcome, finding.detail, perf_counter() - started)

    def _unchanged(self) -> Finding:
        """The target's logits, now that all checks have run, against those before a drafter was loaded."""
        assert self.alone is not None
        pairs = zip(self.alone, target_logits(self.decoder, self.prompts), strict=True)
        errors = [float((a - b).abs().max()) for before, after in pairs for a, b in zip(before, after, strict=True)]
        model = self.decoder.target.model
        allowed = 0.0 if self.decoder.reproducible or model is None else CEILING.get(model.dtype, 0.0)
        detail = (
            f"logits of {len(errors)} tokens differ by {max(errors):.2g}"
            if max(errors)
            else f"logits of {len(errors)} tokens bit-identical"
        )
        return Finding.of(max(errors) <= allowed, detail)

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


def target_logits(decoder: SpeculativeDecoder, prompts: Sequence[NamedPrompt]) -> list[list[Tensor]]:
    """The target's logits along the plain greedy texts of a few prompts."""
    ids = [decoder.encode(prompt.prompt, chat=True) for prompt in prompts[:NUM_ALONE]]
    return list(recorded_logits(decoder, ids, SamplingParams(max_tokens=ALONE_TOKENS, ignore_eos=True)).values())


def verdict_on(decoder: SpeculativeDecoder, checks: Sequence[Check]) -> Verdict:
    """The word on a certificate. A rule that calls itself lossy is never verified, whatever its checks found."""
    if not decoder.lossless:
        return "LOSSY"
    return "FAILED" if any(check.failed for check in checks) else "VERIFIED"
