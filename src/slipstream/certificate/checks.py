"""The certificate: does this pair of models, with this drafter and rule, generate exactly what the target alone would?

Three kinds of evidence. Texts: greedy and seeded speculative decoding against plain decoding, one by one, in a batch
and option by option. Distributions: what the rule emits, by enumeration, and many sampled texts against the target's
own logits. Power: the same tests on deliberately wrong rules, which they must catch, or they show nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from time import perf_counter
from typing import Any, Literal, NamedTuple

from torch import Tensor

from slipstream import drafters
from slipstream.certificate.parity import CEILING, Difference, TieJudge, count_differences
from slipstream.certificate.planned_drafts import LikelyDrafts, PlannedDrafts
from slipstream.certificate.rule_enumeration import OPTIONS as ENUMERATED
from slipstream.certificate.rule_enumeration import TOLERANCE, VOCAB, Case, error_of, first_fault
from slipstream.certificate.sampled_law import (
    Place,
    SampledTexts,
    deep_temperature,
    filtered,
    kept_from,
    near,
    wrong_rules,
)
from slipstream.core.acceptance import Rule, load_rule
from slipstream.core.interfaces import Source
from slipstream.core.kv_slots import CATCH_UP
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.decoder import SpeculativeDecoder
from slipstream.draft_length.choice import LengthChoice
from slipstream.reproducibility.calibration import calibrate
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import warp_options
from slipstream.text.prompt_sets import NamedPrompt

# sampled texts of each prompt under each of six sampling options
SEEDS_AT_ONCE = 4
FEWEST_SEEDS = 8
MOST_WRONG = 48  # of a wrong rule
MOST_SEEDS = 200
NUM_SAMPLED = 4  # of the enumerated options, which are tried on sampled texts as well
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
Comparison = tuple[Difference | None, int]  # of a speculative and a plain text; how many tokens were drafted
Texts = dict[tuple[int, ...], list[Tensor]]  # the logits [V] along the greedy text of each prompt


class Finding(NamedTuple):
    """The result of a check."""

    passed: bool | None  # None if there is nothing to check on this decoder
    detail: str


COUPLED = Finding(None, "every token is the target's own draw")
NOT_COUPLED = Finding(None, "this rule does not couple draws")


@dataclass(frozen=True)
class Check:
    """One line of the certificate."""

    name: str
    outcome: Outcome
    detail: str
    seconds: float

    @property
    def passed(self) -> bool:
        """True if the check was made and found nothing wrong."""
        return self.outcome == "pass"

    @property
    def failed(self) -> bool:
        """True if the check was made and found something wrong."""
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
        self._drafting = always_drafting(self.decoder)
        # a rule that takes the target's own draws is checked at greater depths by planned drafts, token for token
        self.depth = planned_length(self._drafting if self.decoder.coupled else self.decoder)
        choice = LengthChoice.parse(self.decoder.config.num_draft_tokens)
        self.longest = self.depth if choice.kind == "fixed" else longest_draft(self.decoder)
        # a drafter that ends its drafts by confidence still does so inside another one, which has a fixed length
        self._length = self.depth if choice.kind == "confidence" else self._drafting.config.num_draft_tokens

    def enumerated(self) -> Finding:
        """The distribution that the rule itself gives, at every depth of drafts of every length."""
        if self.decoder.coupled:
            return COUPLED
        acceptance = self.decoder.config.acceptance
        rule = self.decoder.rule or load_rule("block" if acceptance == "auto" else acceptance)
        try:
            fault = first_fault(rule, self.longest, self.decoder.target.backend.vocab_size)
        except Exception as error:  # a user's rule may raise anything
            return Finding(False, f"the rule raises {type(error).__name__}: {error} (on {VOCAB} tokens)")
        if fault is not None:
            return Finding(False, f"{fault[0]}: probabilities differ by {fault[1]:.2g}")
        return Finding(True, f"drafts of 1 to {self.longest} tokens, exact at every depth")

    def enumeration_power(self) -> Finding:
        """Rules that are wrong from one depth on; each must be caught."""
        if self.decoder.coupled:
            return COUPLED
        cases = [(depth, Case(depth + 1, "temperature 1", one_hot=False)) for depth in range(self.longest)]
        missed = [depth for depth, case in cases if not error_of(kept_from(depth), case) > TOLERANCE]
        return Finding(not missed, f"missed at depths {missed}" if missed else f"caught at depths 1 to {self.longest}")

    def sampled(self) -> Finding:
        """Texts with the decoder's own drafter."""
        drafting, coupled = self._drafting, self.decoder.coupled
        texts = SampledTexts(drafting.sources, drafting.traits, are_drafts_sampled=not coupled)
        acceptance = "match" if coupled else None
        self._test(drafting.using(texts, num_draft_tokens=self._length, acceptance=acceptance), texts)
        return Finding(texts.passed and texts.drafted > 0, str(texts))

    def likely(self) -> Finding:
        """Texts with drafts that are accepted as deep as the check needs."""
        if self.decoder.coupled:
            return Finding(None, "planned drafts show every depth, token for token")
        texts = self._likely(None)
        return Finding(texts.passed, str(texts))

    def power(self, rule: str) -> Finding:
        """Passes if the test of sampled texts catches a wrong rule."""
        texts = self._likely(wrong_rules(self.depth // 2)[rule])
        return Finding(not texts.passed, str(texts))

    def _likely(self, rule: Rule | None) -> SampledTexts:
        texts = SampledTexts([Source(LikelyDrafts(self._near))], LikelyDrafts.traits, self._near)
        decoder = self.decoder.using(texts, num_draft_tokens=self.depth, acceptance=rule)
        self._test(decoder, texts, is_wrong=rule is not None)
        return texts

    def _test(self, decoder: SpeculativeDecoder, texts: SampledTexts, *, is_wrong: bool = False) -> None:
        """Sample at least FEWEST_SEEDS, and on until the deadline; a wrong rule until it is caught, or MOST_WRONG."""
        longest = planned_length(decoder)
        pairs = [(prompt, params) for prompt in self._prompts for params in self._params]
        for first in range(0, MOST_WRONG if is_wrong else MOST_SEEDS, SEEDS_AT_ONCE):
            batch = []  # of unequal lengths
            for seed in range(first, first + SEEDS_AT_ONCE):
                # half of the drafts are shorter, so that bonus tokens come after every number of tokens
                length = 1 + seed // 2 % longest if seed % 2 else longest
                for number, (_, params) in enumerate(pairs):
                    text = replace(params, seed=seed * len(pairs) + number, ignore_eos=True)  # no draws twice
                    end = length + AFTER_DRAFT - number % 2
                    batch.append(replace(text, max_tokens=end, num_draft_tokens=length if seed % 2 else None))
            decoder.generate([prompt for prompt, _ in pairs] * SEEDS_AT_ONCE, batch)
            is_enough = first + SEEDS_AT_ONCE >= FEWEST_SEEDS and perf_counter() > self.deadline
            if texts.impossible or (is_enough if not is_wrong else not texts.passed):
                break

    @cached_property
    def _prompts(self) -> list[list[int]]:
        if self.decoder.tokenizer is None:
            return [[1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 4, 5, 4]]
        return [self.decoder.encode(text, chat=False) for text in TEXTS]

    @cached_property
    def _likely_texts(self) -> Texts:
        return greedy_logits(self.decoder, self._prompts, self.depth + AFTER_DRAFT)

    @cached_property
    def _params(self) -> list[SamplingParams]:
        deep = deep_temperature(list(self._likely_texts.values()), self.depth)
        options = [options_of(**asdict(options)) for options in list(ENUMERATED.values())[:NUM_SAMPLED]]
        return [*options, options_of(temperature=deep), options_of(temperature=deep, top_k=4)]

    @cached_property
    def _near(self) -> dict[Place, list[Tensor]]:
        return {
            (prompt, warp_options(params)): [near(filtered(row, warp_options(params))) for row in logits]
            for prompt, logits in self._likely_texts.items()
            for params in self._params
        }


def options_of(**options: Any) -> SamplingParams:
    """Sampling options, without the model's own."""
    return SamplingParams(**options).explicit


def greedy_logits(decoder: SpeculativeDecoder, prompts: Sequence[list[int]], tokens: int) -> Texts:
    """The target's logits after each prompt and along its plain greedy text, nothing kept of earlier forwards."""
    decoder.forget()
    params = options_of(max_tokens=tokens, ignore_eos=True)
    logits: Texts = {}
    for prompt in prompts:
        text = decoder.using("none", num_draft_tokens="auto").generate(prompt, params).token_ids
        rows = (decoder.next_logits(prompt + text[:count]) for count in range(tokens))
        logits[tuple(prompt)] = [row[: decoder.target.backend.vocab_size].float().cpu().clone() for row in rows]
    return logits


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
        params = options_of(max_tokens=self._length(self.max_tokens))
        return self._finding([each for ids in self._ids for each in self._compare(self.decoder, [ids], [params])])

    def batch(self) -> Finding:
        """Greedy text of all prompts in a batch, of different lengths."""
        longest = options_of(max_tokens=self._length(self.max_tokens))
        params = [replace(longest, max_tokens=longest.max_tokens - i % 7) for i in range(len(self._ids))]
        return self._finding(self._compare(self.decoder, self._ids, params, longest))

    def seeded(self) -> Finding:
        """Sampled text of every prompt alone, each with its own seed."""
        if not self._seeded.coupled:
            return NOT_COUPLED
        params = options_of(temperature=0.8, max_tokens=self._length(self.max_tokens))
        seeds = enumerate(self._ids)
        texts = [self._compare(self._seeded, [ids], [replace(params, seed=seed)]) for seed, ids in seeds]
        return self._finding([each for text in texts for each in text])

    def option(self, name: str) -> Finding:
        """One text under a sampling option, with the decoder's drafter and with planned drafts."""
        option = OPTIONS[name]
        if option.get("temperature") and not self._seeded.coupled:
            return NOT_COUPLED
        if self.decoder.tokenizer is None:
            return Finding(None, "no tokenizer")
        params = options_of(max_tokens=self._length(OPTION_TOKENS), seed=7)
        ids = self.decoder.encode(PATTERN, chat=False)
        if name in COMPUTED_OPTIONS:
            option = option | COMPUTED_OPTIONS[name](self.decoder, self._plain_text(ids, params))
        params = replace(params, **option)
        planning = self._planning({tuple(ids): self._plain_text(ids, params)})[0]
        return self._finding([*self._compare(self._seeded, [ids], [params]), *self._compare(planning, [ids], [params])])

    def planned(self, temperature: float) -> Finding:
        """Texts and logits with drafts that are right up to every depth, alone, in a batch and after a long prompt."""
        if temperature and not self._seeded.coupled:
            return NOT_COUPLED
        levels = planned_length(self.decoder)
        needed = (levels + 1) * (levels + 2)  # tokens of texts in which every depth occurs
        length = max(self._length(self.max_tokens), min(MOST_PLANNED, needed // (2 * len(self._ids)) + levels))
        params = options_of(temperature=temperature, max_tokens=length, seed=11, ignore_eos=True)
        prompts = [*self._ids, self._long_prompt(length)]
        plain = PlannedDrafts()
        recorded = self.decoder.using(plain, num_draft_tokens=0, acceptance="match")
        texts = {tuple(ids): recorded.generate(ids, params).token_ids for ids in prompts}
        self._known |= {(ids, repr(params)): text for ids, text in texts.items()}
        decoder, drafts = self._planning(texts)
        self.decoder.forget()
        compared = [each for ids in prompts for each in self._compare(decoder, [ids], [params])]
        logits = list(drafts.logits.items())
        drafts.logits.clear()
        short = [replace(params, max_tokens=length - i % 7) for i in range(len(prompts))]
        finding = self._finding([*compared, *self._compare(decoder, prompts, short, params)])
        logits += drafts.logits.items()

        longest = max(drafts.lengths, default=0)
        detail = f"{finding.detail}, drafts of 1 to {longest} tokens, accepted 0 to {levels} deep"
        absent = [f"length {length}" for length in range(1, longest + 1) if not drafts.lengths[length]]
        absent += [f"depth {depth}" for depth in range(levels + 1) if not drafts.accepted[depth]]
        detail += f", without {', '.join(absent)}" if absent else ""
        # a lossless rule may accept as little as it likes, but `match` accepts every token that is right
        passed = bool(finding.passed) and (drafts.accepted[levels] > 0 or not self._seeded.coupled)
        if not self.decoder.reproducible:
            return Finding(passed, detail)
        different = [place for place, bits in logits if plain.logits.get(place) != bits]
        detail += f"; logits of {len(logits)} tokens "
        if not different:
            return Finding(passed, detail + "bit-identical")
        prompt, position = different[0]
        detail += f"differ at {len(different)}, first at token {position} after a prompt of {len(prompt)}"
        return Finding(False, detail)

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
        self._plain.generate(ids, options_of(max_tokens=2))
        started = perf_counter()
        self._plain.generate(ids, options_of(max_tokens=SHORTEST, ignore_eos=True))
        each = (perf_counter() - started) / SHORTEST
        texts = 2 * len(OPTIONS) + len(COMPUTED_OPTIONS)
        planned = 8 * len(self.prompts) * self.max_tokens + texts * OPTION_TOKENS
        return min(1.0, self.budget / (planned * each))

    def _plain_text(self, ids: list[int], params: SamplingParams) -> list[int]:
        place = tuple(ids), repr(params)
        if place not in self._known:
            self._known[place] = self._plain.generate(ids, params).token_ids
        return self._known[place]

    def _compare(
        self,
        decoder: SpeculativeDecoder,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        longest: SamplingParams | None = None,
    ) -> list[Comparison]:
        """Texts of the decoder. longest: options of a longer plain text, which begins with these."""
        compared = []
        results = decoder.generate(list(prompts), list(params))
        for ids, text_params, result in zip(prompts, params, results, strict=True):
            plain = self._plain_text(ids, longest or text_params)[: text_params.max_tokens]
            judged = self._judge.judge(ids, plain, result.token_ids, text_params, same_bits=decoder.reproducible)
            compared.append((judged, result.stats.num_draft_tokens))
        return compared

    def _finding(self, compared: Sequence[Comparison]) -> Finding:
        """The finding for these comparisons; ties are allowed if the decoder is not reproducible."""
        differences = [difference for difference, _ in compared]
        counted = count_differences(differences)
        passed = counted["different"] == 0 and not (counted["ties"] and self.decoder.reproducible)
        detail = f"{counted['identical']} of {len(differences)} identical"
        detail += f", {counted['ties']} ties" if counted["ties"] else ""
        if counted["not_compared"]:
            detail += f", {counted['not_compared']} not compared: rounding at an edge of top-k, top-p, min-p"
        first = next((d for d in differences if d is not None and (not passed or not d.tie)), None)
        if first is not None:
            detail += f"; position {first.position}: plain {first.expected}, speculative {first.got}"
        return Finding(passed, f"{detail}, {sum(drafted for _, drafted in compared)} tokens drafted")


@dataclass
class Verifier:
    """Runs the checks on a decoder."""

    decoder: SpeculativeDecoder
    prompts: Sequence[NamedPrompt]
    max_tokens: int = 48  # length of the compared texts; less if the budget does not allow it
    # seconds to aim for; distributions get at least FEWEST_SEEDS texts per prompt and option, even past it
    budget: float = 120.0
    # `target_logits` of a decoder that was loaded without a drafter; None if there is none to compare with
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

    def run(self) -> Iterator[Check]:
        """Run all checks in order."""
        for name, check in self.checks.items():
            started = perf_counter()
            passed, detail = check()
            outcome: Outcome = "not applicable" if passed is None else "pass" if passed else "FAIL"
            yield Check(name, outcome, detail, perf_counter() - started)

    def _unchanged(self) -> Finding:
        """The target's logits, now that all checks have run, against those before a drafter was loaded."""
        assert self.alone is not None
        pairs = zip(self.alone, target_logits(self.decoder, self.prompts), strict=True)
        errors = [float((a - b).abs().max()) for before, after in pairs for a, b in zip(before, after, strict=True)]
        model, largest = self.decoder.target.model, max(errors)
        allowed = 0.0 if self.decoder.reproducible or model is None else CEILING.get(model.dtype, 0.0)
        detail = f"differ by {largest:.2g}" if largest else "bit-identical"
        return Finding(largest <= allowed, f"logits of {len(errors)} tokens {detail}")

    def _shapes(self) -> Finding:
        """A new calibration must find the shapes in use to agree bit for bit."""
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
        return Finding(passed, f"{widths}; attended lengths in multiples of {used.attended_unit}{shorter}; {prompts}")


def target_logits(decoder: SpeculativeDecoder, prompts: Sequence[NamedPrompt]) -> list[list[Tensor]]:
    """The target's logits along the plain greedy texts of a few prompts."""
    ids = [decoder.encode(prompt.prompt, chat=True) for prompt in prompts[:NUM_ALONE]]
    return list(greedy_logits(decoder, ids, ALONE_TOKENS).values())


def verdict_on(decoder: SpeculativeDecoder, checks: Sequence[Check]) -> Verdict:
    """The word on a certificate. A rule that calls itself lossy is never verified, whatever its checks found."""
    if not decoder.lossless:
        return "LOSSY"
    return "FAILED" if any(check.failed for check in checks) else "VERIFIED"
