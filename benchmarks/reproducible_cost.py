"""What do reproducible forward shapes cost, end to end, against shapes that fit their tokens?

    python benchmarks/reproducible_cost.py smollm2 PROMPTS.jsonl
    python benchmarks/reproducible_cost.py TARGET PROMPTS.jsonl --draft DRAFT

Plain and speculative decoding, greedy, each prompt through both kinds of shapes in turn; times are the medians of
several turns, the cost is their ratio. Texts of the free shapes are compared with those of the reproducible ones.
"""

from __future__ import annotations

import sys
from math import exp, log
from pathlib import Path
from statistics import median
from time import perf_counter

import typer
from rich.console import Console
from rich.table import Table

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.backends.files import quiet
from slipstream.compare import Referee, count_differences
from slipstream.prompts import read_prompts, spread

console = Console(width=None if sys.stdout.isatty() else 120)


def main(
    target: str,
    prompts: Path,
    draft: str | None = None,
    dtype: str = "auto",
    num_prompts: int = 8,
    max_tokens: int = 64,
    repeats: int = 5,
) -> None:
    """Print one line per drafter."""
    quiet()
    base = SpeculativeDecoder(target, draft, dtype=dtype, reproducible=True)
    referee, params = Referee(base), SamplingParams(max_tokens=max_tokens)
    chosen = spread(read_prompts(prompts), num_prompts)
    ids = [base.encode(p.prompt)[-(base.target.backend.max_length - max_tokens) :] for p in chosen]
    table = Table("drafter", "cost (geometric mean)", "least", "most", "identical", "ties", "different")
    for drafter in ["none", "ngram", *(["model"] if draft else [])]:
        arms = [base.using(drafter), base.using(drafter, reproducible=False)]
        ratios, differences = [], []
        for tokens in ids:
            seconds: list[list[float]] = [[], []]
            texts: list[list[int]] = [[], []]
            for _ in range(repeats):
                for arm, decoder in enumerate(arms):
                    decoder.forget()
                    started = perf_counter()
                    texts[arm] = decoder.generate(tokens, params).token_ids
                    seconds[arm].append((perf_counter() - started) / len(texts[arm]))
            ratios.append(median(seconds[0]) / median(seconds[1]))
            differences.append(referee.judge(tokens, texts[0], texts[1], greedy=True))
        cost = exp(sum(map(log, ratios)) / len(ratios)) - 1
        counts = [str(count_differences(differences)[name]) for name in ("identical", "ties", "different")]
        table.add_row(drafter, f"{cost:+.1%}", f"{min(ratios) - 1:+.1%}", f"{max(ratios) - 1:+.1%}", *counts)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
