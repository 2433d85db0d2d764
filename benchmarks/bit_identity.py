"""Is speculative text identical, to the bit of every token id, to plain text? Counted over many settings.

    python benchmarks/bit_identity.py --target smollm2 --prompts FILE.jsonl --num-prompts 60 --max-tokens 128
    python benchmarks/bit_identity.py --target FOLDER --draft FOLDER --reproducible false

Settings: drafters x draft lengths x batch sizes, greedy and at temperature 0.8 with a seed per prompt (acceptance
"match", which couples draws). The reference is plain decoding, one prompt at a time. Differing greedy texts are put to
the tie-aware referee. Exit code 1 if a text differs in reproducible mode, or differs by more than a tie otherwise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.backends.files import quiet
from slipstream.compare import Referee, count_differences
from slipstream.prompts import read_prompts

console = Console(width=None if sys.stdout.isatty() else 120)


def spread(prompts: list[Any], count: int) -> list[Any]:
    """`count` prompts taken evenly over the file, so that every category takes part."""
    return [prompts[i * len(prompts) // count] for i in range(min(count, len(prompts)))]


def settings(drafters: list[str], lengths: list[int], batches: list[int]) -> Iterator[tuple[str, int, int]]:
    """Drafter, draft length, batch size."""
    for drafter in drafters:
        for length in [0] if drafter == "none" else lengths:
            yield from ((drafter, length, batch) for batch in batches)


def main(
    target: str,
    prompts: Path,
    draft: str | None = None,
    dtype: str = "auto",
    num_prompts: int = 60,
    max_tokens: int = 128,
    lengths: Annotated[list[int], typer.Option()] = [1, 4, 7],  # noqa: B006
    batches: Annotated[list[int], typer.Option()] = [1, 4],  # noqa: B006
    temperatures: Annotated[list[float], typer.Option()] = [0.0, 0.8],  # noqa: B006
    reproducible: str = "true",
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Run all settings and print one line for each."""
    quiet()
    started = perf_counter()
    keep = {"true": True, "false": False}.get(reproducible, reproducible)
    base = SpeculativeDecoder(target, draft, dtype=dtype, acceptance="match", reproducible=keep, max_batch_size=4)
    referee = Referee(base)
    ids = [base.encode(p.prompt) for p in spread(read_prompts(prompts), num_prompts)]
    ids = [tokens[-(base.target.backend.max_length - max_tokens) :] for tokens in ids]
    drafters = ["none", "ngram", *(["model"] if draft else [])]
    table = Table(
        "temperature", "drafter", "length", "batch", "identical", "ties", "different", "acceptance", "seconds"
    )
    lines = []
    for temperature in temperatures:
        params = [SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=i) for i in range(len(ids))]
        plain = base.using("none")
        expected = [plain.generate(tokens, one).token_ids for tokens, one in zip(ids, params, strict=True)]
        for drafter, length, batch in settings(drafters, lengths, batches):
            if drafter == "none" and batch == 1:
                continue  # the reference itself
            begun = perf_counter()
            decoder = base.using(drafter, num_draft_tokens=length)
            results = []
            for at in range(0, len(ids), batch):
                chosen = params[at : at + batch]
                results += decoder.generate(ids[at : at + batch], chosen)
            differences = [
                referee.judge(tokens, want, got.token_ids, greedy=temperature == 0)
                for tokens, want, got in zip(ids, expected, results, strict=True)
            ]
            counted = count_differences(differences)
            drafted = sum(r.stats.num_draft_tokens for r in results)
            rate = sum(r.stats.num_accepted_tokens for r in results) / drafted if drafted else None
            line = {
                "temperature": temperature,
                "drafter": drafter,
                "num_draft_tokens": length,
                "batch": batch,
                **counted,
                "acceptance_rate": rate,
                "seconds": perf_counter() - begun,
            }
            lines.append(line)
            print(json.dumps({k: v for k, v in line.items() if k != "differences"}), file=sys.stderr, flush=True)
            table.add_row(
                f"{temperature}",
                drafter,
                str(length),
                str(batch),
                *(str(counted[k]) for k in ("identical", "ties", "different")),
                "-" if rate is None else f"{rate:.0%}",
                f"{line['seconds']:.0f}",
            )
    console.print(table)
    wrong = sum(line["different"] + (line["ties"] if base.reproducible else 0) for line in lines)
    total = len(ids) * len(lines)
    same = sum(line["identical"] for line in lines)
    console.print(
        f"{target}, {dtype}, {'reproducible' if base.reproducible else 'not reproducible'}: {same} of {total} texts of "
        f"up to {max_tokens} tokens identical to plain decoding, {perf_counter() - started:.0f} s"
    )
    if json_file is not None:
        json_file.write_text(
            json.dumps({"target": target, "draft": draft, "identical": same, "lines": lines}, indent=1)
        )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
