"""Draft steps that score all tokens against draft steps that score a part of them: seconds, acceptance, and the texts.

    python benchmarks/draft_vocabulary.py qwen1.5b qwen0.5b --prompt-file prompts.jsonl --limit 2

One pair of models, loaded once. Every prompt is decoded with both drafters, in alternating order; then their steps are
timed in turns. A prompt's step time is the median over rounds, without those in which the draft model reads the prompt;
`reading_share` is the share of the time that it reads. Ends with one JSON line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import torch
import typer
from terminal import Count, run

from slipstream import Drafter, Result, SamplingParams, SpeculativeDecoder
from slipstream.core.rng import Race
from slipstream.core.types import Row
from slipstream.drafters.model import ModelDrafter
from slipstream.errors import UsageError
from slipstream.sampling.sampler import Sampler
from slipstream.text.prompt_sets import NamedPrompt, builtin_prompts, read_prompts

ARMS = ("full", "restricted")
STEPS, WARM_UP = 4, 5  # draft tokens of a timed proposal; proposals before any is timed


def main(
    target: str,
    draft: str,
    draft_vocabulary: Annotated[str, typer.Option(help="auto, or a number of first tokens")] = "auto",
    draft_tokens: Count = 4,
    tokens: Count = 64,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    prompt_file: Annotated[Path | None, typer.Option(help="text or JSON lines; without it the built-in ones")] = None,
    limit: Annotated[int, typer.Option(min=1, help="prompts of each category")] = 1,
) -> None:
    """Print the table; exit status 1 if a greedy text differs."""
    prompts = builtin_prompts(limit=limit) if prompt_file is None else read_prompts(prompt_file, limit=limit)
    decoder = SpeculativeDecoder(
        target,
        draft,
        drafter="model",
        num_draft_tokens=draft_tokens,
        draft_vocabulary=int(draft_vocabulary) if draft_vocabulary.isdecimal() else draft_vocabulary,
    )
    arms = both(decoder, draft_tokens)
    params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=0)
    results: dict[str, list[Result]] = {arm: [] for arm in ARMS}
    new: list[Result] = []  # whose prompts were read, and not reused
    for number, prompt in enumerate(prompts):
        order = ARMS if number % 2 else ARMS[::-1]
        for arm in order:
            results[arm].append(arms[arm].generate(prompt.prompt, params))
        new.append(results[order[0]][-1])
        print(_line(prompt, [results[arm][-1] for arm in ARMS]), flush=True)
    drafters = [arms[arm].drafter for arm in ARMS]
    ids = decoder.encode(prompts[0].prompt)
    full, restricted = interleaved_steps(drafters, ids, decoder.target.backend.vocab_size)
    times = {"full_ms": round(full, 2), "restricted_ms": round(restricted, 2), "ratio": round(restricted / full, 3)}
    report = summary(results) | times | {"reading_share": round(reading_share(new), 3)}
    print(json.dumps({"target": target, "draft": draft, "temperature": temperature} | report))
    raise typer.Exit(int(temperature == 0 and report["identical_texts"] < report["prompts"]))


def both(decoder: SpeculativeDecoder, draft_tokens: int) -> dict[str, SpeculativeDecoder]:
    """The decoder with a draft model that scores all tokens, and with one that scores some."""
    assert isinstance(decoder, SpeculativeDecoder)
    models = decoder._models
    if models.draft is None or models.draft.restricted is None or models.draft_session is None:
        raise UsageError("--draft-vocabulary leaves this draft model's whole; allowed: fewer tokens than it has")
    scorers = dict(zip(ARMS, (models.draft_session, models.draft_scorer()), strict=True))
    vocab_size = models.target.backend.vocab_size
    return {
        arm: decoder.using(ModelDrafter(scorer, vocab_size), num_draft_tokens=draft_tokens)
        for arm, scorer in scorers.items()
        if scorer is not None
    }


@torch.inference_mode()
def interleaved_steps(
    drafters: Sequence[Drafter], text: Sequence[int], vocab_size: int, repeats: int = 60
) -> list[float]:
    """Median milliseconds of a draft step of each drafter; they take turns along one text that grows."""
    device = torch.device("cpu")
    row = Row(0, list(text), SamplingParams(temperature=0.0, max_tokens=1 << 16), seed=0)
    sampler, times = Sampler([row], Race(vocab_size, device), vocab_size, device), [list[float]() for _ in drafters]
    for repeat in range(repeats + WARM_UP):
        for drafter, own in zip(drafters, times, strict=True):
            start = perf_counter()
            draft = drafter.propose([row], [STEPS], sampler)
            if repeat >= WARM_UP:
                own.append(1e3 * (perf_counter() - start) / STEPS)
            row.commit(draft.tokens[0, :1].tolist())
    return [median(own) for own in times]


def step_milliseconds(results: Sequence[Result]) -> float:
    """The median over rounds of a draft step, rounds in which the draft model reads a prompt left out."""
    drafted = [[r for r in result.rounds if r.num_draft_steps][1:] for result in results]
    steps = [1e3 * r.seconds.draft / r.num_draft_steps for rounds in drafted for r in rounds]
    return median(steps) if steps else math.nan


def reading_share(results: Sequence[Result]) -> float:
    """The share of all time in which the draft model read prompts: what its first rounds took beyond their steps."""
    reading = 0.0
    for result in results:
        drafted = [r for r in result.rounds if r.num_draft_steps]
        if len(drafted) > 1:
            steps = drafted[0].num_draft_steps * step_milliseconds([result]) / 1e3
            reading += max(0.0, drafted[0].seconds.draft - steps)
    return reading / sum(r.seconds.total for result in results for r in result.rounds)


def acceptance_rate(results: Sequence[Result]) -> float:
    """Accepted draft tokens per drafted one, over all results."""
    drafted = sum(result.stats.num_draft_tokens for result in results)
    return sum(result.stats.num_accepted_tokens for result in results) / max(1, drafted)


def summary(results: dict[str, list[Result]]) -> dict[str, float]:
    """The figures of a run."""
    full, restricted = (results[arm] for arm in ARMS)
    rates = [acceptance_rate(results[arm]) for arm in ARMS]
    return {
        "full_acceptance": round(rates[0], 4),
        "restricted_acceptance": round(rates[1], 4),
        "difference_in_points": round(100 * (rates[1] - rates[0]), 2),
        "identical_texts": sum(a.token_ids == b.token_ids for a, b in zip(full, restricted, strict=True)),
        "prompts": len(full),
    }


def _line(prompt: NamedPrompt, pair: Sequence[Result]) -> str:
    same = "same text" if pair[0].token_ids == pair[1].token_ids else "OTHER TEXT"
    times = " -> ".join(f"{step_milliseconds([one]):5.2f}" for one in pair)
    rates = " -> ".join(f"{100 * one.stats.acceptance_rate:5.1f} %" for one in pair)
    return f"{prompt.category:16} step {times} ms  accepted {rates}  {same}"


if __name__ == "__main__":
    run(main)
