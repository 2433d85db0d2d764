"""Costs of ragged batches agree with enumeration and simulation; the probe measures ragged batches and trees."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.bench.speed_model.accepted_lengths import Acceptance
from slipstream.bench.speed_model.formula import predicted_speed_up, round_milliseconds
from slipstream.bench.speed_model.probe import measure_costs, ragged_lengths
from slipstream.bench.speed_model.round_costs import Costs, TokenCosts
from tests.support.cost_cases import RAGGED, linear_costs
from tests.support.markers import mostly_slow
from tests.support.simulated_rounds import Load, play
from tests.support.tiny_models import fresh

BATCHES = (1, 2, 4, 8)


def by_tokens(per_token: float = 0.5) -> TokenCosts:
    """Base 10 ms, 0.25 ms around it."""
    tokens = {b: range(b, 33 * b + 1) for b in BATCHES}
    return TokenCosts(
        {b: {n: 10 + per_token * n for n in tokens[b]} for b in BATCHES},
        {b: dict.fromkeys(tokens[b], 0.25) for b in BATCHES},
    )


def unpadded_costs(**changes: Any) -> Costs:
    return linear_costs(ragged=by_tokens(), trees=by_tokens(), **changes)


def enumerated(lengths: list[float], batch: int, cost: Any) -> float:
    """Expected milliseconds of a round over all combinations of proposals; cost(longest draft, draft tokens in all)."""
    total = 0.0
    for rows in itertools.product(range(len(lengths)), repeat=batch):
        chance = 1.0
        for length in rows:
            chance *= lengths[length]
        total += chance * cost(max(rows), sum(rows))
    return total


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_ragged_round_costs_what_the_tokens_of_its_rows_cost(batch: int) -> None:
    costs, shares = unpadded_costs(padded=()), [0.2, 0.0, 0.2, 0.6]
    acceptance = Acceptance.by_position([0.9, 0.7, 0.8], [0.8, 0.8, 0.6])
    milliseconds = round_milliseconds(costs, acceptance, 3, batch)

    def cost(longest: int, drafted: int) -> float:
        return longest * 1.0 + 0.5 + 10 + 0.5 * (batch + drafted) + 0.25

    assert milliseconds == pytest.approx(enumerated(shares, batch, cost))
    if batch > 1:
        assert milliseconds < round_milliseconds(linear_costs(), acceptance, 3, batch) - 0.1  # padded rows cost more


def test_a_ragged_round_is_padded_only_if_that_takes_fewer_tokens() -> None:
    costs = linear_costs(ragged=by_tokens(), padded=(1, 2, 4, 8), totals=(6, 8, 20))
    assert costs.verifying(4, 3, [3]) == pytest.approx(10 + 0.5 * 8 + 0.25)  # 7 tokens, padded to 8, not to 16
    assert costs.verifying(4, 3, [12]) == pytest.approx(10 + 0.5 * 16 + 0.25)  # padded to 16; ragged, it takes 20
    assert costs.verifying(4, 7, [17]) == pytest.approx(10 + 0.5 * 32 + 0.25)  # 21 ragged tokens exceed every total
    assert costs.verifying(1, 3, [3]) == costs.plain(1, 4)


def test_a_single_row_is_padded_to_its_own_widths() -> None:
    costs = linear_costs(padded=(1, 2, 4, 8), alone=(4, 8))
    assert [costs.width_for(1, 1), costs.width_for(1, 2), costs.width_for(5, 1)] == [4, 1, 8]
    measured = Costs(
        {1: {4: 12.0, 8: 14.0}, 4: {1: 12.0, 4: 18.0}}, {1: {4: 0.0, 8: 0.0}, 4: {1: 0.0, 4: 0.0}}, {1: 1, 4: 1}, {1: 0}
    )
    assert measured.forward(2, 1) == pytest.approx(12.0)  # between a row of 4 and four rows of 1


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
def test_simulated_rounds_without_padding_agree_with_the_formula(batch: int) -> None:
    costs, load = unpadded_costs(), Load(rows=8 * batch, batch=batch, tokens=4000 // batch)
    played = play(costs, RAGGED, 0, load, seed=0) / play(costs, RAGGED, 4, load, seed=1)
    assert played == pytest.approx(predicted_speed_up(costs, RAGGED, 4, batch), rel=0.025)
    assert abs(played / predicted_speed_up(costs, RAGGED, 1, batch) - 1) > 0.025


def test_the_probe_measures_trees_as_the_decoder_drafts_them(tmp_path: Path) -> None:
    decoder = SpeculativeDecoder("toy", "toy:2", num_draft_tokens="3x2", reproducible=False)
    costs = measure_costs(decoder, (1, 2), range(1, 5), seconds=0.05)
    assert costs.trees is not None and set(costs.trees.forward[1]) == {3, 5, 7}
    assert min(costs.trees.forward[2]) == 4 and max(costs.trees.forward[2]) == 14
    wide = measure_costs(decoder, (1,), (1, 17), seconds=0.05)
    assert wide.trees is not None and set(wide.trees.forward[1]) >= {3, 33}
    assert wide.trees.forward[1][33] > wide.trees.forward[1][3] > 0  # the toy computes position by position
    assert costs.ragged is None  # its rows are always padded
    costs.save(tmp_path / "costs.json")
    assert Costs.read(tmp_path / "costs.json") == costs
    chains = measure_costs(decoder.using(num_draft_tokens=3), (1,), (1, 4), seconds=0.01)
    assert chains.trees is None


@pytest.mark.slow
@pytest.mark.parametrize("reproducible", mostly_slow([False, True], False))
def test_the_probe_measures_ragged_rounds_and_trees_of_a_transformer(reproducible: bool) -> None:
    length = "auto" if reproducible else "3x2"
    options = {"drafter": "model", "num_draft_tokens": length, "reproducible": reproducible}
    decoder = SpeculativeDecoder(fresh("llama"), fresh("llama"), fast=True, **options)
    prompt, params = list(range(3, 40)), SamplingParams(max_tokens=24)
    before = decoder.generate(prompt, params).token_ids
    costs = measure_costs(decoder, (1, 3), range(1, 5), seconds=0.05)
    shapes = decoder.shapes
    assert decoder.target.backend.ragged
    assert (costs.ragged is not None) == (not shapes.widths or bool(shapes.totals))
    if not reproducible:
        assert costs.ragged is not None and min(costs.ragged.forward[3]) == 4
        assert costs.ragged.forward[1] == costs.target[1]
        assert costs.trees is not None and costs.trees.forward[1].keys() <= {3, 5, 7}
    assert decoder.generate(prompt, params).token_ids == before


@given(st.integers(1, 40), st.integers(2, 8))
def test_uneven_drafts_have_the_requested_tokens_and_fewer_than_their_rectangle(drafted: int, rows: int) -> None:
    lengths = ragged_lengths(drafted, rows, lambda width: width)
    assert lengths is not None and sum(lengths) == drafted and len(lengths) == rows
    assert rows * (max(lengths) + 1) > rows + drafted
    assert ragged_lengths(drafted, 1, lambda width: width) is None


def test_costs_of_trees_must_be_a_table() -> None:
    with pytest.raises(UsageError, match="trees=3; allowed: null, or"):
        Costs.from_dict(linear_costs().to_dict() | {"trees": 3})
