"""`slipstream chat --url` and `slipstream serve`, as they are typed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from slipstream import Constraint, SamplingParams, SlipstreamError, UsageError
from slipstream.apps.chat.remote_chat import RemoteChat
from slipstream.apps.server.launch import serve
from slipstream.apps.server.server_settings import ServerSettings
from tests.support.chat_fakes import Recorder
from tests.support.command_line import run
from tests.support.processes import started
from tests.support.running_server import PATIENCE, RunningServer, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


def test_answers_come_from_the_server_and_stay_in_the_conversation(server: RunningServer) -> None:
    face = Recorder()
    chat = RemoteChat(server.url, face, SamplingParams(max_tokens=20), "Be brief.")
    chat.handle("A heron")
    asked = "Be brief.\nA heron"
    assert chat.model == "toy"
    assert "".join(face.pieces) == server.text(asked, temperature=0, max_tokens=20) + "\n"
    chat.handle("and")
    assert [turn["role"] for turn in chat.turns] == ["user", "assistant"] * 2
    chat.handle("/reset")
    chat.handle("/help")
    chat.handle("/quit")
    assert chat.turns == [] and chat.closed and not face.errors


def test_refused_requests_and_addresses_are_one_line(server: RunningServer) -> None:
    face = Recorder()
    chat = RemoteChat(f"{server.url}/v1/", face, SamplingParams(max_tokens=5000))
    chat.handle("x")
    chat.handle("/debug on")
    assert "maximum context length" in face.errors[0] and "unknown command" in face.errors[1] and chat.turns == []
    with pytest.raises(UsageError, match="--url 'ftp://x'"):
        RemoteChat("ftp://x", face, SamplingParams())
    with pytest.raises(SlipstreamError, match="cannot be reached"):
        RemoteChat("http://127.0.0.1:9", face, SamplingParams())


FORMS = (
    (Constraint(choice=["a heron", "a kingfisher"]), r"a heron|a kingfisher"),
    (Constraint(regex="[a-c]{3}"), r"[a-c]{3}"),
    (Constraint(grammar='start: "yes" | "no"'), r"yes|no"),
    (Constraint(json_schema=json.dumps({"type": "object", "properties": {}, "additionalProperties": False})), r"{}"),
    (Constraint(json_schema={"const": 5}), r"5"),
)


@pytest.mark.parametrize(("constraint", "pattern"), FORMS)
def test_the_server_enforces_a_constraint(server: RunningServer, constraint: Constraint, pattern: str) -> None:
    face = Recorder()
    RemoteChat(server.url, face, SamplingParams(constraint=constraint)).handle("A heron")
    assert not face.errors and re.fullmatch(pattern, "".join(face.pieces).strip())


def test_a_prediction_is_sent_and_does_not_change_the_answer(server: RunningServer) -> None:
    texts = []
    for prediction in (None, "The heron was slow."):
        face = Recorder()
        RemoteChat(server.url, face, SamplingParams(max_tokens=20, prediction=prediction)).handle("A heron")
        texts.append("".join(face.pieces))
        assert not face.errors
    assert texts[0] == texts[1]
    assert 'source="prediction"' in server.http.get("/metrics").text


@pytest.mark.slow
def test_serve_prints_its_address_and_runs_until_a_signal() -> None:
    command = ("-u", "-c", "from slipstream.apps.cli import main; main()")
    serve = ("serve", "--target", "toy", "--port", "0", "--drafter", "suffix")
    with started(*command, *serve, stderr=subprocess.PIPE) as server:
        assert server.stderr is not None
        url = next(line.split()[-1] for line in server.stderr if " serves " in line)
        chat = [sys.executable, *command, "chat", "--url", url]
        talk = subprocess.run(chat, input="A heron\n", capture_output=True, text=True, timeout=PATIENCE)
        assert talk.returncode == 0 and len(talk.stdout.strip()) > 5
        server.send_signal(signal.SIGTERM)
        server.stderr.read()
        assert server.wait(PATIENCE) == 0


@pytest.mark.slow
def test_models_that_cannot_be_loaded_end_the_command_with_one_line(capsys, monkeypatch) -> None:
    code, _, errors = run(capsys, monkeypatch, "serve", "--target", "toy:99", "--port", "0")
    lines = errors.strip().splitlines()
    assert code == 2 and lines[-1].startswith("error: model 'toy:99'") and "Traceback" not in errors


def test_an_address_in_use_is_refused_before_anything_is_loaded(server: RunningServer) -> None:
    port = int(server.url.rpartition(":")[2])
    why = f"cannot listen on 127.0.0.1:{port}: Address already in use; allowed: --port N with another port, or --port 0"
    with pytest.raises(SlipstreamError, match=why):
        serve(ServerSettings(port=port), lambda: pytest.fail("loaded"), lambda server: None)
