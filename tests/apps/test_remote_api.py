"""Other ends that are no server of OpenAI's API: whatever they send, the user reads one line or nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from slipstream.apps.chat.remote_api import KEYS, RemoteApi
from slipstream.errors import SlipstreamError, UsageError

ENDS = [b"SSH-2.0-x\r\n", b"", b"HTTP/1.1 500 x\r\ncontent-length: 99\r\n\r\n{", b"HTTP/1.1 x\r\n\r\n"]

NO_ADDRESSES = (
    *("http://[::1", "http://h:99999", "http://h:x", "http://a b/", "http://x..y", "http://ü.x", "http://h/é"),
    *("http://", "http://:80", "ftp://x", "", "http://h:0", "http://h/\x07"),
    *("http://user:secret@h", "http://user@h", "http://h/?x", "http://h/#x"),
)


@contextmanager
def sending(data: bytes, asked: list[bytes] | None = None) -> Iterator[RemoteApi]:
    """The API at an address where one request is answered with these bytes. asked: what it was."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                told = connection.recv(1 << 16)
                if asked is not None:
                    asked.append(told)
                connection.sendall(data)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield RemoteApi.at(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
        thread.join()


def ok(body: bytes, length: int | None = None) -> bytes:
    count = len(body) if length is None else length
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % count + body


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("data", [*ENDS, ok(b'{"da', 99)])
def test_an_other_end_that_breaks_off_is_one_error(data: bytes) -> None:
    with sending(data) as api, pytest.raises(SlipstreamError, match=r"broke off: .|status 500: no reason"):
        api.models()


@pytest.mark.parametrize("data", ENDS)
def test_so_is_one_that_breaks_off_an_answer(data: bytes) -> None:
    with sending(data) as api, pytest.raises(SlipstreamError, match=r"broke off: .|status 500: no reason"):
        list(api.pieces({}))


@pytest.mark.parametrize(
    "body", [b"<html>", b"[1]", b'{"data":{"a":1}}', b'{"data":["x"]}', b'{"data":[{"id":null}]}', b"[" * 99999]
)
def test_an_answer_of_another_shape_lists_no_models(body: bytes) -> None:
    with sending(ok(body)) as api:
        assert api.models() == []


def test_chunks_of_another_shape_have_no_text() -> None:
    odd = [b"5", b'"x"', b"[", b'{"choices":5}', b'{"choices":["x"]}', b'{"choices":[{"delta":"x"}]}']
    odd += [b'{"choices":[{"delta":{"content":5}}]}', b'{"choices":[{}]}', b'{"choices":[{"delta":{"content":"hi"}}]}']
    with sending(ok(b": note\n" + b"".join(b"data: %s\n\n" % one for one in odd) + b"data: [DONE]\n\n")) as api:
        assert list(api.pieces({})) == ["hi"]


def test_a_key_is_sent_to_the_given_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS[1], "secret key")
    asked = list[bytes]()
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.setblocking(False)
        moved = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/".encode()
        said, match = b"HTTP/1.1 302 x\r\nlocation: %s\r\n\r\n" % moved, "status 302: it is elsewhere"
        with sending(said, asked) as api, pytest.raises(SlipstreamError, match=match):
            api.models()
        with pytest.raises(BlockingIOError):  # nobody has come
            elsewhere.accept()
    assert b"Bearer secret key" in asked[0]


@pytest.mark.parametrize("key", ["a\nb", "ключ", "a\x01"])
def test_a_key_that_cannot_be_sent_is_named_and_not_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS[0], key)
    with pytest.raises(UsageError, match=KEYS[0]) as told:
        RemoteApi.at("http://127.0.0.1:1")
    assert key not in str(told.value)


def test_nothing_shows_a_key_or_a_password() -> None:
    assert "secret" not in repr(RemoteApi("http://h", "secret"))
    with pytest.raises(UsageError) as told:
        RemoteApi.at("http://user:secret@h")
    assert "secret" not in str(told.value)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("place", [b"http://[::1", b"//", b"file:///etc/passwd", b"/\x1b[31m"])
def test_any_redirect_is_one_error(code: int, place: bytes) -> None:
    said = b"HTTP/1.1 %d x\r\nlocation: %s\r\n\r\n" % (code, place)
    with sending(said) as api, pytest.raises(SlipstreamError, match=f"status {code}: it is elsewhere") as told:
        api.models()
    assert str(told.value).isprintable()


@pytest.mark.parametrize(
    ("error", "told"),
    [(b'"a\\n\\u001b[31mb"', r"a \[31mb$"), (b"{}", "no reason given"), (b'{"message":null}', "no reason given")],
)
def test_what_the_other_end_says_is_one_harmless_line(error: bytes, told: str) -> None:
    body = b'{"error":%s}' % error
    said = b"HTTP/1.1 400 x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    with sending(said) as api, pytest.raises(SlipstreamError, match=told):
        api.models()


def test_a_chunk_without_an_error_goes_on() -> None:
    chunk = b'data: {"error":null,"choices":[{"delta":{"content":"hi"}}]}\n\ndata: [DONE]\n\n'
    with sending(ok(chunk)) as api:
        assert list(api.pieces({})) == ["hi"]


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--url"):
        RemoteApi.at(url)
