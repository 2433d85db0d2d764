"""The benchmark of numbers of threads, on a tiny model: figures of every count, resumed, and differences found."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import UsageError
from slipstream.bench.records import Run
from slipstream.models.cpu.kernel_libraries import kernels
from tests.support.tiny_models import fresh, tokenizer

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("cores")


def test_thread_counts_double_up_to_all_cores(cores: Any) -> None:
    assert [cores.up_to(count) for count in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def a_run(arm: str, text: list[int], **more: Any) -> Run:
    return Run(arm, ["p"], "f", 1, 0, 2.0, len(text), [text], ["identical"], **more)


def rounds(*totals: float) -> list[dict[str, Any]]:
    """The first one reads the prompt."""
    return [
        {"seconds": [total, 0, 0, 0, total] if i == 0 else [0, 0, total, 0, total]} for i, total in enumerate(totals)
    ]


def test_a_line_has_speeds_the_plain_step_and_its_limit(cores: Any) -> None:
    plain = a_run("none", [1, 2, 3, 4], rounds=rounds(9.0, 0.5, 0.25, 1.0))
    failed = Run("hf", ["p"], "f", 1, 0, error="no memory")
    line = cores.summary(4, [plain, a_run("auto", [1, 2, 3, 4], rounds=rounds(9.0)), failed], limit_seconds=0.25)
    assert (line["plain"], line["auto"], line["hf"]) == (2.0, 2.0, None)
    assert (line["step_ms"], line["limit_ms"]) == (500.0, 250.0)
    assert (line["identical"], line["tie"], line["different"], line["errors"]) == (2, 0, 0, ["hf: no memory"])


def test_a_text_that_depends_on_the_threads_is_counted(cores: Any) -> None:
    lines = [
        cores.summary(count, [a_run("none", [1, 2]), a_run("auto", text), a_run("hf", [count])], 1.0)
        for count, text in ((1, [1, 2]), (2, [1, 3]), (4, [1, 2]))
    ]
    cores.compare_texts(lines)
    assert [line["depend_on_threads"] for line in lines] == [0, 1, 0]


def test_bits_that_depend_on_the_threads_are_named(cores: Any) -> None:
    same = {"context": 1100, "different": []}
    assert cores.bits_line(same).endswith("with 1, 2, 3, 5, 8, 16, 33 threads: the same bits")
    other = {"context": 1100, "different": [{"threads": 3, "width": 5}, {"threads": 8, "width": 5}]}
    assert cores.bits_line(other).endswith("other bits at width 5 with 3 threads; width 5 with 8 threads")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 64, "max_position_embeddings": 2048}
    fresh("llama", dtype=torch.bfloat16, **sizes).save_pretrained(tmp_path / "tiny")
    tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.skipif(kernels() is None, reason="needs a C compiler and a processor with AVX2")
def test_bits_over_many_threads_are_compared_and_a_difference_is_found(
    cores: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "BITS_THREADS", (1, 2, 3, 5))  # of the kernels many more are tested
    real, width = torch.equal, max(cores.WIDTHS)

    def equal(logits: torch.Tensor, expected: torch.Tensor) -> bool:
        wrong = torch.get_num_threads() == 5 and logits.shape[1] == width
        return real(logits + 1 if wrong else logits, expected)

    monkeypatch.setattr(torch, "equal", equal)
    found = cores.compare_bits(str(tiny))
    assert found["context"] == 1100 and found["weight_bytes"] > 0
    assert found["different"] == [{"threads": 5, "width": width}]  # and no others


@pytest.mark.exhaustive
def test_every_number_of_threads_is_measured_once_and_other_settings_are_refused(
    cores: Any, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "found.json"
    prompts.write_text('{"prompt": "the heron"}\n{"prompt": "a sparrow, a sparrow"}\n')
    monkeypatch.setattr(cores, "COPIED", 1 << 20)
    options: dict[str, Any] = {"target": str(tiny), "prompt_file": prompts, "num_prompts": 2, "json_file": out}
    cores.main(tmp_path / "runs", threads="1,2", max_tokens=6, **options)
    report = json.loads(out.read_text())
    assert [line["threads"] for line in report["threads"]] == [1, 2] and report["bits"]["different"] == []
    for line in report["threads"]:
        assert min(line[name] for name in ("hf", "plain", "auto", "step_ms", "limit_ms")) > 0
        assert line["errors"] == [] and line["depend_on_threads"] == line["different"] == 0
    assert "the same bits" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(cores.subprocess, "run", lambda *given, **more: pytest.fail("measured again"))
    monkeypatch.setattr(cores, "bench", lambda *given: None)  # it resumes by itself, see `slipstream bench`
    cores.main(tmp_path / "runs", threads="2", max_tokens=6, **options)
    assert [line["threads"] for line in json.loads(out.read_text())["threads"]] == [2]
    with pytest.raises(UsageError, match=r"^max_tokens 7; allowed: 6 as in .*plan.json', or a new folder$"):
        cores.main(tmp_path / "runs", threads="1", max_tokens=7, **options)
