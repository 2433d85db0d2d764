"""Plain against speculative decoding on the same prompts in one run: speed, and the proof that the texts agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median
from typing import Any

from slipstream.bench.arms import Arm
from slipstream.bench.lineup import Judge, Lineup, TimedRuns
from slipstream.bench.plan import BenchPrompt, name_prompts
from slipstream.certificate.parity import Difference, count_differences
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import UsageError
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompt_sets import NamedPrompt
from slipstream.text.results import Result, Stats

PLAIN, SPECULATIVE, BATCH, HF = "plain", "speculative", "batch", "hf generate"
ARMS = {PLAIN: Arm(PLAIN, "none"), SPECULATIVE: Arm(SPECULATIVE, predicted=True), HF: Arm(HF, baseline="hf")}


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


def compare(
    decoder: SpeculativeDecoder,
    prompts: Sequence[NamedPrompt | str],
    params: SamplingParams,
    *,
    chat: bool = True,
    with_hf: bool = False,
    repeats: int = 1,
) -> Iterator[Comparison]:
    """Run every prompt through every arm, arms interleaved, and yield a comparison per prompt.

    The arms are "plain", "speculative" and "hf generate": `Comparison.runs` has a `Run` of each by its name.
    Prompt number i is sampled with seed + i, 0 where none is given. Each run starts with an empty KV cache. With
    `repeats` > 1 an arm's time is the median of its runs. with_hf: also run transformers' own `generate`; options that
    it would not apply as we do are refused.
    """
    if isinstance(prompts, str):
        raise UsageError(f"prompts={prompts!r:.60}; allowed: a list of prompts")
    texts = [NamedPrompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    arms = [arm for name, arm in ARMS.items() if name != HF or with_hf]
    lineup = Lineup(decoder, arms, params, chat=chat)
    timed, judge = TimedRuns(lineup), Judge(lineup)
    for prompt, named in zip(texts, name_prompts(texts), strict=True):
        ids = lineup.encode(named)
        runs: dict[str, list[Run]] = {}
        for _ in range(repeats):
            for arm in arms:
                output, seconds = timed.run(arm, [ids], [lineup.params_of(arm, named)])
                result = None if output.results is None else output.results[0]
                runs.setdefault(arm.name, []).append(Run(output.texts[0], seconds, result=result))
        expected = runs[PLAIN][0].token_ids
        yield Comparison(prompt, {arm.name: _judged(judge, arm, named, expected, runs[arm.name]) for arm in arms})


def _judged(judge: Judge, arm: Arm, prompt: BenchPrompt, expected: list[int], runs: Sequence[Run]) -> Run:
    """The first of an arm's repeats with the median of their times and the first difference found in any of them."""
    differences = [judge.difference(arm, prompt, expected, run.token_ids) for run in runs]
    first = next((difference for difference in differences if difference is not None), None)
    return Run(runs[0].token_ids, median(run.seconds for run in runs), first, runs[0].result)


def compare_batch(
    decoder: SpeculativeDecoder, comparisons: Sequence[Comparison], params: SamplingParams, *, chat: bool = True
) -> dict[str, Any]:
    """All prompts in one batch against one by one: total tokens per second, and each row against the row alone."""
    arm = ARMS[SPECULATIVE]
    lineup = Lineup(decoder, [arm], params, chat=chat)
    judge, prompts = Judge(lineup), name_prompts([comparison.prompt for comparison in comparisons])
    alone = [comparison.runs[SPECULATIVE] for comparison in comparisons]
    each = [lineup.params_of(arm, prompt) for prompt in prompts]
    ids, at_once = [lineup.encode(prompt) for prompt in prompts], min(len(prompts), decoder.config.max_batch_size)
    output, seconds = TimedRuns(lineup).run(arm, ids, each, at_once)
    differences = [
        judge.difference(arm, prompt, run.token_ids, text)
        for prompt, run, text in zip(prompts, alone, output.texts, strict=True)
    ]
    together = sum(map(len, output.texts)) / seconds
    one_by_one = sum(len(run.token_ids) for run in alone) / sum(run.seconds for run in alone)
    return {
        "rows": len(prompts),
        "max_batch_size": decoder.config.max_batch_size,
        "tokens_per_second": together,
        "tokens_per_second_one_by_one": one_by_one,
        "speed_up": together / one_by_one,
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
    results = [result for c in comparisons if (result := c.runs[SPECULATIVE].result)]
    lossless = all(result.stats.lossless for result in results)
    summary["stats"] = Stats.of((r for result in results for r in result.rounds), lossless=lossless).to_dict()
    return summary
