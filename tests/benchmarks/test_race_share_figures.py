"""The benchmark of race shares tells both log-losses; wrong use is one line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import race_shares
import terminal

from tests.support.tiny_models import shared, tokenizer

PROMPTS = str(Path(__file__).parents[2] / "src/slipstream/data/prompts.jsonl")
SHORT = [PROMPTS, "--limit", "1", "--tokens", "6", "--races", "2"]


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["race_shares", *arguments])
    with pytest.raises(SystemExit) as end:
        terminal.run(race_shares.main)
    return int(end.value.code or 0)


def test_every_draw_is_in_one_bin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(monkeypatch, "toy", "toy:2", *SHORT) == 0
    said = capsys.readouterr().out
    draws = int(re.match(r"(\d+) draws at 0.8", said)[1])
    assert draws == 8 * 6 * 2 == sum(map(int, re.findall(r"of (\d+)$", said, re.MULTILINE)))
    assert re.search(r"^probability: log-loss \d", said, re.MULTILINE)
    assert re.search(r"^share: log-loss \d", said, re.MULTILINE)


def test_a_model_is_always_sure_of_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(monkeypatch, "toy", "toy", *SHORT) == 0
    assert "the winners agree in 100.0%" in capsys.readouterr().out


def test_another_vocabulary_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shared("llama").save_pretrained(tmp_path)
    tokenizer(template=None).save_pretrained(tmp_path)
    assert ended(monkeypatch, "toy", str(tmp_path), *SHORT) == 2
    assert "another vocabulary" in capsys.readouterr().out


def test_prompts_that_are_not_there_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, "toy", "toy:2", "/no/such.jsonl") == 2
    assert "'/no/such.jsonl' cannot be read" in capsys.readouterr().out
