"""Flags from TOML files and environment variables, and which source wins."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer

from slipstream.apps.cli import app
from slipstream.apps.cli.command_classes import VARIABLES
from slipstream.apps.cli.flags import keys_of
from tests.support.command_line import run
from tests.support.import_graph import SOURCE

FILE = """
model = "toy"
max-tokens = 12
"""
Streams = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("variable", "flags", "tokens"), [(None, (), 12), ("5", (), 5), ("5", ("--max-tokens", "3"), 3)]
)
def test_a_flag_overrides_the_environment_which_overrides_the_file(
    variable: str | None, flags: tuple[str, ...], tokens: int, capsys: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("settings.toml").write_text(FILE.replace("-", "_"))
    if variable is not None:
        monkeypatch.setenv("SLIPSTREAM_MAX_TOKENS", variable)
    command = ("generate", "A heron", "--config", "settings.toml", "--json", "result.json", *flags)
    assert run(capsys, monkeypatch, *command)[0] == 0
    assert len(json.loads(Path("result.json").read_text())["results"][0]["token_ids"]) == tokens


def test_a_variable_can_name_the_file_and_lists_repeat_a_flag(capsys: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("s.toml").write_text('target = "toy"\nstop = ["sparrow", "heron"]\ndrafter = "ngram"\n')
    monkeypatch.setenv("SLIPSTREAM_CONFIG", "s.toml")
    code, _, messages = run(capsys, monkeypatch, "generate", "A heron", "--json", "result.json")
    [result] = json.loads(Path("result.json").read_text())["results"]
    assert code == 0 and result["finish_reason"] == "stop" and "ngram" in messages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 8000", "config file 's.toml' has the unknown key 'prot'; allowed: "),
        ("prot = 8000", "did you mean 'port'?"),
        ('port = "high"', "--port 'high'; allowed: a whole number"),
        ("port = 70000", "port"),
        ("[model.birds]", "config file 's.toml': model={'birds': {}}; allowed: a string, a number"),
        ("port = [", "--config 's.toml' is not TOML: "),
        (f"port = {'[' * 3000}", "--config 's.toml' is not TOML: it is nested too deeply"),
        ("port = 1979-05-27", "config file 's.toml': port=datetime.date(1979, 5, 27); allowed: a string, a number"),
        ("config = 's.toml'", "has the unknown key 'config'"),
    ],
)
def test_what_a_file_says_wrong_is_named(
    text: str, message: str, capsys: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("s.toml").write_text(text)
    code, _, errors = run(capsys, monkeypatch, "serve", "--model", "toy", "--config", "s.toml")
    assert code == 2 and message in " ".join(errors.split()) and "Traceback" not in errors, errors


def test_a_wrong_variable_is_named_like_its_flag(capsys: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_PORT", "high")
    code, _, errors = run(capsys, monkeypatch, "serve", "--model", "toy")
    assert code == 2 and "--port 'high'; allowed: a whole number" in errors
    monkeypatch.setenv("SLIPSTREAM_RAW", "maybe")
    code, _, errors = run(capsys, monkeypatch, "generate", "--model", "toy", "Hi")
    assert (code, errors) == (2, "error: --raw 'maybe'; allowed: true or false\n")


def test_the_variable_that_checks_caches_takes_no_other_word(capsys: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, code in (("yes", 2), ("0", 0), ("1", 0), ("", 0)):
        monkeypatch.setenv("SLIPSTREAM_DEBUG", value)
        status, _, errors = run(capsys, monkeypatch, "help")
        assert status == code and errors == f"error: SLIPSTREAM_DEBUG={value!r}; allowed: '1' or '0'\n" * (code == 2)


def test_a_misspelled_variable_is_refused_and_those_of_others_are_not(
    capsys: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("generate", "--model", "toy", "--max-tokens", "2", "the cat")
    for name in ("SLIPSTREAM_SERVICE_HOST", "SLIPSTREAM_PORT_8000_TCP", "SLIPSTREAM_PORT"):
        monkeypatch.setenv(name, "10.0.0.1")  # the last is a flag of another command
    assert run(capsys, monkeypatch, *command)[0] == 0
    for wrong, right in (("TEMPERATUR", "TEMPERATURE"), ("MEMROY", "MEMORY")):
        monkeypatch.setenv(f"SLIPSTREAM_{wrong}", "0")
        code, _, errors = run(capsys, monkeypatch, *command)
        message = f"environment variable SLIPSTREAM_{wrong} is unknown; did you mean SLIPSTREAM_{right}?"
        assert code == 2 and message in " ".join(errors.split())
        monkeypatch.delenv(f"SLIPSTREAM_{wrong}")


def test_no_flag_takes_a_variable_that_means_something_else() -> None:
    read = {name for file in SOURCE.rglob("*.py") for name in re.findall(r'"(SLIPSTREAM_[A-Z_]+)"', file.read_text())}
    assert read == {f"SLIPSTREAM_{name}" for name in VARIABLES}
    root = typer.main.get_command(app)
    options = [option for command in root.commands.values() for option in command.params]  # type: ignore[attr-defined]
    assert not read & {name for option in options for name in option.envvar or ()}
    assert "port" in {key for option in options for key in keys_of(option)}
