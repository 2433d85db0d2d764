"""A server that is ready shows an address that answers, however early the models are loaded."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest
from uvicorn.lifespan.on import LifespanOn

from slipstream.apps.cli import serve
from slipstream.apps.server.answer_state import ModelFacts
from slipstream.apps.server.launch import Server
from slipstream.apps.server.server_settings import ServerSettings
from slipstream.errors import UsageError
from tests.support.command_line import run
from tests.support.markers import mostly_exhaustive
from tests.support.processes import PATIENCE, started
from tests.support.running_server import running_server, toy


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("::1", "[::1]"),
        ("[::1]", "[::1]"),
        ("127.0.0.1", "127.0.0.1"),
        ("192.168.1.5", "192.168.1.5"),
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("[::]", "[::1]"),
        ("0:0:0:0:0:0:0:0", "[::1]"),
        ("localhost", "localhost"),
    ],
)
def test_an_address_is_shown_as_browsers_accept_it(host: str, url: str) -> None:
    server = Server(ServerSettings(host=host, port=8421, insecure=True), [], lambda server: None)
    server.servers = []  # it listens nowhere yet
    assert server.url == f"http://{url}:8421"


def test_the_address_is_announced_only_once_the_server_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = LifespanOn.startup

    async def after_the_models(self: Any) -> None:
        await begin(self)
        while self.config.app.state.models.state == "loading":
            await asyncio.sleep(0.001)

    monkeypatch.setattr(LifespanOn, "startup", after_the_models)
    with running_server() as server:
        assert httpx.get(f"{server.url}/health", trust_env=False, timeout=PATIENCE).status_code == 200


def test_a_server_names_its_model_once_and_shows_a_call_to_copy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def ready(_settings: Any, sources: Any, banner: Callable[[Server], None]) -> NoReturn:
        sources[0].load()
        with running_server() as server:
            banner(server.server)
        raise SystemExit(0)

    monkeypatch.setattr("slipstream.apps.server.launch.serve", ready)
    run(capsys, monkeypatch, "serve", "--target", "toy")
    lines = caplog.messages
    assert sum(line.startswith("loading toy") for line in lines) == 1
    (call,) = [line for line in lines if "curl" in line]
    assert call.endswith("""[{"role": "user", "content": "Name three birds."}]}'""") and "authorization" not in call


def test_the_shown_call_sends_a_key_where_keys_are_needed(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO, "slipstream.server")
    (tmp_path / "keys").write_text("anna:abcdefgh\n", encoding="utf-8")
    with running_server(api_key_file=str(tmp_path / "keys")) as server:
        serve._banner(server.server)
    (call,) = [line for line in caplog.messages if "curl" in line]
    assert """/v1/chat/completions -H "authorization: Bearer $KEY" -H 'content-type""" in call


@pytest.mark.slow
@pytest.mark.parametrize(("host", "is_open"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_server_open_to_other_machines_says_so_and_shows_an_address_that_answers(
    caplog: pytest.LogCaptureFixture, host: str, is_open: bool
) -> None:
    caplog.set_level(logging.INFO, "slipstream.server")
    with running_server(host=host, insecure=True) as server:
        serve._banner(server.server)
        assert httpx.get(f"{server.url}/health", trust_env=False, timeout=PATIENCE).status_code == 200
    banner = "\n".join(caplog.messages)
    assert (", open to other machines" in banner) is is_open and "http://127.0.0.1:" in banner
    assert "0.0.0.0" not in banner


def test_an_unusable_key_file_is_one_line_before_models_are_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "keys").touch()
    code, out, errors = run(
        capsys, monkeypatch, "serve", "--target", "toy", "--port", "0", "--api-key-file", str(tmp_path / "keys")
    )
    assert code == 2 and not out and len(errors.strip().splitlines()) == 1 and errors.startswith("error: "), errors


@pytest.mark.parametrize("host", ["/run/x.sock", "unix:/run/x.sock", "127.0.0.1:8000", "http://127.0.0.1", "a b", "*"])
def test_a_host_is_an_address_or_a_name(host: str) -> None:
    with pytest.raises(UsageError, match=r"host='.*'; allowed: an address or a name, .*; the port goes to --port"):
        ServerSettings(host=host)


@pytest.mark.parametrize("name", ["mod\udcff", "two\u2028lines", "two\nlines", "\x1b[2J"])
def test_a_name_that_answers_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"served_model_name=.*; allowed: printable characters"):
        ServerSettings(served_model_name=name)
    with pytest.raises(UsageError, match=r"the model's name is .*; allowed: printable characters"):
        ModelFacts.of(toy(), name)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
@pytest.mark.parametrize("how", mostly_exhaustive(["closed", "open", "nohup"], "closed"))
def test_sighup_lets_running_requests_finish_and_ends_the_server_if_its_terminal_is_closed(how: str) -> None:
    import fcntl
    import termios

    def prepare() -> None:
        fcntl.ioctl(2, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if how == "nohup" else signal.SIG_DFL)

    terminal, its_side = os.openpty()
    command = ("-m", "slipstream", "serve", "--target", "toy", "--port", "0")
    with (
        os.fdopen(terminal, encoding="utf-8") as output,
        started(*command, stderr=its_side, preexec_fn=prepare) as server,
    ):
        os.close(its_side)
        url = next(line.split()[-1] for line in output if " at http://" in line)
        body = {"prompt": "A heron", "max_tokens": 1500, "ignore_eos": True, "num_draft_tokens": 0, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, trust_env=False, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            if how == "closed":
                output.close()  # the system sends a signal
            for _ in range(2):  # shells send others
                os.kill(server.pid, signal.SIGHUP)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        if how != "closed":
            assert httpx.get(f"{url}/health", trust_env=False, timeout=PATIENCE).status_code == 200
            if how == "open":
                assert any("no --api-key-file" in line for line in output)
            server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_a_reload_while_a_server_starts_does_not_end_it() -> None:
    command = ("-m", "slipstream", "serve", "--target", "toy", "--port", "0")
    with started(*command, stderr=subprocess.PIPE) as server:
        assert server.stderr is not None and "loading toy" in next(server.stderr)
        server.send_signal(signal.SIGHUP)
        url = next(line.split()[-1] for line in server.stderr if " at http://" in line)
        assert httpx.get(f"{url}/health", trust_env=False, timeout=PATIENCE).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
