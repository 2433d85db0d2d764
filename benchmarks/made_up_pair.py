"""Adds a made-up draft model, and the costs of a pair, to the recorded texts of one model, for `policy_replay.py`.

    python benchmarks/made_up_pair.py smollm2.jsonl pair.jsonl

The draft model gives 62 % of its tokens a probability of at least 90 %, and its probabilities are right on average.
Where its first choice is wrong, its second is right in 40 % of the cases. Times are those of a 1.5B model with a 0.5B
draft model on two cores.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from terminal import run

STEPS = 8  # tokens drafted at each position
# milliseconds of a forward by its tokens
ONE_ROW = {1: 66, 2: 67, 4: 70, 6: 73, 8: 76, 12: 92, 16: 110, 24: 160, 32: 210, 48: 315, 64: 420}
EIGHT_ROWS = {8: 78, 12: 94, 16: 112, 20: 136, 24: 162, 32: 212, 48: 318, 64: 424, 128: 840}
PER_TOKEN = 6.6  # milliseconds per token of forwards with more tokens


def main(recording: Path, out: Path, seed: int = 1) -> None:
    """Write the recording of the pair."""
    rng = random.Random(seed)
    header, *texts = map(json.loads, recording.read_text(encoding="utf-8").splitlines())
    made_up = {"target": "p", "draft": "d", "search": 0.2, "overhead": 0.9, "trees": True}
    lines = [header | made_up | {"costs": header["costs"] | pair_costs()}]
    for text in texts:
        model, chances = drafts(text["output"], rng)
        lines.append(text | {"model": model, "chances": chances})
    out.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")


def pair_costs() -> dict[str, Any]:
    """Milliseconds of the pair's forwards and draft steps; see `CostModel`."""
    together = EIGHT_ROWS | {count: count * PER_TOKEN for count in (192, 256, 512)}
    steps = {1: 12.5, 8: 22.0}
    return {"measured": ONE_ROW, "together": together, "max_batch_size": 8, "steps": steps, "token": 4.0}


def drafts(output: Sequence[int], rng: random.Random) -> tuple[list[Any], list[Any]]:
    """At each position, the draft model's two likeliest tokens of each step, and their probabilities."""
    probs_of = [rng.choices([rng.uniform(0.9, 1), rng.uniform(0.2, 0.9)], [0.62, 0.38])[0] for _ in output]
    is_right_at = [rng.random() < prob for prob in probs_of]
    model, chances = [], []
    for start in range(len(output)):
        tokens, probs, matches = [], [], True  # matches: whether the draft so far is the text
        for i in range(start, start + STEPS):
            can_match = i < len(output) and matches
            prob, is_right = (probs_of[i], is_right_at[i]) if can_match else (rng.uniform(0.2, 0.95), False)
            is_second_right = can_match and not is_right and rng.random() < 0.4
            tokens.append([output[i] if is_right else 3, output[i] if is_second_right else 4])
            probs.append([round(prob, 3), round((1 - prob) * 0.6, 3)])
            matches = matches and is_right
        model.append(tokens)
        chances.append(probs)
    return model, chances


if __name__ == "__main__":
    run(main)
