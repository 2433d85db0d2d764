"""Streams are written in the call that publishes a step; a slow client delays only its own stream and loses nothing."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from slipstream.apps.server import answers
from slipstream.apps.server.answers import DONE, KEEP_ALIVE, encoded, event
from slipstream.apps.server.error_objects import ApiError
from slipstream.apps.server.live_request import Ended, Event, Job, LiveRequest, Started, notify_all
from slipstream.apps.server.streaming import MAX_JOINED_EVENTS, AnswerStream, run_until_blocked
from slipstream.core.types import Row
from slipstream.sampling.params import SamplingParams
from tests.support.markers import subcases
from tests.support.running_server import PATIENCE, running_server


@subcases("text", ["a\x85b\u2028c\u2029d", "\x00\x0b\x0c\x1c\n\r", "heron \U0001f600 \u0645 \u0085"])
def test_json_is_one_line_wherever_a_client_ends_lines(text: str) -> None:
    """Ollama's client splits a stream as `str.splitlines` does."""
    line = encoded({"text": text}).decode()
    assert line.splitlines() == [line] and json.loads(line) == {"text": text}


def test_json_is_written_however_deep_it_is_nested() -> None:
    nested = json.loads("[" * 600 + "]" * 600)
    assert json.loads(encoded({"calls": nested})) == {"calls": nested}


class Times:
    """Writes the time of each event; nothing for times below zero, as for tokens whose text is withheld."""

    media_type, ending, headers = "text/event-stream", DONE, dict[str, str]()

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def failure(self, error: ApiError) -> bytes:
        return event(encoded(error.body()))

    def take(self, event: Event) -> list[dict[str, Any]]:
        return [{"at": event.time}] if event.time >= 0 else []  # type: ignore[union-attr]

    def sent(self, chunk: dict[str, Any]) -> bytes:
        return b"%d " % chunk["at"]

    def closing(self) -> None:
        return None


class Client:
    """A stream of one row and its client, who reads while `reads` is set."""

    def __init__(self, rows: int = 1) -> None:
        self.live = LiveRequest()
        self.live.jobs = [Job(self.live, at, Row(at, [1], SamplingParams(), 0)) for at in range(rows)]
        self.messages: list[dict[str, Any]] = []
        self.tasks: list[object] = []
        self.reads, self.leaves, self.ends = asyncio.Event(), asyncio.Event(), 0
        self.reads.set()
        writer: Any = Times()
        self.stream = AnswerStream(self.live, writer, self.ended)

    def ended(self) -> None:
        self.ends += 1

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.messages.append(dict(message))
        self.tasks.append(_current())

    async def receive(self) -> Any:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    @property
    def text(self) -> str:
        return b"".join(sent.get("body", b"") for sent in self.messages).decode()


def _current() -> object:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


@asynccontextmanager
async def answered(client: Client) -> AsyncIterator[asyncio.Future[None]]:
    """The started stream while it is being sent."""
    send: Callable[[Any], Awaitable[None]] = client.send
    running = asyncio.ensure_future(client.stream({"type": "http"}, client.receive, send))
    while not client.messages:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    yield running
    client.leaves.set()
    await asyncio.wait({running}, timeout=PATIENCE)
    assert running.done() and client.ends == 1


def step(clients: list[Client], at: float) -> None:
    """Publish a step as the engine does, in one call of the event loop."""

    def publish() -> None:
        for client in clients:
            client.live.add_event(Started(0, 0, at))
        notify_all([client.live for client in clients])

    asyncio.get_running_loop().call_soon(publish)


async def a_turn() -> None:
    """One turn of the event loop; tasks that a step has woken have not run yet."""
    await asyncio.sleep(0)


def test_a_step_is_written_in_the_call_that_publishes_it() -> None:
    async def run() -> None:
        first, second = Client(), Client()
        async with answered(first), answered(second):
            step([first, second], 1)
            await a_turn()
            assert (first.text, second.text) == ("1 ", "1 ")
            assert first.tasks[1:] == second.tasks[1:] == [None]

    asyncio.run(run())


def test_a_slow_reader_delays_nobody_and_gets_everything_once_it_reads() -> None:
    async def run() -> None:
        slow, other = Client(), Client()
        async with answered(slow), answered(other):
            slow.reads.clear()
            for at in range(3):
                step([slow, other], at)
                await a_turn()
            assert (slow.text, other.text) == ("", "0 1 2 ")
            assert len(slow.live._events) == 2  # unread events are kept, not the bytes made of them
            slow.reads.set()
            for _ in range(10):
                await a_turn()
            assert slow.text == "0 1 2 "
            step([slow], 3)
            await a_turn()
            assert slow.text == "0 1 2 3 " and slow.tasks[-1] is None  # written without a task again

    asyncio.run(run())


def test_a_step_of_many_rows_is_written_whole() -> None:
    async def run() -> None:
        client = Client(rows=MAX_JOINED_EVENTS)
        async with answered(client) as running:
            for job in client.live.jobs:
                client.live.add_event(Started(job.choice, 0, job.choice))
                client.live.add_event(Ended(job.choice, "length", job.choice))
            client.live.notify()
            await asyncio.wait_for(running, PATIENCE)
        expected = "".join(f"{at} {at} " for at in range(MAX_JOINED_EVENTS)) + DONE.decode()
        assert client.text == expected
        assert [message["more_body"] for message in client.messages[1:]] == [True, False]

    asyncio.run(run())


def test_events_from_before_the_stream_began_are_written() -> None:
    async def run() -> None:
        client = Client()
        client.live.add_event(Started(0, 0, 1))
        client.live.add_event(Ended(0, "stop", 2))
        async with answered(client) as running:
            await asyncio.wait_for(running, PATIENCE)
        assert client.text == f"1 2 {DONE.decode()}"

    asyncio.run(run())


@pytest.mark.parametrize("reads", [True, False])
def test_an_error_follows_the_text_and_ends_the_stream(reads: bool) -> None:
    async def run() -> None:
        client = Client()
        async with answered(client) as running:
            if not reads:
                client.reads.clear()
            step([client], 1)
            await a_turn()
            client.live.fail(ApiError(408, "late"))
            client.reads.set()
            await asyncio.wait_for(running, PATIENCE)
        text, error, end_mark, _ = client.text.replace("data: ", "\n\n", 1).split("\n\n")
        assert text == "1 " and json.loads(error)["error"]["message"] == "late" and f"{end_mark}\n\n" == DONE.decode()

    asyncio.run(run())


@pytest.mark.parametrize("reads", [True, False])
def test_a_write_that_fails_ends_the_stream_with_its_error(reads: bool) -> None:
    async def run() -> None:
        client = Client()

        async def fail(message: Any) -> None:
            await client.reads.wait()
            raise OSError("gone")

        async with answered(client) as running:
            if not reads:
                client.reads.clear()
            client.stream._send = fail
            step([client], 1)
            await a_turn()
            client.reads.set()
            with pytest.raises(OSError, match="gone"):
                await asyncio.wait_for(running, PATIENCE)

    asyncio.run(run())


def test_a_slow_reader_that_disconnects_is_no_longer_waited_for() -> None:
    async def run() -> None:
        client = Client()
        async with answered(client) as running:
            client.reads.clear()
            step([client], 1)
            await a_turn()
            waiting = client.stream._slow_send
            assert waiting is not None
            client.leaves.set()
            await asyncio.wait_for(running, PATIENCE)
            await asyncio.wait({waiting})
            assert waiting.cancelled() and client.live.subscriber is None

    asyncio.run(run())


def test_a_silent_stream_sends_keep_alive_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "SILENCE_SECONDS", 0.01)

    async def run() -> None:
        client = Client()
        async with answered(client):
            while client.text.count(KEEP_ALIVE.decode()) < 2:
                await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_a_stream_is_silent_for_as_long_as_it_sends_nothing_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        client, clock = Client(), Clock(asyncio.get_running_loop())
        async with answered(client):
            client.stream._timer.cancel()  # the test tells the time
            monkeypatch.setattr(client.stream, "_loop", clock)
            client.stream._last_sent = 0.0
            for second in range(1, 61):
                clock.now = float(second)
                step([client], 7 if second == 40 else -1)
                await a_turn()
                client.stream._end_silence()
                client.stream._timer.cancel()
        assert client.text == 2 * KEEP_ALIVE.decode() + "7 " + KEEP_ALIVE.decode()  # after 15, 30 and 55 seconds

    asyncio.run(run())


class Clock:
    """An event loop's timers on a clock that stands still until it is set."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now, self.call_later = 0.0, loop.call_later

    def time(self) -> float:
        return self.now


def test_a_coroutine_run_until_blocked_resumes_where_it_waited() -> None:
    async def run() -> None:
        opened, steps = asyncio.Event(), list[str]()

        async def work() -> None:
            steps.append("begun")
            try:
                await opened.wait()
                await asyncio.sleep(0)
            finally:
                steps.append("ended")

        opened.set()
        opened.clear()
        remainder = run_until_blocked(work())
        assert remainder is not None and steps == ["begun"]
        task = asyncio.ensure_future(remainder)
        await a_turn()
        opened.set()
        await task
        assert steps == ["begun", "ended"]
        opened.clear()
        remainder = run_until_blocked(work())
        assert remainder is not None
        task = asyncio.ensure_future(remainder)
        await a_turn()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled() and steps == ["begun", "ended"] * 2

    asyncio.run(run())


@pytest.mark.slow
def test_a_client_that_stops_reading_gets_the_whole_text_later() -> None:
    body = {"prompt": "A heron", "max_tokens": 600, "temperature": 0, "ignore_eos": True, "logprobs": 20}
    asked = json.dumps(body | {"stream": True, "num_draft_tokens": 0}).encode()
    with running_server() as server:
        for listener in server.server.servers[0].sockets:  # accepted connections inherit the small buffer
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        host, _, port = server.url.rpartition("/")[2].rpartition(":")
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.settimeout(PATIENCE)
            slow.connect((host, int(port)))
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
            slow.sendall(f"{head}content-length: {len(asked)}\r\nconnection: close\r\n\r\n".encode() + asked)
            server.wait_until(lambda: any(live._events for live in server.service.live))
            assert server.text("A crane", max_tokens=5, temperature=0)  # others are answered meanwhile
            received = b""
            while piece := slow.recv(1 << 16):
                received += piece
        lines = [line for line in received.split(b"\n") if line.startswith(b"data: ")]
        assert lines[-1].strip() == b"data: [DONE]"
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]]
        assert "".join(texts) == server.text(**body)
