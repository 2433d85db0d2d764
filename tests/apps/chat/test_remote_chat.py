"""Servers that do not speak OpenAI's API: whatever they send, the user reads at most one line."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from slipstream import Constraint, SamplingParams
from slipstream.apps.chat.remote_chat import KEYS, RemoteApi, RemoteChat, request_fields
from slipstream.errors import SlipstreamError, UsageError
from tests.support.chat_fakes import Recorder
from tests.support.markers import subcases

ENDS = [b"SSH-2.0-x\r\n", b"", b"HTTP/1.1 500 x\r\ncontent-length: 99\r\n\r\n{", b"HTTP/1.1 x\r\n\r\n"]

NO_ADDRESSES = (
    *("http://[::1", "http://h:99999", "http://h:x", "http://a b/", "http://x..y", "http://ü.x", "http://h/é"),
    *("http://", "http://:80", "ftp://x", "", "http://h:0", "http://h/\x07"),
    *("http://user:secret@h", "http://user@h", "http://h/?x", "http://h/#x"),
)


@contextmanager
def sending(data: bytes, asked: list[bytes] | None = None) -> Iterator[RemoteApi]:
    """The API at an address that answers one request with these bytes; the request is appended to `asked`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                request = connection.recv(1 << 16)
                if asked is not None:
                    asked.append(request)
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


@subcases("data", [*ENDS, ok(b'{"da', 99)])
def test_a_server_that_breaks_off_a_list_of_models_is_one_error(data: bytes) -> None:
    with sending(data) as api, pytest.raises(SlipstreamError, match=r"broke off: .|status 500: no reason"):
        api.models()


@pytest.mark.parametrize("data", ENDS)
def test_a_server_that_breaks_off_an_answer_is_one_error(data: bytes) -> None:
    with sending(data) as api, pytest.raises(SlipstreamError, match=r"broke off: .|status 500: no reason"):
        list(api.pieces({}))


@subcases("body", [b"<html>", b"[1]", b'{"data":{"a":1}}', b'{"data":["x"]}', b'{"data":[{"id":null}]}', b"[" * 99999])
def test_a_malformed_list_of_models_is_empty(body: bytes) -> None:
    with sending(ok(body)) as api:
        assert api.models() == []


def test_malformed_chunks_have_no_text() -> None:
    odd = [b'{"choices":5}', b'{"choices":["x"]}', b'{"choices":[{"delta":"x"}]}', b'{"type":"ping"}']
    odd += [b'{"choices":[{"delta":{"content":5}}]}', b'{"choices":[{}]}', HI]
    with sending(sse(*odd, b"[DONE]")) as api:
        assert list(api.pieces({})) == ["hi"]


def test_a_key_is_not_sent_to_the_target_of_a_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS[1], "secret key")
    asked = list[bytes]()
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.setblocking(False)
        moved = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/".encode()
        redirect, match = b"HTTP/1.1 302 x\r\nlocation: %s\r\n\r\n" % moved, "status 302: it redirects to"
        with sending(redirect, asked) as api, pytest.raises(SlipstreamError, match=match):
            api.models()
        with pytest.raises(BlockingIOError):  # nobody has connected
            elsewhere.accept()
    assert b"Bearer secret key" in asked[0]


@pytest.mark.parametrize("key", ["a\nb", "ключ", "a\x01"])
def test_the_refusal_of_an_invalid_key_names_its_variable_but_not_the_key(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEYS[0], key)
    with pytest.raises(UsageError, match=KEYS[0]) as refusal:
        RemoteApi.at("http://127.0.0.1:1")
    assert key not in str(refusal.value)


def test_reprs_and_refusals_show_no_key_or_password() -> None:
    assert "secret" not in repr(RemoteApi("http://h", "secret"))
    with pytest.raises(UsageError) as refusal:
        RemoteApi.at("http://user:secret@h")
    assert "secret" not in str(refusal.value)


@pytest.mark.each_value
@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("place", [b"http://[::1", b"//", b"file:///etc/passwd", b"/\x1b[31m"])
def test_any_redirect_is_one_error(code: int, place: bytes) -> None:
    redirect = b"HTTP/1.1 %d x\r\nlocation: %s\r\n\r\n" % (code, place)
    with sending(redirect) as api, pytest.raises(SlipstreamError, match=f"status {code}: it redirects to") as refusal:
        api.models()
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    ("error", "message"),
    [(b'"a\\n\\u001b[31mb"', r"a \[31mb$"), (b"{}", "no reason given"), (b'{"message":null}', "no reason given")],
)
def test_an_error_from_the_server_is_one_printable_line(error: bytes, message: str) -> None:
    body = b'{"error":%s}' % error
    answer = b"HTTP/1.1 400 x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    with sending(answer) as api, pytest.raises(SlipstreamError, match=message):
        api.models()


def test_a_null_error_in_a_chunk_is_not_an_error() -> None:
    with sending(sse(b'{"error":null,"choices":[{"delta":{"content":"hi"}}]}', b"[DONE]")) as api:
        assert list(api.pieces({})) == ["hi"]


@subcases("url", NO_ADDRESSES)
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--url"):
        RemoteApi.at(url)


HI, OVER = b'{"choices":[{"delta":{"content":"hi"}}]}', b'{"choices":[{"delta":{},"finish_reason":"stop"}]}'
STREAM = b"\xef\xbb\xbf: hello\r\nid: 7\r\ndata: %s\r\n\r\nevent: message\r\ndata:%s\r\n\r\ndata: [DONE]\r\n\r\n" % (
    HI,
    HI,
)


def sse(*data: bytes, kind: bytes = b"text/event-stream") -> bytes:
    body = b"".join(b"data: %s\n\n" % event for event in data)
    return typed(body, kind)


def typed(body: bytes, kind: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (kind, len(body), body)


@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_every_event_of_a_stream_is_shown(ends: bytes) -> None:
    with sending(typed(STREAM.replace(b"\r\n", ends), b"text/event-stream")) as api:
        assert list(api.pieces({})) == ["hi", "hi"]


CALL = b'{"choices":[{"delta":{"tool_calls":[{"function":{"name":"add"}}]},"finish_reason":"tool_calls"}]}'
CUT = b'{"choices":[{"delta":{},"finish_reason":"content_filter"}]}'
WHOLE = b'{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}]}'


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (
            typed(b"<html><title>Sign in</title></html>", b"text/html"),
            r"sent text/html \(Sign in\) instead of a streamed",
        ),
        (typed(b'{"response":"hi"}\n{"response":"!"}\n', b"application/x-ndjson"), "sent application/x-ndjson"),
        (typed(b'{"id":"x"}', b"application/json"), r"sent application/json \(\{\"id\":\"x\"\}\) instead"),
        (typed(b"\n", b"text/plain"), "sent nothing instead"),
        (typed(b"", b"text/event-stream"), "sent events without an answer"),
        (
            typed(b'event: message_start\ndata: {"type":"message_start"}\n\n', b"text/event-stream"),
            "sent events without an answer",
        ),
        (sse(b"[DONE]"), "sent events without an answer"),
        (sse(HI), "broke off: the stream ended before the answer did"),
        (sse(HI, b'{"error":{"message":"out of memory"}}'), "out of memory"),
        (sse(HI, b'{"object":"error","message":"out of memory","code":500}'), "out of memory"),
        (sse(HI, b'{"detail":"out of memory"}'), "out of memory"),
        (
            sse(HI, b'{"choices":[{"finish_reason":"error","delta":{},"error":{"message":"out of memory"}}]}'),
            "out of memory",
        ),
        (sse(HI, b'{"choices":[{"finish_reason":"error","delta":{}}]}', b"[DONE]"), "no reason given"),
        (
            sse(HI, b'{"error":{"message":"out of memory"},"choices":[{"finish_reason":"error","delta":{}}]}'),
            "out of memory",
        ),
        (sse(HI, HI + HI, OVER), "sent an event that cannot be read"),
        (typed(b"data: %s\n\nevent: error\ndata: out of memory\n\n" % HI, b"text/event-stream"), "out of memory"),
        (typed(b'event: error\ndata: {"message":"out of memory"}\n\n', b"text/event-stream"), "out of memory"),
        (typed(b'{"object":"error","message":"out of memory"}', b"application/json"), "out of memory"),
    ],
)
def test_anything_but_an_answer_is_reported_in_one_line(answer: bytes, why: str) -> None:
    with sending(answer) as api, pytest.raises(SlipstreamError, match=why) as refusal:
        list(api.pieces({}))
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    ("answer", "text", "note"),
    [
        (typed(WHOLE, b"application/json"), "hi", "sent its answer whole, not as a stream"),
        (sse(HI, CALL, b"[DONE]"), "hi", "the answer ended by 'tool_calls'"),
        (sse(HI, CUT), "hi", "the answer ended by 'content_filter'"),
        (sse(b'{"choices":[{"delta":{"content":[{"type":"text","text":"hi"}]}}]}', b"[DONE]"), "hi", ""),
        (sse(b"", HI, b"", OVER), "hi", ""),
        (sse(WHOLE), "hi", ""),
        (sse(b'{"choices":[{"delta":{"refusal":"I will not."}}]}', OVER), "I will not.", ""),
        (sse(b'{"choices":[{"delta":{"reasoning_content":"hm"}}]}', OVER), "", "no text, but reasoning"),
        (sse(OVER), "", "the answer is empty"),
    ],
)
def test_a_text_is_shown_with_a_note_about_anything_unusual(answer: bytes, text: str, note: str) -> None:
    notes = list[str]()
    with sending(answer) as api:
        assert "".join(api.pieces({}, notes.append)) == text
    assert len(notes) == bool(note) and all(note in line for line in notes)


@subcases(
    "body, why",
    [
        (b'{"object":"error","message":"no such model","code":404}', "no such model"),
        (b'{"detail":"Not authenticated"}', "Not authenticated"),
        (
            b'{"detail":[{"loc":["body","n"],"msg":"too large"}]}',
            r"\[{.*: \"too large\"}\]",
        ),
        (b'{"error":"busy"}', "busy"),
        (b'{"error":true,"message":"busy"}', "busy"),
        (b'{"code":1301,"msg":"busy"}', "busy"),
        (b'[{"error":{"code":429,"message":"quota"}}]', "quota"),
        (b"<html><head><style>p {}</style></head><h1>502 Bad Gateway</h1>", "502 Bad Gateway"),
        (b"Too Many Requests\n", "Too Many Requests"),
        (b"", "no reason given"),
        (b'{"error":{"type":"x"}}', "no reason given"),
    ],
)
def test_every_form_of_error_is_reported(body: bytes, why: str) -> None:
    answer = b"HTTP/1.1 400 x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    with sending(answer) as api, pytest.raises(SlipstreamError, match=f"status 400: {why}$"):
        list(api.pieces({}))


def test_a_failed_answer_ends_its_line_and_is_not_kept() -> None:
    with sending(sse(HI, b'{"detail":"out of memory"}')) as api:
        face = Recorder()
        chat = RemoteChat(api.url, face, SamplingParams(), model="m")
        chat.handle("hello")
    assert face.pieces == ["hi", "\n"] and chat.turns == [] and "out of memory" in face.errors[0]


def test_a_leading_space_escapes_a_slash() -> None:
    with sending(sse(HI, b"[DONE]")) as api:
        face = Recorder()
        chat = RemoteChat(api.url, face, SamplingParams(), model="m")
        chat.handle(" /usr is a folder")
    assert face.errors == [] and chat.turns[0] == {"role": "user", "content": "/usr is a folder"}


# Options become fields that servers know, or are refused in one line that names the flag

DEFAULTS = {"temperature": 0.0, "max_tokens": 200}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_OPENAI_HAS_IT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("constraint", "fields"),
    [
        (Constraint(json_schema=SCHEMA), {"response_format": AS_OPENAI_HAS_IT}),
        (Constraint(json_schema=json.dumps(SCHEMA)), {"response_format": AS_OPENAI_HAS_IT}),
        (Constraint(json_object=True), {"response_format": {"type": "json_object"}}),
        (Constraint(regex="[ab]+"), {"structured_outputs": {"regex": "[ab]+"}}),
        (Constraint(choice=("a", "b")), {"structured_outputs": {"choice": ["a", "b"]}}),
        (Constraint(grammar='start: "a"'), {"structured_outputs": {"grammar": 'start: "a"'}}),
    ],
)
def test_a_constraint_becomes_a_request_field(constraint: Constraint, fields: dict[str, object]) -> None:
    asked = request_fields(SamplingParams(constraint=constraint))
    assert asked == DEFAULTS | fields and json.dumps(asked)


def test_a_prediction_has_openais_form() -> None:
    asked = request_fields(SamplingParams(prediction="def f():"))
    assert asked == DEFAULTS | {"prediction": {"type": "content", "content": "def f():"}}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(constraint=Constraint(json_object=True, whitespace="spaced")), "--whitespace 'spaced' with"),
        (SamplingParams(constraint=Constraint(grammar="start: @a", schemas={"a": SCHEMA})), "--grammar that names"),
        (SamplingParams(prediction=[1, 2]), "--prediction of token ids with --url; allowed: a text"),
    ],
)
def test_options_without_a_request_field_are_refused_before_anything_is_sent(
    params: SamplingParams, message: str
) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        RemoteChat("http://127.0.0.1:9", Recorder(), params)
