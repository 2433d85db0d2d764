"""Compares a draft model that scores part of the vocabulary, or reads part of the prompt, with an unrestricted one.

    python benchmarks/draft_restrictions.py qwen1.5b qwen0.5b --prompt-file prompts.jsonl --limit 2
    python benchmarks/draft_restrictions.py qwen1.5b qwen0.5b --prompt-file prompts.jsonl --context 256 --context 512

The pair of models is loaded once. Every prompt is decoded with each drafter, in alternating order and with an empty
cache. A prompt's step time is the median over rounds, except those in which the draft model reads the prompt; `reading`
is the share of the time that it spends reading. Without --context, the drafters' steps are also timed in turns along
one text. The last line of output is JSON. Exit code 1 if a greedy text differs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean, median
from time import perf_counter
from typing import Annotated

import torch
import typer
from terminal import Count, run

from slipstream import Drafter, Result, SamplingParams, SpeculativeDecoder
from slipstream.core.rng import Race
from slipstream.core.types import Row
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.model.restricted_scorer import RestrictedScorer
from slipstream.drafters.model.windowed_session import WindowedSession
from slipstream.errors import UsageError
from slipstream.sampling.sampler import Sampler
from slipstream.text.prompt_sets import builtin_prompts, read_prompts

STEPS, WARM_UP = 4, 5  # draft tokens of a timed proposal; proposals before any is timed


def main(
    target: str,
    draft: str,
    vocabulary: Annotated[str, typer.Option(help="auto, or N for the first N token ids")] = "auto",
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="tokens of a prompt that the draft model reads; repeatable")
    ] = None,
    draft_tokens: Count = 4,
    tokens: Count = 64,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    prompt_file: Annotated[Path | None, typer.Option(help="text or JSON lines", show_default="the package's")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="prompts of each category")] = None,
) -> None:
    """Print a line per prompt and a JSON report."""
    prompts = builtin_prompts(limit=limit or 1) if prompt_file is None else read_prompts(prompt_file, limit=limit)
    decoder = SpeculativeDecoder(
        target,
        draft,
        drafter="model",
        num_draft_tokens=draft_tokens,
        draft_vocabulary=int(vocabulary) if vocabulary.isdecimal() else vocabulary,
        draft_context="full",
    )
    drafters = _by_context(decoder, context) if context else _by_vocabulary(decoder)
    arms = {name: decoder.using(drafter, num_draft_tokens=draft_tokens) for name, drafter in drafters.items()}
    params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=0).explicit
    results: dict[str, list[Result]] = {name: [] for name in arms}
    arms["full"].generate("Hello", SamplingParams(max_tokens=8).explicit)
    for number, prompt in enumerate(prompts):
        for name in list(arms)[:: 1 if number % 2 else -1]:
            decoder.forget()
            results[name].append(arms[name].generate(prompt.prompt, params))
        print(_line(prompt.category, {name: results[name][-1] for name in arms}), flush=True)
    report = {name: figures(results[name], results["full"]) for name in arms}
    if not context:
        ids = decoder.encode(prompts[0].prompt, chat=True)
        times = interleaved_steps(list(drafters.values()), ids, decoder.target.backend.vocab_size)
        for name, milliseconds in zip(drafters, times, strict=True):
            report[name]["interleaved_step_ms"] = round(milliseconds, 2)
    print(json.dumps({"target": target, "draft": draft, "temperature": temperature, "prompts": len(prompts)} | report))
    is_same = all(arm["identical_texts"] == len(prompts) for arm in report.values())
    raise typer.Exit(int(temperature == 0 and not is_same))


def _by_vocabulary(decoder: SpeculativeDecoder) -> dict[str, ModelDrafter]:
    """Two drafters: the draft model scoring all tokens, and scoring its restricted vocabulary."""
    models = decoder._models
    if models.draft is None or models.draft.restricted is None or models.draft_session is None:
        raise UsageError("--vocabulary leaves this draft model's whole; allowed: fewer tokens than the vocabulary has")
    restricted, vocab_size = models.draft_scorer(), models.target.backend.vocab_size
    assert restricted is not None
    return {
        "full": ModelDrafter(models.draft_session, vocab_size),
        "restricted": ModelDrafter(restricted, vocab_size),
    }


def _by_context(decoder: SpeculativeDecoder, limits: Sequence[int]) -> dict[str, ModelDrafter]:
    """The draft model as it is, and restricted to reading each number of tokens."""
    models = decoder._models
    if models.draft is None or models.draft_session is None:
        raise UsageError("--context without a draft model; allowed: with one that has the target's vocabulary")
    restricted, vocab_size = models.draft.restricted, models.target.backend.vocab_size
    scorer = models.draft_scorer()
    assert scorer is not None
    drafters = {"full": ModelDrafter(scorer, vocab_size)}
    for limit in limits:
        window = WindowedSession(models.draft_session, limit)
        scorer = window if restricted is None else RestrictedScorer(window, restricted)
        drafters[str(limit)] = ModelDrafter(scorer, vocab_size)
    return drafters


@torch.inference_mode()
def interleaved_steps(
    drafters: Sequence[Drafter], text: Sequence[int], vocab_size: int, repeats: int = 60
) -> list[float]:
    """Median milliseconds of a draft step of each drafter; the drafters take turns along one growing text."""
    device = torch.device("cpu")
    row = Row(0, list(text), SamplingParams(temperature=0.0, max_tokens=1 << 16), seed=0)
    sampler, times = Sampler([row], Race(vocab_size, device), vocab_size, device), [list[float]() for _ in drafters]
    for repeat in range(repeats + WARM_UP):
        for drafter, milliseconds in zip(drafters, times, strict=True):
            start = perf_counter()
            draft = drafter.propose([row], [STEPS], sampler)
            if repeat >= WARM_UP:
                milliseconds.append(1e3 * (perf_counter() - start) / STEPS)
            row.commit(draft.tokens[0, :1].tolist())
    return [median(milliseconds) for milliseconds in times]


def step_milliseconds(results: Sequence[Result]) -> float:
    """The median over rounds of a draft step's time, without the rounds in which the draft model reads a prompt."""
    drafted = [[r for r in result.rounds if r.num_draft_steps][1:] for result in results]
    steps = [1e3 * r.seconds.draft / r.num_draft_steps for rounds in drafted for r in rounds]
    return median(steps) if steps else math.nan


def reading_share(results: Sequence[Result]) -> float:
    """The share of the time in which the draft model read prompts: its first rounds, minus their draft steps."""
    reading = 0.0
    for result in results:
        drafted = [r for r in result.rounds if r.num_draft_steps]
        if len(drafted) > 1:
            steps = drafted[0].num_draft_steps * step_milliseconds([result]) / 1e3
            reading += max(0.0, drafted[0].seconds.draft - steps)
    return reading / sum(r.seconds.total for result in results for r in result.rounds)


def figures(results: Sequence[Result], full: Sequence[Result]) -> dict[str, float]:
    """The figures of an arm. relative_time: relative to the unrestricted draft model."""
    drafted = sum(result.stats.num_draft_tokens for result in results)
    accepted = sum(result.stats.num_accepted_tokens for result in results)
    ratios = [a.stats.total_seconds / b.stats.total_seconds for a, b in zip(results, full, strict=True)]
    return {
        "seconds": round(median(result.stats.total_seconds for result in results), 2),
        "relative_time": round(geometric_mean(ratios), 3),
        "step_ms": round(step_milliseconds(results), 2),
        "reading": round(reading_share(results), 3),
        "acceptance": round(accepted / max(1, drafted), 4),
        "identical_texts": sum(a.token_ids == b.token_ids for a, b in zip(results, full, strict=True)),
    }


def _line(category: str, results: dict[str, Result]) -> str:
    parts = (
        f"{name} {result.stats.total_seconds:5.2f} s, step {step_milliseconds([result]):5.2f} ms, "
        f"accepted {100 * (result.stats.acceptance_rate or 0):4.1f} %"
        for name, result in results.items()
    )
    prompt = len(next(iter(results.values())).prompt_token_ids)
    return f"{category:16} {prompt:5} tokens   " + "   ".join(parts)


if __name__ == "__main__":
    run(main)
