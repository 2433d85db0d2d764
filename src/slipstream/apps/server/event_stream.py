"""Server-sent events: what a stream of chunks looks like on the wire."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = "data: [DONE]\n\n"
KEEP_ALIVE = ": still here\n\n"  # a comment, which clients skip; proxies cut silent connections
SILENCE = 15.0  # seconds after which one is sent


encoded = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # JSON without spaces


def event(text: str) -> str:
    """One event with this JSON."""
    return f"data: {text}\n\n"


class EventStream(StreamingResponse):
    """A stream that says when it is over: read to its end, broken off, or never begun."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None] = lambda: None) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
