"""A server that is told to end does so in bounded time, whatever a thread of it does."""

from __future__ import annotations

import signal
import subprocess

import httpx
import pytest

from tests.support.processes import PATIENCE, started

SERVE = """
import sys, threading, time
from slipstream.apps.server import launch
from slipstream.apps.server.launch import serve
from slipstream.apps.server.server_settings import ServerSettings
from slipstream.models.toy import ToyTokenizer
from tests.support.running_server import toy_with

class Stuck(ToyTokenizer):
    def encode(self, text):
        while text.startswith("stuck"):
            time.sleep(0.01)
        return super().encode(text)

def load():
    decoder = toy_with(Stuck())
    if sys.argv[1] == "engine":
        forward = decoder.target.backend.forward
        def stuck(*given, **more):
            while True:
                time.sleep(0.01)
        decoder.target.backend.forward = stuck
    return decoder

def ready(server):
    if sys.argv[1] == "lock":  # a thread that lets no other run, from the moment the server is to end
        def hog():
            import re
            while server.service.state != "draining":
                time.sleep(0.01)
            re.match("(a+)+$", "a" * 60 + "b")
        threading.Thread(target=hog, daemon=True).start()
    print(server.url, flush=True)

launch.CLOSING_SECONDS = 1.0
launch.FORCED_SECONDS = 0.1
import slipstream.apps.server.service as service
service.ENGINE_STOP_SECONDS = 0.1
serve(ServerSettings(port=0, drain_timeout=0.3), load, ready)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stuck", ["texts", "engine", "lock"])
def test_a_signal_ends_the_process_whatever_its_threads_do(stuck: str) -> None:
    with started("-c", SERVE, stuck, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stderr is not None
        url = server.stdout.readline().strip()
        for prompt in ("stuck 1", "stuck 2", "stuck 3") if stuck == "texts" else ("A heron",) * (stuck == "engine"):
            with pytest.raises(httpx.TimeoutException):
                httpx.post(f"{url}/v1/completions", json={"prompt": prompt}, trust_env=False, timeout=0.3)
        server.send_signal(signal.SIGTERM)
        server.wait(PATIENCE)
        assert "Traceback" not in server.stderr.read()
