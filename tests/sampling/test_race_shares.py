"""A token's share of the speeds in a race predicts whether another distribution chooses it in the same race."""

import torch
from torch import Tensor

from slipstream import SamplingParams
from slipstream.core.rng import Race
from slipstream.core.types import Row
from slipstream.sampling.sampler import Sampler

CPU = torch.device("cpu")
ROWS, VOCAB = 4000, 40


def batch(temperature: float) -> Sampler:
    params = SamplingParams(temperature=temperature)
    return Sampler([Row(i, [1, 2], params, seed=i) for i in range(ROWS)], Race(VOCAB, CPU), VOCAB, CPU)


def pair_of_distributions() -> tuple[Tensor, Tensor]:
    """Those of a target and of a draft model that resembles it, [ROWS, VOCAB] each."""
    generator = torch.Generator().manual_seed(5)
    common = 3 * torch.randn(ROWS, VOCAB, generator=generator)
    target, draft = (common + 0.7 * torch.randn(ROWS, VOCAB, generator=generator) for _ in range(2))
    return target.softmax(-1), draft.softmax(-1)


def log_loss(certainty: Tensor, happened: Tensor) -> float:
    """Mean over all rows; each bin of the certainty predicts the rate observed in it."""
    bins = (certainty.clamp(max=0.999) * 20).long()
    rate = (
        torch.zeros(20).scatter_reduce_(0, bins, happened.float(), "mean", include_self=False)[bins].clamp(1e-3, 0.999)
    )
    return float(-torch.where(happened, rate, 1 - rate).log().mean())


def test_the_leader_is_the_token_that_is_sampled() -> None:
    target, _ = pair_of_distributions()
    sampler = batch(0.8)
    leaders, _ = sampler.leaders(0.8 * target.log(), 3, 1)
    assert torch.equal(leaders, sampler.draw(target[:, None], 3))
    assert not torch.equal(leaders, sampler.draw(target[:, None], 4))


def test_the_share_of_a_race_predicts_acceptance_better_than_the_probability() -> None:
    target, draft = pair_of_distributions()
    sampler = batch(0.8)
    leaders, shares = sampler.leaders(0.8 * draft.log(), 0, 1)
    accepted = leaders[:, 0] == sampler.draw(target[:, None])[:, 0]
    probability = draft.gather(1, leaders)[:, 0]
    assert log_loss(shares[:, 0], accepted) < 0.95 * log_loss(probability, accepted)


def test_greedy_rows_run_without_noise() -> None:
    _, draft = pair_of_distributions()
    probs, likeliest = draft.sort(descending=True, stable=True)
    leaders, shares = batch(0.0).leaders(draft.log(), 0, 2)
    assert torch.equal(leaders, likeliest[:, :2])
    torch.testing.assert_close(shares, probs[:, :2])
    params = [SamplingParams(temperature=temperature) for temperature in (0.0, 50.0)]
    mixed = Sampler([Row(i, [1], options, seed=i) for i, options in enumerate(params)], Race(VOCAB, CPU), VOCAB, CPU)
    leaders, shares = mixed.leaders(torch.zeros(2, VOCAB), 0, 2)
    assert leaders[0].tolist() == [0, 1] and leaders[1].tolist() != [0, 1]
    torch.testing.assert_close(shares[0], torch.full((2,), 1 / VOCAB))
    assert float(shares[1].sum()) > 3 / VOCAB


def test_leaders_respect_options_that_drop_tokens() -> None:
    _, draft = pair_of_distributions()
    options = [SamplingParams(temperature=2.0, top_k=3), SamplingParams(temperature=2.0, top_p=0.5, min_p=0.1)]
    rows = [Row(i, [1], params, seed=i) for i, params in enumerate(options)]
    sampler = Sampler(rows, Race(VOCAB, CPU), VOCAB, CPU)
    for scores in (draft[i : i + 2].log() for i in range(0, ROWS, 2)):
        leaders, shares = sampler.leaders(scores, 1, 1)
        assert torch.equal(leaders, sampler.draw(sampler.probs(scores[:, None]), 1))
        assert bool((shares > 0.2).any())
