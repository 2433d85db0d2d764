"""A job that is killed at random moments answers every id once, with the texts of an uninterrupted run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.job_cases import by_id, chat, requests, toy
from tests.support.processes import PATIENCE, started

pytestmark = pytest.mark.slow

LINES = [*requests(60, most=60), *(chat(f"c{at}", "The heron and", temperature=0.5) for at in range(20))]
FORWARDS_BEFORE_KILL = 120  # a process stops here even if the kill comes late: enough for many answers, not for all
SERVER = """
import os, sys
from tests.jobs.test_batch_job_kill import FORWARDS_BEFORE_KILL, go_on
for folder in sys.stdin:
    child = os.fork()
    if child == 0:
        go_on(folder.strip(), max_forwards=FORWARDS_BEFORE_KILL)
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def go_on(folder: str, max_forwards: int | None = None) -> None:
    """Answer the missing lines of the job; after FORWARDS_BEFORE_KILL forwards, wait to be killed."""
    torch.set_num_threads(1)
    decoder = toy()
    if max_forwards is not None:
        forward, turns = decoder.target.backend.forward, iter(range(max_forwards))

        def limited(*arguments: Any, **options: Any) -> Any:
            if next(turns, None) is None:
                signal.pause()
            return forward(*arguments, **options)

        decoder.target.backend.forward = limited  # type: ignore[method-assign]
    decoder.batch(LINES, Path(folder) / "out.jsonl")


def test_sigkill_at_random_moments_changes_no_result(tmp_path: Path) -> None:
    rng, kept, kills = random.Random(3), b"", 0
    with started("-c", SERVER, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        while kills < 6 and kept.count(b"\n") < len(LINES) // 2:
            kept, kills = killed(server, tmp_path, kept, rng.uniform(0.0, 0.02)), kills + 1
            if kills % 2:  # as if the process had been killed during a write
                with open(tmp_path / "out.jsonl", "ab") as file:
                    file.write(b'{"id":"r59","text":"half')
        assert server.stdin is not None
        server.stdin.close()
    assert kills >= 2 and kills <= kept.count(b"\n")
    go_on(str(tmp_path))
    assert (tmp_path / "out.jsonl").read_bytes().startswith(kept)
    whole = tmp_path / "whole"
    whole.mkdir()
    go_on(str(whole))
    assert by_id(tmp_path / "out.jsonl") == by_id(whole / "out.jsonl") and len(by_id(whole / "out.jsonl")) == len(LINES)


def killed(server: Any, folder: Path, kept: bytes, delay: float) -> bytes:
    """Start the job and kill it `delay` seconds after the first new answer; return the complete lines."""
    server.stdin.write(f"{folder}\n")
    server.stdin.flush()
    child = int(server.stdout.readline())
    file, end = folder / "out.jsonl", time.monotonic() + PATIENCE
    while not file.exists() or file.read_bytes().count(b"\n") <= kept.count(b"\n"):
        assert time.monotonic() < end, "the job answered nothing"
        time.sleep(0.01)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    assert int(server.stdout.readline()) == -signal.SIGKILL
    data = file.read_bytes()
    assert data.startswith(kept)
    return data[: data.rfind(b"\n") + 1]
