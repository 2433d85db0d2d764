"""`slipstream doctor` names what is missing with the command that fixes it, and does not fail because of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.apps.cli import doctor
from slipstream.models.cpu import kernel_libraries
from slipstream.models.cpu.processor import NoCompilerError
from tests.support.command_line import run

TORCH = version("torch")  # torch.__version__ also names the build, such as 2.13.0+cu130


def diagnosis(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[int, str, dict[str, Any]]:
    file = tmp_path / "doctor.json"
    code, out, _ = run(capsys, monkeypatch, "doctor", "--json", str(file))
    return code, " ".join(out.split()), json.loads(file.read_text(encoding="utf-8"))


def test_doctor_reports_versions_kernels_devices_and_caches(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch>=2.0", "no-such-package; extra == 'all'"])
    code, out, report = diagnosis(capsys, monkeypatch, tmp_path)
    assert code == 0 and "passed: the toy model generates the same tokens" in out
    subjects = [fact["subject"] for fact in report["facts"]]
    assert {"slipstream", "python", "packages", "processor", "bfloat16 kernels", "device", "cache"} <= set(subjects)
    assert f"torch {TORCH}" in out
    assert out.endswith("No problem found.") == (report["problems"] == 0)


def test_missing_and_outdated_packages_come_with_the_command_that_installs_them(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch>=99", "no-such-package>=2", "numpy>=1"])
    code, out, report = diagnosis(capsys, monkeypatch, tmp_path)
    assert code == 0 and "pip install 'torch>=99'" in out and "pip install 'no-such-package>=2'" in out
    assert f"torch>=99 is needed, {TORCH} is installed" in out
    assert not any(fact["problem"] for fact in report["facts"] if fact["subject"] == "numpy")
    find_spec = doctor.find_spec
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    assert "uv pip install 'torch>=99'" in diagnosis(capsys, monkeypatch, tmp_path)[1]


def test_kernels_that_need_a_compiler_say_how_to_get_one(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none(forced: str | None) -> None:
        raise NoCompilerError("no C compiler found (gcc or cc)")

    monkeypatch.setattr(kernel_libraries, "best_bfloat16_recipe", none)
    monkeypatch.setattr(kernel_libraries, "COMPILERS", {sys.platform: "get gcc"})
    _, out, report = diagnosis(capsys, monkeypatch, tmp_path)
    assert "problem: bfloat16 kernels are not available" in out and "(gcc or cc); get gcc" in out
    assert report["problems"] >= 1


def test_a_gpu_that_this_pytorch_does_not_use_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "version", SimpleNamespace(cuda=None))
    (fact,) = doctor._device()
    assert "is built without CUDA" in fact.problem and "pytorch.org/get-started" in fact.remedy


def test_a_check_that_raises_is_a_problem_without_a_traceback(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def _self_test() -> None:
        raise RuntimeError("no\nway")

    def _processor() -> None:
        _self_test()

    monkeypatch.setattr(doctor, "CHECKS", [_processor])
    code, out, _ = diagnosis(capsys, monkeypatch, tmp_path)
    assert code == 0 and "problem: processor: RuntimeError: no way" in out
    monkeypatch.setattr(doctor, "CHECKS", [_self_test])
    assert run(capsys, monkeypatch, "doctor")[0::2] == (1, "error: the self-test failed\n")


def test_a_cache_folder_that_cannot_be_written_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path / "absent"))
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    (fact,) = doctor._cache()
    assert "GB free" in fact.value and "cannot be written" in fact.problem and "SLIPSTREAM_MODELS" in fact.remedy


def test_slipstream_runs_as_a_module() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "slipstream", "--version"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0 and process.stdout[0].isdigit(), process.stderr
