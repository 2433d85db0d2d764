"""A server that is told to end does so in bounded time, whatever its threads do; and starts on a full disk."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.processes import PATIENCE, started

# Imports what servers need once, then forks a server for each line of input: the part that hangs, and an error file.
# For a port instead of a part, it is the server of the command.
SERVE = """
import os, signal, sys, threading, time
import torch
from dataclasses import replace
from slipstream.apps.cli import main
from slipstream.apps.server import launch
from slipstream.apps.server.launch import serve
from slipstream.apps.server.served_models import ServedModels
from slipstream.apps.server.server_settings import ServerSettings
from slipstream.apps.server.service import ModelSource
from slipstream.models.toy import ToyTokenizer
from tests.support.processes import PATIENCE
from tests.support.running_server import toy_with

class Stuck(ToyTokenizer):
    def encode(self, text):
        while text.startswith("stuck"):
            time.sleep(0.01)
        return super().encode(text)

def load():
    while stuck_part == "load":
        torch.ones(64, 64) @ torch.ones(64, 64)
    decoder = toy_with(Stuck())
    if stuck_part == "engine":
        forward = decoder.target.backend.forward
        def stuck(*given, **more):
            while True:
                time.sleep(0.01)
        decoder.target.backend.forward = stuck
    return decoder

def ready(server):
    if stuck_part == "lock":  # from the shutdown on, a thread holds the interpreter lock
        def hog():
            import re
            while server.models.state != "draining":
                time.sleep(0.01)
            re.match("(a+)+$", "a" * 60 + "b")
        threading.Thread(target=hog, daemon=True).start()
    print(os.getpid(), server.url, flush=True)

launch.FORCED_SECONDS = 0.1
ServedModels.close.__defaults__ = (0.1,)  # instead of ENGINE_STOP_SECONDS
for line in sys.stdin:
    stuck_part, errors = line.split()
    launch.CLOSING_SECONDS = 2.0 if stuck_part == "lock" else PATIENCE
    if (child := os.fork()) == 0:
        signal.alarm(int(PATIENCE))  # ends it if nothing else does
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        if stuck_part.isdigit():
            print(os.getpid(), flush=True)
            sys.argv = ["slipstream", "serve", "--target", "toy", "--acceptance", "topk:2", "--port", stuck_part]
            main()
        settings = ServerSettings(port=0, drain_timeout=0.3)
        names = [("a",), ("b",)] if stuck_part == "load" else [()]  # one of several is loaded by its first request
        serve(settings, [ModelSource(load, replace(settings, served_model_name=name)) for name in names], ready)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def servers() -> Iterator[subprocess.Popen[str]]:
    with started("-c", SERVE, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("stuck", ["texts", "engine", "load", "lock"])
def test_a_signal_ends_the_process_whatever_its_threads_do(
    stuck: str, servers: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert servers.stdin is not None and servers.stdout is not None
    print(stuck, tmp_path / "errors", file=servers.stdin, flush=True)
    server, url = servers.stdout.readline().split()
    prompts = ("stuck 1", "stuck 2", "stuck 3") if stuck == "texts" else ("A heron",) * (stuck in ("engine", "load"))
    for prompt in prompts:
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{url}/v1/completions", json={"prompt": prompt}, trust_env=False, timeout=0.3)
    os.kill(int(server), signal.SIGTERM)
    assert int(servers.stdout.readline()) == (1 if stuck == "lock" else 0)
    assert "Traceback" not in (tmp_path / "errors").read_text()


@pytest.mark.slow
def test_a_server_starts_although_its_log_cannot_be_written(servers: subprocess.Popen[str]) -> None:
    assert servers.stdin is not None and servers.stdout is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    print(port, "/dev/full", file=servers.stdin, flush=True)
    server, end, status = int(servers.stdout.readline()), time.monotonic() + PATIENCE, 0
    while status != 200:
        assert time.monotonic() < end
        try:
            status = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False, timeout=PATIENCE).status_code
        except httpx.ConnectError:
            time.sleep(0.05)
    os.kill(server, signal.SIGTERM)
    assert int(servers.stdout.readline()) == 0
