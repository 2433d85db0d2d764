"""A benchmark killed at any moment loses nothing that was finished."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.bench.arms import Arm, parse_arms
from slipstream.bench.lineup import Lineup, Runner
from slipstream.bench.plan import Measurement, plan
from slipstream.bench.records import FILE, open_folder, read_records
from tests.support.processes import PATIENCE, started
from tests.support.toy_bench import GREEDY, HEADER, PROMPTS, toy

pytestmark = pytest.mark.slow

SERVER = """
import os, sys
from pathlib import Path
from tests.bench.test_bench_kill import go_on
for folder in sys.stdin:
    child = os.fork()
    if child == 0:
        go_on(Path(folder.strip()))
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def kill_plan() -> tuple[list[Arm], list[Measurement]]:
    arms = parse_arms("none,ngram,model@4")
    return arms, plan(arms, PROMPTS, [1, 2], 20)


def go_on(folder: Path) -> None:
    torch.set_num_threads(1)
    arms, planned = kill_plan()
    list(Runner(Lineup(toy(), arms, GREEDY), planned, folder).run(open_folder(folder, HEADER)))


def test_kill_9_loses_nothing_finished(tmp_path: Path) -> None:
    rng, kept = random.Random(7), b""
    with started("-c", SERVER, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        for _ in range(8):
            kept = killed(server, tmp_path, kept, rng.uniform(0.0, 0.05))
        assert server.stdin is not None
        server.stdin.close()
    runs, (_, planned) = read_records(tmp_path)[1], kill_plan()
    assert 8 <= len(runs) < len(planned)
    go_on(tmp_path)
    whole = read_records(tmp_path)[1]
    assert whole[: len(runs)] == runs and [run.key for run in whole] == [one.key for one in planned]
    found = [v for run in whole for v in run.verdicts]
    assert set(found) == {"reference", "identical"} and found.count("reference") == len(PROMPTS)


def killed(server: Any, folder: Path, kept: bytes, delay: float) -> bytes:
    """Start a process in the folder, kill it `delay` seconds after its first run; the whole lines it left."""
    server.stdin.write(f"{folder}\n")
    server.stdin.flush()
    child = int(server.stdout.readline())
    end = time.monotonic() + PATIENCE
    while size(folder) <= len(kept) + 2000:
        assert time.monotonic() < end, "the process wrote nothing"
        time.sleep(0.002)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    assert int(server.stdout.readline()) == -signal.SIGKILL
    data = (folder / FILE).read_bytes()
    assert data.startswith(kept)
    whole = data[: data.rfind(b"\n") + 1]
    assert len(whole) > len(kept)
    return whole


def size(folder: Path) -> int:
    return (folder / FILE).stat().st_size if (folder / FILE).exists() else 0
