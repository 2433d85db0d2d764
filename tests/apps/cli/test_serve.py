"""`slipstream serve`, as it is typed."""

from __future__ import annotations

import signal
import subprocess

import httpx
import pytest

from slipstream import SlipstreamError
from slipstream.apps.server.launch import serve
from slipstream.apps.server.server_settings import ServerSettings
from tests.support.command_line import run
from tests.support.processes import started
from tests.support.running_server import PATIENCE, running_server


@pytest.mark.slow
def test_serve_prints_its_address_and_runs_until_a_signal() -> None:
    command = ("-u", "-c", "from slipstream.apps.cli import main; main()")
    arguments = ("serve", "--target", "toy", "--port", "0", "--drafter", "suffix")
    with started(*command, *arguments, stderr=subprocess.PIPE) as server:
        assert server.stderr is not None
        url = next(line.split()[-1] for line in server.stderr if " serves " in line)
        body = {"messages": [{"role": "user", "content": "A heron"}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=PATIENCE).json()
        assert len(answer["choices"][0]["message"]["content"].strip()) > 5
        server.send_signal(signal.SIGTERM)
        server.stderr.read()
        assert server.wait(PATIENCE) == 0


@pytest.mark.slow
def test_models_that_cannot_be_loaded_end_the_command_with_one_line(capsys, monkeypatch) -> None:
    code, _, errors = run(capsys, monkeypatch, "serve", "--target", "toy:99", "--port", "0")
    lines = errors.strip().splitlines()
    assert code == 2 and lines[-1].startswith("error: model 'toy:99'") and "Traceback" not in errors


def test_an_address_in_use_is_refused_before_anything_is_loaded() -> None:
    with running_server() as server:
        port = int(server.url.rpartition(":")[2])
        why = f"cannot listen on 127.0.0.1:{port}: Address already in use; allowed: --port N with another port"
        with pytest.raises(SlipstreamError, match=why):
            serve(ServerSettings(port=port), lambda: pytest.fail("loaded"), lambda server: None)
