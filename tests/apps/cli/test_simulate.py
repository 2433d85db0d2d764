"""`slipstream simulate`: costs measured, saved and on paper, an arm of a benchmark, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream import UsageError
from slipstream.apps.cli.application import app
from slipstream.apps.cli.consoles import out
from slipstream.bench.speed_model.round_costs import Costs
from slipstream.text.results import Stats
from tests.support import command_line
from tests.support.cost_cases import linear_costs
from tests.support.markers import subcases
from tests.support.toy_runs import make

pytestmark = pytest.mark.slow


def run(arguments: list[str]) -> str:
    with out.capture() as captured:
        app(["simulate", *arguments], standalone_mode=False)
    return captured.get()


def test_measured_costs_saved_to_a_file_give_the_same_output(tmp_path: Path) -> None:
    costs, result = tmp_path / "costs.json", tmp_path / "result.json"
    asked = "--alpha 0.8 --length 2 --length 4"
    probe = "--target toy --reproducible false --batch 1 --seconds 0.01"
    measured = run(f"{probe} {asked} --save-costs {costs} --json {result}".split())
    assert "measured" in measured and json.loads(result.read_text())["simulation"]["lengths"] == [2, 4]
    assert Costs.read(costs).drafter == "suffix"
    again = run(f"--costs {costs} {asked}".split())
    assert again == measured


def test_simulate_takes_statistics_and_costs_on_paper(tmp_path: Path) -> None:
    stats = Stats(num_rounds=10, accepted_per_position=[6, 3], drafted_per_position=[10, 10]).to_dict()
    paper = ["--target-params", "8e9", "--draft-params", "6e8", "--bandwidth", "4.8e12", "--flops", "6e14"]
    texts = []
    for value in (stats, {"summary": {"stats": stats}}):
        (tmp_path / "stats.json").write_text(json.dumps(value))
        texts.append(run([*paper, "--stats", str(tmp_path / "stats.json")]))
    assert texts[0] == texts[1] and "on paper: 4800 GB/s" in texts[0] and "1.90" in texts[0]


def test_simulate_takes_an_arm_of_a_benchmark_and_shows_its_measured_gain(tmp_path: Path) -> None:
    costs, result = tmp_path / "costs.json", tmp_path / "result.json"
    linear_costs().save(costs)
    folder = make(tmp_path / "runs", "none,model@3,model@2x2", batches=[1, 2], repeats=1)
    shown = run(f"--costs {costs} --stats {folder} --arm model@3 --json {result}".split())
    report = json.loads(result.read_text())
    assert report["simulation"]["lengths"] == [1, 2, 3] and list(report["observed"]) == ["1", "2"]
    for batch in (1, 2):
        expected = report["observed"][str(batch)]
        assert (
            f"batch {batch}: this run was {expected['observed']:.2f}x plain decoding, {expected['predicted']:.2f}x"
            in shown
        )
    with pytest.raises(UsageError, match="2 arms that draft; allowed: --arm model@3 or model@2x2"):
        run(f"--costs {costs} --stats {folder}".split())
    with pytest.raises(UsageError, match="--arm 'none' drafted nothing"):
        run(f"--costs {costs} --stats {folder} --arm none".split())
    with pytest.raises(UsageError, match="which were trees; allowed: statistics of drafts without branches"):
        run(f"--costs {costs} --stats {folder} --arm model@2x2".split())
    probe = "--target toy --draft toy:2 --reproducible false --seconds 0.01"
    assert "drafter model;" in run(f"{probe} --stats {folder} --arm model@3".split())  # the drafter of the arm


@subcases(
    "arguments, message",
    [
        (["--alpha", "0.5", "--arm", "none", "--target", "toy"], "--arm none names an arm of a benchmark"),
        (["--alpha", "0.5", "--stats", "x.json"], "--alpha or from --stats; allowed: one of them"),
        (["--target", "toy", "--costs", "x.json"], "exactly one of them"),
        (["--alpha", "0.5", "--target", "toy", "--target-params", "1e9"], "costs come from"),
        (["--alpha", "0.5", "--target-params", "1e9"], "--target-params without --bandwidth"),
        (["--alpha", "0.5", "--target", "toy", "--flops", "1e9"], "belong to --target-params"),
        (["--alpha", "0.5", "--target-params", "1e9", "--drafter", "ngram"], "belong to --target"),
        (["--alpha", "0.5", "--target", "toy", "--num-draft-tokens", "3"], "num_draft_tokens=3"),
        (["--stats", "/nowhere.json", "--target", "toy"], "cannot be read"),
    ],
)
def test_simulate_refuses_options_that_conflict(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        app(["simulate", *arguments], standalone_mode=False)
    assert message in str(error.value)


def test_simulate_without_options_shows_an_example_and_its_assumptions(capsys, monkeypatch) -> None:
    code, shown, notes = command_line.run(capsys, monkeypatch, "simulate")
    assert code == 0 and "best draft length" in shown
    assert "assumed: 70% of tested tokens are accepted" in notes and "--model MODEL" in notes
