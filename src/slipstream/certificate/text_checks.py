"""Checks of the certificate that compare texts: speculative against plain decoding, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import Any

from slipstream.certificate.finding import Finding, not_applicable
from slipstream.certificate.parity import Difference, count_differences
from slipstream.certificate.tie_judge import TieJudge
from slipstream.decoder import SpeculativeDecoder
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompts import NamedPrompt

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
    "logit_bias": {"logit_bias": {0: -5.0, 5: 3.0}},
    "bad_words": {"bad_words": ["red", "green blue"]},
    "min_tokens": {"min_tokens": 12},
    "stop": {"stop": ["e,", "blue"]},
    "all together": {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1},
}


@dataclass
class Pair:
    """Differences between plain and speculative texts of the same prompts, and how many tokens were drafted."""

    differences: list[Difference | None] = field(default_factory=list)
    drafted: int = 0


@dataclass
class TextChecks:
    """Compares texts of `max_tokens` tokens, fewer where the budget (seconds for all of them) does not allow it."""

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

    def option(self, given: dict[str, Any]) -> Finding:
        """One text under a sampling option."""
        if given.get("temperature") and not self._seeded.coupled:
            return not_applicable("this rule does not couple draws")
        if self.decoder.tokenizer is None:
            return not_applicable("no tokenizer")
        params = SamplingParams(**{"max_tokens": self._length(OPTION_TOKENS), "seed": 7, **given})
        return self._finding([self._pair(self._seeded, [PATTERN], [params], chat=False)])

    def _length(self, wanted: int) -> int:
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
        return min(1.0, self.budget / (planned * each))

    def _pair(
        self, decoder: SpeculativeDecoder, prompts: list[str], params: list[SamplingParams], *, chat: bool = True
    ) -> Pair:
        ids = [decoder.encode(prompt, chat=chat) for prompt in prompts]
        got = decoder.generate(ids, params)
        expected = [self._plain.generate(prompt, one) for prompt, one in zip(ids, params, strict=True)]
        differences = [
            self._judge.judge(prompt, a.token_ids, b.token_ids, one, same_bits=decoder.reproducible)
            for prompt, one, a, b in zip(ids, params, expected, got, strict=True)
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
