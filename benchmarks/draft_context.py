"""Draft models that read a part of long prompts: acceptance, time and texts beside reading all of them.

    python benchmarks/draft_context.py qwen1.5b qwen0.5b --prompt-file prompts.jsonl --limit 256 --limit 512

One pair of models, loaded once. Every prompt is decoded with each limit and with the whole prompt, in alternating
order; nothing is cached beforehand. Ends with one JSON line. Exit code 1 if a greedy text differs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from statistics import mean, median
from typing import Annotated

import typer
from draft_vocabulary import acceptance_rate
from terminal import Count, run

from slipstream import Result, SamplingParams, SpeculativeDecoder
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.model.restricted_scorer import RestrictedScorer
from slipstream.drafters.model.windowed_session import WindowedSession
from slipstream.errors import UsageError
from slipstream.text.prompt_sets import read_prompts

LIMITS = [256, 512]


def main(
    target: str,
    draft: str,
    prompt_file: Annotated[Path, typer.Option(help="text or JSON lines")],
    limit: Annotated[list[int], typer.Option(min=1, help="tokens of a prompt that are read at most")] = LIMITS,
    draft_tokens: Count = 4,
    tokens: Count = 64,
) -> None:
    """Print the table; exit status 1 if a greedy text differs."""
    decoder = SpeculativeDecoder(target, draft, drafter="model", draft_context="full")
    arms = {"full": decoder.using("model", num_draft_tokens=draft_tokens)}
    for most in limit:
        arms[str(most)] = decoder.using(_windowed(decoder, most), num_draft_tokens=draft_tokens)
    params, results = SamplingParams(temperature=0.0, max_tokens=tokens), {arm: list[Result]() for arm in arms}
    arms["full"].generate("Hello", SamplingParams(temperature=0.0, max_tokens=8))
    names = list(arms)
    for number, prompt in enumerate(read_prompts(prompt_file)):
        for arm in names if number % 2 else names[::-1]:
            decoder.forget()
            results[arm].append(arms[arm].generate(prompt.prompt, params))
        print(_line(prompt.category, {arm: results[arm][-1] for arm in names}), flush=True)
    report = {arm: _figures(results[arm], results["full"]) for arm in names}
    print(json.dumps({"target": target, "draft": draft} | report))
    raise typer.Exit(int(any(figures["identical_texts"] < len(results["full"]) for figures in report.values())))


def _windowed(decoder: SpeculativeDecoder, limit: int) -> ModelDrafter:
    """The decoder's draft model, reading at most so many tokens of a prompt."""
    models = decoder._models
    if models.draft is None or models.draft_session is None:
        raise UsageError("draft context without a draft model; allowed: one of the target's vocabulary")
    window = WindowedSession(models.draft_session, limit)
    scorer = window if models.draft.restricted is None else RestrictedScorer(window, models.draft.restricted)
    return ModelDrafter(scorer, models.target.backend.vocab_size)


def _figures(results: Sequence[Result], whole: Sequence[Result]) -> dict[str, float]:
    ratios = [one.stats.total_seconds / other.stats.total_seconds for one, other in zip(results, whole, strict=True)]
    return {
        "seconds": round(median(one.stats.total_seconds for one in results), 2),
        "relative_time": round(exp(mean(map(log, ratios))), 3),
        "acceptance": round(acceptance_rate(results), 3),
        "identical_texts": sum(a.token_ids == b.token_ids for a, b in zip(results, whole, strict=True)),
    }


def _line(category: str, results: dict[str, Result]) -> str:
    parts = (
        f"{arm} {one.stats.total_seconds:5.2f} s {100 * one.stats.acceptance_rate:4.1f} %"
        for arm, one in results.items()
    )
    prompt = len(next(iter(results.values())).prompt_token_ids)
    return f"{category:14} {prompt:5} tokens  " + "   ".join(parts)


if __name__ == "__main__":
    run(main)
