"""Keyed random numbers: their distribution, with a biased draw that must be caught, and what they depend on."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.core.rng import Race, Stream, argmax, key, uniform, words

CPU = torch.device("cpu")
PROBS = torch.tensor([0.30, 0.02, 0.0, 0.18, 0.25, 0.0, 0.15, 0.10])
DRAWS = 10_000
SUSPICIOUS = 1e-4  # the seeds are fixed, so a test either always passes or never does


def p_value(observed: Tensor, expected: Tensor) -> float:
    """Chi-square test of counts; categories that cannot occur are left out."""
    possible = expected > 0
    observed, expected = observed[possible].double(), expected[possible].double()
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def keys(draws: int = DRAWS, stream: int = Stream.TOKEN, seed: int = 7) -> list[int]:
    return [key(seed, stream, position) for position in range(draws)]


@cache
def winners(stream: int = Stream.TOKEN, seed: int = 7) -> Tensor:
    return Race(len(PROBS), CPU).draw(PROBS.expand(DRAWS, -1), keys(stream=stream, seed=seed))


@cache
def uniforms(stream: int = Stream.KEEP, seed: int = 7, shift: int = 0) -> Tensor:
    values = [uniform(key(seed, stream, position + shift)) for position in range(DRAWS)]
    return torch.tensor(values, dtype=torch.float64)


def test_draws_follow_the_distribution() -> None:
    counts = torch.bincount(winners(), minlength=len(PROBS))
    assert p_value(counts, PROBS * DRAWS) > SUSPICIOUS


def test_draws_by_seed_follow_the_distribution_as_draws_by_position_do() -> None:
    """One draw for each of many requests, all at the same position."""
    row_keys = [key(seed, Stream.TOKEN, 12) for seed in range(DRAWS)]
    counts = torch.bincount(Race(len(PROBS), CPU).draw(PROBS.expand(DRAWS, -1), row_keys), minlength=len(PROBS))
    assert p_value(counts, PROBS * DRAWS) > SUSPICIOUS


@pytest.mark.slow
def test_biased_draws_are_caught() -> None:
    """Three wrong races: with uniform noise, of a distribution that is a little off, and won by the largest noise."""
    race = Race(len(PROBS), CPU)
    noise = torch.stack([race.noise(bits) for bits in keys()])
    off = PROBS + torch.tensor([0.03, 0, 0, 0, -0.03, 0, 0, 0])
    for wrong in ((PROBS / (1 - torch.exp(-noise))), (off / noise), (PROBS * noise)):
        counts = torch.bincount(wrong.argmax(-1), minlength=len(PROBS))
        assert p_value(counts, PROBS * DRAWS) < SUSPICIOUS
    right = torch.bincount((PROBS / noise).argmax(-1), minlength=len(PROBS))
    assert torch.equal(right, torch.bincount(winners(), minlength=len(PROBS)))


def test_weights_need_not_be_normalized() -> None:
    race, row_keys = Race(len(PROBS), CPU), keys(500)
    assert torch.equal(race.draw(8 * PROBS.expand(500, -1), row_keys), winners()[:500])


def test_impossible_tokens_never_win() -> None:
    assert set(winners().tolist()) <= set(PROBS.nonzero()[:, 0].tolist())
    last_only = torch.zeros(2000, 5)
    last_only[:, 4] = 1e-30
    assert set(Race(5, CPU).draw(last_only, keys(2000)).tolist()) == {4}


def test_noise_is_exponential_and_independent_of_the_token() -> None:
    race = Race(16, CPU)
    noise = torch.stack([race.noise(bits) for bits in keys(4000)]).double()
    assert bool((noise > 0).all()) and bool(torch.isfinite(noise).all())
    u = 1 - torch.exp(-noise)
    for token in range(16):
        assert p_value(torch.histc(u[:, token], bins=20, min=0, max=1), torch.full((20,), 200.0)) > SUSPICIOUS
    correlation = torch.corrcoef(u.T) - torch.eye(16)
    assert float(correlation.abs().max()) < 5 / 4000**0.5


def test_equal_keys_give_equal_draws_and_different_keys_different_ones() -> None:
    race = Race(1000, CPU)
    distribution = torch.full((1, 1000), 1e-3)
    draws = [int(race.draw(distribution, [bits])) for bits in keys(50)]
    assert draws == [int(Race(1000, CPU).draw(distribution, [bits])) for bits in keys(50)]
    assert len(set(draws)) > 40


def test_draw_does_not_depend_on_batch_mates_or_place() -> None:
    race = Race(len(PROBS), CPU)
    distributions = torch.rand(40, len(PROBS), generator=torch.Generator().manual_seed(0))
    row_keys = keys(40)
    together = race.draw(distributions, row_keys)
    assert together.tolist() == [int(race.draw(distributions[i : i + 1], row_keys[i : i + 1])) for i in range(40)]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(race.draw(distributions[order], [row_keys[i] for i in order.tolist()]), together[order])


def test_speeds_do_not_depend_on_how_many_tokens_have_noise() -> None:
    race, probs = Race(64, CPU), torch.zeros(64, 6)
    bits = race.bits(words(keys(6)))
    probs[:5] = torch.rand(5, 6, generator=torch.Generator().manual_seed(2))
    few = race.speeds(probs.T, bits)  # not contiguous
    everywhere = race.speeds(probs.T + 1e-30, bits)
    assert torch.equal(few[:, :5], everywhere[:, :5]) and not few[:, 5:].any()
    assert torch.equal(race.draw(probs.T, bits), few.argmax(-1))


def test_no_distributions_give_no_draws() -> None:
    drawn = Race(5, CPU).draw(torch.empty(0, 5), [])
    assert drawn.shape == (0,) and drawn.dtype == torch.int64


def test_distributions_raced_with_one_key_agree_as_often_as_gumbel_coupled_ones() -> None:
    """P(both choose i) = 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    race, row_keys = Race(3, CPU), keys()
    agree = (race.draw(p.expand(DRAWS, -1), row_keys) == race.draw(q.expand(DRAWS, -1), row_keys)).double().mean()
    expected = sum(1 / float(torch.maximum(p / p[i], q / q[i]).sum()) for i in range(3))
    assert float(agree) == pytest.approx(expected, abs=4 * 0.5 / DRAWS**0.5)
    other = (race.draw(p.expand(DRAWS, -1), row_keys) == race.draw(q.expand(DRAWS, -1), keys(seed=8))).double().mean()
    assert float(other) == pytest.approx(float((p * q).sum()), abs=4 * 0.5 / DRAWS**0.5)


def test_uniform_stays_below_one_and_reaches_zero() -> None:
    assert uniform(0) == 0.0
    assert uniform((1 << 64) - 1) == 1 - 2.0**-53
    assert bool((uniforms() >= 0).all()) and bool((uniforms() < 1).all())


def test_uniform_numbers_are_uniform() -> None:
    for stream in Stream:
        counts = torch.histc(uniforms(stream), bins=50, min=0, max=1)
        assert p_value(counts, torch.full((50,), DRAWS / 50)) > SUSPICIOUS
    assert p_value(torch.histc(uniforms() ** 1.1, bins=50, min=0, max=1), torch.full((50,), DRAWS / 50)) < SUSPICIOUS


def dependence(a: Tensor, b: Tensor, cells: int = 8) -> float:
    """p-value of the joint counts of two uniform variables, cells x cells."""
    joint = (a * cells).long() * cells + (b * cells).long()
    return p_value(torch.bincount(joint, minlength=cells**2), torch.full((cells**2,), DRAWS / cells**2))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"stream": Stream.TOKEN}, {"stream": Stream.DRAFT}),
        ({"stream": Stream.TOKEN}, {"stream": Stream.KEEP}),
        ({"stream": Stream.DRAFT}, {"stream": Stream.KEEP}),
        ({}, {"shift": 1}),
        ({}, {"shift": 2}),
        ({"seed": 7}, {"seed": 8}),
        ({"seed": 7}, {"seed": 7 + (1 << 32)}),
    ],
    ids=["token-draft", "token-keep", "draft-keep", "next position", "position after that", "next seed", "far seed"],
)
def test_uniforms_of_different_streams_positions_and_seeds_are_independent(
    first: dict[str, int], second: dict[str, int]
) -> None:
    a, b = uniforms(**first), uniforms(**second)
    assert dependence(a, b) > SUSPICIOUS
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 4 / DRAWS**0.5


def test_dependent_uniforms_are_caught() -> None:
    a, b = uniforms(), uniforms(shift=1)
    assert dependence(a, (a + 0.1 * b) % 1) < SUSPICIOUS
    assert dependence(a, torch.where(a > 0.9, a, b)) < SUSPICIOUS


@pytest.mark.parametrize(
    ("other", "shift"),
    [({"stream": Stream.DRAFT}, 0), ({"seed": 8}, 0), ({}, 1)],
    ids=["streams", "seeds", "positions"],
)
def test_draws_of_different_streams_seeds_and_positions_are_independent(other: dict[str, int], shift: int) -> None:
    a, b = winners()[: DRAWS - shift], winners(**other)[shift:]
    counts = torch.bincount(a * len(PROBS) + b, minlength=len(PROBS) ** 2)
    assert p_value(counts, torch.outer(PROBS, PROBS).flatten() * len(a)) > SUSPICIOUS


def test_key_depends_on_every_part_and_on_their_order() -> None:
    parts = [(seed, stream, position) for seed in range(8) for stream in Stream for position in range(8)]
    assert len({key(*p) for p in parts} | {key(*p, 0) for p in parts}) == 2 * len(parts)
    assert key(1, 2) != key(2, 1)
    assert key(-1) == key((1 << 64) - 1)  # parts count modulo 2**64


def test_noise_equals_a_plain_splitmix64() -> None:
    def splitmix(state: int) -> int:
        mask = (1 << 64) - 1
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
        return state ^ (state >> 31)

    golden = 0x9E3779B97F4A7C15
    for bits in (0, 1, (1 << 63) + 12345, (1 << 64) - 1):
        words = [splitmix((bits + golden * (v + 1)) % (1 << 64)) for v in range(20)]
        expected = [-np.log1p(-((word >> 11) + 0.5) * 2.0**-53) for word in words]
        assert Race(20, CPU).noise(bits).tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 5, 1000), (0, 7)])
def test_argmax_is_the_first_of_the_largest_scores(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(argmax(scores), scores.argmax(-1)) and argmax(scores).dtype == torch.int64
    coarse = (scores.float() * 2).round().to(dtype)  # many are equal
    first = (coarse == coarse.amax(-1, keepdim=True)).to(torch.int8).argmax(-1)
    assert torch.equal(argmax(coarse), first)


def test_argmax_handles_infinities_nan_and_strided_tensors() -> None:
    all_impossible = torch.full((2, 5), float("-inf"))
    assert argmax(all_impossible).tolist() == [0, 0]
    assert argmax(torch.tensor([1.0, float("nan"), float("inf")])).item() == 1
    table = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(2), requires_grad=True)
    assert torch.equal(argmax(table[:, 1::2, :]), table[:, 1::2, :].argmax(-1))
    assert torch.equal(argmax(table.transpose(1, 2)), table.transpose(1, 2).argmax(-1))


def test_argmax_distinguishes_close_double_precision_scores() -> None:
    assert argmax(torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)).item() == 1
