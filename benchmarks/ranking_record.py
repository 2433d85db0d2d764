"""Records texts and what the target ranked highest at each of their positions, for `drafter_replay.py`.

    python benchmarks/ranking_record.py smollm2 recorded.jsonl --max-tokens 64
    python benchmarks/ranking_record.py smollm2 recorded.jsonl --prompt-file PROMPTS.jsonl --per-family 6

Each line has a greedy text: "family", "prompt" and "output" as token ids, and "rankings", for each output token the ids
that were likeliest in its place, best first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from terminal import Count, console, run

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.errors import UsageError
from slipstream.models.weights.model_files import quiet
from slipstream.text.prompt_sets import builtin_prompts, read_prompts

RANKED = 8  # ids per position


def main(
    target: str,
    out: Path,
    prompt_file: Annotated[Path | None, typer.Option(help="prompts, if not the package's own")] = None,
    per_family: Count = 5,
    max_tokens: Count = 64,
) -> None:
    """Note texts and rankings."""
    quiet()
    if not out.parent.is_dir() or out.is_dir():
        raise UsageError(f"{str(out)!r}; allowed: a file in an existing folder")
    prompts = builtin_prompts(limit=per_family) if prompt_file is None else read_prompts(prompt_file, limit=per_family)
    decoder = SpeculativeDecoder(target, drafter="none")
    params = SamplingParams(max_tokens=max_tokens, logprobs=min(RANKED, decoder.target.backend.vocab_size))
    with out.open("w") as file:
        for prompt in prompts:
            ids = decoder.encode(prompt.prompt)
            result = decoder.generate(ids, params)
            rankings = [[token for token, _ in place.top] for place in result.logprobs or ()]
            line = {"family": prompt.category, "prompt": ids, "output": result.token_ids, "rankings": rankings}
            file.write(json.dumps(line) + "\n")
            file.flush()
            console.print(f"{prompt.category}: {len(ids)} + {len(result.token_ids)} tokens")


if __name__ == "__main__":
    run(main)
