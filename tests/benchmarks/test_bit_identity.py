"""The count of identical texts over many settings, on the toy model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import bit_identity
import pytest
import terminal

from tests.support.command_line import run_main

pytestmark = pytest.mark.slow

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, prompts: Path) -> Run:
    asked = ("toy", prompts, "--draft", "toy:1", "--max-tokens", "12")
    return lambda *arguments: run_main(capsys, monkeypatch, lambda: terminal.run(bit_identity.main), *asked, *arguments)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one two one two one", "a b c a b")))
    return path


def test_every_drafter_runs_with_the_lengths_it_supports(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    named = ("--drafters", "none,ngram,auto,model", "--lengths", "3", "--lengths", "2x2", "--json", str(out))
    code, printed, err = run(*named)
    assert code == 0, printed + err
    lines = json.loads(out.read_text())["lines"]
    greedy = [(line["drafter"], line["length"], line["batch"]) for line in lines if line["temperature"] == 0]
    assert greedy == [
        ("none", 0, 4),
        *((name, length, batch) for name, length in (("ngram", 3), ("auto", "auto")) for batch in (1, 4)),
        *(("model", length, batch) for length in (3, "2x2") for batch in (1, 4)),
    ]
    assert all((line["identical"], line["ties"], line["different"]) == (2, 0, 0) for line in lines)
    assert all(line["acceptance_rate"] is not None for line in lines if line["drafter"] == "model")


@pytest.mark.parametrize(
    ("drafters", "lengths", "message"),
    [
        ("model", "wide", "num_draft_tokens='wide'"),
        ("medium", "3", "drafter='medium'"),
        ("ngram", "2x2", "--drafters ngram with --lengths 2x2 is nothing to compare"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(run: Run, drafters: str, lengths: str, message: str) -> None:
    code, out, err = run("--drafters", drafters, "--lengths", lengths)
    assert code and "Traceback" not in out + err and message in out
