"""`slipstream models check` for models of two vocabularies, and `--draft` with one of another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models

from tests.support.command_line import run
from tests.support.vocabularies import TEXT, speaking, tokenizer

STORY = "\n".join(TEXT)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {}
    for kind in ("bytes", "sentencepiece"):
        path = tmp_path_factory.mktemp(kind)
        speaking(kind).save_pretrained(path)
        tokenizer(kind).save_pretrained(path)
        made[kind] = str(path)
    return made


def test_it_says_what_the_bridge_does_and_loses(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, folders: dict[str, str], tmp_path: Path
) -> None:
    file, text = tmp_path / "report.json", tmp_path / "story.txt"
    text.write_text(STORY)
    check = ("models", "check", folders["bytes"], folders["sentencepiece"])
    code, out, _ = run(capsys, monkeypatch, *check, "--text", str(text), "--json", str(file))
    report = json.loads(file.read_text())
    assert code == 0 and "usable through bytes, verified by match" in out
    assert report["usable"] and 0.5 < report["bridge"]["kept"] <= 1 and 0 < report["bridge"]["aligned"] < 1
    assert "<|end|>, <|model|>, <|user|>" in out and "by the draft model's own template" in out
    assert f"{1 - report['bridge']['kept']:.1%} of its tokens rejected" in " ".join(out.split())
    code, _, _ = run(capsys, monkeypatch, *check, "--json", str(file))
    assert code == 0 and json.loads(file.read_text())["bridge"] != report["bridge"]  # another text, another estimate


def test_what_cannot_work_is_one_line_that_names_both(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, folders: dict[str, str], tmp_path: Path
) -> None:
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "##s": 2}, unk_token="[UNK]"))
    speaking("bytes").save_pretrained(tmp_path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="[UNK]").save_pretrained(tmp_path)
    for command in (("models", "check", folders["bytes"], str(tmp_path)),):
        code, _, err = run(capsys, monkeypatch, *command)
        assert code == 1 and len(err.strip().splitlines()) == 1 and "WordPiece" in err
        assert folders["bytes"] in err and str(tmp_path) in err
    options = ("generate", "-p", "a", "--target", folders["bytes"], "--draft", str(tmp_path), "--reproducible", "false")
    code, _, err = run(capsys, monkeypatch, *options)
    assert code == 2 and "WordPiece" in err and folders["bytes"] in err and str(tmp_path) in err


def test_a_draft_model_of_another_vocabulary_is_taken_on_the_command_line(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, folders: dict[str, str], tmp_path: Path
) -> None:
    texts = []
    for number, drafting in enumerate([(), ("--draft", folders["sentencepiece"], "--num-draft-tokens", "3")]):
        file = tmp_path / f"{number}.json"
        options = ("--target", folders["bytes"], "--max-tokens", "12", "--reproducible", "false", "--json", str(file))
        code, _, err = run(capsys, monkeypatch, "generate", "-p", "The heron", *drafting, *options)
        assert code == 0, err
        texts.append(json.loads(file.read_text())["results"][0]["token_ids"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["a b", "-x", "a..b", "x/", "a" * 120])
def test_a_name_that_no_model_can_have_is_wrong_use(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, name: str, folders: dict[str, str]
) -> None:
    code, _, err = run(capsys, monkeypatch, "models", "check", "--", folders["bytes"], name)
    assert code == 2 and len(err.strip().splitlines()) == 1 and repr(name) in err
