"""The formula against simulated rounds; the table and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream import UsageError
from slipstream.apps.cli.application import app
from slipstream.apps.cli.consoles import out
from slipstream.apps.cli.tables import print_simulation, simulation_table
from slipstream.bench.speed_model.accepted_lengths import Acceptance
from slipstream.bench.speed_model.formula import (
    best_length,
    break_even_acceptance,
    pays_until,
    predicted_speed_up,
    simulate,
)
from slipstream.bench.speed_model.round_costs import Costs
from slipstream.text.results import Stats
from tests.support.cost_cases import RAGGED, linear_costs
from tests.support.markers import subcases
from tests.support.simulated_rounds import Load, play
from tests.support.toy_runs import make

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("acceptance", [0.7, RAGGED], ids=["alpha", "by position"])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_played_run_agrees_with_the_formula(acceptance: Acceptance | float, batch: int) -> None:
    """12,000 rounds or so: the speed-up's sampling error is about 1 %, the text's end and the last rows add little."""
    costs, load = linear_costs(), Load(rows=8 * batch, batch=batch, tokens=4000 // batch)
    plain = play(costs, acceptance, 0, load, seed=0)
    played = plain / play(costs, acceptance, 4, load, seed=1)
    assert played == pytest.approx(predicted_speed_up(costs, acceptance, 4, batch), rel=0.025)
    wrong = predicted_speed_up(costs, acceptance, 2, batch)
    assert abs(played / wrong - 1) > 0.025  # the tolerance can tell one draft length from another


def test_a_played_run_is_a_function_of_its_seed() -> None:
    costs, load = linear_costs(), Load(rows=5, batch=2, tokens=50)
    once, again, other = (play(costs, RAGGED, 4, load, seed) for seed in (7, 7, 8))
    assert once == again != other


@pytest.mark.parametrize(("alpha", "taken"), [(1.0, 5 + 5 + 3), (0.0, 9 * 5 + 4 + 3 + 2 + 1)])
def test_played_rows_draft_no_further_than_their_end(alpha: float, taken: int) -> None:
    """13 tokens at 1 ms a column: 4 are drafted a round as long as 5 or more tokens are left, whatever is drawn."""
    costs = Costs({1: {1: 1.0, 5: 5.0}}, {1: {1: 0.0, 5: 0.0}}, {1: 0.0}, {1: 0.0})
    assert play(costs, alpha, 4, Load(rows=1, batch=1, tokens=13), seed=0) == taken


def test_unfinished_rows_take_the_places_of_finished_ones() -> None:
    costs = linear_costs()
    together = play(costs, 0.0, 0, Load(rows=3, batch=2, tokens=10), seed=0)
    assert together == pytest.approx(10 * costs.plain(2, 1) + 10 * costs.plain(1, 1))


def test_the_table_holds_what_the_functions_say() -> None:
    costs = linear_costs(per_token=2.0, step=4.0)
    table = simulate(costs, 0.75, range(1, 7), (1, 4))
    assert table.speed_ups[4][3] == predicted_speed_up(costs, 0.75, 3, 4)
    assert table.best == {b: best_length(costs, 0.75, batch=b) for b in (1, 4)}
    assert table.stops == pays_until(costs, 0.75)
    assert table.break_even[1][2] == break_even_acceptance(costs, 2, 1)
    assert simulate(costs, RAGGED).lengths == (1, 2, 3, 4)
    assert simulate(costs, 0.5).batches == (1, 2, 4, 8)
    json.dumps(table.to_dict())


def test_the_best_is_marked_and_what_is_slower_too() -> None:
    with out.capture() as captured:
        found = print_simulation(out, linear_costs(), 0.75, simulate(linear_costs(), 0.75))
    text = captured.get()
    simulation = found["simulation"]
    slower = sum(value < 1 for column in simulation["speed_ups"].values() for value in column.values())
    assert text.count("x*") == len(simulation["batches"]) and text.count("x-") == slower > 0
    assert f"batch 1: best draft length {simulation['best'][1]}" in text
    assert len(simulation_table(simulate(linear_costs(), 0.75)).table.rows) == 16


def run(arguments: list[str]) -> str:
    with out.capture() as captured:
        app(["simulate", *arguments], standalone_mode=False)
    return captured.get()


def test_the_command_goes_from_measuring_to_a_file_and_back(tmp_path: Path) -> None:
    costs, result = tmp_path / "costs.json", tmp_path / "result.json"
    asked = "--alpha 0.8 --length 2 --length 4"
    probe = "--target toy --reproducible false --batch 1 --seconds 0.01"
    measured = run(f"{probe} {asked} --save-costs {costs} --json {result}".split())
    assert "measured" in measured and json.loads(result.read_text())["simulation"]["lengths"] == [2, 4]
    assert Costs.read(costs).drafter == "suffix"
    again = run(f"--costs {costs} {asked}".split())
    assert again == measured


def test_the_command_takes_statistics_and_paper(tmp_path: Path) -> None:
    stats = Stats(num_rounds=10, accepted_per_position=[6, 3], drafted_per_position=[10, 10]).to_dict()
    paper = ["--target-params", "8e9", "--draft-params", "6e8", "--bandwidth", "4.8e12", "--flops", "6e14"]
    texts = []
    for value in (stats, {"summary": {"stats": stats}}):
        (tmp_path / "stats.json").write_text(json.dumps(value))
        texts.append(run([*paper, "--stats", str(tmp_path / "stats.json")]))
    assert texts[0] == texts[1] and "on paper: 4800 GB/s" in texts[0] and "1.90" in texts[0]


def test_the_command_takes_an_arm_of_a_benchmark_and_says_what_that_run_gained(tmp_path: Path) -> None:
    costs, result = tmp_path / "costs.json", tmp_path / "result.json"
    linear_costs().save(costs)
    folder = make(tmp_path / "runs", "none,model@3,model@2x2", batches=[1, 2], repeats=1)
    shown = run(f"--costs {costs} --stats {folder} --arm model@3 --json {result}".split())
    told = json.loads(result.read_text())
    assert told["simulation"]["lengths"] == [1, 2, 3] and list(told["observed"]) == ["1", "2"]
    for batch in (1, 2):
        expected = told["observed"][str(batch)]
        assert (
            f"batch {batch}: this run was {expected['observed']:.2f}x plain decoding, {expected['predicted']:.2f}x"
            in shown
        )
    with pytest.raises(UsageError, match="2 arms that draft; allowed: --arm model@3 or model@2x2"):
        run(f"--costs {costs} --stats {folder}".split())
    with pytest.raises(UsageError, match="--arm 'none' drafted nothing"):
        run(f"--costs {costs} --stats {folder} --arm none".split())
    trees = f"--target toy --draft toy:2 --reproducible false --seconds 0.01 --stats {folder}"
    with pytest.raises(UsageError, match="acceptance of trees beside costs"):
        run(f"--costs {costs} --stats {folder} --arm model@2x2".split())
    measured = run(f"{trees} --arm model@2x2".split())  # the arm's own drafter
    assert "without branches" in measured and "drafter model;" in measured


@subcases(
    "arguments, message",
    [
        (["--alpha", "0.5", "--arm", "none", "--target", "toy"], "--arm none names an arm of a benchmark"),
        (["--alpha", "0.5", "--stats", "x.json"], "--alpha or from --stats; allowed: one of them"),
        (["--target", "toy", "--costs", "x.json"], "exactly one of them"),
        (["--alpha", "0.5", "--target", "toy", "--target-params", "1e9"], "costs come from"),
        (["--alpha", "0.5", "--target-params", "1e9"], "memory_bandwidth=0"),
        (["--alpha", "0.5", "--target", "toy", "--flops", "1e9"], "belong to --target-params"),
        (["--alpha", "0.5", "--target-params", "1e9", "--drafter", "ngram"], "belong to --target"),
        (["--alpha", "0.5", "--target", "toy", "--num-draft-tokens", "3"], "num_draft_tokens=3"),
        (["--stats", "/nowhere.json", "--target", "toy"], "cannot be read"),
    ],
)
def test_the_command_refuses(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        app(["simulate", *arguments], standalone_mode=False)
    assert message in str(error.value)


def test_without_options_the_command_shows_an_example_and_says_what_it_assumes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from slipstream.apps.cli import main; main()", "simulate"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "best draft length" in done.stdout
    assert "assumed: 70% of tested tokens are accepted" in done.stderr and "--model MODEL" in done.stderr
