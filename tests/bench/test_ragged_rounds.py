"""Trees and ragged batches: what they cost and bring, against enumeration, random rounds and real ones."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.apps.cli.application import app
from slipstream.apps.cli.consoles import out
from slipstream.bench.records import compact
from slipstream.bench.speed_model.accepted_lengths import Acceptance, LevelCounts
from slipstream.bench.speed_model.formula import (
    best_length,
    conclusions,
    expected_tokens,
    predict_from_stats,
    predicted_speed_up,
    round_milliseconds,
    simulate,
)
from slipstream.bench.speed_model.probe import measure_costs, ragged_lengths
from slipstream.bench.speed_model.round_costs import Costs, Machine, TokenCosts, paper_costs
from slipstream.core.rounds import Round
from slipstream.text.results import Stats
from tests.support.cost_cases import RAGGED, linear_costs
from tests.support.markers import mostly_slow, subcases
from tests.support.simulated_rounds import Load, play
from tests.support.tiny_models import fresh

BATCHES = (1, 2, 4, 8)
COMB = Acceptance.by_position([0.8, 0.6, 0.7, 0.5], siblings=[[0.1, 0.05], [0.2, 0.1], [0.1, 0.0], [0.3, 0.1]])


def by_tokens(per_token: float = 0.5) -> TokenCosts:
    """Base 10 ms, 0.25 ms around it."""
    tokens = {b: range(b, 33 * b + 1) for b in BATCHES}
    return TokenCosts(
        {b: {n: 10 + per_token * n for n in tokens[b]} for b in BATCHES},
        {b: dict.fromkeys(tokens[b], 0.25) for b in BATCHES},
    )


def unpadded_costs(**changes: Any) -> Costs:
    return linear_costs(ragged=by_tokens(), trees=by_tokens(), **changes)


def walked(acceptance: list[tuple[float, list[float]]], rng: Random) -> int:
    """Tokens of one round, its tree walked node by node."""
    for depth, (alpha, siblings) in enumerate(acceptance):
        draw = rng.random()
        if draw >= alpha:
            return depth + 1 + (draw < alpha + sum(siblings))
    return len(acceptance) + 1


@pytest.mark.parametrize("siblings", [[0.11], [0.11, 0.06]])
def test_expected_tokens_of_a_comb_are_those_of_random_walks(siblings: list[float]) -> None:
    rng, rounds, depth = Random(3), 40_000, 4
    mean = sum(walked([(0.75, siblings)] * depth, rng) for _ in range(rounds)) / rounds
    comb = Acceptance.constant(0.75, siblings=siblings)
    assert mean == pytest.approx(expected_tokens(comb, depth), rel=0.01)
    assert expected_tokens(comb, depth) > 1.02 * expected_tokens(0.75, depth)  # a chain is told from it
    closed = 1 + (0.75 + sum(siblings)) * (1 - 0.75**depth) / (1 - 0.75)
    assert expected_tokens(comb, depth) == pytest.approx(closed)


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 12))
def test_a_sibling_brings_at_most_one_token_and_never_costs_one(alpha: float, share: float, depth: int) -> None:
    comb = Acceptance.constant(alpha, siblings=[share * (1 - alpha)])
    gain = expected_tokens(comb, depth) - expected_tokens(alpha, depth)
    assert -1e-9 <= gain <= 1 + 1e-9
    assert comb.main_chain.accepted == pytest.approx(Acceptance.constant(alpha).accepted)
    assert comb.num_nodes(depth) == 2 * depth


def recorded(text: str, **options: Any) -> list[Round]:
    decoder = SpeculativeDecoder("toy", "toy:2", drafter="model", reproducible=False, **options)
    return decoder.generate(text, SamplingParams(max_tokens=160, ignore_eos=True)).rounds


def counted(rounds: list[Round]) -> dict[str, Any]:
    return Stats.of(rounds).to_dict() | LevelCounts.of(map(compact, rounds)).to_dict()


def test_tokens_of_real_trees_are_those_of_the_formula() -> None:
    rounds = recorded("The heron", num_draft_tokens="4x2")
    known = Acceptance.from_stats(counted(rounds))
    assert known.branches and sum(known.branched) > 0
    hits = sum(len(done.path or ()) > done.num_accepted_on_chain for done in rounds)
    assert sum(known.branched) == pytest.approx(hits / len(rounds))
    committed = sum(1 + done.num_accepted_tokens for done in rounds) / len(rounds)
    assert expected_tokens(known, known.longest) == pytest.approx(committed)
    on_chain = sum(1 + done.num_accepted_on_chain for done in rounds) / len(rounds)
    assert expected_tokens(known.main_chain, known.longest) == pytest.approx(on_chain)
    assert on_chain < committed
    drafted = sum(len(done.draft) for done in rounds) / len(rounds)
    sizes = [known.proposed[i] * known.nodes[i] for i in range(known.longest)]
    assert sum(sizes) == pytest.approx(drafted)


def test_levels_of_any_tree_are_counted() -> None:
    chain = {"draft": [5, 6, 7]}
    tree = {"draft": [1, 2, 3, 4, 5, 6], "parents": [-1, 0, 1, 0, 3, -1], "path": [0, 3, 4]}
    counts = LevelCounts.of([chain, tree])
    assert counts.nodes_per_position == [1 + 2, 1 + 2, 1 + 2] and counts.branched_per_position == [0, 1, 1]
    both = LevelCounts.total([counts, LevelCounts.of([{"draft": [1]}])])
    assert both.nodes_per_position == [4, 3, 3] and both.branched_per_position == [0, 1, 1]


def enumerated(lengths: list[float], nodes: list[int], batch: int, cost: Any) -> float:
    """Milliseconds of a round over every combination of proposals; cost: longest, draft tokens in all."""
    total = 0.0
    for rows in itertools.product(range(len(lengths)), repeat=batch):
        chance = 1.0
        for levels in rows:
            chance *= lengths[levels]
        total += chance * cost(max(rows), sum(nodes[levels] for levels in rows))
    return total


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("wide", [1, 3])
def test_rounds_cost_what_the_tokens_of_all_rows_cost(batch: int, wide: int) -> None:
    costs, shares = unpadded_costs(padded=(), move=0.5), [0.2, 0.0, 0.2, 0.6]
    siblings = [[0.04] * (wide - 1)] * 3 if wide > 1 else ()
    known = Acceptance.by_position([0.9, 0.7, 0.8], [0.8, 0.8, 0.6], siblings)
    found = round_milliseconds(costs, known, 3, batch)

    def cost(longest: int, drafted: int) -> float:
        return longest * 1.0 + 0.5 + 10 + 0.5 * (batch + drafted) + 0.25

    moves = 0.5 * batch * sum(known.branched)
    assert found == pytest.approx(enumerated(shares, [n * wide for n in range(4)], batch, cost) + moves)
    if batch > 1 and wide == 1:
        assert found < round_milliseconds(linear_costs(), known, 3, batch) - 0.1  # padded rows cost more


def test_padding_is_paid_only_where_it_takes_fewer_tokens() -> None:
    costs = linear_costs(ragged=by_tokens(), padded=(1, 2, 4, 8), totals=(6, 8, 20))
    assert costs.verifying(4, 3, [3]) == pytest.approx(10 + 0.5 * 8 + 0.25)  # 7 tokens, padded to 8, not to 16
    assert costs.verifying(4, 3, [12]) == pytest.approx(10 + 0.5 * 16 + 0.25)  # 16, which 20 is beyond
    assert costs.verifying(4, 7, [17]) == pytest.approx(10 + 0.5 * 32 + 0.25)  # 21, which no total holds
    assert costs.verifying(1, 3, [3]) == costs.plain(1, 4)


def test_a_single_row_s_own_widths_are_padded_to() -> None:
    costs = linear_costs(padded=(1, 2, 4, 8), alone=(4, 8))
    assert [costs.width_for(1, 1), costs.width_for(1, 2), costs.width_for(5, 1)] == [4, 1, 8]
    measured = Costs(
        {1: {4: 12.0, 8: 14.0}, 4: {1: 12.0, 4: 18.0}}, {1: {4: 0.0, 8: 0.0}, 4: {1: 0.0, 4: 0.0}}, {1: 1, 4: 1}, {1: 0}
    )
    assert measured.forward(2, 1) == pytest.approx(12.0)  # between a row of 4 and four rows of 1


def test_trees_that_fit_no_shape_are_priced_as_their_main_chains() -> None:
    fits, small = (unpadded_costs(padded=(1, 2, 4, 8, 16), totals=totals) for totals in ((8, 16, 32, 64), (8, 16)))
    comb = Acceptance.constant(0.7, siblings=[0.1])
    assert small.takes_tree(4, 12) and not small.takes_tree(4, 24)
    assert predicted_speed_up(small, comb, 3, 4) == predicted_speed_up(small, comb.main_chain, 3, 4)
    assert predicted_speed_up(fits, comb, 3, 4) != predicted_speed_up(fits, comb.main_chain, 3, 4)


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", [COMB, RAGGED], ids=["comb", "uneven chains"])
@pytest.mark.parametrize("batch", [1, 4])
def test_played_rounds_without_padding_agree_with_the_formula(acceptance: Acceptance, batch: int) -> None:
    costs, load = unpadded_costs(move=2.0), Load(rows=8 * batch, batch=batch, tokens=4000 // batch)
    played = play(costs, acceptance, 0, load, seed=0) / play(costs, acceptance, 4, load, seed=1)
    assert played == pytest.approx(predicted_speed_up(costs, acceptance, 4, batch), rel=0.025)
    assert abs(played / predicted_speed_up(costs, acceptance, 1, batch) - 1) > 0.025


def test_free_siblings_always_help_and_dear_ones_never_do() -> None:
    comb = Acceptance.constant(0.7, siblings=[0.15])
    dear, free = (linear_costs(per_token=t, trees=by_tokens(t)) for t in (6.0, 0.0))
    for n in range(1, 8):
        assert predicted_speed_up(free, comb, n) > predicted_speed_up(free, 0.7, n)
        assert predicted_speed_up(dear, comb, n) < predicted_speed_up(dear, 0.7, n)
    table = simulate(free, comb, None, (1, 4))
    assert table.nodes[3] == 6 and table.best[1] == best_length(free, comb)
    assert table.chains[1] < table.speed_ups[1][table.best[1]]
    assert "best tree depth" in conclusions(free, table)[0]


def test_statistics_of_trees_that_cost_what_the_table_says_are_predicted_exactly() -> None:
    costs = unpadded_costs()
    comb = Acceptance.by_position([0.75, 0.5], siblings=[[0.125], [0.25]])
    stats = Stats(
        num_rounds=800,
        num_steps=800,
        num_draft_tokens=3200,
        num_output_tokens=round(800 * expected_tokens(comb, 2)),
        accepted_per_position=[700, 450],
        drafted_per_position=[800, 800],
        total_seconds=0.8 * round_milliseconds(costs, comb, 2),
    ).to_dict()
    levels = LevelCounts([1600, 1600], [100, 150]).to_dict()
    assert predict_from_stats(stats | levels, costs).deviation == pytest.approx(0)
    with pytest.raises(UsageError, match="no counts of their branches"):
        predict_from_stats(stats, costs)


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
        assert costs.trees is not None and costs.move > 0 and costs.trees.forward[1].keys() <= {3, 5, 7}
        assert predicted_speed_up(costs, Acceptance.constant(0.7, [0.1]), 3, 3) > 0
    assert decoder.generate(prompt, params).token_ids == before


@given(st.integers(1, 40), st.integers(2, 8))
def test_uneven_drafts_have_the_tokens_asked_for_and_beat_their_rectangle(drafted: int, rows: int) -> None:
    lengths = ragged_lengths(drafted, rows, lambda width: width)
    assert lengths is not None and sum(lengths) == drafted and len(lengths) == rows
    assert rows * (max(lengths) + 1) > rows + drafted
    assert ragged_lengths(drafted, 1, lambda width: width) is None


def simulated(arguments: str) -> str:
    with out.capture() as captured:
        app(["simulate", *arguments.split()], standalone_mode=False)
    return captured.get()


@pytest.mark.slow
def test_the_command_simulates_trees(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    paper = "--target-params 8e9 --draft-params 6e8 --bandwidth 4.8e12 --flops 6e14 --alpha 0.75 --length 4"
    tree = simulated(f"{paper} --sibling-alpha 0.11 --json {file}")
    tokens = 1 + 0.86 * (1 - 0.75**4) / 0.25
    assert "depth" in tree and f"{tokens:.2f}" in tree and f"{tokens:.2f}" not in simulated(paper)
    assert json.loads(file.read_text())["simulation"]["nodes"] == {"4": 8.0}
    toy = "--target toy --draft toy:2 --drafter model --reproducible false --batch 1 --seconds 0.01 --alpha 0.75"
    assert "without branches" in simulated(f"{toy} --length 2 --sibling-alpha 0.1 --sibling-alpha 0.05")


@subcases(
    "build, message",
    [
        (lambda: Acceptance.constant(0.9, siblings=[0.2]), "acceptance 0.9 of a draft token and 0.2 of those beside"),
        (lambda: Acceptance.constant(0.5, siblings=[1.2]), "acceptance 1.2; allowed: from 0 to 1"),
        (lambda: Acceptance((0.5,), (1.0,), (0.5,), (0.1,)), "nodes=(0.5,); allowed: numbers >= 1"),
        (lambda: Acceptance((0.5,), (1.0,), (2.0,), (0.6,)), "branched=(0.6,); allowed: at most accepted"),
        (lambda: Acceptance((0.5,), (1.0,), (2.0,), (0.1, 0.1)), "branched for 2; allowed: the same number"),
        (lambda: simulate(linear_costs(), COMB), "without them; allowed: costs measured with --sibling-alpha"),
        (lambda: replace(linear_costs(), move=-1.0), "move=-1.0"),
        (lambda: Costs.from_dict(linear_costs().to_dict() | {"trees": 3}), "trees=3; allowed: null, or"),
        (lambda: simulated("--sibling-alpha 0.1 --stats x.json"), "--sibling-alpha beside --stats"),
        (
            lambda: simulated("--sibling-alpha 0.1 --target toy --alpha 0.5 --drafter ngram"),
            "allowed: trees with drafters",
        ),
    ],
)
def test_what_is_no_tree_is_refused(build: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        build()
    assert message in str(error.value)


def test_on_paper_a_tree_costs_its_tokens() -> None:
    costs = paper_costs(1e9, 0, Machine(memory_bandwidth=1e12, flops=1e13), batches=(1, 4), widths=range(1, 18))
    comb = Acceptance.constant(0.75, siblings=[0.11])
    milliseconds = 2e3 * 1e9 * 4 * 9 / 1e13
    assert round_milliseconds(costs, comb, 4, 4) == pytest.approx(milliseconds)
    assert simulate(costs, comb).lengths == tuple(range(1, 9))
