"""A server that is killed with a batch under way: the next one goes on, and every line is there once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.support.job_cases import by_id, chat, toy, write

pytestmark = pytest.mark.slow
LINES = [chat(f"c{at}", "The heron and the", temperature=0.4, max_tokens=30 + at) for at in range(40)]
SERVE = """
import sys
from slipstream.apps.server.launch import serve
from slipstream.apps.server.server_settings import ServerSettings
from tests.support.running_server import toy
serve(ServerSettings(port=0, batch_folder=sys.argv[1]), toy, lambda server: print(server.url, flush=True))
"""


def test_kill_9_loses_no_line_of_a_batch(tmp_path: Path) -> None:
    batch, kept, data = "", 0, "".join(json.dumps(line) + "\n" for line in LINES).encode()
    for kill in (True, True, False):
        with subprocess.Popen(
            [sys.executable, "-c", SERVE, str(tmp_path / "b")], env=environment(), stdout=-1
        ) as server:
            assert server.stdout is not None
            with httpx.Client(base_url=server.stdout.readline().decode().strip(), trust_env=False) as client:
                if not batch:
                    file = client.post("/v1/files", files={"file": data}, data={"purpose": "batch"}).json()["id"]
                    wanted = {"input_file_id": file, "endpoint": "/v1/chat/completions"}
                    batch = client.post("/v1/batches", json=wanted).json()["id"]
                told, kept = followed(client, batch, kept + 1 if kill else len(LINES)), kept + kill
                if kill:
                    assert told["status"] == "in_progress"
                else:
                    assert told["status"] == "completed"
                    found = client.get(f"/v1/files/{told['output_file_id']}/content").text
            os.kill(server.pid, signal.SIGKILL)
    output = write(tmp_path / "output.jsonl", found.splitlines())
    toy(max_batch_size=8).batch(LINES, tmp_path / "job.jsonl")
    assert by_id(output) == by_id(tmp_path / "job.jsonl") and len(by_id(output)) == len(LINES)


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def followed(client: httpx.Client, batch: str, enough: int) -> dict[str, object]:
    """What is told of a batch once so many of its lines are answered."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        told: dict[str, object] = client.get(f"/v1/batches/{batch}").json()
        counts = told["request_counts"]
        assert isinstance(counts, dict)
        if counts["completed"] >= enough and (enough < len(LINES) or told["status"] == "completed"):
            return told
        time.sleep(0.005)
    raise AssertionError("the batch did not go on in a minute")
