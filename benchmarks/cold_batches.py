"""Is `auto` behind plain decoding in a batch whose drafts it knows nothing about yet?

    python benchmarks/cold_batches.py smollm2 --prompt-file FILE
    python benchmarks/cold_batches.py qwen1.5b --draft qwen0.5b --prompt-file FILE --categories qa,rag --repeats 2

Each group of prompts, of one family, is decoded in one batch: plainly, then by an `auto` that was made for this group
and has learned nothing, the other way round at the next repeat. Only the measured costs of forwards are known
beforehand, from the calibration. Prints seconds, the ratio of each group, the geometric mean over groups, and whether
the texts are identical. Exit code 1 if a text differs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from terminal import Count, JsonFile, console, run

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.errors import UsageError
from slipstream.models.weights.model_files import quiet
from slipstream.text.prompt_sets import NamedPrompt, builtin_prompts, read_prompts
from slipstream.text.results import Result

LEFT_OUT = 8  # tokens of the batch that is decoded once before anything is measured


@dataclass(frozen=True)
class Timed:
    """One group, one way, once. efficiency: tokens per forward of a row, on average."""

    group: str
    way: str
    seconds: float
    prefill: float
    efficiency: float
    texts: list[list[int]]


def main(
    target: str,
    draft: Annotated[str | None, typer.Option()] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="besides the package's prompts")] = None,
    categories: Annotated[str, typer.Option(help="families to measure, by default all with enough prompts")] = "",
    groups: Annotated[int, typer.Option(min=1, help="families at most")] = 5,
    batch: Count = 8,
    max_tokens: Count = 64,
    repeats: Count = 2,
    json_file: JsonFile = None,
) -> None:
    """Measure and print the groups."""
    quiet()
    families = _families(prompt_file, [name for name in categories.split(",") if name], groups, batch)
    decoder = SpeculativeDecoder(target, draft, drafter="none", max_batch_size=batch)
    _decode(decoder, "warm-up", "plain", next(iter(families.values())), LEFT_OUT)
    timed = list[Timed]()
    for name, prompts in families.items():
        for repeat in range(repeats):
            for way in ("plain", "auto") if repeat % 2 == 0 else ("auto", "plain"):
                cold = decoder.using("auto") if way == "auto" else decoder
                cold.forget()
                timed.append(_decode(cold, name, way, prompts, max_tokens))
    same = _print(list(families), timed)
    if json_file:
        json_file.write_text(json.dumps([asdict(one) for one in timed], indent=2))
    if not same:
        sys.exit(1)


def _families(file: Path | None, wanted: Sequence[str], most: int, batch: int) -> dict[str, list[NamedPrompt]]:
    prompts = builtin_prompts() + (read_prompts(file) if file else [])
    by_family: dict[str, list[NamedPrompt]] = {}
    for prompt in prompts:
        by_family.setdefault(prompt.category, []).append(prompt)
    able = {name: own[:batch] for name, own in by_family.items() if len(own) >= batch}
    if unknown := [name for name in wanted if name not in able]:
        allowed = ", ".join(able) or "none without --prompt-file"
        raise UsageError(f"--categories {unknown[0]!r} has no {batch} prompts; allowed: {allowed}")
    chosen = {name: able[name] for name in wanted or list(able)[:most]}
    if not chosen:
        raise UsageError(f"no family has {batch} prompts; allowed: --prompt-file with more, or a smaller --batch")
    return chosen


def _decode(decoder: SpeculativeDecoder, group: str, way: str, prompts: Sequence[NamedPrompt], tokens: int) -> Timed:
    started = perf_counter()
    results: list[Result] = decoder.generate(
        [prompt.prompt for prompt in prompts], SamplingParams(max_tokens=tokens, seed=0)
    )
    seconds = perf_counter() - started
    prefill = max(result.stats.prefill_seconds for result in results)  # the rows share its steps
    efficiency = mean(result.stats.block_efficiency for result in results)
    texts = [result.token_ids for result in results]
    return Timed(group, way, seconds, prefill, efficiency, texts)


def _print(names: Sequence[str], timed: Sequence[Timed]) -> bool:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for head in ("family", "plain", "auto", "ratio", "without prompts", "tokens per forward", "texts"):
        table.add_column(head, justify="left" if head == "family" else "right")
    ratios, same = list[float](), True
    for name in names:
        plain = [one for one in timed if one.group == name and one.way == "plain"]
        auto = [one for one in timed if one.group == name and one.way == "auto"]
        ratios.append(median(a.seconds / b.seconds for a, b in zip(plain, auto, strict=True)))
        identical = sum(a == b for one in auto for a, b in zip(plain[0].texts, one.texts, strict=True))
        count = sum(len(one.texts) for one in auto)
        same &= identical == count
        per_forward = mean(one.efficiency for one in auto)
        decoding = median((a.seconds - a.prefill) / (b.seconds - b.prefill) for a, b in zip(plain, auto, strict=True))
        seconds = [f"{median(one.seconds for one in ones):.2f} s" for ones in (plain, auto)]
        table.add_row(
            name,
            *seconds,
            f"{ratios[-1]:.3f}",
            f"{decoding:.3f}",
            f"{per_forward:.2f}",
            f"{identical}/{count} identical",
        )
    console.print(table)
    console.print(f"geometric mean {exp(mean(map(log, ratios))):.3f}, least {min(ratios):.3f}")
    return same


if __name__ == "__main__":
    run(main)
