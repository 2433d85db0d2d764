"""Replays recorded texts with different drafters and policies, on a simulated clock that runs by recorded costs.

    python benchmarks/policy_record.py qwen1.5b pair.jsonl --draft qwen0.5b
    python benchmarks/policy_replay.py pair.jsonl --batch 1
    python benchmarks/policy_replay.py pair.jsonl --batch 8 --ablate

The engine, drafters and policies are the real ones. Target and draft model are stand-ins: they return what was recorded
and advance the clock by the recorded times of forwards, draft steps, reading a text and searches for retrieval drafts.
So the same texts can be tried with many settings, without a model. The script prints each setting's speed-up over plain
decoding by family of prompts (geometric means over texts), without the time to read prompts. "random" texts repeat
nothing, and the draft model is always wrong about them.

The rows of a batch belong to one call, which ends when the last of them does. Times vary at random by a few percent, as
on a real machine. With `--off 0.1`, `auto` chooses draft lengths by costs that are off by about 10 %, each by another
amount. `--ablate` removes one mechanism of `auto` at a time and prints how the speed changes, in percent.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import exp
from pathlib import Path
from statistics import geometric_mean
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
from slipstream.core.interfaces import DraftScorer, Policy
from slipstream.core.kv_slots import Shapes
from slipstream.core.loop import Engine
from slipstream.core.session import Session
from slipstream.core.types import Row, Verdict
from slipstream.draft_length.costs import CostModel
from slipstream.draft_length.planner import STEPS, Planner, awaited_together
from slipstream.draft_length.policies import Fixed, Heuristic
from slipstream.drafters import Setup, sources, traits
from slipstream.errors import UsageError
from slipstream.reproducibility.expert_reads import PRIOR, ExpertReads
from slipstream.sampling.sampler import Sampler

CPU = torch.device("cpu")
LONGEST = 56  # tokens of a draft
NOISE = 0.03  # of a round's time, as a standard deviation of its logarithm
CATCH_UP = 3  # unread tokens that the draft model reads in its first step, at no extra time
Record = dict[str, Any]


@dataclass
class Recording:
    """Texts and costs. Token ids are renumbered from 0."""

    costs: CostModel  # as calibrated; it never learns, so that the clock runs by it
    records: list[Record]
    search: float = 0.0  # milliseconds of a row's search for a retrieval draft
    overhead: float = 0.0  # milliseconds of a round besides forwards and drafting
    trees: bool = False  # whether the target verifies trees

    def __post_init__(self) -> None:
        ids: dict[int, int] = defaultdict(lambda: len(ids))
        for record in self.records:
            for name in ("prompt", "output"):
                record[name] = [ids[token] for token in record[name]]
            steps = record.get("model") or []
            record["model"] = [[[ids[token] for token in pair] for pair in line] for line in steps]
        self.vocab_size = len(ids) + 1

    @property
    def has_draft(self) -> bool:
        """True if there is a draft model."""
        return bool(self.records[0]["model"])

    @classmethod
    def read(cls, file: Path) -> Recording:
        """Read what `policy_record.py` has written, without very short texts, and add random texts."""
        try:
            header, *records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            costs = costs_of(header["costs"])
            more = {name: header[name] for name in ("search", "overhead", "trees")}
            records = [record for record in records if len(record["output"]) > 8]
            records += random_texts(records[:8]) if records else []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{str(file)!r}: {error!r}; allowed: what policy_record.py has written") from error
        if not records:
            raise UsageError(f"{str(file)!r} holds no text of more than 8 tokens; allowed: at least one")
        return cls(costs, records, **more)


def costs_of(table: Mapping[str, Any]) -> CostModel:
    """The costs in the first line of a recording."""
    shapes = Shapes(tuple(table["widths"]), 0, alone=tuple(table["alone"]), totals=tuple(table["totals"]))
    measured, together, steps = (
        {int(count): float(milliseconds) for count, milliseconds in table[name].items()}
        for name in ("measured", "together", "steps")
    )
    return CostModel(
        shapes.width_for,
        lambda rows, drafted: shapes.total_for(rows + drafted) if together else None,
        measured,
        together,
        int(table["max_batch_size"]),
        steps,
        table["token"],
        ExpertReads(**table["experts"]) if "experts" in table else None,
    )


def random_texts(records: Sequence[Record], seed: int = 0) -> list[Record]:
    """Texts as long as these that cannot be drafted: the draft model has the same probabilities, but wrong tokens."""
    rng, texts = random.Random(seed), []
    for record in records:
        prompt, output = ([rng.randrange(50) for _ in record[name]] for name in ("prompt", "output"))
        wrong = [[[50 + rng.randrange(50), 100] for _ in line] for line in record.get("model") or []]
        texts.append(record | {"family": "random", "prompt": prompt, "output": output, "model": wrong})
    return texts


@dataclass
class SimulatedClock:
    """A clock that the recorded models and drafters advance."""

    now: float = 0.0  # seconds

    def read(self) -> float:
        return self.now


@dataclass
class RecordedModel:
    """Base of the stand-ins for both models. noise: varies the times."""

    recording: Recording
    clock: SimulatedClock
    noise: random.Random

    def __post_init__(self) -> None:
        self.backend = cast(Any, self)
        self.device, self.vocab_size = CPU, self.recording.vocab_size

    def take(self, milliseconds: float) -> None:
        """Advance the clock, with some noise."""
        self.clock.now += milliseconds / 1e3 * exp(self.noise.gauss(0, NOISE))


class RecordedTarget(RecordedModel):
    """Stands in for the target's session in `Engine`. Reading prompts takes no time."""

    longest_draft = LONGEST
    shapes: Any = None

    table = SimpleNamespace(longest_short=None, returns_prompt_logits=True, longest_draft=lambda rows: LONGEST)

    def __post_init__(self) -> None:
        super().__post_init__()
        reads, self._distinct = self.recording.costs.experts, 0.0
        self.experts = reads and SimpleNamespace(
            layers=1, count=reads.count, used=reads.used, num_read=lambda: self._distinct
        )

    def prefill(self, rows: Sequence[Row], *, logits: bool = False) -> Tensor | None:
        """Logits of the first token of new rows."""
        return self._logits([self._text(row)[:1] for row in rows]) if logits else None

    def fits_tree(self, rows: Sequence[Row], draft: Draft) -> bool:
        """True if a forward takes such a tree."""
        return len(rows) == 1 or self.recording.costs.ragged(len(rows), sum(draft.lengths)) is not None

    def score_tree(self, rows: Sequence[Row], draft: Draft) -> Tensor:
        """[B, K + 1, V] logits whose argmax after each node is the recorded text's next token."""
        assert draft.parents is not None
        self._verify(rows, [sum(draft.lengths)])
        chosen = []
        for row, parents in zip(rows, draft.parents, strict=True):
            text, depths = self._text(row), list[int]()
            for parent in parents:
                depths.append(0 if parent < 0 else depths[parent] + 1)
            line = [text[0], *(text[depth + 1] if depth + 1 < len(text) else 0 for depth in depths)]
            chosen.append(line + [0] * (draft.width + 1 - len(line)))
        return self._logits(chosen)

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int]) -> Tensor:
        """[B, K + 1, V] logits whose argmax is the recorded text."""
        self._verify(rows, lengths)
        width = draft.shape[1] + 1
        return self._logits([(self._text(row) + [0] * width)[:width] for row in rows])

    def verify_greedy(self, rows: Sequence[Row], draft: Draft) -> Verdict:
        """Accept each draft as far as it is the recorded text."""
        self._verify(rows, draft.lengths)
        accepted, following = [], []
        for row, line, length in zip(rows, draft.tokens.tolist(), draft.lengths, strict=True):
            text = self._text(row)
            pairs = enumerate(zip(line[:length], text, strict=False))
            count = next((i for i, (token, actual) in pairs if token != actual), min(length, len(text) - 1))
            accepted.append(count)
            following.append(text[count])
        return Verdict(torch.tensor(accepted), torch.tensor(following))

    def _verify(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        seconds = self.recording.costs.verify(len(rows), max(lengths), sum(lengths))
        if (reads := self.recording.costs.experts) is not None:
            self._distinct += reads.expected(len(rows), len(rows) + sum(lengths))
        self.take(1e3 * seconds + self.recording.overhead)

    def _text(self, row: Row) -> list[int]:
        """The rest of the row's recorded output."""
        return list(self.recording.records[row.index]["output"][row.num_output_tokens :])

    def _logits(self, chosen: Sequence[Sequence[int]]) -> Tensor:
        tokens = torch.tensor(chosen)
        return torch.zeros(*tokens.shape, self.vocab_size).scatter_(2, tokens[..., None], 1.0)


class RecordedDraftModel(RecordedModel):
    """Stands in for the draft model's session in `ModelDrafter`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._read: dict[Row, int] = {}  # tokens of each row that it has read

    begin = DraftScorer.begin
    acceptance = DraftScorer.acceptance
    token_ids = None  # it scores the whole vocabulary

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        """[B, 1, V] logits with the probabilities recorded at this step, uniform where nothing was recorded."""
        step = draft.shape[1]
        if not step:
            unread = [len(row.tokens) - self._read.get(row, 0) for row in rows]
            self.take((self.recording.costs.token or 0.0) * sum(count for count in unread if count > CATCH_UP))
            self._read |= {row: len(row.tokens) for row in rows}
        self.take(1e3 * self.recording.costs.step(len(rows)))
        probs = torch.full((len(rows), 1, self.vocab_size), 1e-9)
        for i, row in enumerate(rows):
            record, position = self.recording.records[row.index], row.num_output_tokens
            if position < len(record["model"]) and step < len(record["model"][position]):
                tokens, leaders = (torch.tensor(record[name][position][step]) for name in ("model", "chances"))
                probs[i, 0] += (1 - float(leaders.sum())) / self.vocab_size
                probs[i, 0, tokens] = leaders
        return probs.log()

    def draft_greedy(self, rows: Sequence[Row], steps: int, vocab_size: int) -> Tensor | None:
        """None: steps are drafted one by one."""
        return None

    def keep_drafts(self, lengths: Sequence[int]) -> None:
        """Do nothing, as there is no cache."""

    def holds(self, row: Row) -> bool:
        """True if it has read some of the row's text."""
        return row in self._read


@dataclass
class Replay:
    """Decodes recorded texts with one setting. drafted: length of every draft, of each round and row."""

    recording: Recording
    clock: SimulatedClock
    engine: Engine
    drafted: list[int] = field(default_factory=list)

    def seconds(self, chosen: Sequence[int]) -> float:
        """Decode these texts as one batch and return the simulated seconds."""
        rows, before = [self._row(i) for i in chosen], self.clock.now
        with awaited_together(rows):
            while active := [row for row in rows if row.finish_reason is None]:
                for round_ in self.engine.step(self.engine.batch(active)):
                    self.drafted.append(len(round_.draft))
                failed = next((row.error for row in active if row.error is not None), None)
                if failed is not None:
                    raise failed
        self.rows = rows
        return self.clock.now - before

    def _row(self, index: int) -> Row:
        record = self.recording.records[index]
        length, stops = len(record["output"]), record.get("stops", False)
        limit = max(record.get("max_tokens", length), length) if stops else length
        row = Row(index, list(record["prompt"]), SamplingParams(max_tokens=limit), seed=0)
        if stops:
            row.find_stop = lambda tokens, _: rest if (rest := length - row.num_output_tokens) <= len(tokens) else None
        return row


def replay_of(
    recording: Recording,
    drafter: str,
    make_policy: Callable[[RecordedDraftModel], Policy],
    seed: int = 0,
) -> Replay:
    """A replay that has learned nothing yet."""
    noise, clock = random.Random(seed), SimulatedClock()
    target = RecordedTarget(recording, clock, noise)
    draft = RecordedDraftModel(recording, clock, noise)
    policy = make_policy(draft)
    planner = policy if isinstance(policy, Planner) else None
    setup = Setup(
        CPU,
        recording.vocab_size,
        cast(Any, draft) if recording.has_draft else None,
        coupled=True,
        planner=planner,
        acceptance_probs=planner is not None,
        steps=LONGEST if planner is None else STEPS,
        siblings=int(planner is not None and recording.trees and traits(drafter).branches),
    )
    drawn_from = sources(drafter, setup)

    def search(rows: Sequence[Row], lengths: Sequence[int], *others: Any) -> Draft:
        target.take(recording.search * len(rows))
        return look_up(rows, lengths, *others)

    if drawn_from and not drawn_from[0].takes_forwards:
        retriever: Any = drawn_from[0].drafter
        look_up, retriever.propose = retriever.propose, search
    engine = Engine(cast(Session, target), drawn_from, policy, Sampler, now=clock.read)
    return Replay(recording, clock, engine)


def auto(recording: Recording, drafter: str, cost_model: CostModel, seed: int = 0) -> Replay:
    """A replay whose planner chooses draft lengths, as `auto` does."""
    declared = traits(drafter)

    def make_planner(draft: RecordedDraftModel) -> Planner:
        return Planner(
            cost_model,
            longest=LONGEST,
            room=LONGEST if declared.needs_cost_model else 2 * STEPS,
            has_model=declared.needs_forwards,
            only_model=declared.needs_forwards and not declared.needs_cost_model,
            reads=declared.has_own_cache,
            has_cached=draft.holds,
        )

    return replay_of(recording, drafter, make_planner, seed)


def settings(recording: Recording, off: float = 0.0, seed: int = 0) -> Iterator[tuple[str, Replay]]:
    """Names and replays of all settings; none has learned anything yet. off, seed: see `cost_model_of`."""

    def fixed(drafter: str, policy: Policy) -> Replay:
        return replay_of(recording, drafter, lambda _: policy, seed)

    yield "none", fixed("none", Fixed(0))
    for name, length in [("ngram", 3), ("ngram", 8), ("suffix:outputs=0", 3), ("suffix:outputs=0", 7)]:
        yield f"{name}@{length}", fixed(name, Fixed(length))
    if recording.has_draft:
        for name, length in [("model", 2), ("model", 4), ("model", 6), ("model:p=40", 6), ("hybrid", 7)]:
            yield f"{name}@{length}", fixed(name, Fixed(length))
        yield "model heuristic", fixed("model", Heuristic(8))
    for name in ("ngram", "suffix:outputs=0", *(("model", "hybrid") if recording.has_draft else ())):
        yield f"{name} auto", auto(recording, name, cost_model_of(recording.costs, off, seed), seed)


def cost_model_of(costs: CostModel, off: float = 0.0, seed: int = 0) -> CostModel:
    """The cost model of a decoder that has learned nothing yet.

    off: the error of each measurement, as a standard deviation of its logarithm.
    """
    noise = random.Random(seed)

    def measured(points: Mapping[int, float]) -> dict[int, float]:
        return {count: milliseconds * exp(noise.gauss(0, off)) for count, milliseconds in points.items()}

    return CostModel(
        costs.pad,
        costs.ragged,
        measured(costs.measured),
        measured(costs.together),
        costs.max_batch_size,
        {} if not any(costs.steps.values()) else measured(costs.steps),
        (costs.token or 0.0) * exp(noise.gauss(0, off)) or None,
        costs.experts and replace(costs.experts, exponent=PRIOR),
    )


def groups_of(recording: Recording, batch: int, seed: int) -> dict[str, list[list[int]]]:
    """Indices of texts decoded together, by family; above batch 1 also "mixed", of all but random ones."""
    order = list(range(len(recording.records)))
    random.Random(seed).shuffle(order)
    families = defaultdict[str, list[int]](list)
    for i in order:
        families[recording.records[i]["family"]].append(i)
    if batch > 1:
        families["mixed"] = [i for i in order if recording.records[i]["family"] != "random"]
    return {
        family: [texts[first : first + batch] for first in range(0, len(texts), batch)]
        for family, texts in sorted(families.items())
    }


def seconds_of(replay: Replay, groups: Mapping[str, Sequence[Sequence[int]]], seed: int) -> dict[str, list[float]]:
    """The simulated seconds of each group. Families alternate, so that what one teaches is used for another."""
    turns = [(family, i) for family, texts in groups.items() for i in range(len(texts))]
    random.Random(seed).shuffle(turns)
    seconds = {family: [0.0] * len(texts) for family, texts in groups.items()}
    for family, i in turns:
        seconds[family][i] = replay.seconds(groups[family][i])
    return seconds


def speed_ups(plain: Mapping[str, Sequence[float]], seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Geometric means of the speed-ups: of all texts but random ones first, then by family."""
    ratios = {family: [a / b for a, b in zip(plain[family], seconds[family], strict=True)] for family in plain}
    everything = [ratio for family, values in ratios.items() if family != "random" for ratio in values]
    return {"all": geometric_mean(everything)} | {family: geometric_mean(values) for family, values in ratios.items()}


def ablation(
    recording: Recording, batch: int, off: float, seeds: Sequence[int], without: Mechanism | None
) -> dict[str, float]:
    """The speed-up of `auto`, without one of its mechanisms, over plain decoding: by family, means over the seeds."""
    name = "hybrid" if recording.has_draft else "suffix:outputs=0"
    by_family = defaultdict[str, list[float]](list)
    for seed in seeds:
        groups = groups_of(recording, batch, seed)
        with ExitStack() as stack:
            for owner, attribute, replacement in without.patches if without is not None else ():
                stack.enter_context(patch.object(owner, attribute, replacement))
            plain = replay_of(recording, "none", lambda _: Fixed(0), seed=seed)
            ablated = auto(recording, name, cost_model_of(recording.costs, off, seed), seed)
            means = speed_ups(*(seconds_of(replay, groups, seed) for replay in (plain, ablated)))
        for family, mean in means.items():
            by_family[family].append(mean)
    return {family: geometric_mean(means) for family, means in by_family.items()}


def show_ablation(recording: Recording, batch: int, off: float, seeds: Sequence[int]) -> None:
    """Print how much speed the lack of each mechanism costs."""
    full = ablation(recording, batch, off, seeds, None)
    table = Table(
        title=f"auto without each mechanism, batch {batch}, costs off by {off:.0%}: change of speed in percent"
    )
    for column in ("without", "all", "worst family", "random, of plain"):
        table.add_column(column)
    table.add_row("(nothing)", f"{full['all']:.3f}x", "", f"{full.get('random', 1):.3f}")
    for mechanism in MECHANISMS:
        ablated = ablation(recording, batch, off, seeds, mechanism)
        change = {family: 100 * (ablated[family] / full[family] - 1) for family in ablated}
        worst = min((family for family in change if family != "all"), key=lambda family: change[family])
        random_speed = f"{ablated.get('random', 1):.3f}"
        table.add_row(mechanism.name, f"{change['all']:+.1f}", f"{change[worst]:+.1f} {worst}", random_speed)
    console.print(table)


def main(
    file: Path,
    batch: Count = 1,
    seed: int = 0,
    off: Annotated[float, typer.Option(min=0, max=1, help="error of the costs that auto knows; 0.1: 10 %")] = 0.0,
    ablate: Annotated[bool, typer.Option(help="remove one mechanism of auto at a time")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="with --ablate: runs, each with the texts in another order")] = 3,
) -> None:
    """Print the speed-up of every setting on a recording, or with --ablate the worth of each mechanism of `auto`."""
    recording = Recording.read(file)
    if ablate:
        show_ablation(recording, batch, off, range(seed, seed + repeats))
        return
    groups = groups_of(recording, batch, seed)
    plain: dict[str, list[float]] = {}
    table = Table(title=f"speed-up over plain decoding, batch {batch}, {len(recording.records)} texts")
    for name, replay in settings(recording, off, seed):
        seconds = seconds_of(replay, groups, seed)
        plain = plain or seconds
        means = speed_ups(plain, seconds)
        if not table.columns:
            for column in ("setting", *means):
                table.add_column(column, justify="left" if column == "setting" else "right")
        table.add_row(name, *(f"{mean:.3f}" if family == "all" else f"{mean:.2f}" for family, mean in means.items()))
    console.print(table)


if __name__ == "__main__":
    run(main)
