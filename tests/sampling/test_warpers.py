"""Top-p by selection keeps what a full sort keeps, ties and impossible tokens included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.core.rng import Race, WarpOptions, key
from slipstream.sampling import warpers as truncation
from slipstream.sampling.warpers import NEVER, Highest, Warp, keep_top_p_selected, keep_top_p_sorted

CPU = torch.device("cpu")
SIZES = st.sampled_from([3, 40, 257, 700, 3000])
TOP_P = st.one_of(st.floats(1e-6, 0.999999), st.sampled_from([0.25, 0.5, 0.75, 0.9, 1e-9, 1 - 1e-7]))


def full_sort(scores: Tensor, top_p: float, top_k: int = 0) -> Tensor:
    """[N, V] bool: the tokens kept by definition, found by sorting each position whole."""
    kept = torch.zeros_like(scores, dtype=torch.bool)
    for i, line in enumerate(scores):
        if top_k:
            line = line.masked_fill(line < line.topk(min(top_k, len(line))).values[-1], NEVER)
        ascending, order = torch.sort(line)
        removed = ascending.softmax(-1).cumsum(-1) <= 1 - torch.tensor(top_p)
        removed[-1] = False
        kept[i, order[~removed]] = True
        kept[i] &= line > NEVER
    return kept


def scores_of(vocab: int, seed: int, scale: float, rounding: float, impossible: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = scale * torch.randn(6, vocab, generator=generator)
    if rounding:
        scores = (scores / rounding).round() * rounding  # many equal scores
    scores[torch.rand(scores.shape, generator=generator) < impossible] = NEVER
    scores[:, seed % vocab] = scores.amax(-1).clamp(min=0.0)
    return scores


@settings(max_examples=150)
@given(
    vocab=SIZES,
    seed=st.integers(0, 1 << 20),
    scale=st.sampled_from([0.0, 0.3, 2.0, 6.0, 40.0]),
    rounding=st.sampled_from([0.0, 0.0, 0.125, 1.0]),
    impossible=st.sampled_from([0.0, 0.5, 0.99]),
    top_p=TOP_P,
    top_k=st.sampled_from([0, 0, 1, 5, 64, 1000]),
)
def test_selection_keeps_what_the_full_sort_keeps(
    vocab: int, seed: int, scale: float, rounding: float, impossible: float, top_p: float, top_k: int
) -> None:
    scores = scores_of(vocab, seed, scale, rounding, impossible)
    distribution = Warp(WarpOptions(1.0, top_k, top_p), CPU)(scores)
    warped = scores - scores.amax(-1, keepdim=True)
    expected = warped.masked_fill(~full_sort(warped, top_p, top_k), NEVER).softmax(-1)
    assert torch.equal(distribution, expected)


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75])
def test_a_threshold_that_is_met_exactly_is_decided_as_the_full_sort_does(top_p: float) -> None:
    scores = torch.full((1, 400), NEVER)
    scores[0, 17:21] = 0.0  # a quarter each: the cumulated probability reaches top_p exactly
    top = torch.tensor([top_p])
    assert torch.equal(keep_top_p_selected(scores, top), keep_top_p_sorted(scores, top))


def positions_sorted(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> int:
    """How many positions `act` sorts in full."""
    counts = []

    def counting(scores: Tensor, top_p: Tensor) -> Tensor:
        counts.append(len(scores))
        return keep_top_p_sorted(scores, top_p)

    monkeypatch.setattr(truncation, "keep_top_p_sorted", counting)
    act()
    monkeypatch.undo()
    return sum(counts)


def test_only_positions_that_selection_leaves_open_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    peaked, flat = scores_of(3000, 1, 6.0, 0.0, 0.0), torch.zeros(1, 3000)
    top_p = torch.tensor([0.9])
    assert positions_sorted(monkeypatch, lambda: keep_top_p_selected(peaked, top_p)) == 0
    assert positions_sorted(monkeypatch, lambda: keep_top_p_selected(torch.cat([peaked, flat]), top_p)) == 1
    after_top_k = Warp(WarpOptions(0.8, 50, 0.9), CPU)
    assert positions_sorted(monkeypatch, lambda: after_top_k(scores_of(3000, 2, 1.0, 0.0, 0.0))) == 0


def test_a_wrong_selection_is_caught() -> None:
    """Negative control: the highest scores are listed in a shifted order."""
    scores, top_p = scores_of(3000, 3, 6.0, 0.0, 0.0), torch.tensor([0.9])
    values, tokens = scores.topk(64, dim=-1)
    shifted = Highest(values.roll(-1, -1), tokens)
    assert not torch.equal(keep_top_p_selected(scores, top_p, shifted), keep_top_p_sorted(scores, top_p))


@settings(max_examples=60)
@given(SIZES, st.integers(0, 1 << 20), st.sampled_from([0.0, 0.3, 0.9, 0.999, 1.0]))
def test_noise_for_the_possible_tokens_alone_draws_what_noise_for_all_draws(
    vocab: int, seed: int, impossible: float
) -> None:
    distributions = scores_of(vocab, seed, 3.0, 0.0, impossible).softmax(-1)
    if impossible == 1.0:
        distributions[2:4] = 0.0
    race, keys = Race(vocab, CPU), [key(seed, i) for i in range(len(distributions))]
    plain = [
        int((distribution / race.noise(bits)).argmax()) for distribution, bits in zip(distributions, keys, strict=True)
    ]
    assert race.draw(distributions, keys).tolist() == plain
