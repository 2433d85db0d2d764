"""Text from models, files and other machines never controls the terminal; a pipe gets it unchanged."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console
from rich.table import Table

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.apps.cli import consoles
from slipstream.text.terminal_text import harmless
from tests.support.command_line import run

ESCAPE, BELL, DELETE, NEXT_LINE = "\x1b", "\x07", "\x7f", "\x85"
OF_RICH = r"\x1b\[(\?25[lh]|2K|1A)|\r"  # redrawing hides, shows and moves the cursor
BIASED = ("--target", "toy", "-p", "A heron", "--raw", "--max-tokens", "3", "--logit-bias")


def controls(text: str) -> set[str]:
    return {letter for letter in text if not letter.isprintable()} - {"\n", "\t"}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both streams are terminals without colors."""
    for console in (consoles.out, consoles.err):
        monkeypatch.setattr(console, "_force_terminal", True)
        monkeypatch.setattr(console, "no_color", True)
        monkeypatch.setattr(console, "_color_system", None)


def test_control_characters_become_pictures() -> None:
    assert harmless("plain é\tü\n") == "plain é\tü\n"
    assert (
        harmless(f"{ESCAPE}[2J{BELL}\r\0{DELETE}{NEXT_LINE}\ud800")
        == "␛[2J␇␍␀␡\N{REPLACEMENT CHARACTER}" + "\N{REPLACEMENT CHARACTER}"
    )


@pytest.mark.each_value
@pytest.mark.parametrize("control", ["27", "7", "13", "9", "12", "155", "127"])
@pytest.mark.parametrize("several", [(), ("-p", "A sparrow")])
def test_a_pipe_gets_control_characters_unchanged(
    control: str, several: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, printed, _ = run(capsys, monkeypatch, "generate", *BIASED, f"{control}=1000", *several)
    text = bytes([int(control)] * 3).decode(errors="replace")
    assert code == 0 and text in printed


@pytest.mark.each_value
@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("control", ["27", "7", "13", "155", "127"])
@pytest.mark.parametrize("more", [(), ("--debug",), ("-p", "A sparrow"), ("--logprobs", "2")])
def test_a_terminal_gets_no_control_characters(
    control: str, more: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, printed, notes = run(capsys, monkeypatch, "generate", *BIASED, f"{control}=1000", *more)
    assert code == 0 and not controls(printed) and not controls(notes.replace(ESCAPE + "[", ""))
    assert control != "27" or "␛␛␛" in printed


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("arguments", [("compare", *BIASED, "27=1000"), ("compare", *BIASED, "27=1000", "--debug")])
def test_the_views_of_a_comparison_print_no_control_characters(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, printed, notes = run(capsys, monkeypatch, *arguments)
    assert code == 0 and not controls(printed + re.sub(OF_RICH, "", notes)) and "␛" in notes


@pytest.mark.usefixtures("terminal")
def test_a_conversation_prints_no_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "stdin", io.StringIO(f"/debug on\nhi {ESCAPE}[2J\n/set stop {ESCAPE}]0;x{BELL}\n/{ESCAPE}c\n")
    )
    code, printed, notes = run(
        capsys, monkeypatch, "chat", "--target", "toy", "--max-tokens", "3", "--logit-bias", "27=1000"
    )
    assert code == 0 and not controls(re.sub(OF_RICH, "", printed) + notes) and "␛␛␛" in printed


def test_names_from_files_print_neither_control_characters_nor_markup(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"[/x]{ESCAPE}[31m"
    table = Table("the prompts")
    table.add_row(name)  # the category of a prompt is the name of its file
    consoles.out.print(table, name)
    consoles.err.print(f"loading {name} ...", style="dim")
    consoles.print_error(name)
    printed = "".join(capsys.readouterr())
    assert printed.count("[/x]␛[31m") == 4 and ESCAPE not in printed


def test_the_log_prints_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    from slipstream.apps.cli import _Harmless

    record = logging.LogRecord("slipstream", logging.INFO, "x", 1, "begun by %s", (f"{ESCAPE}[31m",), None)
    assert _Harmless("%(message)s").format(record) == "begun by ␛[31m"


def test_rounds_printed_by_callers_have_no_control_characters() -> None:
    decoder = SpeculativeDecoder("toy", drafter="ngram")
    result = decoder.generate("A heron", SamplingParams(max_tokens=12, logit_bias={27: 1000}), chat=False)
    assert ESCAPE in result.text
    screen = io.StringIO()
    Console(file=screen, force_terminal=True, color_system=None, width=200).print(result.debug())
    assert not controls(screen.getvalue()) and "␛" in screen.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_missing_from_the_encoding_are_written_as_escapes(encoding: str) -> None:
    code = "from slipstream.apps.cli import main; main()"
    process = subprocess.run(
        [sys.executable, "-c", code, "generate", *BIASED, "255=1000"],
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0 and process.stdout == "\\ufffd" * 3 + "\n", process.stderr
