"""The compiled race against `Race`: the same winner for every distribution and key."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from dataclasses import make_dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.core.rng import Race, WarpOptions, key, words
from slipstream.core.types import Draft, Row
from slipstream.models.cpu.compiled_race import CompiledRace, race
from slipstream.models.cpu.kernel_libraries import (
    SOURCES,
    best_bfloat16_recipe,
    block_kernels,
    compile_library,
    kernels,
    typed,
)
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import NONE, Sampler
from slipstream.sampling.warpers import Warp

CPU, VOCAB, ROWS = torch.device("cpu"), 5003, 40  # no multiple of the kernel's block size


def compiled() -> CompiledRace:
    if (library := kernels()) is None:
        pytest.skip("needs the kernels, which this machine cannot compile")
    return CompiledRace(VOCAB, library)


def distributions(scale: float, kept: float = 0.0) -> Tensor:
    """[ROWS, VOCAB]; a larger `scale` makes them sharper; probabilities below `kept` times the largest are zero."""
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


def test_the_kernels_for_quantized_files_race_alike() -> None:
    compiled()
    in_blocks, probs = race(VOCAB, CPU, in_blocks=True), distributions(1.0)
    assert isinstance(in_blocks, CompiledRace) and in_blocks._library is block_kernels()
    for seed in range(5):
        assert torch.equal(in_blocks.draw(probs, keys(seed)), Race(VOCAB, CPU).draw(probs, keys(seed)))


def test_another_key_draws_other_winners() -> None:
    probs = distributions(1.0)
    assert not torch.equal(compiled().draw(probs, keys(1)), Race(VOCAB, CPU).draw(probs, keys(0)))


def test_equal_speeds_go_to_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens whose order depends on rounding are raced by `Race`."""
    race_in_c = compiled()
    exact = list[int]()
    noise_of = Race.noise
    monkeypatch.setattr(Race, "noise", lambda self, *args: exact.append(1) or noise_of(self, *args))
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
    assert type(race(257, CPU)) is Race  # too few tokens for the compiled race
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


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_restricted_race_equals_one_where_all_other_tokens_are_impossible(temperature: float) -> None:
    token_ids = torch.arange(3, VOCAB, 3)
    restricted = distributions(3.0).log()[:, token_ids]
    full = torch.full((ROWS, VOCAB), float("-inf")).index_copy(1, token_ids, restricted)
    for any_race in (compiled(), Race(VOCAB, CPU)):
        bits, temperatures = any_race.bits(words(keys(1))), torch.full((ROWS,), temperature)
        tokens, shares = any_race.leaders(restricted, temperatures, bits, 2, token_ids)
        expected_tokens, expected_shares = any_race.leaders(full, temperatures, bits, 2)
        assert torch.equal(tokens, expected_tokens)
        torch.testing.assert_close(shares, expected_shares)
        shifted, _ = any_race.leaders(restricted, temperatures, bits, 2, token_ids - 1)
        assert (temperature == 0) == torch.equal(
            shifted + 1, tokens
        )  # noise belongs to the token id, not to the column


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_shares_do_not_depend_on_the_default_dtype(default: torch.dtype) -> None:
    scores, temperatures = distributions(3.0).log(), torch.full((ROWS,), 0.7)
    expected = compiled().leaders(scores, temperatures, None, 2)
    torch.set_default_dtype(default)
    try:
        leaders = compiled().leaders(scores, temperatures, None, 2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(leaders[0], expected[0]) and torch.equal(leaders[1], expected[1])


def test_leaders_have_no_share_where_no_token_is_possible() -> None:
    for any_race in (compiled(), Race(VOCAB, CPU)):
        for score in (float("-inf"), float("nan")):
            scores, bits = torch.full((2, VOCAB), score), any_race.bits(words([5, 6]))
            _, shares = any_race.leaders(scores, torch.tensor([0.0, 0.5]), bits, 2)
            assert shares.tolist() == [[0.0, 0.0]] * 2


def test_impossible_tokens_neither_lead_nor_count() -> None:
    scores = torch.full((1, VOCAB), float("-inf"))
    scores[0, [7, 4000]] = torch.tensor([1.0, 0.5])
    for any_race in (compiled(), Race(VOCAB, CPU)):
        tokens, shares = any_race.leaders(scores, torch.zeros(1), None, 2)
        assert tokens.tolist() == [[7, 4000]]
        torch.testing.assert_close(shares, scores[:, [7, 4000]].softmax(-1))


def test_the_only_possible_token_is_not_its_own_runner_up() -> None:
    scores = torch.full((1, VOCAB), float("-inf"))
    scores[0, 0] = 1.0
    for any_race in (compiled(), Race(VOCAB, CPU)):
        tokens, shares = any_race.leaders(scores, torch.zeros(1), None, 2)
        assert tokens[0, 0] == 0 != tokens[0, 1] and shares.tolist() == [[1.0, 0.0]]


# winners known from the scores, without a distribution

Case = tuple[Tensor, int, WarpOptions]  # scores [VOCAB], key, options
CUTS = ({}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 20, "top_p": 0.8, "min_p": 0.01})


def drawn(scores: Tensor, bits: int, options: WarpOptions) -> int:
    """The token that the specification draws."""
    probs = Warp(options, CPU)(scores[None].float())
    winner = int(Race(len(scores), CPU).draw(probs, [bits]))
    return winner if probs[0, winner] > 0 else NONE


def random_cases(seeds: range = range(5)) -> Iterator[Case]:
    """Scores as models have them, and flatter and sharper ones; in bfloat16 many are equal."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for scale in (0.1, 1.0, 3.0, 10.0):
            scores = scale * torch.randn(VOCAB, generator=generator) + 5
            scores[torch.rand(VOCAB, generator=generator) < 0.1] = float("-inf")
            for dtype in (torch.float32, torch.bfloat16):
                for temperature in (0.05, 0.3, 0.8, 1.0, 5.0):
                    for number, cut in enumerate(CUTS):
                        yield scores.to(dtype), key(seed, number), WarpOptions(temperature, **cut)


def near_ties() -> Iterator[Case]:
    """Races of all or of two tokens whose speeds differ only by the last bits of scores or temperature."""
    generator = torch.Generator().manual_seed(1)
    for seed in range(150):
        noise, bits = Race(VOCAB, CPU).noise(key(seed)).double().log(), key(seed)
        for temperature in (0.05, 0.8, 5.0):
            last_bits = 1 + torch.randint(-1, 2, (VOCAB,), generator=generator) * 2.0**-23
            yield (temperature * noise + 3).float() * last_bits, bits, WarpOptions(temperature)
        slow, fast = (int(token) for token in torch.randperm(VOCAB, generator=generator)[:2])
        slow, fast = (slow, fast) if noise[slow] > noise[fast] else (fast, slow)
        scores = torch.full((VOCAB,), float("-inf"), dtype=torch.bfloat16)
        scores[fast], scores[slow] = 10, 11
        temperature = 1 / float(noise[slow] - noise[fast])
        yield (
            scores,
            bits,
            WarpOptions(temperature * (1 + int(torch.randint(-2, 3, (1,), generator=generator)) * 2.0**-23)),
        )


def edges() -> Iterator[Case]:
    """Options that just keep or just drop the winner of the whole distribution."""
    for scores, bits, options in random_cases():
        probs = Warp(WarpOptions(options.temperature), CPU)(scores[None].float())[0].double()
        winner = probs[int(Race(VOCAB, CPU).draw(probs[None].float(), [bits]))]
        mass_above, ratio = float(probs[probs > winner].sum()), float(winner / probs.max())
        for nudge in (-1e-7, 0.0, 1e-7):
            yield scores, bits, WarpOptions(options.temperature, top_p=min(1.0, max(1e-9, mass_above + nudge)))
            yield scores, bits, WarpOptions(options.temperature, min_p=min(1.0, ratio * (1 + nudge)))
            yield (
                scores,
                bits,
                WarpOptions(options.temperature, max(1, int((probs > winner).sum()) + round(nudge * 1e7))),
            )


def outcomes(race_in_c: CompiledRace, cases: Iterator[Case]) -> Counter[str]:
    """How many winners are right, wrong, or not known."""
    counts = Counter[str]()
    for scores, bits, options in cases:
        winner = race_in_c.sure_winner(scores, bits, options)
        right = winner is None or winner == drawn(scores, bits, options)
        counts["unknown" if winner is None else "right" if right else "wrong"] += 1
    return counts


@pytest.mark.slow
def test_winners_that_are_known_from_the_scores_are_those_of_the_race() -> None:
    counts = outcomes(compiled(), random_cases())
    assert not counts["wrong"] and counts["right"] > 2 * counts["unknown"]
    uncut = (case for case in random_cases(range(20)) if not case[2].removes_tokens)
    counts = outcomes(compiled(), uncut)
    assert not counts["wrong"] and counts["unknown"] < 0.01 * counts["right"]


def test_winners_of_a_vocabulary_as_large_as_gemmas_are_known() -> None:
    compiled()
    vocabulary, generator = 262_208, torch.Generator().manual_seed(4)
    scores = 3 * torch.randn(4, vocabulary, generator=generator)
    cases = (
        (row, key(number), WarpOptions(temperature, **cut))
        for number, row in enumerate(scores)
        for temperature in (0.3, 0.6)
        for cut in CUTS
    )
    counts = outcomes(CompiledRace(vocabulary, kernels()), cases)
    assert not counts["wrong"] and counts["right"] > 2 * counts["unknown"]


@pytest.mark.slow
def test_winners_that_depend_on_rounding_are_left_to_the_race() -> None:
    assert outcomes(compiled(), near_ties()) == {"unknown": 600}
    counts = outcomes(compiled(), edges())
    assert not counts["wrong"] and counts["right"] and counts["unknown"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "cases"),
    [
        pytest.param("#define ROUNDING 1e-4", near_ties, id="ties"),
        pytest.param(
            *("#define KEPT(tokens) (1e-4f+(tokens)*0x1.4p-27f)", edges), marks=pytest.mark.exhaustive, id="edges"
        ),
    ],
)
def test_without_a_margin_winners_are_wrong(bound: str, cases: type[Iterator[Case]], tmp_path: Path) -> None:
    compiled()
    text = (SOURCES / "race.c").read_text(encoding="utf-8")
    assert bound in text
    source, library = tmp_path / "race.c", tmp_path / "race.so"
    source.write_text(text.replace(bound, f"{bound.rpartition(' ')[0]} 0.0f"), encoding="utf-8")
    compile_library(["gcc"], replace(best_bfloat16_recipe(None), sources=(source,)), library)
    assert outcomes(CompiledRace(VOCAB, typed(ctypes.CDLL(str(library)))), cases())["wrong"]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_without_a_distribution_have_no_known_winner(value: str, dtype: torch.dtype) -> None:
    for scores in (torch.zeros(VOCAB), torch.full((VOCAB,), float("-inf"))):
        scores[77] = float(value)
        winner, expected = (
            compiled().sure_winner(scores.to(dtype), 5, WarpOptions(0.8)),
            drawn(scores, 5, WarpOptions(0.8)),
        )
        is_possible = expected != NONE and dtype != torch.float16
        assert winner == (expected if is_possible else None)


def test_a_sampler_chooses_the_tokens_of_the_plain_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with and without options, greedy rows and impossible scores take every way to a winner."""
    params = [SamplingParams(temperature=0.8, **cut) for cut in CUTS] + [
        SamplingParams(),
        SamplingParams(temperature=1.5, repetition_penalty=1.3),
        SamplingParams(temperature=0.3, top_p=0.5),
    ]
    rows = [Row(i, [1, 2, 3], options, seed=i) for i, options in enumerate(params * 3)]
    logits = 2 * torch.randn(len(rows), 4, VOCAB, generator=torch.Generator().manual_seed(2))
    logits[0, 1, 5], logits[1, 2] = float("nan"), float("-inf")
    winners, sure_winner = [], CompiledRace.sure_winner
    monkeypatch.setattr(CompiledRace, "sure_winner", lambda *args: winners.append(sure_winner(*args)) or winners[-1])
    for batch in (rows, [row for row in rows if row.params.repetition_penalty == 1]):
        for dtype in (torch.float32, torch.bfloat16):
            scores = logits[: len(batch)].to(dtype)
            tokens = [[0, 0, 0]] * len(batch)
            for position in range(4):  # the draft is right up to this position
                chosen, expected = (
                    Sampler(batch, racing, VOCAB, CPU).choose(scores, Draft.from_lists(tokens, CPU))
                    for racing in (compiled(), Race(VOCAB, CPU))
                )
                assert torch.equal(chosen, expected)
                right = chosen[:, : position + 1].clamp(min=0).tolist()
                tokens = [[*path, 0, 0, 0][:3] for path in right]
    assert 0 < winners.count(None) < 0.5 * len(winners)


def test_an_option_that_the_kernel_does_not_know_is_not_ignored() -> None:
    further = make_dataclass("Further", [("typical_p", float, 1.0)], bases=(WarpOptions,), frozen=True)
    with pytest.raises(ValueError, match="too many values"):
        compiled().sure_winner(torch.zeros(VOCAB), 0, further(1.0))
