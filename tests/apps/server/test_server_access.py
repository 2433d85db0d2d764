"""Keys, hosts and origins: whatever is not listed is refused, however a request is written."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from slipstream import UsageError
from slipstream.apps.server import access
from slipstream.apps.server.access import OPEN, PAGE, ApiKeys
from slipstream.apps.server.server_settings import ServerSettings
from tests.support.markers import subcases
from tests.support.processes import PATIENCE
from tests.support.running_server import RunningServer, running_server

KEY, OTHER = "correct-horse-battery", "another-long-key"
TEXTS, HOT = "/v1/completions", {"temperature": "hot"}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# who\nann:{KEY}\n\n{OTHER}\n")
    return str(file)


@pytest.fixture(scope="module")
def server(key_file: str) -> Iterator[RunningServer]:
    with running_server(api_key_file=key_file) as running:
        yield running


@pytest.fixture(scope="module")
def unlocked() -> Iterator[RunningServer]:
    with running_server(allowed_host=("box.lan",), allowed_origin=("https://pages.example",)) as running:
        yield running


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The server's lines since the last call."""
    lines = [record.getMessage() for record in caplog.records if record.name == "slipstream.server"]
    caplog.clear()
    return lines


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def raw(server: RunningServer, request: bytes) -> bytes:
    """The status line of the answer to raw bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(request)
        return connection.recv(4096).partition(b"\r\n")[0]


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/nowhere", "/v1/completions"])
def test_head_is_answered_with_the_headers_of_get(unlocked: RunningServer, path: str) -> None:
    answer, head = unlocked.http.get(path), unlocked.http.head(path)
    assert (head.status_code, head.content) == (answer.status_code, b"")
    for name in ("content-type", "content-length", "x-content-type-options", "allow"):
        assert head.headers.get(name) == answer.headers.get(name)
    assert unlocked.http.head("/v1/slipstream/events").status_code == 405  # the stream of events would never end


def test_head_needs_a_key_where_get_does(server: RunningServer) -> None:
    assert server.http.head("/v1/models").status_code == 401
    assert server.http.head("/v1/models", headers=bearer(KEY)).status_code == 200


def walk(routes: Any) -> Iterator[Any]:
    """Every route, also those of included routers."""
    for route in routes:
        if isinstance(route, Route):
            yield route
        else:
            yield from walk(route.original_router.routes)


def test_every_route_but_the_listed_ones_needs_a_key(server: RunningServer) -> None:
    routes = list(walk(server.server.config.app.routes))  # type: ignore[union-attr]
    assert len(routes) > 14
    for route in routes:
        path = route.path.replace("{name:path}", "toy").replace("{name}", "app.js")
        for method in route.methods:
            answer = server.http.request(method, path)
            is_open = path in OPEN or path.startswith(PAGE)
            assert (answer.status_code == 401) is not is_open, (method, path, answer.status_code)
            if not is_open and method != "HEAD":
                error = answer.json()["error"]  # of Ollama's API, a string
                assert isinstance(error, str) or error["type"] == "authentication_error"


def test_routes_without_a_key_say_nothing_about_the_model(server: RunningServer) -> None:
    for path in OPEN:
        answer = server.http.get(path)
        assert answer.status_code == 200 and "toy" not in answer.text


@subcases("path", ["/nowhere", "/v1", "/health/", "//health", "/health/../v1/models", "/HEALTH", "/page"])
def test_unlisted_addresses_need_a_key(server: RunningServer, path: str) -> None:
    assert raw(server, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()).split()[1] == b"401"


@subcases(
    "path, host",
    [
        ("/v1/models", "localhost/health?"),
        ("/v1/models", "x/health?"),
        ("/v1/models", "localhost#"),
        ("/v1/models?/health", "localhost"),
        ("/v1/%6dodels", "localhost"),
        ("/%76%31/models", "localhost"),
        ("//v1/models", "localhost"),
        ("/page/../v1/models", "localhost"),
        ("/page/..%2f..%2fv1/models", "localhost"),
        ("http://localhost/v1/models", "localhost"),
    ],
)
def test_no_spelling_of_a_path_or_host_bypasses_the_key(server: RunningServer, path: str, host: str) -> None:
    status = raw(server, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()).split()[1]
    assert status in (b"400", b"401", b"403", b"404")


def test_raw_requests_pass_with_a_key(server: RunningServer) -> None:
    request = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n\r\n"
    assert raw(server, request.encode()).split()[1] == b"200"


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_every_key_of_the_file_is_accepted(server: RunningServer, key: str) -> None:
    assert server.http.get("/v1/models", headers=bearer(key)).status_code == 200


def test_a_key_sent_with_its_name_is_told_to_leave_it_out_whether_or_not_it_is_right(server: RunningServer) -> None:
    answers = {server.http.get("/v1/models", headers=bearer(key)).text for key in (f"ann:{KEY}", f"ann:{OTHER}", "x:y")}
    (answer,) = answers
    assert "(of NAME:KEY, only the part after the colon)" in answer


@subcases("key", [KEY[:-1], KEY + "x", KEY.upper(), f"ann:{KEY}", "\xff" * 20, KEY + " " + KEY])
def test_no_other_key_is_accepted(server: RunningServer, key: str) -> None:
    headers = {"authorization": f"Bearer {key}".encode("latin-1")}
    assert server.http.get("/v1/models", headers=headers).status_code == 401  # type: ignore[arg-type]


def test_a_key_must_be_sent_once_and_as_a_bearer_token(server: RunningServer) -> None:
    twice = [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")]
    assert server.http.get("/v1/models", headers=twice).status_code == 401
    assert server.http.get("/v1/models", headers={"authorization": f"Basic {KEY}"}).status_code == 401
    assert server.http.get(f"/v1/models?api_key={KEY}").status_code == 401


@subcases(
    "method, path, key, body, endpoint, status, owner, reason",
    [
        ("GET", "/v1/models?api_key=secret-key", "x", None, "/v1/models", 401, "", "no valid API key"),
        ("GET", "/v1/models", f"ann:{KEY}", None, "/v1/models", 401, "", "no valid API key"),
        ("GET", "/no%0awhere", KEY, None, "/no%0Awhere", 404, '"ann"', "GET "),
        ("GET", TEXTS, KEY, None, TEXTS, 405, '"ann"', "GET '"),
        ("POST", TEXTS, OTHER, {"prompt": "my secret"} | HOT, TEXTS, 400, '"unnamed"', "temperature"),
        ("POST", TEXTS, KEY, b"{", TEXTS, 400, '"ann"', "the request body is not valid"),
        ("GET", "/v1/models", None, None, "/v1/models", 403, "", "host 'evil.example'"),
    ],
)
def test_a_refused_request_has_one_line_with_reason_and_name_of_the_key(
    server: RunningServer,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    key: str | None,
    body: Any,
    endpoint: str,
    status: int,
    owner: str,
    reason: str,
) -> None:
    caplog.set_level(logging.INFO, "slipstream.server")
    caplog.clear()
    headers = {"content-type": "application/json"} | ({"host": "evil.example"} if key is None else bearer(key))
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = server.http.request(method, path, headers=headers, content=None if body is None else content)
    (line,) = logged(caplog)
    place = f'method={method} path={endpoint} status={status} {owner and f"key={owner} "}client="127.0.0.1" seconds='
    assert line.startswith(f"request {place}") and f' reason="{reason}' in line, line
    assert json.loads(line.partition(" reason=")[2]) == answer.json()["error"]["message"]
    assert "secret" not in line and KEY not in line and OTHER not in line


def test_the_line_of_a_request_that_was_under_way_names_the_key(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "slipstream.server")
    for more in ({}, {"stream": True}):
        server.http.post(TEXTS, headers=bearer(KEY), json={"prompt": "x", "max_tokens": 3} | more)
        (line,) = logged(caplog)
        who = 'method=POST path=/v1/completions status=200 model="toy" key="ann" client="127.0.0.1"'
        figures = r"rows=1 prompt_tokens=1 tokens=3 tokens_per_round=\d\.\d+ first_token_seconds=[\d.]+ seconds=[\d.]+$"
        assert re.search(f"id=[0-9a-f]{{32}} {who} {figures}", line), line
    answer = server.http.post(TEXTS, headers=bearer(KEY), json={"prompt": "x" * 5000, "max_tokens": 3})
    (line,) = logged(caplog)
    assert ' status=400 model="toy" key="ann" client="127.0.0.1" rows=0 ' in line
    assert json.loads(line.partition(" reason=")[2]) == answer.json()["error"]["message"]


def test_the_log_does_not_tell_when_health_is_asked_for(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    for level, count in ((logging.INFO, 0), (logging.DEBUG, 1)):
        caplog.set_level(level, "slipstream.server")
        assert server.http.get("/health").status_code == 200 and len(logged(caplog)) == count


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(access.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    keys = ApiKeys((("a", access._digest(KEY)), ("b", access._digest(OTHER))))
    for key in (KEY, OTHER, "x"):
        keys.owner(key)
    assert len(compared) == 6  # every key of the file is compared, even after a match


@subcases("host", ["evil.example", "localhost.evil.example", ":80", "127.0.0.1.evil.example", "a b"])
def test_unlisted_host_names_are_refused(unlocked: RunningServer, host: str) -> None:
    assert raw(unlocked, f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()).split()[1] in (b"403", b"400")


@subcases("host", ["localhost", "localhost:80", "127.0.0.1:1", "[::1]:8000", "192.168.0.7", "box.lan"])
def test_ip_addresses_and_listed_host_names_are_served(unlocked: RunningServer, host: str) -> None:
    assert raw(unlocked, f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()).split()[1] == b"200"


@pytest.mark.each_value
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1"])
def test_pages_of_other_sites_cannot_call(unlocked: RunningServer, method: str, origin: str) -> None:
    answer = unlocked.http.request(method, "/v1/models", headers={"origin": origin})
    assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers


def test_the_page_itself_and_listed_sites_can_call(unlocked: RunningServer) -> None:
    assert unlocked.http.get("/v1/models", headers={"origin": unlocked.url}).status_code == 200
    listed = unlocked.http.get("/v1/models", headers={"origin": "https://pages.example"})
    assert listed.headers["access-control-allow-origin"] == "https://pages.example"


def test_an_address_that_other_machines_can_reach_needs_keys(key_file: str) -> None:
    for host in ("0.0.0.0", "192.168.0.7", "::", "example.org"):
        with pytest.raises(UsageError, match="--api-key-file"):
            ServerSettings(host=host)
        ServerSettings(host=host, api_key_file=key_file)
        ServerSettings(host=host, insecure=True)
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        ServerSettings(host=host)


@pytest.mark.parametrize("text", ["", "# none\n", "short\n", "name:short\n", "a key with spaces\n", "schlüssel-lang\n"])
def test_a_key_file_without_usable_keys_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(UsageError, match="--api-key-file"):
        ApiKeys.read(str(tmp_path / "keys"))
    with pytest.raises(UsageError, match="cannot be read"):
        ApiKeys.read(str(tmp_path / "nothing"))


def test_a_huge_header_and_a_huge_body_are_refused(unlocked: RunningServer) -> None:
    big = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 20)
    with suppress(ConnectionError):  # the server closes before the header ends
        assert raw(unlocked, big).split()[1] in (b"400", b"431")
    answer = unlocked.http.post(
        "/v1/completions", content=b" " * (5 << 20), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413 and answer.json()["error"]["type"] == "invalid_request_error"
    pieces = (b" " * (1 << 20) for _ in range(6))  # chunked, without a content length
    answer = unlocked.http.post("/v1/completions", content=pieces, headers={"content-type": "application/json"})
    assert answer.status_code == 413 and answer.json()["error"]["type"] == "invalid_request_error"
    assert unlocked.complete().status_code == 200


def test_no_other_file_is_served(unlocked: RunningServer) -> None:
    for name in ("..%2fweb_app.py", "web_app.py", "__init__.py", "nothing.js", "%2e%2e"):
        assert unlocked.http.get(f"/page/{name}").status_code == 404


def test_preflight_requests_of_listed_sites_need_no_key(key_file: str) -> None:
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with running_server(api_key_file=key_file, allowed_origin=("https://pages.example",)) as server:
        for origin, status in (("https://pages.example", 200), ("https://evil.example", 403)):
            answer = server.http.options("/v1/completions", headers=asking | {"origin": origin})
            assert answer.status_code == status
        refused = server.http.options("/v1/models", headers={"origin": "https://pages.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://pages.example"
        assert "access-control-allow-origin" not in server.http.get("/v1/models").headers
        listed = server.http.get("/v1/models", headers=bearer(KEY) | {"origin": "https://pages.example"})
        assert listed.status_code == 200 and listed.headers["access-control-allow-origin"] == "https://pages.example"


@subcases(
    "name, value",
    [
        *(("allowed_host", host) for host in ("box:8000", "http://box", "box/", "*", "", "a b", "[::1]")),
        *(("allowed_origin", f"{scheme}://a.example{port}") for scheme, port in (("http", ":80"), ("https", ":443"))),
        *(("allowed_origin", origin) for origin in ("http://a.example/", "*", "http://A.example", "a.example", "null")),
    ],
)
def test_hosts_and_origins_that_no_request_can_have_are_refused(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{name}={value!r}; allowed: ")):
        ServerSettings(**{name: ("localhost", value) if name == "allowed_host" else (value,)})  # type: ignore[arg-type]


def test_hosts_and_origins_are_allowed_as_browsers_send_them() -> None:
    ServerSettings(allowed_host=("box", "Box.LAN", "10.0.0.7", "fe80::1"))
    sites = (
        "http://a.example",
        "https://a.example:8443",
        "http://[::1]:3000",
        "vscode-webview://0abc",
        "http://a.example:8080",
    )
    ServerSettings(allowed_origin=sites)


@subcases(
    "settings",
    [
        {"port": "8000"},
        {"port": True},
        {"drain_timeout": "1"},
        {"insecure": 1},
        {"host": 0},
        {"allowed_host": "box"},
        {"allowed_origin": (1,)},
    ],
)
def test_settings_of_the_wrong_type_are_refused_by_name(settings: dict[str, object]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(UsageError, match=re.escape(f"{name}={value!r}; allowed: ")):
        ServerSettings(**settings)  # type: ignore[arg-type]


def test_the_owner_of_an_unnamed_key_does_not_depend_on_its_line(tmp_path: Path) -> None:
    def owners(text: str) -> list[str | None]:
        (tmp_path / "keys").write_text(text, encoding="utf-8")
        keys = ApiKeys.read(str(tmp_path / "keys"))
        return [keys.owner(key) for key in ("first-key-A", "second-key-B", "key-of-ann")]

    first, second, ann = owners("first-key-A\nsecond-key-B\n ann : key-of-ann\n")
    assert ann == "ann" and first and second and first != second and "first" not in first
    assert owners("\ufeffsecond-key-B\n:first-key-A\n") == [first, second, None]  # an empty name counts as no name
    assert owners("\ufeffann:key-of-ann\r\n") == [None, None, "ann"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ann:key-of-ann\nann:key-of-bob\n", "line 2: the name is that of line 1; allowed: each name once"),
        ("ann:key-of-ann\n\nbob:key-of-ann\n", "line 3: the key is that of line 1; allowed: each key once"),
        ("key-of-ann\nkey-of-ann\n", "line 2: the key is that of line 1"),
        ("sha256:ab:key-of-ann\n", "line 1: the name 'sha256:ab'; allowed: printable"),
        ("a\x07nn:key-of-ann\n", "line 1: the name"),
    ],
)
def test_duplicate_or_misleading_names_and_keys_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(UsageError, match=message):
        ApiKeys.read(str(tmp_path / "keys"))


DIGITS = b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "\xff"}', "is not valid UTF-8 at byte 12"),
        (b"\x1f\x8b\x08\x00" + b"\x00" * 20, "is not valid UTF-8 at byte 1"),
        (DIGITS, r"is not valid JSON here: .*4300 digits"),
        (b"[" * 100_000, "is not valid JSON here: lists and objects are nested too deep"),
        (b'{"a":' * 100_000, "is not valid JSON here: lists and objects are nested too deep"),
        (b'{"prompt": "x", "metadata": ' + b"[" * 900 + b"]" * 900 + b"}", ""),
        (b'{"prompt": "x"} x', "is not valid JSON at character 16: Extra data$"),
        (b'{"prompt": "a\nb"}', "is not valid JSON at character 13: Invalid control character$"),
        (b'["x"]', "^the request body is a list; allowed: a JSON object, sent as application/json$"),
        (b"5", "^the request body is 5; allowed: a JSON object"),
        (b"", ""),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_refused_body_is_told_what_is_wrong_with_it(
    unlocked: RunningServer, path: str, body: bytes, message: str
) -> None:
    answer = unlocked.http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code < 500 and "bad request" not in answer.text
    if message:
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
        assert re.search(message, answer.json()["error"]["message"]), answer.text


def test_a_body_of_another_content_type_is_refused_by_name(unlocked: RunningServer) -> None:
    answer = unlocked.http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"})
    assert answer.json()["error"]["message"].startswith("the request body is not sent as application/json; allowed: ")


def test_a_compressed_body_is_refused_by_name(unlocked: RunningServer) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = unlocked.http.post("/v1/completions", content=b"\x1f\x8b\x08\x00", headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the request body has content-encoding 'gzip'; allowed: none"
