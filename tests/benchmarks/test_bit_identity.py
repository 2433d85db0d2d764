"""The count of identical texts over many settings, on the toy model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "bit_identity.py"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one two one two one", "a b c a b")))
    return path


def run(prompts: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FILE), "toy", str(prompts), "--draft", "toy:1", "--max-tokens", "12", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_drafter_takes_the_lengths_that_it_can(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    named = ("--drafters", "none,ngram,auto,model", "--lengths", "3", "--lengths", "2x2", "--json", str(out))
    done = run(prompts, *named)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads(out.read_text())["lines"]
    greedy = [(one["drafter"], one["length"], one["batch"]) for one in lines if one["temperature"] == 0]
    assert greedy == [
        ("none", 0, 4),
        *((name, length, batch) for name, length in (("ngram", 3), ("auto", "auto")) for batch in (1, 4)),
        *(("model", length, batch) for length in (3, "2x2") for batch in (1, 4)),
    ]
    assert all((one["identical"], one["ties"], one["different"]) == (2, 0, 0) for one in lines)
    assert all(one["acceptance_rate"] is not None for one in lines if one["drafter"] == "model")


def test_a_length_that_is_none_is_one_line(prompts: Path) -> None:
    done = run(prompts, "--drafters", "model", "--lengths", "wide")
    assert done.returncode and "Traceback" not in done.stdout + done.stderr
    assert "num_draft_tokens='wide'" in done.stdout


def test_a_drafter_that_there_is_not_is_one_line(prompts: Path) -> None:
    done = run(prompts, "--drafters", "medium")
    assert done.returncode and "Traceback" not in done.stdout + done.stderr
    assert "drafter='medium'" in done.stdout


def test_settings_that_leave_nothing_to_compare_are_refused(prompts: Path) -> None:
    done = run(prompts, "--drafters", "ngram", "--lengths", "2x2")
    assert done.returncode and "Traceback" not in done.stdout + done.stderr
    assert "--drafters ngram with --lengths 2x2 is nothing to compare" in done.stdout
