"""Plain against speculative decoding on the same prompts in one run: speed, and the proof that the texts agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import exp, log
from statistics import median
from time import perf_counter
from typing import Any

from slipstream.bench import hf_reference as reference
from slipstream.certificate.parity import Difference, explain, first_difference
from slipstream.core.stats import Stats
from slipstream.decoder import SpeculativeDecoder
from slipstream.models.loaded import LoadOptions
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompts import NamedPrompt
from slipstream.text.requests import Prompt
from slipstream.text.results import Result

PLAIN, SPECULATIVE, BATCH, HF = "plain", "speculative", "batch", "hf generate"


@dataclass(frozen=True)
class Run:
    """One arm on one prompt."""

    token_ids: list[int]
    seconds: float
    difference: Difference | None = None
    result: Result | None = None

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, prompt processing included."""
        return len(self.token_ids) / self.seconds


@dataclass
class Comparison:
    """All arms on one prompt; `difference` of each run is against the plain arm."""

    prompt: NamedPrompt
    runs: dict[str, Run] = field(default_factory=dict)

    def speed_up(self, arm: str) -> float:
        """Tokens per second of an arm relative to plain decoding."""
        return self.runs[arm].tokens_per_second / self.runs[PLAIN].tokens_per_second


@dataclass
class Referee:
    """Tells ties from bugs, loading the full-precision model when the first difference turns up."""

    decoder: SpeculativeDecoder

    @cached_property
    def _options(self) -> LoadOptions:
        config = self.decoder.config
        return LoadOptions(config.dtype, config.device, False, config.load_options)

    @cached_property
    def _full(self) -> Any:
        return reference.full_precision_model(self.decoder.target, self._options)

    @cached_property
    def plain_model(self) -> Any:
        """The target as transformers loads it."""
        return reference.plain_model(self.decoder.target, self._options)

    def judge(self, prompt: list[int], expected: list[int], got: list[int], *, greedy: bool) -> Difference | None:
        """The first difference, explained where an explanation is possible (greedy texts of real models)."""
        at = first_difference(expected, got)
        if at is None:
            return None
        if not greedy or self.decoder.target.model is None:
            pair = [ids[at] if at < len(ids) else None for ids in (expected, got)]
            return Difference(at, pair[0], pair[1])
        return explain(
            prompt,
            expected,
            got,
            lambda ids, count: reference.last_logits(self._full, ids, count),
            self.decoder.next_logits,
            self.decoder.target.model.dtype,
        )


def compare(
    decoder: SpeculativeDecoder,
    prompts: Sequence[NamedPrompt],
    params: SamplingParams,
    *,
    chat: bool = True,
    with_hf: bool = False,
    repeats: int = 1,
) -> Iterator[Comparison]:
    """Run every prompt through every arm, arms interleaved, and yield a comparison per prompt.

    Each run starts with an empty memory. With `repeats` > 1 an arm's time is the median of its runs.
    """
    referee, plain = Referee(decoder), decoder.using("none")
    _warm_up(decoder, plain, prompts[0].prompt, chat)
    for prompt in prompts:
        done = Comparison(prompt)
        ids = decoder.encode(prompt.prompt, chat=chat)
        timed: dict[str, list[Run]] = {}
        for _ in range(repeats):
            if with_hf:
                timed.setdefault(HF, []).append(_run_hf(referee.plain_model, ids, params))
            for arm, one in ((PLAIN, plain), (SPECULATIVE, decoder)):
                timed.setdefault(arm, []).append(_run(one, ids, params))
        expected = timed[PLAIN][0].token_ids
        for arm, runs in timed.items():
            verdicts = [referee.judge(ids, expected, r.token_ids, greedy=params.temperature == 0) for r in runs]
            worst = next((d for d in verdicts if d is not None), None)
            seconds = median(r.seconds for r in runs)
            done.runs[arm] = Run(runs[0].token_ids, seconds, worst, runs[0].result)
        yield done


def compare_batch(
    decoder: SpeculativeDecoder, comparisons: Sequence[Comparison], params: SamplingParams, *, chat: bool = True
) -> dict[str, Any]:
    """All prompts in one batch against one by one: total tokens per second, and each row against the row alone."""
    referee = Referee(decoder)
    ids = [decoder.encode(c.prompt.prompt, chat=chat) for c in comparisons]
    decoder.forget()
    decoder.forget_learned()
    started = perf_counter()
    results = decoder.generate(ids, params)
    seconds = perf_counter() - started
    greedy = params.temperature == 0
    differences = [
        referee.judge(prompt, done.runs[SPECULATIVE].token_ids, result.token_ids, greedy=greedy)
        for prompt, done, result in zip(ids, comparisons, results, strict=True)
    ]
    alone = sum(done.runs[SPECULATIVE].seconds for done in comparisons)
    tokens = sum(len(result.token_ids) for result in results)
    tokens_alone = sum(len(done.runs[SPECULATIVE].token_ids) for done in comparisons)
    return {
        "rows": len(results),
        "max_batch_size": decoder.config.max_batch_size,
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_one_by_one": tokens_alone / alone,
        "speed_up": (tokens / seconds) / (tokens_alone / alone),
        **count_differences(differences),
    }


def summarise(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Speed-ups, parity and statistics over all prompts."""
    arms = list(comparisons[0].runs)
    summary: dict[str, Any] = {"prompts": len(comparisons), "arms": {}}
    for arm in arms:
        runs = [c.runs[arm] for c in comparisons]
        speed_ups = [c.speed_up(arm) for c in comparisons]
        summary["arms"][arm] = {
            "tokens": sum(len(r.token_ids) for r in runs),
            "seconds": sum(r.seconds for r in runs),
            "tokens_per_second": sum(len(r.token_ids) for r in runs) / sum(r.seconds for r in runs),
            "speed_up_geometric_mean": exp(sum(map(log, speed_ups)) / len(speed_ups)),
            "speed_up_median": median(speed_ups),
            **count_differences([r.difference for r in runs]),
        }
    rounds = [r for c in comparisons if (result := c.runs[SPECULATIVE].result) for r in result.rounds]
    summary["stats"] = Stats.of(rounds).to_dict()
    return summary


def count_differences(differences: Sequence[Difference | None]) -> dict[str, Any]:
    """How many texts are identical, differ by a tie, or differ otherwise; and the details of those that differ."""
    found = [d for d in differences if d is not None]
    ties = sum(d.tie for d in found)
    return {
        "identical": len(differences) - len(found),
        "ties": ties,
        "different": len(found) - ties,
        "differences": [{"prompt": i, **asdict(d)} for i, d in enumerate(differences) if d is not None],
    }


def _run(decoder: SpeculativeDecoder, ids: Prompt, params: SamplingParams) -> Run:
    decoder.forget()
    decoder.forget_learned()
    started = perf_counter()
    result = decoder.generate(ids, params)
    seconds = perf_counter() - started
    return Run(result.token_ids, seconds, result=result)


def _run_hf(model: Any, ids: list[int], params: SamplingParams) -> Run:
    started = perf_counter()
    tokens = reference.generate(model, ids, params)
    return Run(tokens, perf_counter() - started)


def _warm_up(decoder: SpeculativeDecoder, plain: SpeculativeDecoder, prompt: Prompt, chat: bool) -> None:
    short = SamplingParams(max_tokens=8)
    ids = decoder.encode(prompt, chat=chat)
    for one in (decoder, plain):
        one.generate(ids, short)
