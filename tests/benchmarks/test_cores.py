"""The benchmark of thread counts, on a tiny model: figures for every count, resumed runs, and detected differences."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import AutoConfig

from slipstream import UsageError
from slipstream.bench.records import Run
from tests.support.markers import needs_kernels
from tests.support.tiny_models import fresh, tokenizer

pytestmark = pytest.mark.exhaustive

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


def test_a_summary_has_speeds_the_plain_step_and_its_limit(cores: Any) -> None:
    plain = a_run("none", [1, 2, 3, 4], rounds=rounds(9.0, 0.5, 0.25, 1.0))
    failed = Run("hf", ["p"], "f", 1, 0, error="no memory")
    line = cores.summary(4, [plain, a_run("auto", [1, 2, 3, 4], rounds=rounds(9.0)), failed], limit_seconds=0.25)
    assert (line["plain"], line["auto"], line["peers"]) == (2.0, 2.0, {})
    assert (line["step_ms"], line["limit_ms"]) == (500.0, 250.0)
    assert (line["different"], line["errors"]) == (0, ["hf: no memory"])
    assert line["verdicts"] == {"none": {"identical": 1}, "auto": {"identical": 1}, "hf": {}}


@pytest.mark.parametrize(("arm", "counted"), [("auto", 1), ("hf", 1), ("llama", 0)])
def test_different_texts_are_counted_except_those_of_llama_cpp(cores: Any, arm: str, counted: int) -> None:
    other = Run(arm, ["p"], "f", 1, 0, 2.0, 4, [[9]], ["different"])
    line = cores.summary(1, [a_run("none", [1]), other], 1.0)
    assert line["different"] == counted
    assert cores.speed_cell(2.0, line["verdicts"][arm]) == "2.0 (0/1)"


def test_a_text_that_depends_on_the_threads_is_counted(cores: Any) -> None:
    lines = [
        cores.summary(count, [a_run("none", [1, 2]), a_run("auto", text), a_run("hf", [count])], 1.0)
        for count, text in ((1, [1, 2]), (2, [1, 3]), (4, [1, 2]))
    ]
    for line, digest in zip(lines, "aab", strict=True):
        line["contexts"] = [{"digest": digest}]
    cores.compare_with_first(lines)
    assert [line["depend_on_threads"] for line in lines] == [0, 1, 0]
    assert [line["bits_depend_on_threads"] for line in lines] == [0, 0, 1]


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


@needs_kernels
def test_bits_are_compared_over_thread_counts_and_a_difference_is_caught(
    cores: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "BITS_THREADS", (1, 2, 3, 5))  # many more of the kernels are tested
    real, width = torch.equal, max(cores.WIDTHS)

    def equal(logits: torch.Tensor, expected: torch.Tensor) -> bool:
        wrong = torch.get_num_threads() == 5 and logits.shape[1] == width
        return real(logits + 1 if wrong else logits, expected)

    monkeypatch.setattr(torch, "equal", equal)
    report = cores.compare_bits(str(tiny))
    assert report["context"] == 1100
    assert report["different"] == [{"threads": 5, "width": width}]  # and no others


@needs_kernels
def test_a_step_counts_the_bytes_of_weights_and_of_all_earlier_positions(cores: Any, tiny: Path) -> None:
    report = cores.steps_after(str(tiny), "1024", "128", "9999")
    assert [step["context"] for step in report["contexts"]] == [128, 1024]  # the model has no 9,999 positions
    shape, near, far = AutoConfig.from_pretrained(tiny), *report["contexts"]
    of_position = shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * 2 * 2
    assert near["bytes"] == report["weight_bytes"] + 128 * of_position
    assert far["bytes"] - near["bytes"] == (1024 - 128) * of_position
    assert near["digest"] != far["digest"]
    assert cores.steps_after(str(tiny), "128")["contexts"][0]["digest"] == near["digest"]


def test_each_thread_count_is_measured_once_and_other_settings_are_refused(
    cores: Any, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "found.json"
    prompts.write_text('{"prompt": "the heron"}\n{"prompt": "a sparrow, a sparrow"}\n')
    monkeypatch.setattr(cores, "COPIED", 1 << 20)
    options: dict[str, Any] = {"target": str(tiny), "prompt_file": prompts, "num_prompts": 2, "json_file": out}
    options |= {"contexts": "64,128"}
    with pytest.raises(typer.Exit) as stopped:
        cores.main(tmp_path / "runs", threads="1", max_tokens=6, minutes=0.0001, **options)
    assert stopped.value.exit_code == 3 and "stopped after" in capsys.readouterr().out
    cores.main(tmp_path / "runs", threads="1,2", max_tokens=6, **options)
    report = json.loads(out.read_text())
    assert [line["threads"] for line in report["threads"]] == [1, 2] and report["bits"]["different"] == []
    for line in report["threads"]:
        assert min(line[name] for name in ("plain", "auto", "step_ms", "limit_ms")) > 0
        assert min(line["peers"][name] for name in ("hf", "hf-lookup")) > 0 and len(line["contexts"]) == 2
        assert line["errors"] == []
        assert line["depend_on_threads"] == line["bits_depend_on_threads"] == line["different"] == 0
    assert "the same bits" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(cores.subprocess, "run", lambda *arguments, **more: pytest.fail("measured again"))
    monkeypatch.setattr(cores.Stage, "bench", lambda *arguments: None)  # it resumes by itself, see `slipstream bench`
    cores.main(tmp_path / "runs", threads="2", max_tokens=6, **options)
    assert [line["threads"] for line in json.loads(out.read_text())["threads"]] == [2]
    with pytest.raises(UsageError, match=r"^max_tokens 7; allowed: 6 as in .*plan.json', or a new folder$"):
        cores.main(tmp_path / "runs", threads="1", max_tokens=7, **options)
