"""The comparison of two checkouts' speeds compares equal settings and finds a slower checkout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkout_speed
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "checkout_speed.py"


def test_measurements_are_compared_by_arm_prompt_batch_and_repeat() -> None:
    def runs(*seconds: float) -> dict[Any, Any]:
        keys = [("none", "one", 1, 0), ("auto", "one", 1, 0), ("none", "two", 1, 0)]
        return {key: checkout_speed.Measured(taken, [[1]]) for key, taken in zip(keys, seconds, strict=False)}

    assert checkout_speed.ratios(runs(2.0, 3.0, 4.0), runs(1.0, 3.0, 8.0)) == {"none": [2.0, 0.5], "auto": [1.0]}
    with pytest.raises(SystemExit, match=r"only one checkout ran \('none', 'two', 1, 0\)"):
        checkout_speed.ratios(runs(2.0, 3.0, 4.0), runs(1.0, 3.0))


@pytest.mark.parametrize(("least", "code"), [(0.4, 0), (0.6, 1)])
def test_an_arm_that_became_too_slow_is_an_error(monkeypatch: pytest.MonkeyPatch, least: float, code: int) -> None:
    seconds = iter((1.0, 2.0))
    runs = lambda *arguments: {("none", "one", 1, 0): checkout_speed.Measured(next(seconds), [[1]])}  # noqa: E731
    monkeypatch.setattr(checkout_speed, "bench", runs)
    with pytest.raises(SystemExit) as ended:
        checkout_speed.main(ROOT, ROOT, turns=1, least=least)
    assert ended.value.code == code


def test_each_checkout_runs_the_plan_in_its_own_process(tmp_path: Path) -> None:
    plan, report = tmp_path / "plan.json", tmp_path / "found.json"
    plan.write_text(json.dumps({"target": "toy", "arms": ["none", "ngram@4"], "limit": 1, "max_tokens": 4}))
    options = ["--plan", plan, "--turns", "1", "--least", "1000", "--json", report]
    process = subprocess.run([sys.executable, str(FILE), str(ROOT), str(ROOT), *map(str, options)], capture_output=True)
    assert process.returncode == 1, process.stderr
    saved = json.loads(report.read_text())
    assert saved["texts that differ"] == {"none": 0, "ngram@4": 0}
    assert saved["medians"].keys() == saved["ratios"][0].keys() == {"none", "ngram@4"}
