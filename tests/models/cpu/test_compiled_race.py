"""The compiled race against `Race`: the same winner for every distribution and key."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.core.rng import Race, key, words
from slipstream.models.cpu.compiled_race import CompiledRace, race
from slipstream.models.cpu.kernel_libraries import kernels

CPU, VOCAB, ROWS = torch.device("cpu"), 5003, 40  # no multiple of what the kernel looks at together


def compiled() -> CompiledRace:
    if (library := kernels()) is None:
        pytest.skip("needs the kernels, which this machine cannot compile")
    return CompiledRace(VOCAB, library)


def distributions(scale: float, kept: float = 0.0) -> Tensor:
    """[ROWS, VOCAB], the wider `scale` the sharper; probabilities below `kept` of the greatest are zero."""
    probs = (scale * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))).softmax(-1)
    return torch.where(probs < kept * probs.amax(-1, keepdim=True), 0.0, probs)


def keys(seed: int = 0) -> list[int]:
    return [key(seed, row) for row in range(ROWS)]


@pytest.mark.parametrize("kept", [0.0, 0.3], ids=["all tokens", "few tokens"])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 3.0, 20.0])
def test_the_winners_are_those_of_the_race(scale: float, kept: float) -> None:
    probs, race_in_c = distributions(scale, kept), compiled()
    for seed in range(10):
        assert torch.equal(race_in_c.draw(probs, keys(seed)), Race(VOCAB, CPU).draw(probs, keys(seed)))
        assert torch.equal(race_in_c.draw(1e-4 * probs, keys(seed)), race_in_c.draw(probs, keys(seed)))


def test_another_key_has_other_winners() -> None:
    probs = distributions(1.0)
    assert not torch.equal(compiled().draw(probs, keys(1)), Race(VOCAB, CPU).draw(probs, keys(0)))


def test_equal_speeds_go_to_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contenders that rounding alone could order are raced as `Race` does."""
    race_in_c = compiled()
    exact = list[int]()
    own = Race.noise
    monkeypatch.setattr(Race, "noise", lambda self, *given: exact.append(1) or own(self, *given))
    noise = Race(VOCAB, CPU).noise(key(3))
    exact.clear()
    assert race_in_c.draw(noise[None] / noise.sum(), [key(3)]).tolist() == [
        int((noise / noise.sum() / noise).numpy().argmax())
    ]
    assert exact


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_where_no_token_is_possible_the_winner_has_no_probability(value: float) -> None:
    probs = torch.full((2, VOCAB), value)
    winners = compiled().draw(probs, [1, 2])
    assert winners.shape == (2,) and not bool((probs.gather(1, winners[:, None]) > 0).any())


def test_distributions_over_another_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="probs: 5004 tokens; allowed: 5003"):
        compiled().draw(torch.ones(1, VOCAB + 1), [1])


def test_without_kernels_pytorch_races(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(race(VOCAB, CPU), CompiledRace) or kernels() is None
    assert type(race(257, CPU)) is Race  # for which nothing is compiled
    monkeypatch.setenv("SLIPSTREAM_KERNELS", "off")
    assert type(race(VOCAB, CPU)) is Race


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.6, 5.0])
@pytest.mark.parametrize("scale", [0.1, 3.0, 20.0])
def test_leaders_and_their_shares_are_nearly_those_of_the_race(
    scale: float, temperature: float, dtype: torch.dtype
) -> None:
    race_in_c, plain = compiled(), Race(VOCAB, CPU)
    scores = (distributions(scale).log() * max(temperature, 1.0)).to(dtype) + 7
    temperatures = torch.tensor([temperature, 0.0]).repeat(ROWS // 2)
    for bits in [race_in_c.bits(words(keys(seed))) for seed in range(3)] + [None] * (temperature == 0):
        tokens, shares = race_in_c.leaders(scores, temperatures, bits, 2)
        expected_tokens, expected_shares = plain.leaders(scores, temperatures, bits, 2)
        torch.testing.assert_close(shares, expected_shares, rtol=0.01, atol=1e-6)
        clear = expected_shares[:, 0] > 1.01 * expected_shares[:, 1]
        assert torch.equal(tokens[clear, 0], expected_tokens[clear, 0]) and int(clear.sum()) > ROWS // 4


def test_leaders_of_a_race_that_nobody_can_win_have_no_share() -> None:
    for race_of_nobody in (compiled(), Race(VOCAB, CPU)):
        for nothing in (float("-inf"), float("nan")):
            scores, bits = torch.full((2, VOCAB), nothing), race_of_nobody.bits(words([5, 6]))
            _, shares = race_of_nobody.leaders(scores, torch.tensor([0.0, 0.5]), bits, 2)
            assert shares.tolist() == [[0.0, 0.0]] * 2


def test_impossible_tokens_neither_lead_nor_count() -> None:
    scores = torch.full((1, VOCAB), float("-inf"))
    scores[0, [7, 4000]] = torch.tensor([1.0, 0.5])
    for either in (compiled(), Race(VOCAB, CPU)):
        tokens, shares = either.leaders(scores, torch.zeros(1), None, 2)
        assert tokens.tolist() == [[7, 4000]]
        torch.testing.assert_close(shares, scores[:, [7, 4000]].softmax(-1))


def test_the_only_possible_token_is_not_its_own_runner_up() -> None:
    scores = torch.full((1, VOCAB), float("-inf"))
    scores[0, 0] = 1.0
    for either in (compiled(), Race(VOCAB, CPU)):
        tokens, shares = either.leaders(scores, torch.zeros(1), None, 2)
        assert tokens[0, 0] == 0 != tokens[0, 1] and shares.tolist() == [[1.0, 0.0]]
