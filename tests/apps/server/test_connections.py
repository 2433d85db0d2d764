"""Connections as clients and proxies need them, over real sockets: each way of writing a request gets an answer."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream import UsageError
from slipstream.apps.server.access import KeyFile
from slipstream.apps.server.connections import HEAD_SECONDS, ConnectionSweep
from slipstream.apps.server.server_settings import ServerSettings
from tests.support.markers import subcases
from tests.support.processes import PATIENCE
from tests.support.running_server import RunningServer, running_server

HOST = b"host: localhost\r\n"
BODY = b'{"prompt": "A heron", "max_tokens": 3, "temperature": 0}'
POST = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n" + HOST
WHOLE = POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(trusted_proxy=("127.0.0.1", "10.0.0.0/8")) as running:
        yield running


def answers(connection: socket.socket, count: int) -> list[tuple[int, bytes]]:
    """Status and body of the next answers, whose lengths their headers tell."""
    with connection.makefile("rb") as file:
        found = []
        for _ in range(count):
            status, length = int(file.readline().split()[1]), 0
            while line := file.readline().strip():
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            found.append((status, file.read(length)))
        return found


def answer(server: RunningServer, request: bytes) -> tuple[int, bytes]:
    with server.connected() as connection:
        connection.sendall(request)
        return answers(connection, 1)[0]


def test_a_body_of_two_lengths_is_refused_and_nothing_behind_it_is_read(server: RunningServer) -> None:
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    chunked = POST + b"transfer-encoding: chunked\r\n"
    assert answer(server, chunked + b"\r\n" + body)[0] == 200
    for length in (len(BODY), len(body), 0):
        with server.connected() as connection:
            connection.sendall(chunked + b"content-length: %d\r\n\r\n" % length + body + WHOLE)
            received = b""
            while block := connection.recv(65536):
                received += block
        assert received.startswith(b"HTTP/1.1 400 ") and received.count(b"HTTP/1.1") == 1
        assert b"content-length with transfer-encoding; allowed: one of them" in received


# ---- idle connections


def test_an_idle_connection_is_closed_after_the_time_that_its_answers_name() -> None:
    with running_server(keep_alive_timeout=1) as server, server.connected() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
        received = b""
        while not received.endswith(b"}"):
            received += connection.recv(4096)
        assert b"\r\nkeep-alive: timeout=1\r\n" in received
        assert connection.recv(1) == b""


def test_idle_connections_stay_open_longer_than_those_of_common_proxies(server: RunningServer) -> None:
    assert server.server.config.timeout_keep_alive == 75
    assert server.http.get("/health").headers["keep-alive"] == "timeout=75"


class Connection:
    """What the sweep reads of a connection."""

    def __init__(self, **cycle: bool) -> None:
        self.cycle: Any = None
        if cycle:
            self.cycle = type("Cycle", (), {"response_complete": False, "more_body": False} | cycle)
        self.flow: Any = type("Flow", (), {"write_paused": False})
        self.transport, self.aborted = self, False

    def abort(self) -> None:
        self.aborted = True


def test_only_connections_that_do_not_change_for_too_long_are_aborted() -> None:
    empty, idle, body, unread, slow, busy = connections = [
        Connection(),
        Connection(response_complete=True),
        Connection(more_body=True),
        Connection(more_body=False),
        Connection(more_body=False),
        Connection(more_body=False),
    ]
    sweep, alive = ConnectionSweep(99, idle_seconds=75, stalled_seconds=600), set[Any](connections)
    unread.flow.write_paused = slow.flow.write_paused = True
    aborted_at: dict[Any, float] = {}
    for now in range(0, 2000, 5):
        slow.flow.write_paused = now % 500 > 5  # its client reads now and then
        sweep.sweep(alive, now)
        for connection in [connection for connection in alive if connection.aborted]:
            aborted_at[connection] = now
            alive.remove(connection)
    head = 75 + HEAD_SECONDS + 5
    assert aborted_at == {empty: head, idle: head, unread: 605} and alive == {body, slow, busy}


def test_the_connections_that_have_waited_longest_give_way_to_others() -> None:
    sweep, connections = ConnectionSweep(3, idle_seconds=75, stalled_seconds=600), set[Any]()
    order = [Connection(), Connection(more_body=True), Connection(more_body=False), Connection(), Connection()]
    for now, connection in enumerate(order):
        connections.add(connection)
        sweep.sweep(connections, now)
        connections -= {other for other in connections if other.aborted}
    assert [connection.aborted for connection in order] == [True, True, False, False, False]


# ---- who is asking


@subcases(
    "headers, client",
    [
        ([], "127.0.0.1"),
        ([("x-forwarded-for", "192.0.2.7")], "192.0.2.7"),
        ([("x-forwarded-for", "198.51.100.1, 192.0.2.7, 10.1.2.3")], "192.0.2.7"),  # by way of another trusted proxy
        ([("x-forwarded-for", "198.51.100.1"), ("x-forwarded-for", "192.0.2.7")], "192.0.2.7"),
        ([("x-forwarded-for", "192.0.2.7:5123")], "192.0.2.7"),
        ([("x-forwarded-for", "[2001:db8::1]:80")], "2001:db8::1"),
        ([("x-forwarded-for", "2001:db8::1")], "2001:db8::1"),
        ([("x-forwarded-for", '192.0.2.7, x status=200 key="root"')], "127.0.0.1"),
        ([("x-forwarded-for", "192.0.2.7, unknown, 10.0.0.1")], "10.0.0.1"),
        ([("x-forwarded-for", "")], "127.0.0.1"),
        ([("forwarded", "for=192.0.2.7"), ("x-real-ip", "192.0.2.7")], "127.0.0.1"),
    ],
)
def test_a_trusted_proxy_names_its_client_by_address_only(
    server: RunningServer, caplog: pytest.LogCaptureFixture, headers: list[tuple[str, str]], client: str
) -> None:
    caplog.set_level(logging.INFO, "slipstream.server")
    caplog.clear()
    assert server.http.post("/v1/completions", headers=headers, json={}).status_code == 400
    (line,) = [record.getMessage() for record in caplog.records if record.name == "slipstream.server"]
    assert f' status=400 client="{client}" seconds=' in line


def test_without_a_trusted_proxy_nobody_chooses_an_address(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "slipstream.server")
    callers = set[str]()
    with running_server() as server:
        enter = server.service.enter

        def entering(owner: str, salt: str | None, caller: str = "") -> Any:
            callers.add(caller)
            return enter(owner, salt, caller)

        server.service.enter = entering
        for name in ("192.0.2.7", 'x status=200 key="root"'):
            headers = {"x-forwarded-for": name, "content-type": "application/json"}
            assert server.http.post("/v1/completions", headers=headers, content=BODY).status_code == 200
            assert server.http.post("/v1/completions", headers=headers, content=b"{}").status_code == 400
    assert callers == {"127.0.0.1"} and "192.0.2.7" not in caplog.text


@pytest.mark.parametrize("proxy", ["nginx", "10.0.0.0/33", "*", "127.0.0.1:80", ""])
def test_a_proxy_is_an_address_or_a_network(proxy: str) -> None:
    with pytest.raises(UsageError, match=r"trusted_proxy=.*; allowed: an address like 127.0.0.1, or a network"):
        ServerSettings(trusted_proxy=(proxy,))


# ---- the ways to write a request


@subcases("path", ["/health", "/live", "/ping", "/v1/models"])
def test_requests_of_http_1_0_need_no_host(server: RunningServer, path: str) -> None:
    line = f"GET {path} HTTP/1.0\r\n".encode()
    for host in (b"", b"host:\r\n", b"host: \r\n"):
        assert answer(server, line + host + b"\r\n")[0] == 200
        assert answer(server, line + host + b"origin: http://evil.example\r\n\r\n")[0] == 403


@pytest.mark.slow
@subcases(
    "target, host, status",
    [
        ("http://127.0.0.1/health", "127.0.0.1", 200),
        ("http://localhost:8000/v1/models?x=1", "localhost:8000", 200),
        ("HTTP://localhost/health", "evil.example", 200),  # the target's host counts
        ("https://[::1]/v1/models", "localhost", 200),
        ("http://localhost", "localhost", 200),
        ("http://evil.example/health", "localhost", 403),
        ("http://evil.example", "evil.example", 403),
        ("http://localhost/nowhere", "localhost", 404),
        ("ftp://localhost/health", "localhost", 404),
    ],
)
def test_a_target_may_be_a_whole_url(server: RunningServer, target: str, host: str, status: int) -> None:
    assert answer(server, f"GET {target} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())[0] == status


def test_every_framing_of_a_body_gives_the_same_text(server: RunningServer) -> None:
    def text(answered: tuple[int, bytes]) -> str:
        assert answered[0] == 200, answered
        return str(json.loads(answered[1])["choices"][0]["text"])

    wanted = text(answer(server, WHOLE))
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:9], BODY[9:], b""))
    assert text(answer(server, POST + b"transfer-encoding: chunked\r\n\r\n" + chunks)) == wanted
    assert text(answer(server, WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0"))) == wanted
    with server.connected() as connection:  # two requests at once
        connection.sendall(WHOLE + WHOLE)
        assert [text(answered) for answered in answers(connection, 2)] == [wanted] * 2
    with server.connected() as connection:
        connection.sendall(POST + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY))
        assert connection.recv(4096).startswith(b"HTTP/1.1 100 ")
        connection.sendall(BODY)
        assert text(answers(connection, 1)[0]) == wanted


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(server: RunningServer) -> None:
    assert answer(server, POST + b"expect: 100-continue\r\ncontent-length: 99999999\r\n\r\n")[0] == 413


def test_a_client_that_closes_its_sending_side_has_left(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "slipstream.server")
    with server.connected() as connection:
        connection.sendall(WHOLE.replace(b'"max_tokens": 3', b'"max_tokens":99'))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(4096) == b""
    server.wait_until(lambda: not server.service.live and "status=499" in caplog.text)


@subcases("data", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /health HTTP/3.7\r\nhost: localhost\r\n\r\n"])
def test_other_versions_of_http_are_named(server: RunningServer, data: bytes) -> None:
    status, body = answer(server, data)
    assert status == 505 and b"is not served; allowed: HTTP/1.1" in body


@subcases("protocol", [b"websocket", b"h2c"])
def test_an_upgrade_is_ignored(server: RunningServer, protocol: bytes) -> None:
    upgrade = HOST + b"connection: upgrade\r\nupgrade: " + protocol + b"\r\n\r\n"
    assert answer(server, b"GET /v1/models HTTP/1.1\r\n" + upgrade)[0] == 200
    assert answer(server, b"GET /v1/completions HTTP/1.1\r\n" + upgrade)[0] == 405


@pytest.mark.slow
def test_head_and_options_are_answered_on_every_address(server: RunningServer) -> None:
    document = server.http.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        path = path.replace("{name}", "toy")
        head, options = server.http.head(path), server.http.options(path)
        is_read = "get" in operations and path != "/v1/slipstream/events"  # whose answer never ends
        assert (head.status_code, head.content) == (200 if is_read else 405, b""), path
        assert (options.status_code, options.headers["allow"].lower()) == (204, ", ".join(sorted(operations))), path
    assert answer(server, b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n")[0] == 204
    assert server.http.options("/nowhere").status_code == 404


@subcases(
    "method, path, meant",
    [
        ("POST", "/chat/completions", "did you mean '/v1/chat/completions'?"),
        ("POST", "/v1/v1/chat/completions", "did you mean '/v1/chat/completions'?"),
        ("POST", "/v1/chat/completions/", "did you mean '/v1/chat/completions'?"),
        ("POST", "/api/v1/completions", "did you mean '/v1/completions'?"),
        ("POST", "/v1/chat/completion", "did you mean '/v1/chat/completions'?"),
        ("GET", "/healthz", "did you mean '/health'?"),
        ("GET", "/v1/metrics", "did you mean '/metrics'?"),
        ("GET", "/models", "did you mean '/v1/models'?"),
        ("POST", "/v1/files", "`slipstream batch` answers files of requests"),
        ("GET", "/v1/batches/b1", "`slipstream batch` answers files of requests"),
        ("GET", "/zebra", "allowed: those that GET /openapi.json lists"),
    ],
)
def test_a_wrong_address_names_the_right_one(server: RunningServer, method: str, path: str, meant: str) -> None:
    refusal = server.http.request(method, path, json={} if method == "POST" else None)
    error = refusal.json()["error"]
    assert refusal.status_code == 404 and set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith(meant)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/toy"])
def test_models_are_found_with_a_slash_at_the_end(server: RunningServer, path: str) -> None:
    assert server.http.get(f"{path}/").json() == server.http.get(path).json()


def test_the_page_loads_through_a_proxy_that_rewrites_the_host(server: RunningServer) -> None:
    site = {"origin": "https://llm.example"}
    for path in ("/", "/page/app.js", "/page/style.css"):
        assert server.http.get(path, headers=site).status_code == 200
    assert "--allowed-origin" in server.http.get("/v1/models", headers=site).json()["error"]["message"]
    with running_server(allowed_origin=("https://llm.example",)) as listed:
        for path in ("/", "/page/app.js", "/v1/models", "/health"):
            assert listed.http.get(path, headers=site).status_code == 200
        assert listed.http.get("/v1/models", headers={"origin": "https://evil.example"}).status_code == 403


def test_a_server_without_keys_looks_for_no_key_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = KeyFile("")
    (tmp_path / "a file").touch()
    assert not keys.keys().digests and caplog.messages == []


@pytest.mark.slow
def test_a_key_file_is_read_again_when_it_changes(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    keys = tmp_path / "keys"

    def status(key: str) -> int:
        return httpx.get(
            f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}"}, trust_env=False, timeout=PATIENCE
        ).status_code

    keys.write_text("ann:first-key-of-ann\n")
    with running_server(api_key_file=str(keys)) as server:
        assert (status("first-key-of-ann"), status("second-key-of-ann")) == (200, 401)
        keys.write_text("ann:second-key-of-ann\n")
        assert (status("first-key-of-ann"), status("second-key-of-ann")) == (401, 200)
        for text in ("", "short\n"):
            keys.write_text(text)
            assert (status("first-key-of-ann"), status("second-key-of-ann"), status("nobody")) == (401, 200, 401)
        keys.unlink()
        assert (status("second-key-of-ann"), status("nobody")) == (200, 401)
        assert caplog.text.count("; the earlier keys stay") == 3
        keys.write_text("bob:key-of-bob-1\n")
        assert (status("second-key-of-ann"), status("key-of-bob-1")) == (401, 200)
