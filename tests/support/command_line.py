"""The command line in this process."""

from __future__ import annotations

import sys

import pytest

from slipstream.apps import cli


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """`slipstream` with these arguments: exit status, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["slipstream", *arguments])
    with pytest.raises(SystemExit) as done:
        cli.main()
    captured = capsys.readouterr()
    code = done.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err
