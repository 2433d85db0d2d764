"""Times of forwards do not depend on when the machine was busy with something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.reproducibility import timing
from slipstream.reproducibility.timing import (
    FEWEST_OF_FEW,
    FEWEST_RAGGED_TURNS,
    FEWEST_TURNS,
    MOST_TURNS,
    ForwardTimes,
)

ALONE = {width: 10.0 + width for width in (1, 8, 16)}
TURNS = [(turn, total) for turn in range(2) for total in (8, 12)]


class Clocked:
    """A forward takes 10 ms and one for each token, times how slow the machine is just then; the first twice that."""

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
def test_ragged_forwards_count_beside_those_of_one_row(monkeypatch: pytest.MonkeyPatch, slowness: float) -> None:
    backend = Clocked(monkeypatch)
    times = ForwardTimes(backend, torch.zeros(64, dtype=torch.int64), [8] * 8, 8)  # type: ignore[arg-type]
    alone = times.alone([1, 8, 16], range(3))
    assert alone == pytest.approx(ALONE)
    backend.slowness = slowness  # as it became after that
    assert times.ragged(TURNS, [1, 8, 16], alone) == pytest.approx({8: 18.0, 12: 22.0})
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
