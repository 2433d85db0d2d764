"""Gives the recorded texts of one model a made-up draft model and the costs of a pair, for `policy_replay.py`.

    python benchmarks/made_up_pair.py smollm2.jsonl pair.jsonl

The draft model is at least 90 % sure of 62 % of its tokens, and right as often as it is sure; where it is wrong, its
second choice is right in 40 % of the cases. Times are those of a 1.5B model with a 0.5B draft model on two cores.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from terminal import run

STEPS = 8  # tokens of the draft model at each position
ROW = {1: 66, 2: 67, 4: 70, 6: 73, 8: 76, 12: 92, 16: 110, 24: 160, 32: 210, 48: 315, 64: 420}  # milliseconds by tokens
ROWS = {8: 78, 12: 94, 16: 112, 20: 136, 24: 162, 32: 212, 48: 318, 64: 424, 128: 840}  # by tokens of eight rows
PER_TOKEN = 6.6  # milliseconds of forwards with more tokens


def main(recording: Path, out: Path, seed: int = 1) -> None:
    """Write the recording of the pair."""
    rng = random.Random(seed)
    header, *texts = map(json.loads, recording.read_text(encoding="utf-8").splitlines())
    lines = [{"target": "p", "draft": "d", "costs": header["costs"] | pair_costs(), "reading": 4.0}]
    for text in texts:
        model, chances = drafts(text["output"], rng)
        lines.append(text | {"model": model, "chances": chances})
    out.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")


def pair_costs() -> dict[str, Any]:
    """What the pair's forwards and draft steps take, in milliseconds; see `Costs`."""

    def table(points: dict[int, float]) -> dict[str, float]:
        return {str(count): milliseconds for count, milliseconds in points.items()}

    padded = {width: ROWS.get(8 * width, 8 * width * PER_TOKEN) for width in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)}
    target = {"1": table(ROW), "8": table(padded)}
    return {
        "target": target,
        "overhead": {rows: dict.fromkeys(points, 0.7) for rows, points in target.items()},
        "draft_step": {"1": 12.5, "8": 22.0},
        "draft_round": {"1": 0.2, "8": 0.4},
        "ragged": {"forward": {"8": table(ROWS)}, "overhead": {"8": dict.fromkeys(table(ROWS), 1.0)}},
        "trees": {
            "forward": {"1": table(ROW), "8": table(ROWS)},
            "overhead": {"1": dict.fromkeys(table(ROW), 1.2), "8": dict.fromkeys(table(ROWS), 2)},
        },
        "drafter": "x",
    }


def drafts(output: Sequence[int], rng: random.Random) -> tuple[list[Any], list[Any]]:
    """At each position the two likeliest tokens of each step, and how sure the draft model is of both."""
    sure = [rng.choices([rng.uniform(0.9, 1), rng.uniform(0.2, 0.9)], [0.62, 0.38])[0] for _ in output]
    right = [rng.random() < chance for chance in sure]
    model, chances = [], []
    for start in range(len(output)):
        tokens, probs, follows = [], [], True  # follows: whether the draft is the text so far
        for place in range(start, start + STEPS):
            is_known = place < len(output) and follows
            chance, is_right = (sure[place], right[place]) if is_known else (rng.uniform(0.2, 0.95), False)
            has_second = is_known and not is_right and rng.random() < 0.4
            tokens.append([output[place] if is_right else 3, output[place] if has_second else 4])
            probs.append([round(chance, 3), round((1 - chance) * 0.6, 3)])
            follows = follows and is_right
        model.append(tokens)
        chances.append(probs)
    return model, chances


if __name__ == "__main__":
    run(main)
