"""The first load of a model says what it does, once per machine, whether or not logging is set up."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

from slipstream.models.notices import OneLineProgress, TimeLeft, announce, is_silenced

LOG = logging.getLogger("slipstream")
LOADS = "from slipstream import SpeculativeDecoder; SpeculativeDecoder('toy')"
SILENT = "import logging; logging.getLogger('slipstream').setLevel(logging.WARNING); "


def errors_of(code: str, folder: Path) -> str:
    environment = {**os.environ, "SLIPSTREAM_MODELS": str(folder), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return finished.stderr


@pytest.mark.slow
def test_only_the_first_load_announces_what_it_measures(tmp_path: Path) -> None:
    first, second = errors_of(LOADS, tmp_path), errors_of(LOADS, tmp_path)
    assert first == "slipstream: measuring how 'toy' runs here (once) ...\n"
    assert second == ""
    assert errors_of(SILENT + LOADS, tmp_path / "other") == ""


def test_a_notice_goes_to_the_log_if_one_is_set_up_or_else_to_stderr(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    announce("without a log")
    assert capsys.readouterr().err == "slipstream: without a log\n" and not caplog.records
    with caplog.at_level(logging.INFO, logger="slipstream"):
        announce("in the log")
    assert [record.message for record in caplog.records] == ["in the log"] and capsys.readouterr().err == ""
    with caplog.at_level(logging.WARNING, logger="slipstream"):
        assert is_silenced()
        announce("to nobody")
    assert len(caplog.records) == 1 and capsys.readouterr().err == "" and not is_silenced()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_progress_stays_on_one_line_and_says_which_time_it_shows(width: int) -> None:
    console = Console(width=width, color_system=None)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeLeft()
    progress = OneLineProgress(*columns, console=console, get_time=iter(range(100)).__next__)
    task = progress.add_task("downloading SmolLM2-135M-Instruct (once)", total=97_600_000)
    progress.update(task, advance=12_300_000)
    progress.update(task, advance=12_300_000)
    for end in ("left", "in all"):
        with console.capture() as captured:
            console.print(progress)
        (line,) = captured.get().splitlines()
        assert len(line) <= width
        assert width < 80 or ("/97.6 MB" in line and "MB/s" in line and line.rstrip().endswith(end))
        progress.update(task, completed=97_600_000)
