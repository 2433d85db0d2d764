"""Damaged files run, or are refused in one line; check_mutations.py tries as many as one wants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from slipstream.errors import SlipstreamError
from tests.models.weights import check_mutations
from tests.models.weights.check_mutations import READERS, Reader, check
from tests.support.markers import needs_avx2


@pytest.mark.slow
@needs_avx2
@pytest.mark.skipif(os.name != "posix", reason="each batch of files has a process of its own")
def test_damaged_files_of_every_reader_run_or_are_refused_in_one_line() -> None:
    command = [sys.executable, "-m", "tests.models.weights.check_mutations", "16", "--seed", "1"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr[-2000:]
    lines = {line.partition(" ")[0]: line for line in finished.stdout.splitlines()}
    assert lines.keys() >= READERS.keys()
    assert all("'runs'" in line and "'refused'" in line for line in lines.values())


def hostile(folder: Path, number: int) -> str | None:
    """A reader with every kind of fault."""
    match number:
        case 1:
            raise SlipstreamError("no model")  # a check for one line that is forgotten
        case 2:
            os._exit(3)  # as a crash does
        case 3:
            time.sleep(60)
        case 4:
            bytearray(2 * check_mutations.MEMORY)
        case 5:
            return "refused"
    return None


def damage(random: Random, sample: Any, folder: Path) -> None:
    (folder / sample).write_bytes(random.randbytes(4))


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="each batch of files has a process of its own")
def test_every_kind_of_fault_is_noticed() -> None:
    """In a process without threads, whose locks its forks would inherit."""
    finished = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-2000:]
    faults, counts = json.loads(finished.stdout)
    expected = ["SlipstreamError: no model", "ends the process: 3", "takes longer than 4 s", "MemoryError: "]
    assert [
        fault.split(": ", 1)[1].split(":  ")[0][: len(end)] for fault, end in zip(faults, expected, strict=True)
    ] == expected
    assert counts["runs"] == 2 and counts["refused"] == 1
    assert faults[1].startswith("hostile --seed 0 --first 2: ")


if __name__ == "__main__":
    READERS["hostile"] = Reader(lambda folder: ["a", "b"], damage, hostile)
    check_mutations.SECONDS = 4
    report = check("hostile", 7)
    sys.stdout.write(json.dumps([report.faults, report.counts]))
