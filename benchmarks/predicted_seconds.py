"""Compares the planner's seconds of a forward with measured ones, on prose, code and random tokens.

    python benchmarks/predicted_seconds.py MODEL... [--widths 1,2,4,8] [--turns 20] [--json FILE]

MODEL is any that is calibrated, such as the mixtures of `upcycled_mixture.py`. Models, kinds of tokens and widths take
turns, each at another place of a text of 512 tokens; measured are the medians. The prediction is that of `auto`: the
calibration and, of a mixture, the distinct experts that it has learned to expect of these tokens. A common factor is
the machine's speed since the calibration, which `auto` learns, too; the second ratio is without it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from terminal import Count, JsonFile, console, numbers, run, save
from torch import Tensor

from slipstream import SpeculativeDecoder
from slipstream.core.interfaces import counted_experts
from slipstream.core.rng import argmax
from slipstream.models.weights.model_files import quiet

ROOT = Path(__file__).parents[1]
FILES = {"prose": ROOT / "docs" / "planner.md", "code": ROOT / "src" / "slipstream" / "core" / "loop.py"}
RANDOM, TEXT, FIRST = "random tokens", 512, 200


@dataclass
class Measured:
    """Forwards of a width on a kind of tokens."""

    seconds: list[float] = field(default_factory=list)
    experts: list[float] = field(default_factory=list)  # distinct ones, per layer


class Timed:
    """A model whose first slots hold a text of each kind."""

    def __init__(self, model: str) -> None:
        self.decoder = SpeculativeDecoder(model, drafter="none", max_batch_size=4)
        self.backend: Any = self.decoder.target.backend
        self._experts = counted_experts(self.backend)
        self.costs = {kind: self.decoder.costs for kind in (*FILES, RANDOM)}
        self._texts = {kind: self._text(kind) for kind in self.costs}
        self.measured = defaultdict[tuple[str, int], Measured](Measured)
        self.backend.reserve(len(self._texts), TEXT)
        for slot, text in enumerate(self._texts.values()):
            self.backend.forward(text[None], [0], first_slot=slot, logits=False)

    def _text(self, kind: str) -> Tensor:
        if kind == RANDOM:
            size = self.backend.vocab_size
            return torch.randint(0, size, (TEXT,), generator=torch.Generator().manual_seed(1))
        assert self.decoder.tokenizer is not None
        return torch.tensor(self.decoder.tokenizer.encode(FILES[kind].read_text(encoding="utf-8"))[:TEXT])

    def time(self, kind: str, width: int) -> None:
        """One forward at a random place of the text."""
        slot, text = list(self._texts).index(kind), self._texts[kind]
        start = random.randrange(FIRST, len(text) - width)
        read = 0 if self._experts is None else self._experts.num_read()
        started = perf_counter()
        logits = self.backend.forward(text[None, start : start + width], [start], first_slot=slot, logits=True)
        argmax(logits)[-1, -1].item()
        result = self.measured[kind, width]
        result.seconds.append(perf_counter() - started)
        if self._experts is not None:
            distinct = (self._experts.num_read() - read) / self._experts.layers
            result.experts.append(distinct)
            if (reads := self.costs[kind].experts) is not None:
                reads.learn(1, width, distinct)

    def rows(self) -> list[dict[str, Any]]:
        """What was measured and predicted."""
        rows = [
            {
                "tokens": kind,
                "width": width,
                "predicted_ms": 1e3 * self.costs[kind].verify(1, width - 1),
                "measured_ms": 1e3 * median(result.seconds),
                "experts": fmean(result.experts) if result.experts else None,
            }
            for (kind, width), result in sorted(self.measured.items())
        ]
        speed = median(row["measured_ms"] / row["predicted_ms"] for row in rows)
        for row in rows:
            row["ratio"] = row["measured_ms"] / row["predicted_ms"]
            row["ratio_at_this_speed"] = row["ratio"] / speed
        return rows


def main(
    models: list[str],
    widths: str = "1,2,4,8",
    turns: Count = 20,
    json_file: JsonFile = None,
) -> None:
    """Print predicted and measured milliseconds, their ratio, and the distinct experts of a layer."""
    quiet()
    random.seed(1)
    timed = {model: Timed(model) for model in models}
    shapes = [
        (model, kind, width) for model in models for kind in (*FILES, RANDOM) for width in numbers("--widths", widths)
    ]
    for _ in range(turns + 1):
        for model, kind, width in random.sample(shapes, len(shapes)):
            timed[model].time(kind, width)
    results = dict[str, Any]()
    for model, forwards in timed.items():
        for result in forwards.measured.values():
            del result.seconds[0]  # the first includes work that is done once
        results[model] = forwards.rows()
        console.print(f"{model}: predicted and measured ms, ratio, ratio at this speed, distinct experts")
        for row in results[model]:
            experts = "" if row["experts"] is None else f"  {row['experts']:.2f}"
            console.print(
                f"  {row['tokens']:13} {row['width']:2}  {row['predicted_ms']:7.2f}  {row['measured_ms']:7.2f}  "
                f"{row['ratio']:.3f}  {row['ratio_at_this_speed']:.3f}{experts}"
            )
    save(json_file, results)


if __name__ == "__main__":
    run(main)
