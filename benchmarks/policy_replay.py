"""Drafters and policies over recorded texts: what each would have taken, and what the best choice in hindsight takes.

    python benchmarks/policy_record.py qwen1.5b PROMPTS.jsonl pair.jsonl --draft qwen0.5b --per-family 4
    python benchmarks/policy_replay.py pair.jsonl --batch 1

The real drafters and policies run over a recording, a round at a time, with the recorded costs for a clock. No model is
needed, so the same texts can be tried with many settings. Printed: the speed-up over plain decoding of each setting by
family (geometric means over texts), prompt processing not counted. With `--off 0.1` the lengths that pay are chosen by
measurements of forwards that are off by 10 %, each by another amount.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import exp, log
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from terminal import Count, console, run

from slipstream import Draft, SamplingParams
from slipstream.bench.speed_model.round_costs import Costs
from slipstream.core.interfaces import Drafter, Policy
from slipstream.core.loop import draft_lengths
from slipstream.core.rng import Race
from slipstream.core.rounds import Round, Seconds
from slipstream.core.types import Row
from slipstream.draft_length.costs import CostModel
from slipstream.draft_length.planner import DraftController
from slipstream.draft_length.policies import Auto, Fixed, Heuristic
from slipstream.drafters import Setup, load
from slipstream.drafters.hybrid import HybridDrafter
from slipstream.drafters.model import PathBelow, Stop, WhilePays, annotated
from slipstream.errors import UsageError
from slipstream.sampling.sampler import Sampler

CPU = torch.device("cpu")
Record = dict[str, Any]
numbers = count()


@dataclass
class Recorded:
    """The draft model, as it was recorded; rows are told apart by their index."""

    records: Sequence[Record]
    stop: Stop | None = None

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Any) -> Draft:
        """As `ModelDrafter`, without the model."""
        tokens: list[list[int]] = [[] for _ in rows]
        chances: list[list[float]] = [[] for _ in rows]
        most = len(self.records[0]["model"][0])
        ends = [min(length, most) for length in lengths]
        steps = 0
        for j in range(max(ends, default=0)):
            steps += 1
            for i, row in enumerate(rows):
                record, at = self.records[row.index], row.num_output_tokens
                known = at < len(record["model"])
                tokens[i].append(record["model"][at][j] if known else 0)
                chances[i].append(record["chances"][at][j] if known else 0.0)
            if self.stop is not None:
                over = self.stop.ends(rows, lengths, chances, False)
                ends = [min(end, j + 1) if ended else end for end, ended in zip(ends, over, strict=True)]
            if max(ends) <= j + 1:
                break
        draft = Draft.from_lists([row[:end] for row, end in zip(tokens, ends, strict=True)], CPU)
        made = Draft(draft.tokens, draft.lengths, steps=steps)
        return made if self.stop is None else annotated(made, self.stop, rows, lengths, chances)


@dataclass
class Replay:
    """One setting over recorded texts, `batch` at a time."""

    records: Sequence[Record]
    costs: Costs
    drafter: Drafter
    policy: Policy
    lengths: list[int] = field(default_factory=list)  # drafted, round by round

    def seconds(self, chosen: Sequence[int]) -> float:
        """What these texts take, together."""
        rows = [self._row(i) for i in chosen]
        taken = 0.0
        while active := [row for row in rows if row.finish_reason is None]:
            taken += self._step(active)
        return taken

    def _row(self, index: int) -> Row:
        record = self.records[index]
        return Row(index, list(record["prompt"]), SamplingParams(max_tokens=len(record["output"])), seed=0)

    def _step(self, rows: list[Row]) -> float:
        lengths = draft_lengths(self.policy, rows, 24)
        draft = self.drafter.propose(rows, lengths, Sampler(rows, Race(8, CPU), 8, CPU))
        draft = self.policy.worth_verifying(rows, draft)
        verify = self.verify(len(rows), draft.width)
        drafting = self._drafting(len(rows), draft.steps)
        seconds, step = Seconds(draft=drafting, verify=verify, total=drafting + verify), next(numbers)
        for i, row in enumerate(rows):
            proposed = tuple(draft.tokens[i, : draft.lengths[i]].tolist())
            truth = self.records[row.index]["output"][row.num_output_tokens :]
            accepted = next((n for n, (a, b) in enumerate(zip(proposed, truth, strict=False)) if a != b), None)
            accepted = min(len(proposed), len(truth)) if accepted is None else accepted
            start, tokens = len(row.tokens), row.commit(truth[: accepted + 1])
            rejected = accepted < len(proposed) and len(tokens) > accepted
            row.rounds.append(
                Round(
                    row.index,
                    step,
                    len(rows),
                    start,
                    proposed,
                    tokens,
                    accepted,
                    rejected,
                    row.finish_reason,
                    seconds,
                    draft.steps,
                    None if draft.notes is None else draft.notes[i],
                )
            )
            self.lengths.append(len(proposed))
        self.policy.observe(rows)
        return seconds.total

    def _drafting(self, rows: int, steps: int) -> float:
        width = self.costs.width_for(1, rows)
        return (self.costs.round(rows, width, steps) - self.costs.round(rows, width, 0)) / 1e3

    def verify(self, rows: int, drafted: int) -> float:
        """Seconds of a forward over rows that draft up to `drafted` tokens."""
        return self.costs.plain(rows, self.costs.width_for(drafted + 1, rows)) / 1e3


def settings(records: Sequence[Record], costs: Costs, off: float = 0.0, seed: int = 0) -> Iterator[tuple[str, Replay]]:
    """Name and replay of everything that is compared; each has learned nothing yet. off, seed: of `cost_model_of`."""
    with_model = bool(records[0]["model"])

    def made(name: str, length: int, controller: DraftController | None = None) -> Drafter:
        stop = None if controller is None else WhilePays(controller)
        if name.startswith("model"):
            return Recorded(records, PathBelow(int(name[8:]) / 100) if ":" in name else stop)
        if name == "hybrid":
            first = load("suffix:outputs=0", Setup(CPU, 1 << 20, controller=controller, acceptance_probs=True))
            return HybridDrafter(first, Recorded(records, stop or PathBelow(0.4)), controller=controller, samples=True)
        return load(name, Setup(CPU, 1 << 20, controller=controller, acceptance_probs=controller is not None))

    yield "none", Replay(records, costs, load("none", Setup(CPU, 1 << 20)), Fixed(0))
    for name, length in [(n, k) for n in ("ngram", "suffix:outputs=0") for k in (3, 7, 15)]:
        yield f"{name}@{length}", Replay(records, costs, made(name, length), Fixed(length))
    if with_model:
        for name, length in [("model", n) for n in (2, 3, 4, 6)] + [(f"model:p={p}", 6) for p in (30, 40, 50, 60)]:
            yield f"{name}@{length}", Replay(records, costs, made(name, length), Fixed(length))
        yield "model heuristic", Replay(records, costs, made("model", 8), Heuristic(8))
        yield "hybrid@7", Replay(records, costs, made("hybrid", 7), Fixed(7))
    for name in ["ngram", "suffix:outputs=0", *(["model", "hybrid"] if with_model else [])]:
        controller = DraftController(cost_model_of(costs, off, seed))
        yield (
            f"{name} auto",
            Replay(records, costs, made(name, 0, controller), Auto(controller, 7, stepwise=name == "model")),
        )


def cost_model_of(costs: Costs, off: float = 0.0, seed: int = 0) -> CostModel:
    """What a decoder would know of these costs beforehand.

    off: how far each measurement is off, as a standard deviation of logarithms.
    """
    noise = random.Random(seed)
    measured = {width: taken * exp(noise.gauss(0, off)) for width, taken in costs.target[1].items()}
    return CostModel(lambda width, rows: costs.width_for(width, rows), measured=measured)


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return exp(sum(map(log, values)) / len(values))


def _read(file: Path) -> tuple[Costs, list[Record]]:
    """A recording: its costs, and its texts of more than a few tokens."""
    try:
        header, *records = [json.loads(line) for line in file.read_text().splitlines()]
        costs, records = Costs.from_dict(header["costs"]), [one for one in records if len(one["output"]) > 8]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{str(file)!r}: {error!r}; allowed: what policy_record.py has written") from error
    if not records:
        raise UsageError(f"{str(file)!r} holds no text of more than 8 tokens; allowed: at least one")
    return costs, records


def main(file: Path, batch: Count = 1, seed: int = 0, off: Annotated[float, typer.Option(min=0, max=1)] = 0.0) -> None:
    """Compare settings over a recording."""
    costs, records = _read(file)
    order = list(range(len(records)))
    random.Random(seed).shuffle(order)
    groups = [order[at : at + batch] for at in range(0, len(order), batch)]
    families = sorted({record["family"] for record in records})
    table = Table(title=f"speed-up over plain decoding, batch {batch}, {len(records)} texts")
    for column in ("setting", "all", *families):
        table.add_column(column, justify="left" if column == "setting" else "right")
    plain: list[float] = []
    for name, one in settings(records, costs, off, seed):
        taken = [one.seconds(group) for group in groups]
        plain = plain or taken
        ratios = [a / b for a, b in zip(plain, taken, strict=True)]
        by_family = [
            [r for r, group in zip(ratios, groups, strict=True) if records[group[0]]["family"] == f] for f in families
        ]
        cells = [f"{geometric_mean(values):.2f}" if values else "" for values in by_family]
        table.add_row(name, f"{geometric_mean(ratios):.3f}", *cells)
    console.print(table)


if __name__ == "__main__":
    run(main)
