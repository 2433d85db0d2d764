"""The benchmarks of draft vocabularies and contexts compare steps, acceptance and texts; wrong use is one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import draft_restrictions
import pytest
import terminal

from tests.support.tiny_models import perturbed, shared, tokenizer

pytestmark = pytest.mark.exhaustive

Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    made = tmp_path_factory.mktemp("models")
    for name, model in (("target", shared("llama")), ("draft", perturbed("llama"))):
        model.save_pretrained(made / name)
        tokenizer(template=None).save_pretrained(made / name)
    (made / "prompt.txt").write_text("the heron and the sparrow and the heron " * 15)
    return [str(made / "target"), str(made / "draft"), "--prompt-file", str(made / "prompt.txt"), "--tokens", "24"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit code and output of a command of benchmarks."""

    def run(main: Callable[..., Any], arguments: list[str]) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["command", *arguments])
        with pytest.raises(SystemExit) as ended:
            terminal.run(main)
        return int(ended.value.code or 0), capsys.readouterr().out

    return run


def test_a_draft_vocabulary_changes_no_text(folders: list[str], run: Run) -> None:
    code, out = run(draft_restrictions.main, [*folders, "--vocabulary", "32"])
    report = json.loads(out.splitlines()[-1])
    assert code == 0 and report["restricted"]["identical_texts"] == report["prompts"] == 1
    for arm in (report["full"], report["restricted"]):
        assert arm["interleaved_step_ms"] > 0 < arm["acceptance"] <= 1 and 0 <= arm["reading"] < 1


def test_a_draft_context_changes_no_text(folders: list[str], run: Run) -> None:
    code, out = run(draft_restrictions.main, [*folders, "--context", "128"])
    report = json.loads(out.splitlines()[-1])
    assert code == 0 and report["full"]["identical_texts"] == report["128"]["identical_texts"] == 1
    assert report["full"]["relative_time"] == 1 and 0 < report["128"]["acceptance"] < report["full"]["acceptance"]


def test_a_vocabulary_that_restricts_nothing_and_a_missing_model_are_refused(folders: list[str], run: Run) -> None:
    code, out = run(draft_restrictions.main, folders)
    assert code == 2 and "leaves this draft model's whole" in out
    code, out = run(draft_restrictions.main, [folders[0], "none.gguf", *folders[2:], "--context", "128"])
    assert code == 2 and "none.gguf" in out
