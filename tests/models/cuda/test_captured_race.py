"""Captured draws are those of `Race` to the bit. `Tape` stands in for CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.core import rng
from slipstream.core.rng import Race, words
from slipstream.models.cuda.captured_race import CapturedRace
from slipstream.models.cuda.graph_store import Rerun
from tests.support.fake_cuda_graph import Tape

VOCAB, CPU = 1000, torch.device("cpu")


class OnGpu(CapturedRace):
    """Computes all noise, as on a GPU; on a CPU, `Race` computes it for possible tokens only."""

    def speeds(self, probs: Tensor, bits: Tensor, token_ids: Tensor | None = None) -> Tensor:
        return probs / rng._exponential(self._steps + bits[:, None])


def case(rows: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = (3 * torch.randn(rows, VOCAB, generator=generator)).to(dtype)
    scores[:, seed % VOCAB] = float("-inf")
    temperatures = torch.tensor([(0.7, 0.0, 1.3)[(row + seed) % 3] for row in range(rows)])
    return scores, temperatures, Race(VOCAB, CPU).bits(words(range(seed, seed + rows)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2])
def test_captured_leaders_are_those_of_the_race_to_the_bit(
    dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape, plain = Tape(), Race(VOCAB, CPU)
    race, rerun = OnGpu(VOCAB, CPU, tape), OnGpu(VOCAB, CPU, Rerun())
    drawn = set[int]()
    for seed in range(30):
        inputs = case(1 + seed % 4, dtype, seed)
        expected = plain.leaders(*inputs, count)
        with monkeypatch.context() as patch:
            patch.setattr(rng, "argmax", lambda scores: scores.argmax(-1))  # as on a GPU: NumPy cannot be recorded
            for leaders in (race.leaders(*inputs, count), rerun.leaders(*inputs, count)):
                assert all(map(torch.equal, leaders, expected))
        drawn |= set(expected[0].flatten().tolist())
    assert (tape.captured, tape.replayed) == (4, 30) and len(drawn) > 20


def test_a_draw_with_the_keys_of_another_position_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "argmax", lambda scores: scores.argmax(-1))
    race, (scores, temperatures, bits) = OnGpu(VOCAB, CPU, Tape()), case(4, torch.float32, 0)
    first, _ = race.leaders(scores, temperatures, bits, 1)
    other, _ = race.leaders(scores, temperatures, bits + 1, 1)
    is_sampled = temperatures > 0
    assert not torch.equal(first[is_sampled], other[is_sampled])
    assert torch.equal(first[~is_sampled], other[~is_sampled])
