"""The GPU benchmark, on the CPU and tiny models."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_the_benchmark_runs_on_tiny_models(tmp_path: Path) -> None:
    script, out = Path(__file__).parents[2] / "benchmarks" / "gpu.py", tmp_path / "result.json"
    command = [sys.executable, "-W", "error", str(script), "--small", "--acceptance", "0.6", "--json", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == out.read_text().strip()
    result = json.loads(out.read_text())
    for rows, arms in result["batches"].items():
        found = {arm["arm"]: arm for arm in arms}
        assert len(found) == (8 if rows == "1" else 7)
        assert {arm["parity"] for arm in arms} == {f"{rows} identical"}
        for kind in ("eager", "graphed", "fused"):
            speculative = found[f"speculative {kind}"]
            assert 0 < speculative["acceptance_rate"] < 1
            assert set(speculative["stages_ms"]) == {"draft", "verify", "accept", "overhead"}
            assert found[f"plain {kind}"]["tokens_per_round"] == 1 < speculative["tokens_per_round"]
    assert set(result["agreeing_widths"]) == {"eager", "graphed", "fused"}
    assert set(result["logits"]) == {"graphed", "fused"}
    for found in result["logits"].values():
        assert found["largest_relative_difference"] < 0.02 < found["of_other_contexts"]


def test_a_failed_arm_of_the_benchmark_is_a_line_and_not_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    gpu, arms = importlib.import_module("gpu"), importlib.import_module("gpu_arms")

    def broken(_: int) -> list[list[int]]:
        raise RuntimeError("no memory\nat all")

    arm = arms.Arm("broken", broken)
    for _ in range(2):
        gpu.attempt(arm, lambda: arm.run(1))
    assert gpu.report(arm, arm, None, 1) == {"arm": "broken", "error": "RuntimeError: no memory"}
