"""The costs of a mixture's forwards follow the distinct experts that they read, however its routers choose."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.rounds import Seconds
from slipstream.core.types import Row
from slipstream.draft_length.costs import CostModel
from slipstream.reproducibility import timing
from slipstream.reproducibility.calibration import TIMED_IF_GUARANTEED, Calibration
from slipstream.reproducibility.expert_reads import ExpertReads
from slipstream.reproducibility.timing import EXPERTS_TIMED, MOST_TURNS, ForwardTimes
from tests.support.mixtures import mixture
from tests.support.rounds import add_round, step_numbers
from tests.support.tiny_models import shared

LAYERS, COUNT, USED = 12, 64, 4
EXPERT = 2.0  # milliseconds of an expert in every layer
OF_TEXT = {"independent": 0.0, "correlated": 0.3, "same experts": 1.0}
OF_RANDOM_TOKENS = 0.6
WIDTHS = range(1, 9)


class SimulatedMixture:
    """A mixture whose forwards take 12 ms, 0.3 ms for each token and `EXPERT` for each distinct expert.

    keeps: the chance that a token uses an expert of the token before it.
    """

    ragged = False
    layers, count, used = LAYERS, COUNT, USED

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, counts: bool) -> None:
        self.experts = self if counts else None
        self.device, self.random = torch.device("cpu"), random.Random(0)
        self.keeps, self.now, self.read, self.choice = OF_RANDOM_TOKENS, 0.0, 0, None
        self.forced = [0] * COUNT  # forwards that were made to use an expert
        monkeypatch.setattr(timing, "perf_counter", lambda: self.now)

    def num_read(self) -> int:
        return self.read

    def force(self, choice: Tensor | None) -> None:
        self.choice = choice
        for expert in set() if choice is None else set(choice.flatten().tolist()):
            self.forced[expert] += 1

    def forward(self, tokens: Tensor, starts: Sequence[int], **_: Any) -> Tensor:
        self.run(tokens.shape[1], 1)
        return torch.zeros(1, tokens.shape[1], 4)

    def run(self, tokens: int, rows: int) -> tuple[float, float]:
        """Seconds and distinct experts in a layer of a forward in which rows have as many tokens each."""
        read = sum(self._distinct(tokens, rows) for _ in range(LAYERS))
        seconds = (12 + 0.3 * tokens + EXPERT * read / LAYERS) / 1e3 * (1 + 0.02 * self.random.random())
        self.read, self.now = self.read + read, self.now + seconds
        return seconds, read / LAYERS

    def _distinct(self, tokens: int, rows: int) -> int:
        if self.choice is not None:
            assert self.choice.shape == (tokens, USED)
            return len(self.choice.unique())
        seen = set[int]()
        for _ in range(rows):
            chosen = set[int]()
            for _ in range(tokens // rows):
                kept = {expert for expert in chosen if self.random.random() < self.keeps}
                while len(kept) < USED:
                    kept.add(self.random.randrange(COUNT))
                chosen = kept
                seen |= chosen
        return len(seen)


def costs_of(mixture: SimulatedMixture) -> CostModel:
    """The costs that a calibration measures."""
    times = ForwardTimes.of(mixture, torch.zeros(128, dtype=torch.int64), [8] * 8, 8)  # type: ignore[arg-type]
    alone = times.alone(TIMED_IF_GUARANTEED, range(MOST_TURNS))
    experts = times.experts(EXPERTS_TIMED, range(MOST_TURNS))
    calibration = Calibration(TIMED_IF_GUARANTEED, 256, alone, totals=alone, experts=experts)
    assert mixture.choice is None
    shapes = SimpleNamespace(width_for=lambda width, rows: width)
    session = SimpleNamespace(shapes=shapes, num_tokens=lambda rows, drafted: rows + drafted, backend=mixture)
    return CostModel.calibrated(session, calibration, timing.DraftTimes(), 8)  # type: ignore[arg-type]


def learn(costs: CostModel, mixture: SimulatedMixture, rounds: int, rows: int = 1) -> None:
    """Rounds of all widths in random order, on a machine half as fast as at calibration."""
    running = [Row(i, [1], SamplingParams(max_tokens=10_000), seed=0) for i in range(rows)]
    for row in running:
        add_round(row, step=-1, num_rows=rows)
    for _ in range(rounds):
        width = mixture.random.choice(WIDTHS)
        seconds, read = mixture.run(width * rows, rows)
        timed = Seconds(verify=2 * seconds, total=2 * seconds)
        step = next(step_numbers)
        for row in running:
            counted = None if mixture.experts is None else read
            add_round(row, width - 1, step=step, num_rows=rows, seconds=timed, experts_read=counted)
        costs.learn(running)


def errors(costs: CostModel, mixture: SimulatedMixture, rows: int = 1) -> list[float]:
    """For each width, by how much the predicted seconds differ from the mean of many forwards."""
    means = [2 * fmean(mixture.run(width * rows, rows)[0] for _ in range(50)) for width in WIDTHS]
    return [abs(costs.verify(rows, width - 1) / mean - 1) for width, mean in zip(WIDTHS, means, strict=True)]


@pytest.mark.parametrize("routing", OF_TEXT)
@pytest.mark.parametrize("rows", [1, 4])
def test_seconds_are_predicted_for_every_width_and_routing(
    monkeypatch: pytest.MonkeyPatch, routing: str, rows: int
) -> None:
    mixture = SimulatedMixture(monkeypatch, counts=True)
    costs = costs_of(mixture)
    assert costs.experts is not None and costs.experts.milliseconds == pytest.approx(EXPERT, rel=0.05)
    assert min(mixture.forced) > 0 and max(mixture.forced) < 2 * min(mixture.forced)  # they take turns
    mixture.keeps = OF_TEXT[routing]
    learn(costs, mixture, 40, rows)
    assert max(errors(costs, mixture, rows)) < 0.1


@pytest.mark.parametrize("routing", OF_TEXT)
def test_times_of_random_tokens_would_mislead(monkeypatch: pytest.MonkeyPatch, routing: str) -> None:
    mixture = SimulatedMixture(monkeypatch, counts=False)
    costs = costs_of(mixture)
    assert costs.experts is None
    mixture.keeps = OF_TEXT[routing]
    learn(costs, mixture, 40)
    assert max(errors(costs, mixture)) > 0.1


def test_unusual_choices_of_routers_are_not_taken_for_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = SimulatedMixture(monkeypatch, counts=True)
    costs, running = costs_of(mixture), [Row(0, [1], SamplingParams(max_tokens=100), seed=0)]
    add_round(running[0], step=-1)
    for read in (4.0, 4.0, 16.0):
        seconds = Seconds(verify=12.3e-3 + EXPERT * read / 1e3, total=1.0)
        add_round(running[0], 0, seconds=seconds, experts_read=read)
        costs.learn(running)
    assert costs.verify(1, 0) == pytest.approx(12.3e-3 + EXPERT * 4 / 1e3, rel=0.03)


@pytest.mark.slow
def test_a_mixture_is_calibrated_and_counted_and_keeps_its_texts(tmp_path: Path) -> None:
    mixture("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path)
    prompts = [[5, 9, 5, 9, 5, 9, 70, 71], [100, 7, 33]]
    params = SamplingParams(temperature=0.0, max_tokens=60)
    texts, read = [], []
    for drafter in ("none", "suffix"):
        with SpeculativeDecoder(str(tmp_path), drafter=drafter, max_batch_size=2) as decoder:
            assert decoder.calibration is not None and decoder.calibration.experts is not None
            assert (decoder.calibration.experts.count, decoder.calibration.experts.used) == (8, 3)
            results = [*decoder.generate(prompts, params), decoder.generate(prompts[0], params)]
        texts.append([result.token_ids for result in results])
        read.append([round.experts_read for round in results[-1].rounds])
    assert texts[0] == texts[1]
    plain, drafted = ([count for count in counts if count is not None] for counts in read)
    assert all(3 <= count <= 8 for count in (*plain, *drafted)) and len(plain) >= 59 and max(drafted) > 3
    assert results[-1].to_dict()["stats"]["experts_per_round"] == pytest.approx(fmean(drafted))
    dense = SpeculativeDecoder(shared("qwen2"), drafter="none").generate([5, 9, 5], params)
    assert dense.stats.experts_per_round is None and {round.experts_read for round in dense.rounds} == {None}


@pytest.mark.parametrize("exponent", [0.0, 0.5, 0.85, 1.0])
def test_the_exponent_is_found_from_counts(exponent: float) -> None:
    reads, true = ExpertReads(128, 8, 1.0), ExpertReads(128, 8, 1.0, exponent)
    assert true.expected(1, 1) == pytest.approx(8) and true.expected(64, 64) < 128
    assert true.expected(4, 4) == pytest.approx(128 * (1 - (1 - 8 / 128) ** 4))  # rows choose independently
    for _ in range(60):
        for rows, tokens in ((1, 1), (1, 4), (4, 4), (4, 9)):
            reads.learn(rows, tokens, true.expected(rows, tokens))
    assert reads.exponent == pytest.approx(exponent, abs=0.01)
    reads.learn(1, 64, 128.0)  # all of them
    assert 0 <= reads.exponent <= 1
