"""The benchmark of draft vocabularies compares steps, acceptance and texts, and refuses a vocabulary left whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import perturbed, shared, tokenizer

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "draft_vocabulary.py"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    made = tmp_path_factory.mktemp("models")
    for name, model in (("target", shared("llama")), ("draft", perturbed("llama"))):
        model.save_pretrained(made / name)
        tokenizer(template=None).save_pretrained(made / name)
    (made / "prompt.txt").write_text("the heron and the sparrow and the heron")
    return [str(made / "target"), str(made / "draft"), "--prompt-file", str(made / "prompt.txt"), "--tokens", "24"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


def test_a_part_of_the_vocabulary_changes_no_text(folders: list[str]) -> None:
    done = run(*folders, "--draft-vocabulary", "32")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["identical_texts"] == report["prompts"] == 1
    assert report["ratio"] == pytest.approx(report["restricted_ms"] / report["full_ms"], rel=0.05)
    assert 0 < report["full_acceptance"] <= 1 and 0 <= report["reading_share"] < 1


def test_a_vocabulary_that_stays_whole_is_refused(folders: list[str]) -> None:
    done = run(*folders)
    assert done.returncode == 2 and "leaves this draft model's whole" in done.stderr and "Traceback" not in done.stderr
