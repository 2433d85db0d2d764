"""A benchmark that is killed at any moment keeps every finished run."""

import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.bench.arms import Arm, parse_arms
from slipstream.bench.lineup import Lineup, Runner
from slipstream.bench.plan import Measurement, plan
from slipstream.bench.records import FILE, open_folder, read_records
from tests.support.processes import started
from tests.support.toy_bench import GREEDY, HEADER, PROMPTS, toy

pytestmark = pytest.mark.exhaustive

SERVER = """
import os, sys
from pathlib import Path
from tests.bench.test_records_kill import go_on
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        folder, delay = line.split()
        go_on(Path(folder), float(delay))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def kill_plan() -> tuple[list[Arm], list[Measurement]]:
    arms = parse_arms("none,ngram,model@4")
    return arms, plan(arms, PROMPTS, [1, 2], 8)


def go_on(folder: Path, delay: float | None = None) -> None:
    """Run the missing runs; with a delay, the process kills itself so many seconds of CPU time after its first run."""
    torch.set_num_threads(1)
    arms, planned = kill_plan()
    runs = iter(Runner(Lineup(toy(), arms, GREEDY), planned, folder).run(open_folder(folder, HEADER)))
    if delay is not None:
        next(runs)
        signal.setitimer(signal.ITIMER_PROF, delay)  # CPU time of the process, so that a busy machine does not matter
    list(runs)


def test_a_killed_benchmark_keeps_every_finished_run(tmp_path: Path) -> None:
    rng, kept = random.Random(7), b""
    with started("-c", SERVER, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        for _ in range(5):
            kept = killed(server, tmp_path, kept, rng.uniform(0.001, 0.05))
        assert server.stdin is not None
        server.stdin.close()
    runs, (_, planned) = read_records(tmp_path)[1], kill_plan()
    assert 5 <= len(runs) < len(planned)
    go_on(tmp_path)
    whole = read_records(tmp_path)[1]
    assert whole[: len(runs)] == runs and [run.key for run in whole] == [measurement.key for measurement in planned]
    all_verdicts = [verdict for run in whole for verdict in run.verdicts]
    assert set(all_verdicts) == {"reference", "identical"} and all_verdicts.count("reference") == len(PROMPTS)


def killed(server: Any, folder: Path, kept: bytes, delay: float) -> bytes:
    """Start a process that is killed `delay` seconds after its first run; return the complete lines in the folder."""
    server.stdin.write(f"{folder} {delay}\n")
    server.stdin.flush()
    assert int(server.stdout.readline()) == -signal.SIGPROF  # which ends it as at once as SIGKILL
    data = (folder / FILE).read_bytes()
    assert data.startswith(kept)
    whole = data[: data.rfind(b"\n") + 1]
    assert len(whole) > len(kept)
    return whole
