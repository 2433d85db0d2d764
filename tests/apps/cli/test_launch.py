"""`slipstream launch` runs a coding agent with a server's settings."""

from __future__ import annotations

import inspect
import io
import json
import os
import signal
import subprocess
import sys
import time
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from slipstream import SlipstreamError
from slipstream.apps.cli import launch
from slipstream.apps.cli.launch import CLIENTS, URL, Served, server_at
from slipstream.apps.server import served_models
from tests.support.command_line import run
from tests.support.processes import PATIENCE
from tests.support.running_server import RunningServer, running_server

SERVED = Served("http://127.0.0.1:1", "tiny", 32768)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer than `ANSWER_SECONDS`."""
    monkeypatch.setattr(launch._request, "__defaults__", (None, PATIENCE))


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs named like the clients, which write their arguments and variables to a file."""
    told = "json.dump([sys.argv[1:], dict(os.environ)], open(os.environ['TOLD'], 'w'))"
    script = f"import json, os, sys\n{told}\nsys.exit(3)\n"
    for name in CLIENTS:
        (tmp_path / name).write_text(f"#!{sys.executable}\n{script}")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    return tmp_path / "told"


def launched(server: RunningServer, *words: str, told: Path, capsys: Any, monkeypatch: Any) -> Any:
    code, _, errors = run(capsys, monkeypatch, "launch", "--url", server.url, *words)
    assert code == 3, errors
    return json.loads(told.read_text())


def test_each_client_gets_the_address_the_model_and_the_window(
    programs: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(served_model_name="tiny", max_model_len=None) as server:
        tools = {"told": programs, "capsys": capsys, "monkeypatch": monkeypatch}
        words, variables = launched(server, "claude", "--", "-p", "hi", **tools)
        assert words == ["-p", "hi"] and variables["ANTHROPIC_BASE_URL"] == server.url
        assert {variables[name] for name in variables if name.endswith("_MODEL")} == {"tiny"}
        assert variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "32768" and variables["ANTHROPIC_API_KEY"] == ""
        assert int(variables["CLAUDE_STREAM_IDLE_TIMEOUT_MS"]) >= 1_800_000
        words, _ = launched(server, "codex", "--", "exec", "hi", **tools)
        assert words[-2:] == ["exec", "hi"] and "model_context_window=32768" in words
        assert any(f'base_url = "{server.url}/v1"' in word and 'wire_api = "responses"' in word for word in words)
        _, variables = launched(server, "opencode", **tools)
        config = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
        assert config["model"] == "slipstream/tiny" and config["provider"]["slipstream"]["models"]["tiny"]["limit"]


def test_settings_are_printed_without_running_the_client(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(served_model_name="tiny") as server:
        code, printed, errors = run(capsys, monkeypatch, "launch", "claude", "--print", "--url", server.url)
        assert code == 0 and f"ANTHROPIC_BASE_URL={server.url}" in printed.splitlines()
        assert "the first request of claude has about 13000 tokens, and tiny takes 4096" in errors


def test_a_model_of_a_server_of_several_is_loaded_and_used(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(several={"first": {}, "second": {"max_model_len": 512}}) as server:
        options = ("launch", "opencode", "--print", "--url", server.url, "--model", "second")
        code, printed, _ = run(capsys, monkeypatch, *options)
        assert code == 0 and '"slipstream/second"' in printed and '"context": 512' in printed
        assert [service.state for service in server.models.services] == ["unloaded", "loaded"]
        assert server_at(server.url, "third") is None


def test_a_server_that_is_loading_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f'"{launch.LOADING.decode()}"' in Path(inspect.getfile(served_models)).read_text()
    loading = HTTPError(f"{URL}/v1/models", 503, "", Message(), io.BytesIO(b'{"message": "%s"}' % launch.LOADING))
    ending = HTTPError(f"{URL}/v1/models", 503, "", Message(), io.BytesIO(b'{"message": "the server ends"}'))
    again = HTTPError(f"{URL}/v1/models", 503, "", Message(), io.BytesIO(launch.LOADING))
    answers = [loading, again, {"data": [{"id": "toy", "max_model_len": 512}]}, ending]

    def answer(url: str) -> Any:
        if isinstance(next_one := answers.pop(0), HTTPError):
            raise next_one
        return next_one

    monkeypatch.setattr(launch, "_request", answer)
    assert server_at(URL) == Served(URL, "toy", 512) and len(answers) == 1
    assert capsys.readouterr().err.split() == f"waiting until the server at {URL} has loaded its model".split()
    assert server_at(URL) is None


def test_a_key_comes_from_a_variable_and_is_no_argument(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("ann:secret-key\n")
    with running_server(api_key_file=str(tmp_path / "keys")) as server:
        with pytest.raises(SlipstreamError, match="needs a key; set SLIPSTREAM_API_KEY"):
            server_at(server.url)
        monkeypatch.setenv(launch.KEY, "secret-key")
        served = server_at(server.url)
        assert served is not None and served.model == "toy"
        settings = launch.codex_settings(served)
        assert (
            "secret-key" not in "".join(settings.arguments)
            and 'env_key = "SLIPSTREAM_API_KEY"' in settings.arguments[1]
        )


def test_wrong_clients_are_refused_and_missing_ones_explained(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, _, errors = run(capsys, monkeypatch, "launch", "claud")
    assert code == 2 and "unknown client 'claud'; allowed: claude, codex, opencode; did you mean 'claude'?" in errors
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, errors = run(capsys, monkeypatch, "launch", "codex")
    assert code == 1 and "'codex' is not installed; run: npm install -g @openai/codex" in errors


@pytest.mark.slow
def test_a_server_is_started_and_ends_with_the_client(
    programs: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, errors = run(capsys, monkeypatch, "launch", "claude", "--model", "toy")
    assert code == 3, errors
    _, variables = json.loads(programs.read_text())
    assert variables["ANTHROPIC_MODEL"] == "toy" and server_at(variables["ANTHROPIC_BASE_URL"]) is None


@pytest.mark.exhaustive
def test_a_model_that_cannot_be_served_ends_the_command_with_one_line(
    programs: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, errors = run(capsys, monkeypatch, "launch", "claude", "--model", "toy:99")
    assert code == 1 and "model 'toy:99'" in errors and errors.count("error: ") == 1


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to handle")
def test_a_terminated_command_ends_its_client_and_its_server(programs: Path, tmp_path: Path) -> None:
    script = f"import json, os, time\njson.dump(dict(os.environ), open({str(tmp_path / 'part')!r}, 'w'))\n"
    script += f"os.rename({str(tmp_path / 'part')!r}, {str(programs)!r})\ntime.sleep(600)\n"
    (tmp_path / "claude").write_text(f"#!{sys.executable}\n{script}")
    process = subprocess.Popen([sys.executable, "-m", "slipstream", "launch", "claude", "--model", "toy"])
    while not programs.exists():
        assert process.poll() is None
        time.sleep(0.1)
    url = json.loads(programs.read_text())["ANTHROPIC_BASE_URL"]
    assert server_at(url) is not None
    process.terminate()
    assert process.wait(PATIENCE) == 128 + signal.SIGTERM and server_at(url) is None
