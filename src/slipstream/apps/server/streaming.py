"""Streamed answers. Chunks are written in the call that delivers the events of a step, so no task is woken.

If a client reads more slowly than its answer grows, a task waits for it, and ends once the client has caught up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.apps.server import answers
from slipstream.apps.server.answers import HEADERS, AnswerWriter
from slipstream.apps.server.error_objects import as_api_error
from slipstream.apps.server.live_request import LiveRequest

MAX_JOINED_EVENTS = 16  # events of a request that are written at once


def run_until_blocked(work: Awaitable[None]) -> Awaitable[None] | None:
    """Run a coroutine until it waits; returns None if it ended, else the rest, to be awaited by a task.

    Waking a task for every chunk instead would cost a loaded server 15 % more processor time. There is no current task
    meanwhile, so the coroutine must need none before it waits.
    """
    steps: Generator[Any, None, None] = work.__await__()
    try:
        waited_for = next(steps)
    except StopIteration:
        return None
    return _Continuation(steps, waited_for)


class _Continuation:
    """The rest of a coroutine. waited_for: the value that it has yielded to the event loop."""

    def __init__(self, steps: Generator[Any, None, None], waited_for: Any) -> None:
        self._steps, self._waited_for = steps, waited_for

    def __await__(self) -> Generator[Any, None, None]:
        try:
            yield self._waited_for
        except BaseException:  # the task was cancelled
            self._steps.close()
            raise
        yield from self._steps


class AnswerStream(Response):
    """Streams an answer. on_end is called once, whether the answer was finished, cancelled or never started.

    `send` must not need a current task before it waits; see `run_until_blocked`.
    """

    def __init__(self, live: LiveRequest, writer: AnswerWriter, on_end: Callable[[], None]) -> None:
        self.status_code, self.background, self.media_type = 200, None, writer.media_type
        self.init_headers(HEADERS | writer.headers)
        self._live, self._writer, self._on_end = live, writer, on_end
        self._all_sent = False  # whether the last write ends the answer
        self._slow_send: asyncio.Future[None] | None = None  # waits for a slow client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._loop, self._over = loop, loop.create_future()
        self._send: Send = send
        gone = asyncio.ensure_future(until_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._last_sent = loop.time()
            self._timer = loop.call_later(answers.SILENCE_SECONDS, self._end_silence)
            self._live.subscriber = self._on_events
            self._live.notify()  # of events that came before the start
            await asyncio.wait({gone, self._over}, return_when=asyncio.FIRST_COMPLETED)
            for future in (gone, self._over):
                if future.done():
                    future.result()
        finally:
            self._close()
            gone.cancel()
            self._on_end()

    def _close(self) -> None:
        if self._live.subscriber is not None:
            self._live.subscriber = None
            self._timer.cancel()
        if self._slow_send is not None:
            self._slow_send.cancel()

    def _on_events(self) -> Callable[[], None] | None:
        """Read new events; returns a function that writes them. A task that waits for a slow client does both."""
        if self._slow_send is None and not self._all_sent and (data := self._take()):
            return partial(self._write, data)
        return None

    def _write(self, data: bytes) -> None:
        """Send this and all unread events; if sending must wait for the client, a task continues."""
        try:
            rest = run_until_blocked(self._sent(data))
            while rest is None and self._has_unread:
                if data := self._take():
                    rest = run_until_blocked(self._sent(data))
        except Exception as error:
            self._end(error)
            return
        if rest is not None:
            self._slow_send = asyncio.ensure_future(self._catch_up(rest))
        elif self._all_sent:
            self._end()

    async def _catch_up(self, rest: Awaitable[None]) -> None:
        """Wait for the client, then send all events that have arrived meanwhile."""
        try:
            await rest
            while self._has_unread:
                if data := self._take():
                    await self._sent(data)
        except Exception as error:
            self._end(error)
        else:
            if self._all_sent:
                self._end()
        finally:
            self._slow_send = None

    @property
    def _has_unread(self) -> bool:
        """True if there are events to read and send."""
        return self._live.has_unread and not self._all_sent

    def _sent(self, data: bytes) -> Awaitable[None]:
        self._last_sent = self._loop.time()
        message = {"type": "http.response.body", "body": data, "more_body": not self._all_sent}
        return self._send(message)

    def _end(self, error: Exception | None = None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _take(self) -> bytes:
        """Unread events as they are sent, at most `MAX_JOINED_EVENTS`; empty if there are none."""
        events: list[bytes] = []
        try:
            for _ in range(MAX_JOINED_EVENTS):
                if (item := self._live.read()) is None:
                    break
                events += map(self._writer.sent, self._writer.take(item))
            if self._live.all_read:
                closing = self._writer.closing()
                events += [] if closing is None else [self._writer.sent(closing)]
                self._all_sent = True
        except Exception as error:  # the status has been sent, so the error is an event
            events.append(self._writer.failure(as_api_error(error)))
            self._all_sent = True
        return b"".join([*events, self._writer.ending] if self._all_sent else events)

    def _end_silence(self) -> None:
        """Send a sign of life if nothing was sent for long, as while text is withheld; restarts its timer."""
        remaining = self._last_sent + answers.SILENCE_SECONDS - self._loop.time()
        if remaining <= 0:
            remaining = answers.SILENCE_SECONDS
            if self._slow_send is None and not self._all_sent:
                self._write(self._writer.keep_alive())
        self._timer = self._loop.call_later(remaining, self._end_silence)


async def until_disconnected(receive: Receive) -> None:
    """Return once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
