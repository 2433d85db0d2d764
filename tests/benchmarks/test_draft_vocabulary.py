"""The benchmark of draft vocabularies compares steps, acceptance and texts, and refuses a vocabulary left whole."""

from __future__ import annotations

import json

import draft_vocabulary
import pytest
from tiny import perturbed, shared, tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    made = tmp_path_factory.mktemp("models")
    for name, model in (("target", shared("llama")), ("draft", perturbed("llama"))):
        model.save_pretrained(made / name)
        tokenizer(template=None).save_pretrained(made / name)
    (made / "prompt.txt").write_text("the heron and the sparrow and the heron")
    return [str(made / "target"), str(made / "draft"), "--prompt-file", str(made / "prompt.txt"), "--tokens", "24"]


def test_a_part_of_the_vocabulary_changes_no_text(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert draft_vocabulary.main([*folders, "--draft-vocabulary", "32"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["identical_texts"] == report["prompts"] == 1
    assert report["ratio"] == pytest.approx(report["restricted_ms"] / report["full_ms"], rel=0.05)
    assert 0 < report["full_acceptance"] <= 1 and 0 <= report["reading_share"] < 1


def test_a_vocabulary_that_stays_whole_is_refused(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert draft_vocabulary.main(folders) == 2
    error = capsys.readouterr().err
    assert "leaves this draft model's whole" in error and "Traceback" not in error
