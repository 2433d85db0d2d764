"""Connections that must bring their requests in time, of which those without one make room for others."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

# for the head of a request, from the connection's beginning or the last answer
REQUEST_ARRIVAL_SECONDS = 20.0


@dataclass(frozen=True)
class ConnectionLimits:
    """max_connections: beyond which the oldest without a whole request is closed; twice as many are never kept.

    stalled: seconds after which a client that reads nothing is given up.
    """

    max_connections: int
    stalled: float

    def protocol(self) -> Any:
        """The factory of connections that uvicorn calls."""
        return partial(BoundedConnection, self)


class BoundedConnection(H11Protocol):
    """One connection under these limits. waiting_since: when it began to wait for the request that it waits for."""

    def __init__(self, limits: ConnectionLimits, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._limits = limits
        self._arrival: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._cycle_seen: object = None
        self.waiting_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the connection that has waited longest where there are too many."""
        super().connection_made(transport)
        self._await_request()
        limit = self._limits.max_connections
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
        """The client does not read: it gets `stalled` seconds."""
        super().pause_writing()
        self._stall = self.loop.call_later(self._limits.stalled, self.transport.abort)

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
        self.connections.discard(self)  # at once, so that it is not given up twice
        self.transport.abort()

    def _await_request(self) -> None:
        self.waiting_since = self.loop.time()
        _end(self._arrival)
        self._arrival = self.loop.call_later(REQUEST_ARRIVAL_SECONDS, self.give_up)


def _end(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
