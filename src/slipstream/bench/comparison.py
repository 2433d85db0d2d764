"""Plain against speculative decoding on the same prompts in one run: speed, and proof that the outputs agree.

Arms are warmed up on the first prompt and take turns, in an order that is reversed from one run to the next, so that a
machine that becomes slower or faster favors none of them. Times are geometric means of the repeats. The interval of a
speed-up is Student's, from the scatter of the repeats: it shows how far another run of the same prompts may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt
from statistics import NormalDist, fmean, geometric_mean, median
from typing import Any

from slipstream.bench.arms import Arm
from slipstream.bench.lineup import Judge, Lineup, TimedRuns
from slipstream.bench.plan import BenchPrompt, name_prompts
from slipstream.bench.summary import LEVEL, Estimate
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
    seconds: float  # geometric mean of the repeats
    difference: Difference | None = None
    result: Result | None = None
    repeats: tuple[float, ...] = ()  # seconds of each run
    stats: tuple[Stats, ...] = ()  # of each run

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, prompt processing included."""
        return len(self.token_ids) / self.seconds


@dataclass(frozen=True)
class SpeedUpEstimate:
    """The planner's estimate of a speed-up, and what was measured; neither counts the reading of prompts."""

    estimated: float
    measured: float

    @property
    def error(self) -> float:
        """The estimate's share above or below what was measured."""
        return self.estimated / self.measured - 1


@dataclass
class Comparison:
    """All arms on one prompt; `difference` of each run is against the plain arm."""

    prompt: NamedPrompt
    runs: dict[str, Run] = field(default_factory=dict)

    def speed_up(self, arm: str) -> float:
        """Tokens per second of an arm relative to plain decoding."""
        return self.runs[arm].tokens_per_second / self.runs[PLAIN].tokens_per_second

    def log_speed_ups(self, arm: str) -> list[float]:
        """For each repeat, the logarithm of the speed relative to plain decoding."""
        run, plain = self.runs[arm], self.runs[PLAIN]
        tokens = log(len(run.token_ids) / len(plain.token_ids))
        return [tokens + log(base / seconds) for seconds, base in zip(run.repeats, plain.repeats, strict=True)]

    @property
    def estimate(self) -> SpeedUpEstimate | None:
        """The speed-up that users see after an answer; None if the planner has no measured costs or nothing drafted."""
        fast, plain = self.runs[SPECULATIVE].stats, self.runs[PLAIN].stats
        estimates = [stats.estimated_speed_up for stats in fast if stats.num_draft_tokens]
        speed_ups = [estimate for estimate in estimates if estimate is not None]
        if not speed_ups or len(speed_ups) < len(fast):
            return None
        return SpeedUpEstimate(geometric_mean(speed_ups), _decoding_seconds(plain) / _decoding_seconds(fast))


def _decoding_seconds(stats: Sequence[Stats]) -> float:
    """Seconds per token of an arm's runs, without reading the prompt."""
    return geometric_mean((run.total_seconds - run.prefill_seconds) / run.num_output_tokens for run in stats)


def speed_up(comparisons: Sequence[Comparison], arm: str) -> Estimate:
    """The geometric mean over prompts and repeats, with its 95 % interval if there are repeats."""
    logs = [comparison.log_speed_ups(arm) for comparison in comparisons]
    value, count = fmean([entry for repeats in logs for entry in repeats]), sum(map(len, logs))
    freedom = count - len(logs)
    if freedom == 0:
        return Estimate(exp(value))
    squares = sum((entry - fmean(repeats)) ** 2 for repeats in logs for entry in repeats)
    margin = student_quantile(freedom) * sqrt(squares / freedom / count)
    return Estimate(exp(value), exp(value - margin), exp(value + margin))


def within_noise(estimate: Estimate) -> bool:
    """True if the interval contains 1: the measurement shows no difference."""
    return estimate.low is not None and estimate.high is not None and estimate.low <= 1 <= estimate.high


# 97.5 % quantiles of Student's t with 1 to 10 degrees of freedom
_SMALL = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def student_quantile(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t (above 10 by Abramowitz and Stegun 26.7.5)."""
    if freedom <= len(_SMALL):
        return _SMALL[freedom - 1]
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + (z**3 + z) / (4 * freedom) + second


def compare(
    decoder: SpeculativeDecoder,
    prompts: Sequence[NamedPrompt | str],
    params: SamplingParams | None = None,
    *,
    chat: bool = True,
    with_hf: bool = False,
    repeats: int = 1,
    on_run: Callable[[str], None] | None = None,
) -> Iterator[Comparison]:
    """Run every prompt through every arm, arms interleaved, and yield a comparison per prompt.

    The arms are "plain", "speculative" and "hf generate", the keys of `Comparison.runs`.
    Prompt number i is sampled with seed + i; without a seed, with i. Each run starts with an empty KV cache. With
    `repeats` > 1 an arm's time is the geometric mean of its runs. with_hf: also run transformers' own `generate`;
    options that it would apply differently are refused. on_run: called before each run, warm-ups included, with a
    description; `num_runs` calls in all.
    """
    if isinstance(prompts, str):
        raise UsageError(f"prompts={prompts!r:.60}; allowed: a list of prompts")
    texts = [NamedPrompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    params = SamplingParams() if params is None else params
    report = on_run or (lambda doing: None)
    arms = [arm for name, arm in ARMS.items() if name != HF or with_hf]
    lineup = Lineup(decoder, arms, params, chat=chat)
    timed = TimedRuns(lineup)
    judge = Judge(lineup)
    for number, (prompt, named) in enumerate(zip(texts, name_prompts(texts), strict=True)):
        ids = lineup.encode(named)
        if number == 0:
            for arm in arms:
                report(f"warming up {arm.name}")
                timed.warm_up(arm, [ids], [lineup.params_of(arm, named)])
        runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}
        for repeat in range(repeats):
            for arm in arms if (number + repeat) % 2 == 0 else reversed(arms):
                report(f"{named.id}: {arm.name}, run {repeat + 1} of {repeats}")
                output, seconds = timed.run(arm, [ids], [lineup.params_of(arm, named)])
                result = None if output.results is None else output.results[0]
                runs[arm.name].append(Run(output.texts[0], seconds, result=result))
        expected = runs[PLAIN][0].token_ids
        yield Comparison(prompt, {arm.name: _judged(judge, arm, named, expected, runs[arm.name]) for arm in arms})


def num_runs(prompts: int, repeats: int, *, with_hf: bool = False) -> int:
    """Number of runs that `compare` makes, warm-ups included."""
    return (1 + prompts * repeats) * (len(ARMS) if with_hf else len(ARMS) - 1)


def _judged(judge: Judge, arm: Arm, prompt: BenchPrompt, expected: list[int], runs: Sequence[Run]) -> Run:
    """The first of an arm's repeats, with the times of all of them and the first difference that any of them has."""
    differences = [judge.difference(arm, prompt, expected, run.token_ids) for run in runs]
    first = next((difference for difference in differences if difference is not None), None)
    seconds = tuple(run.seconds for run in runs)
    stats = tuple(run.result.stats for run in runs if run.result is not None)
    return Run(runs[0].token_ids, geometric_mean(seconds), first, runs[0].result, seconds, stats)


def compare_batch(
    decoder: SpeculativeDecoder, comparisons: Sequence[Comparison], params: SamplingParams, *, chat: bool = True
) -> dict[str, Any]:
    """Compare one batch of all prompts with one by one: total tokens per second, and every output."""
    arm = ARMS[SPECULATIVE]
    lineup = Lineup(decoder, [arm], params, chat=chat)
    judge = Judge(lineup)
    prompts = name_prompts([comparison.prompt for comparison in comparisons])
    alone = [comparison.runs[SPECULATIVE] for comparison in comparisons]
    options = [lineup.params_of(arm, prompt) for prompt in prompts]
    ids = [lineup.encode(prompt) for prompt in prompts]
    at_once = min(len(prompts), decoder.config.max_batch_size)
    output, seconds = TimedRuns(lineup).run(arm, ids, options, at_once)
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


def summarize(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Speed-ups, parity and statistics over all prompts."""
    arms = list(comparisons[0].runs)
    summary: dict[str, Any] = {"prompts": len(comparisons), "arms": {}}
    for arm in arms:
        runs = [c.runs[arm] for c in comparisons]
        speed_ups = [c.speed_up(arm) for c in comparisons]
        measured = speed_up(comparisons, arm)
        summary["arms"][arm] = {
            "tokens": sum(len(r.token_ids) for r in runs),
            "seconds": sum(r.seconds for r in runs),
            "tokens_per_second": sum(len(r.token_ids) for r in runs) / sum(r.seconds for r in runs),
            "speed_up": measured.value,
            "speed_up_low": measured.low,
            "speed_up_high": measured.high,
            "within_noise": within_noise(measured),
            "speed_up_median": median(speed_ups),
            **count_differences([r.difference for r in runs]),
        }
    if errors := [abs(comparison.estimate.error) for comparison in comparisons if comparison.estimate is not None]:
        summary["estimate"] = {"prompts": len(errors), "median_error": median(errors), "largest_error": max(errors)}
    results = [result for c in comparisons if (result := c.runs[SPECULATIVE].result)]
    lossless = all(result.stats.lossless for result in results)
    summary["stats"] = Stats.of((r for result in results for r in result.rounds), lossless=lossless).to_dict()
    return summary
