"""A researcher's path: an own drafter and own rules are measured, verified, reported and written as tables."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import slipstream
from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.bench.records import read_records
from tests.support.command_line import run
from tests.support.user_objects import users_module

ARMS = "none,mine:Echo@3,ngram@3/mine:right"
PROMPTS = ["The heron looked", "A sparrow", "The wind", "A fish, a fish, a fish", "It was"]
PAPER = r"\documentclass{article}\usepackage{booktabs}\begin{document}\input{tables}\end{document}"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with users_module(tmp_path, monkeypatch):
        yield


@pytest.mark.slow
def test_an_own_drafter_and_own_rules_from_measurement_to_paper(capsys, monkeypatch, tmp_path: Path) -> None:
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    measured = ("--target", "toy", "--prompt-file", "prompts.jsonl", "--max-tokens", "16")
    options = (*measured, "--repeats", "2", "--out", "runs", "--arms", ARMS)
    code, out, errors = run(capsys, monkeypatch, "bench", *options)
    assert code == 0 and "mine:Echo@3" in out, errors
    short = ("--target", "toy", "--drafter", "mine:Echo", "--num-draft-tokens", "2", "--limit", "1", "--budget", "1")
    for rule, verdict, expected in (("right", "VERIFIED", 0), ("wrong", "FAILED", 1)):
        options = ("--acceptance", f"mine:{rule}", "--json", "certificate.json")
        code, out, errors = run(capsys, monkeypatch, "verify", *short, *options)
        assert code == expected and verdict in out and ("error: not exact" in errors) == (code == 1)
        assert json.loads(Path("certificate.json").read_text())["verdict"] == verdict
    monkeypatch.setattr("slipstream.bench.report.charts", lambda data: [])  # tests/bench/test_report.py draws them
    written = ("--csv", "runs.csv", "--latex", "tables.tex", "--bibtex", "methods.bib", "--title", "Echo")
    assert run(capsys, monkeypatch, "report", "runs", *written)[0] == 0
    assert run(capsys, monkeypatch, "report", "runs", "--ids", "--title", "Echo", "--note", "A first try.")[0] == 0
    page = Path("runs/report.html").read_text()
    assert "<h1>Echo</h1>" in page and "A first try." in page and "mine:Echo, 3 tokens" in page
    assert "Proposes the row&#39;s newest tokens again" in page  # what the arms are
    lines = {
        line["arm"]: line
        for line in csv.DictReader(Path("runs.csv").read_text().splitlines())
        if line["family"] == "all"
    }
    assert list(lines) == ARMS.split(",") and lines["mine:Echo@3"]["identical"] == lines["mine:Echo@3"]["n"] == "5"
    assert float(lines["mine:Echo@3"]["speed_up_low"]) > 0
    assert r"mine:Echo, 3 tokens & 5 & " in Path("tables.tex").read_text()
    assert "@misc{saxena2023prompt," in Path("methods.bib").read_text()
    if shutil.which("pdflatex"):
        Path("paper.tex").write_text(PAPER)
        command = ("pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex")
        compiled = subprocess.run(command, capture_output=True, text=True, errors="replace")
        assert compiled.returncode == 0 and Path("paper.pdf").exists(), compiled.stdout


def test_records_from_python_are_those_of_the_command(tmp_path: Path) -> None:
    decoder, params = SpeculativeDecoder("toy"), SamplingParams(max_tokens=12)
    records = slipstream.benchmark(decoder, PROMPTS[:2], ARMS, params, repeats=1)
    assert [(run.arm, run.prompts) for run in records.runs[:3]] == [(arm, ["prompt/1"]) for arm in ARMS.split(",")]
    assert len(records.runs) == 6 and not list(tmp_path.glob("**/runs.jsonl"))
    plain, echo, _ = records.summaries
    assert echo.verdicts["identical"] == 2 and echo.speed_up is not None and plain.verdicts["reference"] == 2
    assert echo.stats is not None and sum(echo.stats.accepted_lengths) > 0
    kept = slipstream.benchmark(decoder, PROMPTS[:2], "none", params, repeats=1, folder="kept")
    assert read_records(Path("kept"))[1] == kept.runs
    assert slipstream.benchmark(decoder, PROMPTS[:2], "none", params, repeats=1, folder="kept").runs == kept.runs
    with pytest.raises(UsageError, match=r"batch_sizes=\[16\]; allowed: up to the decoder's max_batch_size, 8"):
        slipstream.benchmark(decoder, PROMPTS * 4, "none", params, batch_sizes=[16])
