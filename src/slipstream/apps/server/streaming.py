"""A streamed answer, written in the call that tells the events of a step: no task is woken for a stream.

A client that reads slower than its answer comes gets a task, which waits for it and ends once it has caught up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.apps.server import answers
from slipstream.apps.server.access import DIRECT
from slipstream.apps.server.answers import DONE, HEADERS, KEEP_ALIVE, AnswerWriter, encoded, event
from slipstream.apps.server.error_objects import as_api_error
from slipstream.apps.server.live_request import LiveRequest

MOST_JOINED = 16  # events of a request that are written at once: those of a step, or some of what waits for a client


def first_step(work: Awaitable[None]) -> Awaitable[None] | None:
    """Run some work until it waits for something. None if it never did; else what is left, to be awaited by a task.

    There is no current task meanwhile, so the work must need none before it waits.
    """
    steps: Generator[Any, None, None] = work.__await__()
    try:
        waited_for = next(steps)
    except StopIteration:
        return None
    return _Rest(steps, waited_for)


class _Rest:
    """Work that waits. waited_for: what its first step left to the event loop."""

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
    """An answer that is sent as it grows. on_end: called when it is over: read to its end, broken off, or never begun.

    `send` must get along without a current task until it waits; see `first_step`.
    """

    media_type = "text/event-stream"

    def __init__(self, live: LiveRequest, writer: AnswerWriter, on_end: Callable[[], None]) -> None:
        self.status_code, self.background = 200, None
        self.init_headers(HEADERS)
        self._live, self._writer, self._on_end = live, writer, on_end
        self._told_all = False  # nothing follows what has been taken
        self._behind: asyncio.Future[None] | None = None  # waits for a slow client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        loop = asyncio.get_running_loop()
        self._loop, self._over = loop, loop.create_future()
        self._send: Send = scope.get(DIRECT, send)
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._heard = loop.time()
            self._timer = loop.call_later(answers.SILENCE, self._end_silence)
            self._live.subscriber = self._on_events
            self._live.notify()  # of what came before the start
            await asyncio.wait({gone, self._over}, return_when=asyncio.FIRST_COMPLETED)
            for one in (gone, self._over):
                if one.done():
                    one.result()
        finally:
            self._close()
            gone.cancel()
            self._on_end()

    def _close(self) -> None:
        if self._live.subscriber is not None:
            self._live.subscriber = None
            self._timer.cancel()
        if self._behind is not None:
            self._behind.cancel()

    def _on_events(self) -> Callable[[], None] | None:
        """Read what has happened; returns how to write it. While a task waits for the client, the task reads it."""
        self._heard = self._loop.time()
        if self._behind is None and not self._told_all and (data := self._take()):
            return partial(self._write, data)
        return None

    def _write(self, data: bytes) -> None:
        """Send this and what is left to read; where that must wait for the client, a task goes on with it."""
        try:
            rest = first_step(self._sent(data))
            while rest is None and self._more:
                if more := self._take():
                    rest = first_step(self._sent(more))
        except Exception as error:
            self._end(error)
            return
        if rest is not None:
            self._behind = asyncio.ensure_future(self._catch_up(rest))
        elif self._told_all:
            self._end()

    async def _catch_up(self, rest: Awaitable[None]) -> None:
        """Wait for the client, then send what has come meanwhile."""
        try:
            await rest
            while self._more:
                if data := self._take():
                    await self._sent(data)
        except Exception as error:
            self._end(error)
        else:
            if self._told_all:
                self._end()
        finally:
            self._behind = None

    @property
    def _more(self) -> bool:
        """Whether something is left to read."""
        return self._live.has_unread and not self._told_all

    def _sent(self, data: bytes) -> Awaitable[None]:
        message = {"type": "http.response.body", "body": data, "more_body": not self._told_all}
        return self._send(message)

    def _end(self, error: Exception | None = None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _take(self) -> bytes:
        """What has happened since, as server-sent events: nothing if nothing has, and not more than may be joined."""
        found: list[bytes] = []
        try:
            for _ in range(MOST_JOINED):
                if (one := self._live.read()) is None:
                    break
                found += map(self._writer.sent, self._writer.take(one))
            if self._live.all_read:
                closing = self._writer.closing()
                found += [] if closing is None else [self._writer.sent(closing)]
                self._told_all = True
        except Exception as error:  # the status has been sent, so the error is an event
            found.append(event(encoded(as_api_error(error).body)))
            self._told_all = True
        return b"".join([*found, DONE] if self._told_all else found)

    def _end_silence(self) -> None:
        """Say something once nothing has happened for long: one timer, whatever comes in between."""
        left = self._heard + answers.SILENCE - self._loop.time()
        if left <= 0:
            left, self._heard = answers.SILENCE, self._loop.time()
            if self._behind is None and not self._told_all:
                self._write(KEEP_ALIVE)
        self._timer = self._loop.call_later(left, self._end_silence)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
