"""A misspelt name is answered with the known name nearest to it; failures of files read alike everywhere."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream import SamplingParams, UsageError
from slipstream.errors import did_you_mean, first_line, one_line, os_reason, with_class
from tests.support.chat_fakes import refused, toy
from tests.support.command_line import run


def test_only_near_names_are_suggested() -> None:
    assert did_you_mean("ngrm", "ngram", "suffix") == "; did you mean 'ngram'?"
    assert did_you_mean("xyz", "ngram", "suffix") == did_you_mean("topk", "topk") == did_you_mean("x") == ""


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (("--drafter", "ngrm"), "ngram"),
        (("--drafter", "sufix:3"), "suffix"),
        (("--acceptance", "typicl"), "typical"),
        (("--acceptance", "rejecton"), "rejection"),
        (("--dtype", "bfloat1"), "bfloat16"),
        (("--num-draft-tokens", "heuristc:4"), "heuristic"),
        (("--draft-dtype", "in8"), "int8"),
    ],
)
def test_the_command_line_suggests_near_choices(
    arguments: tuple[str, str], near: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, errors = run(capsys, monkeypatch, "generate", "--target", "toy", "-p", "x", *arguments)
    assert code == 2 and f"did you mean '{near}'?" in errors and len(errors.splitlines()) == 1


def test_settings_files_and_sampling_options_suggest_near_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="did you mean 'temperature'"):
        SamplingParams(temprature=1.0)
    (file := tmp_path / "c.json").write_text(json.dumps({"draftr": "ngram"}))
    assert "did you mean 'drafter'?" in run(capsys, monkeypatch, "generate", "-p", "x", "--config", str(file))[2]
    (lines := tmp_path / "p.jsonl").write_text('{"prompt": "x", "category": "code"}\n')
    errors = run(capsys, monkeypatch, "generate", "--prompt-file", str(lines), "--category", "coed")[2]
    assert "did you mean 'code'?" in errors


def test_slash_commands_suggest_near_names() -> None:
    chat = toy()
    assert "did you mean 'nucleus'?" in refused(chat, "/sampling nuclues")
    assert "did you mean 'temperature'?" in refused(chat, "/set temprature 1")
    assert "did you mean 'ngram'?" in refused(chat, "/drafter ngarm")


def test_a_missing_file_is_reported_in_the_same_words_by_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = str(tmp_path / "missing")
    for command in (("report", missing), ("generate", "--target", "toy", "--prompt-file", missing)):
        assert "cannot be read: no such file or directory" in run(capsys, monkeypatch, *command)[2], command[0]
    assert os_reason(OSError(errno.EACCES, os.strerror(errno.EACCES))) == "permission denied"
    assert os_reason(OSError("Odd")) == "odd"


@pytest.mark.parametrize("tell", [first_line, one_line, with_class])
def test_an_error_whose_message_says_little_is_told_with_its_class(tell: Callable[[BaseException], str]) -> None:
    assert tell(KeyError("nope")) == "KeyError: 'nope'"
    assert tell(ZeroDivisionError("division by zero")) == "ZeroDivisionError: division by zero"
    assert tell(ValueError()) == "ValueError"
