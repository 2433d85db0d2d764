"""A training that is killed at random moments ends with the bytes of an uninterrupted one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from slipstream.reproducibility.timing import DraftTimes
from slipstream.training.texts import read_texts
from slipstream.training.training_run import STATE, State
from slipstream.wiring import model_pair
from tests.support.processes import PATIENCE, started
from tests.support.training_cases import train

pytestmark = pytest.mark.exhaustive

STEPS, TOKENS = 10, 500
STEPS_BEFORE_KILL = 3  # a process stops here even if the kill comes late: three such runs do not complete the training
SERVER = """
import os, sys
from tests.training.test_training_kill import STEPS_BEFORE_KILL, go_on
from tests.support.training_cases import decoder
decoder()  # imports what every child needs
for folder in sys.stdin:
    child = os.fork()
    if child == 0:
        go_on(folder.strip(), max_steps=STEPS_BEFORE_KILL)
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def go_on(folder: str, max_steps: int = STEPS) -> None:
    """Resume the training; after STEPS_BEFORE_KILL steps, wait to be killed."""
    torch.set_num_threads(1)
    end, save = how_far(Path(folder))[0] + max_steps, State.save

    def limited(state: State, folder: Path) -> None:
        if state.step > end:
            signal.pause()
        save(state, folder)

    with (
        patch.object(State, "save", limited),
        patch.object(model_pair, "remembered_draft_times", lambda *_: DraftTimes()),
    ):
        train(Path(folder), num_steps=STEPS, num_tokens=TOKENS)


def how_far(folder: Path) -> tuple[int, int]:
    """The numbers of steps and texts in the folder."""
    state = State.read(folder)
    return (0 if state is None else state.step), len(read_texts(folder))


def test_sigkill_at_random_moments_changes_no_result(tmp_path: Path) -> None:
    rng, kills = random.Random(5), list[tuple[int, int]]()
    with started("-c", SERVER, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None and server.stdout is not None
        while len(kills) < 3 or kills[-1][0] < 3:
            server.stdin.write(f"{tmp_path}\n")
            server.stdin.flush()
            child, end = int(server.stdout.readline()), time.monotonic() + PATIENCE
            step, count = how_far(tmp_path)
            goal = (step + rng.randint(1, 3), 0) if step else (0, count + rng.randint(1, 10))
            while how_far(tmp_path) < goal:  # the training makes progress before the kill, however busy the machine is
                assert time.monotonic() < end, "the training made no progress"
                time.sleep(0.03)
            time.sleep(rng.uniform(0.0, 0.05))
            os.kill(child, signal.SIGKILL)
            assert int(server.stdout.readline()) == -signal.SIGKILL
            kills.append(how_far(tmp_path))
            if len(kills) % 2:  # as if the process had been killed during a write
                with open(tmp_path / "texts.jsonl", "ab") as file:
                    file.write(b'{"number": 9, "ids": [4')
                (tmp_path / f".{STATE}.{child}.partial").write_bytes(b"half")
        server.stdin.close()
    assert any(0 < step < STEPS for step, _ in kills)
    go_on(str(tmp_path))
    whole = tmp_path / "whole"
    go_on(str(whole))
    assert (tmp_path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    ids = [[(text.number, text.ids) for text in read_texts(folder)] for folder in (tmp_path, whole)]
    assert ids[0] == ids[1] and sum(len(text) for _, text in ids[0]) >= TOKENS


def test_another_order_of_texts_gives_another_head(tmp_path: Path) -> None:
    """Negative control of the test above: the bytes depend on every step."""
    heads = []
    for seed in (0, 1):
        train(tmp_path / str(seed), seed=seed, num_steps=4, num_tokens=TOKENS)
        heads.append((tmp_path / str(seed) / "model.safetensors").read_bytes())
    assert heads[0] != heads[1]
