"""When a server is killed during a batch, the next one resumes it, and every line is answered once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.job_cases import by_id, chat, toy, write
from tests.support.processes import PATIENCE, started

pytestmark = pytest.mark.slow
LINES = [chat(f"c{at}", "The heron and the", temperature=0.4, max_tokens=30 + at) for at in range(40)]
# Imports what a server needs once, then forks one server after the other.
SERVE = """
import os, sys
from slipstream.apps.server.launch import serve
from slipstream.apps.server.server_settings import ServerSettings
from tests.support.running_server import toy

def load():
    decoder, left = toy(), [0]
    forward = decoder.target.backend.forward
    def allowed(*given, **more):
        left[0] = left[0] or int(sys.stdin.readline())
        left[0] -= 1
        return forward(*given, **more)
    decoder.target.backend.forward = allowed
    return decoder

def ready(server):
    print(os.getpid(), server.url, flush=True)

while True:
    if (child := os.fork()) == 0:
        serve(ServerSettings(port=0, batch_folder=sys.argv[1]), load, ready)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_kill_9_loses_no_line_of_a_batch(tmp_path: Path) -> None:
    """Servers are killed while several lines run: a line that runs alone during a kill is given up by design."""
    batch, data = "", "".join(json.dumps(line) + "\n" for line in LINES).encode()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with started("-c", SERVE, str(tmp_path / "b"), **pipes) as servers:
        for killed in (True, True, False):
            assert servers.stdout is not None
            server, url = servers.stdout.readline().split()
            with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as client:
                if not batch:
                    file = client.post("/v1/files", files={"file": data}, data={"purpose": "batch"}).json()["id"]
                    wanted = {"input_file_id": file, "endpoint": "/v1/chat/completions"}
                    batch = client.post("/v1/batches", json=wanted).json()["id"]
                if killed:
                    status = followed(servers, client, batch, lambda new: new > 0)
                    assert status["status"] == "in_progress"
                else:
                    status = followed(servers, client, batch)
                    output_lines = client.get(f"/v1/files/{status['output_file_id']}/content").text
            if killed:
                os.kill(int(server), signal.SIGKILL)
    output = write(tmp_path / "output.jsonl", output_lines.splitlines())
    toy(max_batch_size=8).batch(LINES, tmp_path / "job.jsonl")
    assert by_id(output) == by_id(tmp_path / "job.jsonl") and len(by_id(output)) == len(LINES)


def followed(
    servers: subprocess.Popen[str], client: httpx.Client, batch: str, enough: Callable[[int], bool] = lambda new: False
) -> dict[str, Any]:
    """The status of a batch once it has ended, or once this server has answered enough lines.

    Each poll allows the server five more forwards.
    """
    assert servers.stdin is not None
    end, before = time.monotonic() + PATIENCE, None
    while time.monotonic() < end:
        status: dict[str, Any] = client.get(f"/v1/batches/{batch}").json()
        counts = status["request_counts"]
        assert counts["failed"] == 0, status
        before = counts["completed"] if before is None else before
        if status["status"] == "completed" or enough(counts["completed"] - before):
            return status
        print(5, file=servers.stdin, flush=True)
        time.sleep(0.005)
    raise AssertionError(f"the batch did not go on: {status}")
