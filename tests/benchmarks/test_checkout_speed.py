"""The comparison of two checkouts' speeds compares equal texts in turn and finds a slower checkout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import checkout_speed
import pytest
from checkout_speed import Pair

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "checkout_speed.py"


def test_the_median_of_the_ratios_is_compared() -> None:
    pairs = {
        "none": [Pair(2.0, 1.0, True), Pair(3.0, 3.0, True), Pair(4.0, 8.0, True)],
        "auto": [Pair(3.0, 2.0, False)],
    }
    assert checkout_speed.show(pairs) == {"none": 1.0, "auto": 1.5}


def test_the_checkouts_take_turns_in_alternating_order() -> None:
    asked = []

    class Recorded(checkout_speed.Checkout):
        def __init__(self, name: str) -> None:
            self.name = name

        def timed(self, arm: str, prompt: str) -> tuple[float, list[int]]:
            asked.append(self.name)
            return (1.0 if self.name == "before" else 2.0), [len(self.name)]

    before, after = Recorded("before"), Recorded("after")
    assert checkout_speed.measure(before, after, "none", "", False) == Pair(1.0, 2.0, False)
    assert checkout_speed.measure(before, after, "none", "", True) == Pair(1.0, 2.0, False)
    assert asked == ["before", "after", "after", "before"]


@pytest.mark.parametrize(("least", "code"), [("0.001", 0), ("1000", 1)])
def test_an_arm_that_became_too_slow_is_an_error(tmp_path: Path, least: str, code: int) -> None:
    report = tmp_path / "found.json"
    options = ["--target", "toy", "--arms", "none,ngram@4", "--prompts", "2", "--max-tokens", "4", "--turns", "1"]
    command = [sys.executable, FILE, ROOT, ROOT, *options, "--least", least, "--json", report]
    process = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert process.returncode == code, process.stderr
    saved = json.loads(report.read_text())
    assert saved["medians"].keys() == saved["runs"].keys() == {"none", "ngram@4"}
    assert all(same for runs in saved["runs"].values() for *_, same in runs)
    assert [len(runs) for runs in saved["runs"].values()] == [2, 2]


def test_a_worker_that_fails_ends_the_comparison() -> None:
    command = [sys.executable, str(FILE), str(ROOT), str(ROOT), "--target", "toy", "--arms", "unknown"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 1 and "ended with exit code" in process.stdout
