"""Connections that are closed if no request arrives in time, or to make room for others while they have none."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

# for the head of a request, counted from the start of the connection or from its last answer
REQUEST_ARRIVAL_SECONDS = 20.0


class BoundedConnection(H11Protocol):
    """A connection that gives way to others while it has no request, and is closed if its client reads nothing.

    max_connections: with more, the one that has waited longest for a request is closed; more than twice as many are
    never kept. stalled_seconds: how long a client may read nothing. waiting_since: when it began to wait for a request.
    """

    def __init__(self, max_connections: int, stalled_seconds: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._max_connections, self._stalled_seconds = max_connections, stalled_seconds
        self._arrival: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._cycle_seen: object = None
        self.waiting_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the connection that has waited longest where there are too many."""
        super().connection_made(transport)
        self._await_request()
        limit = self._max_connections
        if len(self.connections) > limit:
            others = [
                other for other in self.connections if isinstance(other, BoundedConnection) and other.lacks_request
            ]
            if len(self.connections) > 2 * limit:
                transport.abort()
            elif others:
                min(others, key=lambda other: other.waiting_since).give_up()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        _end(self._arrival)
        _end(self._stall)

    def handle_events(self) -> None:
        """End the deadline of a request whose head has come; its body has a deadline of its own."""
        super().handle_events()
        if self.cycle is not self._cycle_seen:
            self._cycle_seen = self.cycle
            _end(self._arrival)

    def on_response_complete(self) -> None:
        """The next request must come in time."""
        self._await_request()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not read: it gets `stalled_seconds`."""
        super().pause_writing()
        self._stall = self.loop.call_later(self._stalled_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _end(self._stall)

    @property
    def lacks_request(self) -> bool:
        """Whether the connection is idle or its request has not come whole."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def give_up(self) -> None:
        """Close the connection without an answer."""
        self.connections.discard(self)  # now, so that it is not given up twice
        self.transport.abort()

    def _await_request(self) -> None:
        self.waiting_since = self.loop.time()
        _end(self._arrival)
        self._arrival = self.loop.call_later(REQUEST_ARRIVAL_SECONDS, self.give_up)


def _end(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
