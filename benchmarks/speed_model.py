"""Compares measured with predicted speed-ups at several draft lengths and batch sizes.

    python benchmarks/speed_model.py smollm2 PROMPTS.jsonl
    python benchmarks/speed_model.py TARGET PROMPTS.jsonl --draft DRAFT

Costs are measured first. Then, for each batch size, plain decoding and every draft length take turns on the same
prompts, greedily. Times exclude the reading of prompts and are medians of several turns. Each line is predicted twice.
The prediction from the arm's own acceptance tests the costs alone. The prediction from the acceptance of the longest
draft also tests the assumption that acceptance by position does not depend on the draft length.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import typer
from rich import box
from rich.table import Table
from terminal import JsonFile, console, run

from slipstream import SamplingParams, SpeculativeDecoder, Stats
from slipstream.bench.speed_model.accepted_lengths import Acceptance
from slipstream.bench.speed_model.formula import predict_from_stats, predicted_speed_up
from slipstream.bench.speed_model.probe import measure_costs
from slipstream.bench.speed_model.round_costs import Costs
from slipstream.models.weights.model_files import quiet
from slipstream.text.prompt_sets import read_prompts, spread


@dataclass
class Arm:
    """One draft length: the statistics and texts of its last turn, and every turn's seconds per output token."""

    decoder: SpeculativeDecoder
    stats: dict[str, Any] = field(default_factory=dict)
    texts: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def run(self, groups: Sequence[list[list[int]]], params: SamplingParams) -> None:
        """Decode every group of prompts as a batch, with an empty KV cache."""
        rounds, self.texts = [], []
        for group in groups:
            self.decoder.forget()
            rows = self.decoder.rows(group, params)
            rounds += list(self.decoder.run(rows))
            self.texts += [row.output for row in rows]
        self.stats = Stats.of(rounds).to_dict()
        decoding_seconds = self.stats["total_seconds"] - self.stats["prefill_seconds"]
        self.seconds.append(decoding_seconds / self.stats["num_output_tokens"])


def main(
    target: str,
    prompts: Path,
    draft: str | None = None,
    drafter: str = "auto",
    dtype: str = "auto",
    reproducible: str = "auto",
    num_prompts: int = 8,
    max_tokens: int = 64,
    lengths: str = "1,2,3,4,5,6,7,8",
    batches: str = "1,4",
    repeats: int = 3,
    seconds: float = 30.0,
    json_file: JsonFile = None,
) -> None:
    """Print a line per batch and draft length; the last line is JSON with the mean deviations."""
    quiet()
    reproducible_shapes = {"true": True, "false": False}.get(reproducible, reproducible)
    base = SpeculativeDecoder(target, draft, drafter=drafter, dtype=dtype, reproducible=reproducible_shapes)
    sizes, rows = [int(n) for n in lengths.split(",")], [int(n) for n in batches.split(",")]
    costs = measure_costs(base, rows, range(1, max(sizes) + 2), seconds=seconds)
    chosen = spread(read_prompts(prompts), num_prompts)
    ids = [base.encode(p.prompt, chat=True)[-(base.target.backend.max_length - max_tokens) :] for p in chosen]
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("batch", "draft\nlength", "tokens\nper round", "observed", "predicted\n(own acceptance)", "off by"):
        table.add_column(name, justify="right")
    for name in ("predicted\n(longest draft's)", "off by", "texts\nidentical"):
        table.add_column(name, justify="right")
    lines = []
    for batch in rows:
        groups = [ids[first : first + batch] for first in range(0, len(ids) - batch + 1, batch)]
        if not groups:
            raise typer.BadParameter(f"{len(ids)}; allowed: at least {batch}, a batch size", param_hint="--num-prompts")
        lines += _batch(base, costs, groups, sizes, SamplingParams(max_tokens=max_tokens, ignore_eos=True), repeats)
    for line in lines:
        table.add_row(*_cells(line))
    console.print(table)
    console.print(f"{costs.machine}; drafter {costs.drafter}; {num_prompts} prompts, {max_tokens} tokens, greedy")
    summary = {
        "target": target,
        "draft": draft,
        "torch": torch.__version__,
        "mean_absolute_deviation": mean(abs(line["deviation"]) for line in lines),
        "mean_absolute_deviation_longest": mean(abs(line["deviation_longest"]) for line in lines),
    }
    print(json.dumps(summary))
    if json_file is not None:
        json_file.write_text(
            json.dumps({**summary, "costs": costs.to_dict(), "lines": lines}, indent=2) + "\n", encoding="utf-8"
        )


def _batch(
    base: SpeculativeDecoder,
    costs: Costs,
    groups: Sequence[list[list[int]]],
    sizes: Sequence[int],
    params: SamplingParams,
    repeats: int,
) -> list[dict[str, Any]]:
    """Measure and predict all draft lengths at one batch size, in turns with plain decoding."""
    batch = len(groups[0])
    plain = Arm(base.using("none", num_draft_tokens=0))
    arms = {n: Arm(base.using(num_draft_tokens=n)) for n in sizes}
    short = SamplingParams(max_tokens=8, ignore_eos=True)
    for arm in (plain, *arms.values()):
        arm.run(groups[:1], short)
        arm.seconds.clear()
    for _ in range(repeats):
        for arm in (plain, *arms.values()):
            arm.run(groups, params)
    longest = Acceptance.from_stats(arms[max(sizes)].stats)
    lines = []
    for n, arm in arms.items():
        prediction = predict_from_stats(arm.stats, costs)
        observed = median(plain.seconds) / median(arm.seconds)
        from_longest = predicted_speed_up(costs, longest, min(n, longest.longest), batch)
        lines.append(
            {
                "batch": batch,
                "num_draft_tokens": n,
                "tokens_per_round": prediction.observed_tokens,
                "observed": observed,
                "predicted": prediction.predicted,
                "deviation": prediction.predicted / observed - 1,
                "predicted_longest": from_longest,
                "deviation_longest": from_longest / observed - 1,
                "identical": sum(a == b for a, b in zip(arm.texts, plain.texts, strict=True)),
                "texts": len(plain.texts),
                "seconds_per_token": arm.seconds,
                "plain_seconds_per_token": plain.seconds,
                "stats": arm.stats,
            }
        )
    return lines


def _cells(line: dict[str, Any]) -> list[str]:
    return [
        str(line["batch"]),
        str(line["num_draft_tokens"]),
        f"{line['tokens_per_round']:.2f}",
        f"{line['observed']:.2f}x",
        f"{line['predicted']:.2f}x",
        f"{line['deviation']:+.1%}",
        f"{line['predicted_longest']:.2f}x",
        f"{line['deviation_longest']:+.1%}",
        f"{line['identical']} of {line['texts']}",
    ]


if __name__ == "__main__":
    run(main)
