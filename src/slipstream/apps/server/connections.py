"""Closes connections that keep others out: those without a request, and those whose clients read nothing.

uvicorn closes only connections that are idle after an answer. It calls `sweep` about ten times a second.
"""

from __future__ import annotations

from collections.abc import Set
from math import inf
from typing import Any

HEAD_SECONDS = 20.0  # that the head of a request may take beyond the time that an idle connection stays open


class ConnectionSweep:
    """Aborts connections that have not changed for too long, and the oldest waiting ones if there are too many.

    The deadlines of a request's body and of its answer are the application's.
    """

    def __init__(self, max_connections: int, idle_seconds: float, stalled_seconds: float) -> None:
        self._max_connections, self._stalled_seconds = max_connections, stalled_seconds
        self._head_seconds = idle_seconds + HEAD_SECONDS
        self._seen: dict[Any, tuple[object, float]] = {}  # the state of each connection, and since when it has it

    def sweep(self, connections: Set[Any], now: float) -> None:
        """Check all connections, uvicorn's `H11Protocol`. now: seconds on a monotonic clock."""
        before, self._seen = self._seen, {}
        waiting: list[Any] = []  # for a request, or the rest of one
        for connection in connections:
            cycle, is_unread = connection.cycle, connection.flow.write_paused
            lacks_head = cycle is None or cycle.response_complete
            state = (cycle, lacks_head, is_unread)
            last_state, since = before.get(connection, (state, now))
            since = since if last_state == state else now
            self._seen[connection] = state, since
            patience = self._head_seconds if lacks_head else self._stalled_seconds if is_unread else inf
            if now - since > patience:
                connection.transport.abort()
            elif lacks_head or cycle.more_body:
                waiting.append(connection)
        waiting.sort(key=lambda connection: self._seen[connection][1])
        for connection in waiting[: max(0, len(connections) - self._max_connections)]:
            connection.transport.abort()
