"""Prompts as arguments and on standard input; results on standard output."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slipstream.apps.cli import application, consoles
from tests.support.command_line import run

TOY = ("--target", "toy", "--max-tokens", "12")


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_a_prompt_is_an_argument_an_option_or_standard_input(capsys: Any, monkeypatch: Any) -> None:
    code, expected, _ = run(capsys, monkeypatch, "generate", *TOY, "The heron")
    assert code == 0 and expected.strip()
    assert run(capsys, monkeypatch, "generate", *TOY, "-p", "The heron")[:2] == (0, expected)
    for words in ((), ("-",), ("-p", "-"), ("--prompt-file", "-")):
        typed(monkeypatch, "The heron\n")
        assert run(capsys, monkeypatch, "generate", *TOY, *words)[:2] == (0, expected)


@contextmanager
def redirected(monkeypatch: pytest.MonkeyPatch, source: Any) -> Iterator[None]:
    with open(source, encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        yield


def test_a_piped_or_redirected_text_is_added_to_each_prompt(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    _, expected, _ = run(capsys, monkeypatch, "generate", *TOY, "Repeat:\n\nThe heron", "Go on:\n\nThe heron")
    texts = [line for line in expected.splitlines() if not line.startswith("--- ")]
    file = tmp_path / "notes.txt"
    file.write_text("The heron\n")
    reader, writer = os.pipe()
    os.write(writer, b"The heron\n")
    os.close(writer)
    for source in (file, reader):
        with redirected(monkeypatch, source):
            code, out, _ = run(capsys, monkeypatch, "generate", *TOY, "Repeat:", "Go on:")
        assert code == 0 and [line for line in out.splitlines() if not line.startswith("--- ")] == texts


def test_a_prompt_needs_no_standard_input(capsys: Any, monkeypatch: Any) -> None:
    _, expected, _ = run(capsys, monkeypatch, "generate", *TOY, "The heron")
    reader, writer = os.pipe()  # open, and nothing comes
    monkeypatch.setattr(application, "PIPE_SECONDS", 0.01)
    empty_reader, empty_writer = os.pipe()
    os.close(empty_writer)
    for source, says in ((reader, True), (empty_reader, False), (os.devnull, False)):
        with redirected(monkeypatch, source):
            code, out, err = run(capsys, monkeypatch, "generate", *TOY, "The heron")
        assert (code, out) == (0, expected) and ("the prompt goes without it" in err) == says
    os.close(writer)
    monkeypatch.setattr(sys, "stdin", None)
    assert run(capsys, monkeypatch, "generate", *TOY, "The heron")[:2] == (0, expected)


def test_each_of_several_texts_is_headed_by_its_prompt(capsys: Any, monkeypatch: Any) -> None:
    _, out, _ = run(capsys, monkeypatch, "generate", *TOY, "The heron", "A sparrow\n" + 40 * "sings ")
    assert "--- 1: The heron\n" in out and "--- 2: A sparrow sings sings" in out and " ...\n" in out


def test_a_prompt_file_is_read_from_standard_input(capsys: Any, monkeypatch: Any) -> None:
    typed(monkeypatch, '{"prompt": "The heron", "category": "a"}\n{"prompt": "A sparrow", "category": "b"}\n')
    flags = ("--prompt-file", "-", "--category", "b", "--json", "-")
    code, out, _ = run(capsys, monkeypatch, "generate", *TOY, *flags)
    assert code == 0 and len(json.loads(out)["results"]) == 1


@pytest.mark.parametrize("command", ["generate", "compare"])
def test_json_on_standard_output_stands_alone(capsys: Any, monkeypatch: Any, command: str) -> None:
    code, out, err = run(capsys, monkeypatch, command, *TOY, "The heron", "--json", "-")
    assert code == 0 and json.loads(out)["target"] == "toy" and "tok" in err
    assert not consoles.out.stderr  # the next command prints where it should


def test_a_terminal_without_a_prompt_is_told_what_is_missing(capsys: Any, monkeypatch: Any) -> None:
    typed(monkeypatch, "")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    code, _, err = run(capsys, monkeypatch, "generate", *TOY)
    assert code == 2 and err.startswith("error: no prompt; allowed: a prompt as an argument")


@pytest.mark.parametrize(("short", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_short_names_of_dtypes_are_accepted(short: str, name: str) -> None:
    from slipstream.config import DecoderConfig

    assert DecoderConfig(dtype=short) == DecoderConfig(dtype=name)
    assert DecoderConfig(draft_dtype=short).draft_dtype == name


def test_sizes_may_end_in_a_unit() -> None:
    from slipstream.apps.cli.simulate import read_size

    assert [read_size(text) for text in ("8b", "0.5B", "100g", "1e12", "10t", "3")] == [8e9, 5e8, 1e11, 1e12, 1e13, 3]
