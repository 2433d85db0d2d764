"""Records texts, drafts and costs for `policy_replay.py`.

    python benchmarks/policy_record.py smollm2 smollm2.jsonl
    python benchmarks/policy_record.py qwen1.5b pair.jsonl --draft qwen0.5b --per-family 4 --prompts PROMPTS.jsonl

The first line holds the calibrated costs, and in milliseconds what a search for a retrieval draft takes, and a round
besides forwards and drafting. Each further line is one of the target's greedy texts. With a draft
model it also has, at each position of the text, that model's two likeliest tokens of each step and their probabilities.
Answers to long prompts are recorded a second time, cut to a few tokens: in such texts a draft model's reading of the
prompt pays least.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from terminal import console, run

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.bench.speed_formula import table_of
from slipstream.core.types import Row
from slipstream.errors import UsageError
from slipstream.models.weights.model_files import quiet
from slipstream.text.prompt_sets import builtin_prompts, read_prompts

STEPS = 8  # tokens of the draft model at each position
SEARCHED = 4  # prompts on which searches are timed
LONG_PROMPT, SHORT_ANSWER = 150, 16  # tokens


def main(
    target: str,
    out: Path,
    draft: str | None = None,
    prompts: Path | None = None,
    per_family: int = 5,
    max_tokens: int = 64,
) -> None:
    """Write texts, drafts and costs to OUT."""
    quiet()
    decoder = SpeculativeDecoder(target, draft, max_batch_size=8)
    chosen = builtin_prompts(limit=per_family) if prompts is None else read_prompts(prompts, limit=per_family)
    if not out.parent.is_dir() or out.is_dir():
        raise UsageError(f"{str(out)!r}; allowed: a file in an existing folder")
    with out.open("w", encoding="utf-8") as file:
        first = [decoder.encode(prompt.prompt, chat=True) for prompt in chosen[:SEARCHED]]
        file.write(json.dumps({"target": target, "draft": draft} | _costs(decoder, first)) + "\n")
        for prompt in chosen:
            ids = decoder.encode(prompt.prompt, chat=True)
            result = decoder.generate(ids, SamplingParams(max_tokens=max_tokens).explicit)
            output = result.token_ids
            line = {"family": prompt.category, "prompt": ids, "output": output, "max_tokens": max_tokens}
            line["stops"] = result.finish_reason == "stop"
            if draft:
                steps = [_drafts(decoder, ids + output[:length]) for length in range(len(output))]
                line |= {"model": [tokens for tokens, _ in steps], "chances": [probs for _, probs in steps]}
            lines = [line]
            if len(ids) >= LONG_PROMPT and len(output) > SHORT_ANSWER:
                short = {name: line[name][:SHORT_ANSWER] for name in ("output", "model", "chances") if name in line}
                lines.append(line | short | {"family": "short answer", "stops": True})
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            console.print(f"{prompt.category}: {len(ids)} + {len(output)} tokens")


def _costs(decoder: SpeculativeDecoder, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """The calibrated costs of rounds, and what a search and the rest of a round take on these prompts."""
    shapes, table = decoder.shapes, table_of(decoder.costs)
    table |= {"widths": shapes.widths, "alone": shapes.alone, "totals": shapes.totals}
    searching = decoder.using("suffix", num_draft_tokens=7)
    results = [searching.generate(ids, SamplingParams(max_tokens=32).explicit) for ids in prompts]
    seconds = [decoded.seconds for result in results for decoded in result.rounds[1:]]  # the first reads the prompt
    return {
        "costs": table,
        "search": 1e3 * median(part.draft for part in seconds),
        "overhead": 1e3 * median(part.total - part.prefill - part.draft - part.verify for part in seconds),
        "trees": decoder._target_session.branches,
    }


@torch.inference_mode()
def _drafts(decoder: SpeculativeDecoder, tokens: list[int]) -> tuple[list[list[int]], list[list[float]]]:
    """The draft model's two likeliest tokens of each step, and their probabilities. The likeliest is drafted."""
    session = decoder._models.draft_session
    assert session is not None
    row = Row(0, tokens, SamplingParams(max_tokens=STEPS), seed=0)
    session.reserve(1, len(tokens) + STEPS)
    drafted, leaders, probs = torch.zeros(1, STEPS, dtype=torch.int64), [], []
    for j in range(STEPS):
        logits = session.score([row], drafted[:, :j], [j], keep=1)[0, 0, : decoder.target.backend.vocab_size]
        top = logits.float().softmax(-1).topk(2)
        drafted[0, j] = top.indices[0]
        leaders.append(top.indices.tolist())
        probs.append([round(prob, 4) for prob in top.values.tolist()])
    return leaders, probs


if __name__ == "__main__":
    run(main)
