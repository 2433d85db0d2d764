"""The GPU benchmark, on the CPU and tiny models."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import gpu
import gpu_arms
import pytest
import terminal

from tests.support.command_line import run_main

pytestmark = pytest.mark.exhaustive


def test_the_gpu_benchmark_runs_on_tiny_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, out = logging.getLogger("slipstream"), tmp_path / "result.json"
    monkeypatch.setattr(log, "handlers", log.handlers[:])  # resuming adds one line
    options = ["--small", "--acceptance", "0.6", "--json", str(out)]
    code, printed, err = run_main(capsys, monkeypatch, lambda: terminal.run(gpu.main), *options)
    assert code == 0, err
    result = json.loads(out.read_text())
    assert json.loads(printed.splitlines()[-1]) == result
    for rows, arms in result["batches"].items():
        by_arm = {arm["arm"]: arm for arm in arms}
        assert len(by_arm) == (10 if rows == "1" else 9)
        assert {arm["parity"] for arm in arms} == {f"{rows} identical"}
        for kind in gpu.KINDS:
            speculative = by_arm[f"speculative {kind}"]
            assert 0 < speculative["acceptance_rate"] < 1
            assert set(speculative["stages_ms"]) == {"draft", "verify", "accept", "overhead"}
            assert by_arm[f"plain {kind}"]["tokens_per_round"] == 1 < speculative["tokens_per_round"]
    assert printed.count("of its limit; speculative") == 2 * len(gpu.KINDS)
    assert set(result["parts"]["widths that give the same bits"]) == set(gpu.CALIBRATED)
    logits = result["parts"]["logits of random tokens against eager"]
    assert set(logits) == set(gpu.KINDS) - {"eager"}
    for by_arm in logits.values():
        assert by_arm["largest_relative_difference"] < 0.02 < by_arm["of_other_contexts"]
    same = result["parts"]["tokens with the bits that they have alone"]
    assert {count["of"] for count in same.values()} == {18}
    code, again, err = run_main(capsys, monkeypatch, lambda: terminal.run(gpu.main), *options)
    assert code == 0, err
    assert again.splitlines()[-1] == printed.splitlines()[-1] and "tokens/s" not in again  # nothing is measured twice


def test_a_failed_arm_of_the_gpu_benchmark_is_reported_without_a_number() -> None:
    def broken(_: int) -> list[list[int]]:
        raise RuntimeError("no memory\nat all")

    arm = gpu_arms.Arm("broken", broken)
    for _ in range(2):
        gpu.attempt(arm, lambda: arm.run(1))
    assert gpu.report(arm, arm, None, 1) == {"arm": "broken", "error": "RuntimeError: no memory"}
