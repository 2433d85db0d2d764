"""Help is short by default and complete with --help-all, has working examples, and fits every terminal width."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from slipstream.apps.cli import app
from slipstream.apps.cli.command_classes import COMMANDS, definition_lines, wrapped
from tests.support.command_line import run
from tests.support.markers import mostly_exhaustive, mostly_slow

ROOT: Any = typer.main.get_command(app)
NAMES = [name for names in COMMANDS.values() for name in names]


@pytest.mark.parametrize("arguments", [(), ("help",), ("--help",), ("-h",)])
def test_the_bare_command_shows_the_help(capsys: Any, monkeypatch: Any, arguments: tuple[str, ...]) -> None:
    code, out, err = run(capsys, monkeypatch, *arguments)
    assert code == 0 and not err and out == run(capsys, monkeypatch, "--help")[1]
    assert out.startswith("Usage: slipstream [OPTIONS] COMMAND") and "slipstream demo" in out


@pytest.mark.parametrize("words", [("generate",), ("models", "check")])
def test_help_explains_a_command(capsys: Any, monkeypatch: Any, words: tuple[str, ...]) -> None:
    code, out, err = run(capsys, monkeypatch, "help", *words)
    assert code == 0 and not err and out == run(capsys, monkeypatch, *words, "--help")[1]


def test_help_of_generate_is_short_and_begins_with_the_models(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, monkeypatch, "generate", "--help")
    sections = re.findall(r"^([A-Z][\w ]+):$", out, re.MULTILINE)
    order = ["Models", "Prompts", "Sampling", "Structured output", "Decoder", "Output", "Options", "Examples"]
    assert sections == order and len(out.splitlines()) <= 65
    assert "suffix[:MIN]" not in out and "suffix[:MIN]" in run(capsys, monkeypatch, "generate", "--help-all")[1]


@pytest.mark.parametrize("name", ["", *NAMES, "models check", "models pull", "models rm"])
def test_help_of_every_command_has_no_type_notation(name: str, capsys: Any, monkeypatch: Any) -> None:
    for word in ("--help", "--help-all"):
        code, out, err = run(capsys, monkeypatch, *name.split(), word)
        assert code == 0 and not err and out.startswith(f"Usage: {' '.join(('slipstream', *name.split()))} [OPTIONS]")
        assert not re.search(r"\bx[<>]|<path>|\w\.\.\.\n", out)
        assert ("--json FILE" in out) == (name not in ("", "chat", "help", "launch", "report", "serve"))


def test_help_all_explains_the_draft_length_as_the_decoder_does(capsys: Any, monkeypatch: Any) -> None:
    words = " ".join(run(capsys, monkeypatch, "generate", "--help-all")[1].split())
    assert "DEPTHxWIDTH (a tree)" in words and "this request's draft length" not in words


EXAMPLES = [(name, line) for name in NAMES for line in (ROOT.commands[name].epilog or "").splitlines()]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "models"])
def test_every_command_has_three_examples(name: str) -> None:
    assert sum(command == name for command, _ in EXAMPLES) == 3


@pytest.mark.parametrize(("name", "line"), EXAMPLES)
def test_every_example_is_a_valid_command_line(
    name: str, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line.rpartition("| ")[2], comments=True)
    assert words[0] == "slipstream"
    command = ROOT.commands[words[1]]
    command.make_context(words[1], [word for word in words[2:] if word != "..."])  # raises for wrong use


@pytest.mark.parametrize("name", mostly_slow(NAMES, "generate", "serve"))
def test_no_word_of_the_help_is_broken_at_any_width(capsys: Any, monkeypatch: Any, name: str) -> None:
    flag = "--help-all" if "--help-all" in {o for p in ROOT.commands[name].params for o in p.opts} else "--help"
    shown = {}
    for columns in (60, 80, 1000):
        monkeypatch.setenv("COLUMNS", str(columns))
        body, _, examples = run(capsys, monkeypatch, name, flag)[1].partition("Examples:")
        assert max(map(len, body.splitlines())) <= columns
        shown[columns] = set(re.split(r"[\s\[\],]+", body))
        wide = shown[columns] | set(re.split(r"[\s\[\],]+", examples))
    assert shown[60] <= wide and shown[80] <= wide


def test_a_long_word_is_broken_between_its_parts() -> None:
    assert wrapped("a suffix[:MIN][+p=PERCENT][+outputs=TOKENS] b", 24) == [
        "a suffix[:MIN]",
        "[+p=PERCENT]",
        "[+outputs=TOKENS] b",
    ]
    assert definition_lines([("--a-name-of-more-than-thirty-columns", "what it does")], 80, 2) == [
        "  --a-name-of-more-than-thirty-columns",
        f"{'':34}what it does",
    ]


def completed(line: str, cword: int) -> list[str]:
    """What bash completion offers for word number `cword`."""
    code = "from slipstream.apps.cli import main; main()"
    asked = {"_SLIPSTREAM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(cword)}
    process = subprocess.run([sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True)
    return process.stdout.split()


@pytest.mark.parametrize(
    ("line", "cword", "offered"),
    mostly_exhaustive(
        [
            ("slipstream ge", 1, "generate"),
            ("slipstream generate --temp", 2, "--temperature"),
            ("slipstream generate --drafter ng", 3, "ngram"),
            ("slipstream generate --dtype b", 3, "bfloat16"),
            ("slipstream generate --model to", 3, "toy"),
        ],
        *(("slipstream generate --drafter ng", 3, "ngram"), ("slipstream generate --model to", 3, "toy")),
    ),
)
def test_the_shell_completes_commands_options_and_values(line: str, cword: int, offered: str) -> None:
    assert offered in completed(line, cword)
