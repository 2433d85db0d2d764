"""Is speculative text identical, to the bit of every token id, to plain text? Counted over many settings.

    python benchmarks/bit_identity.py smollm2 PROMPTS.jsonl --num-prompts 60 --max-tokens 128
    python benchmarks/bit_identity.py TARGET PROMPTS.jsonl --draft DRAFT --reproducible false

Settings: drafters x draft lengths x batch sizes, greedy and at temperature 0.8 with a seed per prompt (acceptance
"match", which couples draws). The reference is plain decoding, one prompt at a time. Differing greedy texts are put to
the tie-aware referee. Exit code 1 if a text differs in reproducible mode, or differs by more than a tie otherwise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
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

Line = dict[str, Any]
COLUMNS = (
    "temperature",
    "drafter",
    "length",
    "batch",
    "identical",
    "ties",
    "different",
    "acceptance_rate",
    "seconds",
)

console = Console(width=None if sys.stdout.isatty() else 120)


def spread(prompts: list[Any], count: int) -> list[Any]:
    """`count` prompts taken evenly over the file, so that every category takes part."""
    return [prompts[i * len(prompts) // count] for i in range(min(count, len(prompts)))]


def settings(drafters: list[str], lengths: list[int], batches: list[int]) -> Iterator[tuple[str, int, int]]:
    """Drafter, draft length, batch size."""
    for drafter in drafters:
        for length in [0] if drafter == "none" else lengths:
            yield from ((drafter, length, batch) for batch in batches)


@dataclass
class Bench:
    """The loaded models, the prompts, and what plain decoding says to them."""

    base: SpeculativeDecoder
    ids: list[list[int]]
    referee: Referee

    def lines(self, chosen: Iterable[tuple[str, int, int]], params: SamplingParams) -> Iterator[Line]:
        """One line per setting, for these sampling options."""
        each = [replace(params, seed=i) for i in range(len(self.ids))]
        plain = self.base.using("none")
        expected = [plain.generate(tokens, one).token_ids for tokens, one in zip(self.ids, each, strict=True)]
        for drafter, length, batch in chosen:
            if (drafter, batch) != ("none", 1):  # that is the reference itself
                decoder = self.base.using(drafter, num_draft_tokens=length)
                setting = {"temperature": params.temperature, "drafter": drafter, "length": length, "batch": batch}
                yield setting | self._measure(decoder, batch, each, expected)

    def _measure(
        self, decoder: SpeculativeDecoder, batch: int, params: list[SamplingParams], expected: list[list[int]]
    ) -> Line:
        begun, results = perf_counter(), []
        for at in range(0, len(self.ids), batch):
            results += decoder.generate(self.ids[at : at + batch], params[at : at + batch])
        seconds = perf_counter() - begun
        differences = [
            self.referee.judge(tokens, want, got.token_ids, greedy=one.temperature == 0)
            for tokens, one, want, got in zip(self.ids, params, expected, results, strict=True)
        ]
        drafted = sum(r.stats.num_draft_tokens for r in results)
        accepted = sum(r.stats.num_accepted_tokens for r in results)
        rate = accepted / drafted if drafted else None
        return {**count_differences(differences), "acceptance_rate": rate, "seconds": seconds}


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
    ids = [base.encode(p.prompt) for p in spread(read_prompts(prompts), num_prompts)]
    ids = [tokens[-(base.target.backend.max_length - max_tokens) :] for tokens in ids]
    bench = Bench(base, ids, Referee(base))
    chosen = list(settings(["none", "ngram", *(["model"] if draft else [])], lengths, batches))
    lines: list[Line] = []
    for temperature in temperatures:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        for line in bench.lines(chosen, params):
            lines.append(line)
            print(json.dumps({k: v for k, v in line.items() if k != "differences"}), file=sys.stderr, flush=True)
    table = Table(*COLUMNS)
    for line in lines:
        table.add_row(*(_cell(line[name]) for name in COLUMNS))
    console.print(table)
    wrong = sum(line["different"] + (line["ties"] if base.reproducible else 0) for line in lines)
    same, total = sum(line["identical"] for line in lines), len(ids) * len(lines)
    console.print(
        f"{target}, {dtype}, {'reproducible' if base.reproducible else 'not reproducible'}: {same} of {total} texts of "
        f"up to {max_tokens} tokens identical to plain decoding, {perf_counter() - started:.0f} s"
    )
    if json_file is not None:
        report = {"target": target, "draft": draft, "dtype": dtype, "identical": same, "texts": total, "lines": lines}
        json_file.write_text(json.dumps(report, indent=1))
    sys.exit(1 if wrong else 0)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    typer.run(main)
