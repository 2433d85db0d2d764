"""Drafters and policies over recorded texts: what each would have taken, on a clock of recorded costs.

    python benchmarks/policy_record.py qwen1.5b pair.jsonl --draft qwen0.5b
    python benchmarks/policy_replay.py pair.jsonl --batch 1
    python benchmarks/policy_replay.py pair.jsonl --batch 8 --ablate

The real engine, drafters and policies run; the target and the draft model say what was recorded and move a clock by
what forwards, draft steps, reading a text and looking for retrieval drafts took. No model is needed, so the same texts
can be tried with many settings. Printed: the speed-up over plain decoding of each setting by family (geometric means
over texts), prompt processing not counted. "random" texts repeat nothing, and the draft model is wrong about them.

The rows of a batch belong to one call, which ends when the last of them does. Rounds take up to a few percent more or
less, as they do on a machine. With `--off 0.1` the lengths that pay are chosen by measurements of forwards that are off
by 10 %, each by another amount. `--ablate` removes one mechanism of `auto` at a time and prints what becomes of the
speed, in percent.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import exp, log
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, cast
from unittest.mock import patch

import torch
import typer
from policy_ablation import MECHANISMS, Mechanism
from rich.table import Table
from terminal import Count, console, run
from torch import Tensor

from slipstream import Draft, SamplingParams
from slipstream.bench.speed_model.round_costs import Costs
from slipstream.core.interfaces import Policy
from slipstream.core.loop import Clock, Engine
from slipstream.core.rounds import Seconds
from slipstream.core.session import Session
from slipstream.core.types import Row, Verdict
from slipstream.draft_length.costs import CostModel
from slipstream.draft_length.planner import STEPS, Planner, awaited_together
from slipstream.draft_length.policies import Fixed, Heuristic
from slipstream.drafters import Setup, load, traits
from slipstream.errors import UsageError
from slipstream.sampling.sampler import Sampler

CPU = torch.device("cpu")
LONGEST = 56  # tokens of a draft
NOISE = 0.03  # of a round's time, as a standard deviation of its logarithm
CATCH_UP = 3  # tokens that the draft model reads beside its first step in no time of their own
Record = dict[str, Any]


@dataclass
class Recording:
    """Texts and costs. reading: milliseconds per token that the draft model reads. Token ids are made few."""

    costs: Costs
    records: list[Record]
    reading: float = 0.0

    def __post_init__(self) -> None:
        ids: dict[int, int] = defaultdict(lambda: len(ids))
        for record in self.records:
            for name in ("prompt", "output"):
                record[name] = [ids[token] for token in record[name]]
            steps = record.get("model") or []
            record["model"] = [[[ids[token] for token in pair] for pair in line] for line in steps]
        self.vocab_size = len(ids) + 1
        self.costs = _as_wide(self.costs, LONGEST + 1)

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model."""
        return bool(self.records[0]["model"])

    @classmethod
    def read(cls, file: Path) -> Recording:
        """What `policy_record.py` has written, but for texts of a few tokens, and random texts beside it."""
        try:
            header, *records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            costs, reading = Costs.from_dict(header["costs"]), float(header["reading"])
            records = [record for record in records if len(record["output"]) > 8]
            records += random_texts(records[:8]) if records else []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{str(file)!r}: {error!r}; allowed: what policy_record.py has written") from error
        if not records:
            raise UsageError(f"{str(file)!r} holds no text of more than 8 tokens; allowed: at least one")
        return cls(costs, records, reading)


def _as_wide(costs: Costs, width: int) -> Costs:
    """Costs of rounds up to so many tokens per row, beyond what was measured by the slope of its end."""
    target, overhead = (
        {rows: _extended(points, costs.width_for(width, rows)) for rows, points in grid.items()}
        for grid in (costs.target, costs.overhead)
    )
    return replace(costs, target=target, overhead=overhead)


def _extended(points: Mapping[int, float], width: int) -> dict[int, float]:
    low, high = sorted(points)[-3], max(points)
    slope = max(0.0, points[high] - points[low]) / (high - low)
    return dict(points) if high >= width else {**points, width: points[high] + slope * (width - high)}


def random_texts(like: Sequence[Record], seed: int = 0) -> list[Record]:
    """Texts that cannot be drafted, as long as these: the draft model is as sure as it was there, and wrong."""
    rng, made = random.Random(seed), []
    for record in like:
        prompt, output = ([rng.randrange(50) for _ in record[name]] for name in ("prompt", "output"))
        wrong = [[[50 + rng.randrange(50), 100] for _ in line] for line in record.get("model") or []]
        made.append(record | {"family": "random", "prompt": prompt, "output": output, "model": wrong})
    return made


class SimulatedClock(Clock):
    """Takes the times that the recorded models and drafters say they took."""

    def __init__(self) -> None:
        self.now = self._before = self._start = 0.0
        self._taken: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """See `Clock`."""
        self._taken[part] = self.now - self._before
        self._before = self.now

    def stop(self) -> Seconds:
        """See `Clock`."""
        seconds = Seconds(**self._taken, total=self.now - self._start)
        self._start, self._taken = self.now, {}
        return seconds


@dataclass
class RecordedModel:
    """What both models have in common: the texts, a clock and costs in milliseconds."""

    recording: Recording
    clock: SimulatedClock
    noise: random.Random

    def __post_init__(self) -> None:
        self.backend = cast(Any, self)
        self.device, self.vocab_size = CPU, self.recording.vocab_size

    def take(self, milliseconds: float) -> None:
        """Let time pass."""
        self.clock.now += milliseconds / 1e3 * exp(self.noise.gauss(0, NOISE))


class RecordedTarget(RecordedModel):
    """The target, as far as `Engine` needs one. Reading prompts takes no time."""

    returns_prompt_logits = True
    longest_draft = LONGEST
    shapes: Any = None

    table = SimpleNamespace(longest_short=None, longest_draft=lambda rows: LONGEST)

    def prefill(self, rows: Sequence[Row], *, logits: bool = False) -> Tensor | None:
        """The first token of new rows."""
        return self._logits([self._text(row)[:1] for row in rows]) if logits else None

    def fits_tree(self, rows: Sequence[Row], draft: Draft) -> bool:
        """Whether there is a shape for it."""
        costs, batch = self.recording.costs, len(rows)
        is_measured = costs.trees is not None and costs.trees.spans(batch)
        return is_measured and costs.shapes.tree_total_for(batch + sum(draft.lengths), batch) is not None

    def score_tree(self, rows: Sequence[Row], draft: Draft) -> Tensor:
        """[B, K + 1, V] likeliest where the text goes on."""
        costs, batch, nodes = self.recording.costs, len(rows), sum(draft.lengths)
        assert draft.parents is not None and costs.trees is not None
        if batch in costs.trees.forward and batch + nodes > (limit := max(costs.trees.forward[batch])):
            raise UsageError(f"trees of {batch + nodes} tokens were not measured; allowed: up to {limit}")
        total = costs.shapes.tree_total_for(batch + nodes, batch) or batch + nodes
        self.take(float(costs.trees.milliseconds(batch, [total])[0]))
        chosen = []
        for row, parents in zip(rows, draft.parents, strict=True):
            text, depths = self._text(row), list[int]()
            for parent in parents:
                depths.append(0 if parent < 0 else depths[parent] + 1)
            line = [text[0], *(text[depth + 1] if depth + 1 < len(text) else 0 for depth in depths)]
            chosen.append(line + [0] * (draft.width + 1 - len(line)))
        return self._logits(chosen)

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int]) -> Tensor:
        """[B, K + 1, V] the same of chains."""
        self.take(float(self.recording.costs.verifying(len(rows), max(lengths), [sum(lengths)])[0]))
        width = draft.shape[1] + 1
        return self._logits([(self._text(row) + [0] * width)[:width] for row in rows])

    def verify_greedy(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int]) -> Verdict:
        """How far each draft is the text."""
        self.take(float(self.recording.costs.verifying(len(rows), max(lengths), [sum(lengths)])[0]))
        accepted, following = [], []
        for row, line, length in zip(rows, draft.tolist(), lengths, strict=True):
            text = self._text(row)
            pairs = enumerate(zip(line[:length], text, strict=False))
            count = next((at for at, (token, came) in pairs if token != came), min(length, len(text) - 1))
            accepted.append(count)
            following.append(text[count])
        return Verdict(torch.tensor(accepted), torch.tensor(following))

    def _text(self, row: Row) -> list[int]:
        """What is still to come."""
        return list(self.recording.records[row.index]["output"][row.num_output_tokens :])

    def _logits(self, chosen: Sequence[Sequence[int]]) -> Tensor:
        tokens = torch.tensor(chosen)
        return torch.zeros(*tokens.shape, self.vocab_size).scatter_(2, tokens[..., None], 1.0)


class RecordedDraftModel(RecordedModel):
    """The draft model, as far as `ModelDrafter` needs one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._read: dict[Row, int] = {}  # tokens of each row that it has read

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        """[B, 1, V] likeliest what it said here, as sure as it was."""
        at = draft.shape[1]
        if not at:
            unread = [len(row.tokens) - self._read.get(row, 0) for row in rows]
            self.take(self.recording.reading * sum(count for count in unread if count > CATCH_UP))
            self._read |= {row: len(row.tokens) for row in rows}
        self.take(self.recording.costs.drafting(len(rows), 1) - self.recording.costs.drafting(len(rows), 0))
        probs = torch.full((len(rows), 1, self.vocab_size), 1e-9)
        for i, row in enumerate(rows):
            record, place = self.recording.records[row.index], row.num_output_tokens
            if place < len(record["model"]) and at < len(record["model"][place]):
                tokens, sure = torch.tensor(record["model"][place][at]), torch.tensor(record["chances"][place][at])
                probs[i, 0] += (1 - float(sure.sum())) / self.vocab_size
                probs[i, 0, tokens] = sure
        return probs.log()

    def draft_greedy(self, rows: Sequence[Row], steps: int, vocab_size: int) -> Tensor | None:
        """Not in one call."""
        return None

    def keep_drafts(self, lengths: Sequence[int]) -> None:
        """Nothing is cached."""

    def holds(self, row: Row) -> bool:
        """Whether it has read a row's text."""
        return row in self._read


@dataclass
class Replay:
    """One setting over recorded texts. drafted: tokens, row by row and round by round."""

    recording: Recording
    clock: SimulatedClock
    engine: Engine
    drafted: list[int] = field(default_factory=list)

    def seconds(self, chosen: Sequence[int]) -> float:
        """What these texts take, together."""
        rows, before = [self._row(i) for i in chosen], self.clock.now
        with awaited_together(rows):
            while active := [row for row in rows if row.finish_reason is None]:
                for done in self.engine.step(self.engine.batch(active), self.clock):
                    self.drafted.append(len(done.draft))
                failed = next((row.error for row in active if row.error is not None), None)
                if failed is not None:
                    raise failed
        self.rows = rows
        return self.clock.now - before

    def _row(self, index: int) -> Row:
        record = self.recording.records[index]
        length, stops = len(record["output"]), record.get("stops", False)
        most = max(record.get("max_tokens", length), length) if stops else length
        row = Row(index, list(record["prompt"]), SamplingParams(max_tokens=most), seed=0)
        row.completes_stop = (lambda token: row.num_output_tokens >= length) if stops else None
        return row


def replay_of(
    recording: Recording,
    drafter: str,
    policy: Callable[[RecordedDraftModel], Policy],
    planner: Planner | None = None,
    seed: int = 0,
) -> Replay:
    """A setting that has learned nothing yet. planner: where lengths that pay are chosen."""
    noise, clock = random.Random(seed), SimulatedClock()
    target = RecordedTarget(recording, clock, noise)
    draft = RecordedDraftModel(recording, clock, noise)
    setup = Setup(
        CPU,
        recording.vocab_size,
        cast(Any, draft) if recording.has_draft else None,
        coupled=True,
        planner=planner,
        acceptance_probs=planner is not None,
        steps=LONGEST if planner is None else STEPS,
        siblings=int(planner is not None and recording.costs.trees is not None and traits(drafter).branches),
    )
    if planner is not None:
        planner.has_cached = draft.holds
    made = load(drafter, setup)
    searching = getattr(made, "first", made)  # what retrieves

    def search(rows: Sequence[Row], lengths: Sequence[int], *others: Any) -> Draft:
        if any(lengths):
            target.take(recording.costs.drafting(len(rows), 0))
        return look_up(rows, lengths, *others)

    if drafter != "none" and (searching is not made or not traits(drafter).needs_draft_model):
        look_up, searching.propose = searching.propose, search
    return Replay(recording, clock, Engine(cast(Session, target), made, policy(draft), Sampler))


def auto(recording: Recording, drafter: str, cost_model: CostModel, seed: int = 0) -> Replay:
    """Lengths that pay."""
    declared = traits(drafter)
    planner = Planner(
        cost_model,
        longest=LONGEST,
        room=2 * STEPS,
        has_model=declared.needs_forwards,
        asks_model=declared.needs_forwards and not declared.needs_cost_model,
        reads=declared.has_own_cache,
    )
    return replay_of(recording, drafter, lambda _: planner, planner, seed)


def settings(recording: Recording, off: float = 0.0, seed: int = 0) -> Iterator[tuple[str, Replay]]:
    """Name and replay of everything that is compared; each has learned nothing yet. off, seed: of `cost_model_of`."""

    def fixed(drafter: str, policy: Policy) -> Replay:
        return replay_of(recording, drafter, lambda _: policy, seed=seed)

    yield "none", fixed("none", Fixed(0))
    for name, length in [("ngram", 3), ("ngram", 8), ("suffix:outputs=0", 3), ("suffix:outputs=0", 7)]:
        yield f"{name}@{length}", fixed(name, Fixed(length))
    if recording.has_draft:
        for name, length in [("model", 2), ("model", 4), ("model", 6), ("model:p=40", 6), ("hybrid", 7)]:
            yield f"{name}@{length}", fixed(name, Fixed(length))
        yield "model heuristic", fixed("model", Heuristic(8))
    for name in ("ngram", "suffix:outputs=0", *(("model", "hybrid") if recording.has_draft else ())):
        yield f"{name} auto", auto(recording, name, cost_model_of(recording.costs, off, seed, recording.reading), seed)


def cost_model_of(costs: Costs, off: float = 0.0, seed: int = 0, reading: float = 0.0) -> CostModel:
    """What a decoder would know of these costs beforehand.

    off: how far each measurement is off, as a standard deviation of logarithms.
    """
    noise, most = random.Random(seed), max(costs.batches)

    def measured(points: Any) -> dict[int, float]:
        return {width: taken * exp(noise.gauss(0, off)) for width, taken in points.items()}

    ragged = None if costs.ragged is None else costs.ragged.forward.get(most)
    steps = {rows: taken for rows, taken in measured(costs.draft_step).items() if taken}
    return CostModel(
        lambda width, rows: costs.width_for(width, rows),
        (lambda rows, drafted: None) if ragged is None else lambda rows, n: costs.shapes.total_for(rows + n),
        measured=measured(costs.target[1]),
        together={} if ragged is None else measured(ragged),
        max_batch_size=most,
        steps=steps,
        token=reading * exp(noise.gauss(0, off)) or None,
    )


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return exp(sum(map(log, values)) / len(values))


def groups_of(recording: Recording, batch: int, seed: int) -> dict[str, list[list[int]]]:
    """Texts that are decoded together, by family; in batches also some of all families, as "mixed"."""
    order = list(range(len(recording.records)))
    random.Random(seed).shuffle(order)
    families = defaultdict[str, list[int]](list)
    for i in order:
        families[recording.records[i]["family"]].append(i)
    if batch > 1:
        families["mixed"] = [i for i in order if recording.records[i]["family"] != "random"]
    return {
        family: [texts[at : at + batch] for at in range(0, len(texts), batch)]
        for family, texts in sorted(families.items())
    }


def seconds_of(replay: Replay, groups: Mapping[str, Sequence[Sequence[int]]], seed: int) -> dict[str, list[float]]:
    """What each group takes; the families take turns, so that what is learned of one is used for another."""
    turns = [(family, at) for family, texts in groups.items() for at in range(len(texts))]
    random.Random(seed).shuffle(turns)
    taken = {family: [0.0] * len(texts) for family, texts in groups.items()}
    for family, at in turns:
        taken[family][at] = replay.seconds(groups[family][at])
    return taken


def speed_ups(plain: Mapping[str, Sequence[float]], taken: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Geometric means by family, that of all texts but random ones first."""
    ratios = {family: [a / b for a, b in zip(plain[family], taken[family], strict=True)] for family in plain}
    everything = [ratio for family, values in ratios.items() if family != "random" for ratio in values]
    return {"all": geometric_mean(everything)} | {family: geometric_mean(values) for family, values in ratios.items()}


def ablation(
    recording: Recording, batch: int, off: float, seeds: Sequence[int], without: Mechanism | None
) -> dict[str, float]:
    """The speed-up of `auto` over plain decoding by family, the mean over the seeds, without one of its mechanisms."""
    name = "hybrid" if recording.has_draft else "suffix:outputs=0"
    found = defaultdict[str, list[float]](list)
    for seed in seeds:
        groups = groups_of(recording, batch, seed)
        with ExitStack() as stack:
            for owner, attribute, other in without.patches if without is not None else ():
                stack.enter_context(patch.object(owner, attribute, other))
            plain = replay_of(recording, "none", lambda _: Fixed(0), seed=seed)
            tried = auto(recording, name, cost_model_of(recording.costs, off, seed, recording.reading), seed)
            means = speed_ups(*(seconds_of(each, groups, seed) for each in (plain, tried)))
        for family, mean in means.items():
            found[family].append(mean)
    return {family: geometric_mean(means) for family, means in found.items()}


def show_ablation(recording: Recording, batch: int, off: float, seeds: Sequence[int]) -> None:
    """Print what each mechanism is worth."""
    whole = ablation(recording, batch, off, seeds, None)
    table = Table(
        title=f"auto without each mechanism, batch {batch}, costs off by {off:.0%}: change of speed in percent"
    )
    for column in ("without", "all", "worst family", "random, of plain"):
        table.add_column(column)
    table.add_row("(nothing)", f"{whole['all']:.3f}x", "", f"{whole.get('random', 1):.3f}")
    for mechanism in MECHANISMS:
        found = ablation(recording, batch, off, seeds, mechanism)
        change = {family: 100 * (found[family] / whole[family] - 1) for family in found}
        worst = min((family for family in change if family != "all"), key=lambda family: change[family])
        random_speed = f"{found.get('random', 1):.3f}"
        table.add_row(mechanism.name, f"{change['all']:+.1f}", f"{change[worst]:+.1f} {worst}", random_speed)
    console.print(table)


def main(
    file: Path,
    batch: Count = 1,
    seed: int = 0,
    off: Annotated[float, typer.Option(min=0, max=1)] = 0.0,
    ablate: bool = False,
    repeats: Count = 3,
) -> None:
    """Compare settings over a recording. repeats: of --ablate, with the texts in another order each."""
    recording = Recording.read(file)
    if ablate:
        show_ablation(recording, batch, off, range(seed, seed + repeats))
        return
    groups = groups_of(recording, batch, seed)
    plain: dict[str, list[float]] = {}
    table = Table(title=f"speed-up over plain decoding, batch {batch}, {len(recording.records)} texts")
    for name, replay in settings(recording, off, seed):
        taken = seconds_of(replay, groups, seed)
        plain = plain or taken
        means = speed_ups(plain, taken)
        if not table.columns:
            for column in ("setting", *means):
                table.add_column(column, justify="left" if column == "setting" else "right")
        table.add_row(name, *(f"{mean:.3f}" if family == "all" else f"{mean:.2f}" for family, mean in means.items()))
    console.print(table)


if __name__ == "__main__":
    run(main)
