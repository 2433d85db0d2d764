"""Records texts for `policy_replay.py`.

    python benchmarks/policy_record.py qwen1.5b PROMPTS.jsonl pair.jsonl --draft qwen0.5b --per-family 4

Noted are what forwards cost here (the first line), the target's greedy texts, and what the draft model says at each of
their positions and how sure it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from terminal import console, run

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.bench.speed_model.probe import measure_costs
from slipstream.core.types import Row
from slipstream.errors import UsageError
from slipstream.models.hf.model_files import quiet
from slipstream.text.prompt_sets import read_prompts

STEPS = 8  # tokens of the draft model at each position


def main(
    target: str,
    prompts: Path,
    out: Path,
    draft: str | None = None,
    per_family: int = 4,
    max_tokens: int = 64,
    batches: Annotated[list[int], typer.Option()] = [1, 2, 4, 8],  # noqa: B006
) -> None:
    """Note texts, drafts and costs."""
    quiet()
    decoder = SpeculativeDecoder(target, draft, max_batch_size=max(batches))
    chosen = [p for _, group in _by_family(read_prompts(prompts)).items() for p in group[:per_family]]
    if not out.parent.is_dir() or out.is_dir():
        raise UsageError(f"{str(out)!r}; allowed: a file in an existing folder")
    with out.open("w") as file:
        costs = measure_costs(decoder.using("model" if draft else "suffix"), batches, [*range(1, 9), 16])
        file.write(json.dumps({"target": target, "draft": draft, "costs": costs.to_dict()}) + "\n")
        for prompt in chosen:
            ids = decoder.encode(prompt.prompt)
            output = decoder.generate(ids, SamplingParams(max_tokens=max_tokens)).token_ids
            said = [_continued(decoder, ids + output[:at]) for at in range(len(output))] if draft else []
            line = {"family": prompt.category, "prompt": ids, "output": output}
            line |= {"model": [tokens for tokens, _ in said], "chances": [chances for _, chances in said]}
            file.write(json.dumps(line) + "\n")
            file.flush()
            console.print(f"{prompt.category}: {len(ids)} + {len(output)} tokens")


def _by_family(prompts: Sequence[Any]) -> dict[str, list[Any]]:
    families: dict[str, list[Any]] = {}
    for prompt in prompts:
        families.setdefault(prompt.category, []).append(prompt)
    return families


@torch.inference_mode()
def _continued(decoder: SpeculativeDecoder, tokens: list[int]) -> tuple[list[int], list[float]]:
    """What the draft model would say next, greedily, and how sure it is of each token."""
    session = decoder._draft_session
    assert session is not None
    row = Row(0, tokens, SamplingParams(max_tokens=STEPS), seed=0)
    session.reserve(1, len(tokens) + STEPS)
    drafted, chances = torch.zeros(1, STEPS, dtype=torch.int64), []
    for j in range(STEPS):
        distribution = session.score([row], drafted[:, :j], [j], keep=1)[
            0, 0, : decoder.target.backend.vocab_size
        ].float()
        chance, drafted[0, j] = distribution.softmax(-1).max(-1)
        chances.append(round(float(chance), 4))
    return drafted[0].tolist(), chances


if __name__ == "__main__":
    run(main)
