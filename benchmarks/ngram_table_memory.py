"""How much memory does the `ngram_table` drafter take? Traced while a target decodes.

    python benchmarks/ngram_table_memory.py smollm2 PROMPTS.jsonl
    python benchmarks/ngram_table_memory.py TARGET book.txt --max-tokens 16

Every prompt is decoded greedily with `ngram_table`, then with `ngram_table:fill`; counted are the bytes that the
drafter's own file has allocated and not freed. A last line has the worst case: a table of tokens of which none comes
twice.
"""

from __future__ import annotations

import json
import random
import tracemalloc
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.table import Table
from terminal import Count, JsonFile, console, run

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.types import Row
from slipstream.drafters import ngram_table as drafter
from slipstream.models.weights.model_files import quiet
from slipstream.text.prompt_sets import read_prompts, spread

DRAFTED = 7  # tokens in every round, so that what a table holds does not depend on what forwards cost


@dataclass(frozen=True)
class Memory:
    """Of one row: its tokens, how many of them are output, and the bytes of its table without and with fill."""

    tokens: int
    output: int
    table: int
    filled: int

    @property
    def per_token(self) -> float:
        """Bytes of the n-grams per token of the row."""
        return self.table / self.tokens

    @property
    def per_output(self) -> float:
        """Bytes that filling adds per output token."""
        return (self.filled - self.table) / self.output


def main(
    target: str,
    prompts: Path,
    dtype: str = "auto",
    num_prompts: Count = 8,
    max_tokens: Count = 64,
    worst_tokens: Annotated[int, typer.Option(min=1, max=2 * drafter.SPAN)] = 2 * drafter.SPAN,
    json_file: JsonFile = None,
) -> None:
    """Print a line per prompt, their range, and the worst case."""
    quiet()
    decoder = SpeculativeDecoder(target, dtype=dtype, num_draft_tokens=DRAFTED)
    params = SamplingParams(max_tokens=max_tokens)
    ids = [decoder.encode(p.prompt) for p in spread(read_prompts(prompts), num_prompts)]
    ids = [tokens[-(decoder.target.backend.max_length - max_tokens) :] for tokens in ids]
    rows = [measure(decoder, tokens, params) for tokens in ids]
    shown = Table("tokens", "of them output", "bytes per token", "fill adds per output token")
    for row in rows:
        shown.add_row(str(row.tokens), str(row.output), f"{row.per_token:.0f}", f"{row.per_output:.0f}")
    console.print(shown)
    console.print(f"ngram_table: {_range([row.per_token for row in rows])} bytes per token of the row")
    console.print(f"fill:  {_range([row.per_output for row in rows])} bytes more per output token")
    size = worst_case(worst_tokens)
    per_gram = size / worst_tokens / drafter.LONGEST
    console.print(
        f"worst: {size / 1e6:.0f} MB for {worst_tokens} tokens, {per_gram:.0f} bytes per n-gram size and token"
    )
    if json_file is not None:
        worst = {"worst_tokens": worst_tokens, "worst_bytes": size}
        json_file.write_text(json.dumps({"rows": [asdict(row) for row in rows], **worst}, indent=1) + "\n")


def measure(decoder: SpeculativeDecoder, tokens: list[int], params: SamplingParams) -> Memory:
    """Decode one prompt with both forms of the drafter."""
    plain, row = _decode(decoder.using("ngram_table"), tokens, params)
    filled, _ = _decode(decoder.using("ngram_table:fill"), tokens, params)
    return Memory(len(row.tokens), row.num_output_tokens, plain, filled)


def worst_case(count: int) -> int:
    """Bytes of a table of the default sizes that holds `count` different tokens, so that no n-gram comes twice."""
    tokens = random.Random(1).sample(range(count), count)
    tracemalloc.start()
    try:
        table = drafter._Table(range(drafter.SHORTEST, drafter.LONGEST + 1), count, 0)
        table.learn(tokens)
        return _allocated()
    finally:
        tracemalloc.stop()


def _decode(decoder: SpeculativeDecoder, tokens: list[int], params: SamplingParams) -> tuple[int, Row]:
    decoder.forget()
    [row] = decoder.rows([tokens], params)
    tracemalloc.start()
    try:
        for _ in decoder.run([row]):
            pass
        return _allocated(), row  # the row is alive, and so is its table
    finally:
        tracemalloc.stop()


def _allocated() -> int:
    """Bytes allocated by the drafter's file and not yet freed."""
    own = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, drafter.__file__)])
    return sum(trace.size for trace in own.traces)


def _range(values: list[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f} (median {median(values):.0f})"


if __name__ == "__main__":
    run(main)
