"""`slipstream simulate`: costs measured and on paper, an arm of a benchmark, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream import SpeculativeDecoder, UsageError
from slipstream.apps.cli.application import app
from slipstream.apps.cli.consoles import out
from slipstream.text.results import Stats
from tests.support import command_line
from tests.support.markers import subcases
from tests.support.toy_runs import make

pytestmark = pytest.mark.slow


def run(arguments: list[str]) -> str:
    with out.capture() as captured:
        app(["simulate", *arguments], standalone_mode=False)
    return captured.get()


def test_costs_are_those_of_the_calibration(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    shown = run(f"--target toy --draft toy:2 --alpha 0.8 --length 2 --length 4 --batch 1 --json {result}".split())
    saved = json.loads(result.read_text())
    calibration = SpeculativeDecoder("toy", "toy:2").calibration
    assert calibration is not None
    assert saved["costs"]["measured"] == {str(width): ms for width, ms in calibration.milliseconds.items()}
    assert list(saved["simulation"]["speed_ups"]["1"]) == ["2", "4"] and "2.44" in shown


def test_simulate_takes_statistics_and_costs_on_paper(tmp_path: Path) -> None:
    stats = Stats(num_rounds=10, num_draft_tokens=20, accepted_per_position=[6, 3], drafted_per_position=[10, 10])
    paper = ["--target-params", "8e9", "--draft-params", "6e8", "--bandwidth", "4.8e12", "--flops", "6e14"]
    texts = []
    for value in (stats.to_dict(), {"summary": {"stats": stats.to_dict()}}):
        (tmp_path / "stats.json").write_text(json.dumps(value))
        texts.append(run([*paper, "--stats", str(tmp_path / "stats.json")]))
    assert texts[0] == texts[1] and "1.90" in texts[0]


@subcases("text", ["[]", "{}", '{"num_rounds": "x"}', '{"stats": 3}', '{"accepted_per_position": 3, "lossless": true}'])
def test_a_file_without_statistics_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "stats.json").write_text(text)
    with pytest.raises(UsageError, match="allowed: "):
        run(["--stats", str(tmp_path / "stats.json")])


def test_simulate_takes_an_arm_of_a_benchmark(tmp_path: Path) -> None:
    folder = make(tmp_path / "runs", "none,model@3,model@2x2", batches=[1, 2], repeats=1)
    shown = run(f"--stats {folder} --arm model@3".split())
    assert [line.split()[0] for line in shown.splitlines() if line[:6].strip().isdigit()] == ["1", "2", "3"]
    with pytest.raises(UsageError, match="2 arms that draft; allowed: --arm model@3 or model@2x2"):
        run(f"--stats {folder}".split())
    with pytest.raises(UsageError, match="--arm 'none' drafted nothing"):
        run(f"--stats {folder} --arm none".split())
    with pytest.raises(UsageError, match="stats of draft trees"):
        run(f"--stats {folder} --arm model@2x2".split())


@subcases(
    "arguments, message",
    [
        (["--alpha", "0.5", "--arm", "none", "--target", "toy"], "--arm none names an arm of a benchmark"),
        (["--alpha", "0.5", "--stats", "x.json"], "--alpha or from --stats; allowed: one of them"),
        (["--target", "toy", "--target-params", "1e9"], "--model or from --target-params; allowed: one of them"),
        (["--alpha", "0.5", "--target", "toy", "--target-params", "1e9"], "costs come from"),
        (["--alpha", "0.5", "--target-params", "1e9"], "--target-params without --bandwidth"),
        (["--alpha", "0.5", "--target", "toy", "--flops", "1e9"], "--flops need --target-params"),
        (["--alpha", "0.5", "--target-params", "1e9", "--drafter", "ngram"], "flags need --model"),
        (["--alpha", "0.5", "--target", "toy", "--num-draft-tokens", "3"], "num_draft_tokens=3"),
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
