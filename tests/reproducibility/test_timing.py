"""How long a draft model takes: measured once per machine, and used by `auto`."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.types import Row
from slipstream.models.toy import VOCAB_SIZE, ToyBackend
from slipstream.reproducibility import timing
from slipstream.reproducibility.timing import (
    FEWEST_OF_FEW,
    FEWEST_RAGGED_TURNS,
    FEWEST_TURNS,
    MOST_TURNS,
    SHORT,
    STEPS,
    TEXT,
    TURNS,
    DraftTimes,
    ForwardTimes,
    time_drafts,
)
from tests.support.tiny_models import perturbed, prompts, shared

TIMES = "slipstream.wiring.model_pair.remembered_draft_times"
MEASURE = "slipstream.wiring.model_pair.time_drafts"


class Sleeping:
    """A scorer that takes a millisecond per row and step, and one for every token that it reads."""

    def __init__(self) -> None:
        self.backend = ToyBackend(2)
        self.texts: dict[int, list[int]] = {}
        self.read_rows: set[Row] = set()

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        unread = [row for row in rows if row not in self.read_rows]
        self.read_rows |= set(rows)
        self.texts |= {id(row): row.tokens for row in unread}
        sleep(1e-3 * (len(rows) + sum(len(row.tokens) - 1 for row in unread)))
        return torch.zeros(len(rows), 1, VOCAB_SIZE)


def test_time_drafts_times_steps_by_rows_and_the_reading_of_a_token() -> None:
    scorer = Sleeping()
    times = time_drafts(scorer, 6)  # type: ignore[arg-type]  # it only scores
    assert list(times.steps) == [1, 2, 4, 6]
    assert all(times.steps[rows] >= rows for rows in times.steps)  # a busy machine only adds time
    assert times.token is not None and times.token >= 0.5
    lengths = [len(text) for text in scorer.texts.values()]
    assert lengths == [TEXT] * TURNS + [SHORT] * (2 + 4 + 6) and STEPS > 1
    assert len(set(map(tuple, scorer.texts.values()))) == len(lengths)  # every text is new, so none is cached


def test_only_steps_of_possible_batch_sizes_are_timed() -> None:
    assert list(time_drafts(Sleeping(), 1).steps) == [1]  # type: ignore[arg-type]


def draft_steps_at(monkeypatch: pytest.MonkeyPatch, share: float) -> list[int]:
    """Draft steps per round of `auto`, where a step takes this share of the target's fastest forward."""
    decoder = SpeculativeDecoder(shared("qwen2"), perturbed("qwen2"), max_batch_size=2)
    assert decoder.calibration is not None
    step_milliseconds = share * min(decoder.calibration.milliseconds.values())
    monkeypatch.setattr(TIMES, lambda *_: DraftTimes({1: step_milliseconds, 2: step_milliseconds}, step_milliseconds))
    decoder = SpeculativeDecoder(shared("qwen2"), perturbed("qwen2"), drafter="model", max_batch_size=2)
    result = decoder.generate(prompts((9,))[0], SamplingParams(max_tokens=8))
    assert result.token_ids == decoder.using("none").generate(prompts((9,))[0], SamplingParams(max_tokens=8)).token_ids
    return [round.num_draft_steps for round in result.rounds]


@pytest.mark.slow
def test_a_draft_model_slower_than_its_target_is_not_asked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(draft_steps_at(monkeypatch, 1_000.0)[:4])  # it is tried only later
    assert any(draft_steps_at(monkeypatch, 0.001)[:4])


@pytest.mark.slow
@pytest.mark.draft_times
def test_draft_times_are_measured_once_unless_their_file_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    measured = []
    monkeypatch.setattr(MEASURE, lambda scorer, most: measured.append(most) or DraftTimes({1: 2.0, most: 3.0}, 0.1))

    def load() -> DraftTimes:
        return SpeculativeDecoder(shared("qwen2"), perturbed("qwen2"), max_batch_size=2)._models.draft_times

    assert load() == load() == DraftTimes({1: 2.0, 2: 3.0}, 0.1)
    assert measured == [2]
    (file,) = [
        path
        for path in tmp_path.glob("calibration/*.json")
        if "steps" in json.loads(path.read_text())["values"]["timed"]
    ]
    for value, damaged in (('"token"', '"tokens"'), ("2.0", "0.0"), ("0.1", "Infinity")):
        caplog.clear()
        file.write_text(file.read_text().replace(value, damaged))
        with caplog.at_level(logging.WARNING, "slipstream"):
            assert load() == DraftTimes({1: 2.0, 2: 3.0}, 0.1)
        assert "is damaged and measured again" in caplog.text
    assert measured == [2, 2, 2, 2]


@pytest.mark.draft_times
def test_without_calibration_no_draft_times_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MEASURE, lambda scorer, most: pytest.fail("measured"))
    decoder = SpeculativeDecoder(shared("qwen2"), perturbed("qwen2"), reproducible=False)
    assert decoder._models.draft_times == DraftTimes()


# times of forwards do not depend on when the machine was busy

ALONE = {width: 10.0 + width for width in (1, 8, 16)}
FORWARDS = [(turn, total) for turn in range(2) for total in (8, 12)]


class Clocked:
    """A forward takes 10 ms and 1 ms per token, times `slowness`; the first ragged one takes a second more."""

    ragged = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slowness, self.first, self.counts = 0.0, 1.0, True, list[int]()
        monkeypatch.setattr(timing, "perf_counter", lambda: self.now)

    def forward(self, tokens: Tensor, starts: Sequence[int], **_: Any) -> Tensor:
        return self._taken(tokens.numel())[None]

    def forward_ragged(self, tokens: Tensor, segments: Sequence[Any], widths: Sequence[int]) -> Tensor:
        assert sum(segment.count for segment in segments) == len(tokens)
        if self.first:
            self.first, self.now = False, self.now + 1.0
        return self._taken(len(tokens))

    def _taken(self, count: int) -> Tensor:
        self.now += 1e-3 * self.slowness * (10 + count)
        self.counts.append(count)
        return torch.zeros(count, 4)


@pytest.mark.parametrize("slowness", [1.0, 2.0])
def test_times_of_ragged_forwards_are_relative_to_those_of_one_row(
    monkeypatch: pytest.MonkeyPatch, slowness: float
) -> None:
    backend = Clocked(monkeypatch)
    times = ForwardTimes(backend, torch.zeros(64, dtype=torch.int64), [8] * 8, 8)  # type: ignore[arg-type]
    alone = times.alone([1, 8, 16], range(3))
    assert alone == pytest.approx(ALONE)
    backend.slowness = slowness  # the machine becomes slower
    assert times.ragged(FORWARDS, [1, 8, 16], alone) == pytest.approx({8: 18.0, 12: 22.0})
    assert times.ragged([], [1, 8, 16], alone) == {}


def test_slow_forwards_of_few_tokens_get_more_turns_than_those_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Clocked(monkeypatch)
    backend.slowness = 20.0  # a forward takes half a second
    times = ForwardTimes(backend, torch.zeros(128, dtype=torch.int64), [8] * 8, 8)  # type: ignore[arg-type]
    alone = times.alone([1, 16, 64], range(MOST_TURNS))
    assert [backend.counts.count(width) for width in (1, 16, 64)] == [FEWEST_OF_FEW, FEWEST_OF_FEW, FEWEST_TURNS]
    backend.counts.clear()
    times.ragged([(turn, total) for turn in range(MOST_TURNS) for total in (8, 32, 64)], [1, 16, 64], alone)
    assert [backend.counts.count(total) for total in (32, 64)] == [FEWEST_OF_FEW, FEWEST_RAGGED_TURNS]
