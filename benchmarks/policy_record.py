"""Records texts, drafts and costs for `policy_replay.py`.

    python benchmarks/policy_record.py smollm2 smollm2.jsonl
    python benchmarks/policy_record.py qwen1.5b pair.jsonl --draft qwen0.5b --per-family 4 --prompts PROMPTS.jsonl

The first line holds, in milliseconds on this machine, the times of forwards, of the draft model's steps, of its reading
of a token, and of a search for retrieval drafts. Each further line is one of the target's greedy texts. With a draft
model it also has, at each position of the text, that model's two likeliest tokens of each step and their probabilities.
Answers to long prompts are recorded a second time, cut to a few tokens: in such texts a draft model's reading of the
prompt pays least.
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
from slipstream.models.weights.model_files import quiet
from slipstream.text.prompt_sets import builtin_prompts, read_prompts

STEPS = 8  # tokens of the draft model at each position
WIDTHS = [*range(1, 9), 12, 16, 24, 32]
LONG_PROMPT, SHORT_ANSWER = 150, 16  # tokens


def main(
    target: str,
    out: Path,
    draft: str | None = None,
    prompts: Path | None = None,
    per_family: int = 5,
    max_tokens: int = 64,
    batches: Annotated[list[int], typer.Option(help="batch size to measure; repeatable")] = [1, 2, 4, 8],  # noqa: B006
) -> None:
    """Write texts, drafts and costs to OUT."""
    quiet()
    decoder = SpeculativeDecoder(target, draft, max_batch_size=max(batches))
    offered = builtin_prompts() if prompts is None else read_prompts(prompts)
    chosen = [prompt for group in _by_family(offered).values() for prompt in group[:per_family]]
    if not out.parent.is_dir() or out.is_dir():
        raise UsageError(f"{str(out)!r}; allowed: a file in an existing folder")
    with out.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"target": target, "draft": draft} | _costs(decoder, batches, bool(draft))) + "\n")
        for prompt in chosen:
            ids = decoder.encode(prompt.prompt, chat=True)
            result = decoder.generate(ids, SamplingParams(max_tokens=max_tokens))
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


def _costs(decoder: SpeculativeDecoder, batches: Sequence[int], has_draft: bool) -> dict[str, Any]:
    """Milliseconds of rounds, of searches for retrieval drafts, and of the draft model's reading of a token."""
    searching = measure_costs(decoder.using("suffix"), batches, WIDTHS)
    costs = measure_costs(decoder.using("model"), batches, WIDTHS[:4]) if has_draft else searching
    rounds = searching.to_dict() | {"draft_step": costs.draft_step if has_draft else dict.fromkeys(batches, 0.0)}
    reading = decoder._models.draft_times.token or 0.0
    return {"costs": rounds | {"draft_round": searching.draft_round}, "reading": reading}


def _by_family(prompts: Sequence[Any]) -> dict[str, list[Any]]:
    families: dict[str, list[Any]] = {}
    for prompt in prompts:
        families.setdefault(prompt.category, []).append(prompt)
    return families


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
