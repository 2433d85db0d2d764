"""A request under way: its rows, and what happened to them, as the event loop sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import TypeVar
from uuid import uuid4

from slipstream.apps.server.error_objects import ApiError
from slipstream.core.rounds import FinishReason, Round, TokenLogprobs
from slipstream.core.types import Row

T = TypeVar("T")


@dataclass(frozen=True)
class Started:
    """A row left the queue."""

    choice: int
    cached: int  # prompt tokens that need not be read again
    time: float


@dataclass(frozen=True)
class Scored:
    """The log-probabilities of a prompt's tokens from its second on."""

    choice: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class Committed:
    """A round of a row."""

    choice: int
    round: Round
    time: float
    text: str = ""  # its addition to the answer; an answer that is sent whole gets all text at the end


@dataclass(frozen=True)
class Ended:
    """A row is over."""

    choice: int
    reason: FinishReason
    time: float
    error: Exception | None = None  # why it failed


Event = Started | Scored | Committed | Ended
Subscriber = Callable[[], Callable[[], None] | None]
GONE = "the client has left"
MAX_UNREAD_EVENTS = 64  # of an answer that is sent whole; more are read before it is complete


@dataclass(eq=False)
class Job:
    """One row of a request, for the engine."""

    request: LiveRequest
    choice: int
    row: Row
    echo: int | None = None  # alternatives to report when the prompt is scored; None: do not score it
    generate: bool = True  # False for a prompt that is only scored
    limits: str | None = None  # the request's field that rules tokens out, if it has one
    started: bool = False
    over: bool = False


@dataclass(eq=False)
class LiveRequest:
    """Events arrive from the engine in order and are read once, by the handler of the request."""

    owner: str = ""  # the name of the caller's key
    group: str = ""  # rows of requests with the same group share cached prompts and what drafters learn
    id: str = field(default_factory=lambda: uuid4().hex)
    jobs: list[Job] = field(default_factory=list)
    arrived: float = field(default_factory=monotonic)
    error: Exception | None = None
    model: str = ""  # its name in answers
    first_token: float | None = None  # when the first round has ended
    caller: str = ""  # callers take turns by it: the owner, or a client's address
    # called with every event as it arrives
    observer: Callable[[LiveRequest, Event], None] = lambda request, event: None
    # Called after new events, to `read` them; may return a function, which is called once the subscribers of other
    # requests have read theirs.
    subscriber: Subscriber | None = None
    _events: deque[Event] = field(default_factory=deque)
    _failed: asyncio.Event = field(default_factory=asyncio.Event)
    _num_ended: int = 0  # rows whose end has come
    _num_read: int = 0  # rows whose end the handler has read

    def add_event(self, event: Event) -> None:
        """Called on the event loop; `notify` follows once all events of a step are there."""
        self._num_ended += isinstance(event, Ended)
        if self.first_token is None and isinstance(event, Committed):
            self.first_token = event.time
        self._events.append(event)
        self.observer(self, event)

    def notify(self) -> None:
        """Have the handler read what has happened."""
        notify_all([self])

    def fail(self, error: Exception) -> None:
        """The handler gets an error instead of the next event, unless the answer is whole; on the event loop."""
        if not self._is_complete or not self.jobs:
            self.error = self.error or error
            self._failed.set()
            self.notify()

    async def before_failing(self, work: Awaitable[T]) -> T:
        """The result of work that precedes all events; if the request fails meanwhile, its error ends the work."""
        task, failed = asyncio.ensure_future(work), asyncio.ensure_future(self._failed.wait())
        try:
            await asyncio.wait({task, failed}, return_when=asyncio.FIRST_COMPLETED)
            if self.error is not None:
                raise self.error
            return await task
        finally:
            task.cancel()
            failed.cancel()

    def figures(self) -> dict[str, float | None]:
        """The numbers of the request for the log; None where there are none."""
        rows = [job.row for job in self.jobs]
        tokens, rounds = sum(row.num_output_tokens for row in rows), sum(len(row.rounds) for row in rows)
        return {
            "rows": len(rows),
            "prompt_tokens": sum(row.prompt_length for row in rows),
            "tokens": tokens,
            "tokens_per_round": round(tokens / rounds, 2) if rounds else None,
            "first_token_seconds": None if self.first_token is None else round(self.first_token - self.arrived, 3),
        }

    @property
    def failure(self) -> str | None:
        """The reason why the answer is incomplete, in one line; None if it is complete."""
        errors = (self.error, *(job.row.error for job in self.jobs))
        if (error := next(filter(None, errors), None)) is not None:
            return type(error).__name__ if not isinstance(error, ApiError) else error.message
        return None if self.all_read else GONE

    @property
    def has_unread(self) -> bool:
        """True if an event or an error waits to be read."""
        return bool(self._events) or self.error is not None

    @property
    def all_read(self) -> bool:
        """True if all rows have ended and the handler knows it."""
        return self._num_read == len(self.jobs)

    def read(self) -> Event | None:
        """The next event, None if none waits; raises the request's error."""
        if self.all_read:
            return None
        if self.error is not None:  # before events that wait, as the reader may be slow
            raise self.error
        if not self._events:
            return None
        event = self._events.popleft()
        self._num_read += isinstance(event, Ended)
        return event

    async def read_all(self, take: Callable[[Event], None]) -> None:
        """Call `take` with every event until all rows have ended; raises the request's error.

        Many events are read together, in the call that brings the last of them: waking a task after each step would
        take longer than everything else that is done for such an answer.
        """
        over = asyncio.get_running_loop().create_future()

        def on_events() -> None:
            is_due = self.error is not None or self._is_complete or len(self._events) >= MAX_UNREAD_EVENTS
            if over.done() or not is_due:
                return
            try:
                while (event := self.read()) is not None:
                    take(event)
            except Exception as error:
                over.set_exception(error)
            else:
                if self.all_read:
                    over.set_result(None)

        self.subscriber = on_events
        try:
            self.notify()  # of events that came before
            await over
        finally:
            self.subscriber = None

    @property
    def _is_complete(self) -> bool:
        return self._num_ended == len(self.jobs)


def notify_all(requests: Iterable[LiveRequest]) -> None:
    """Let the subscribers of these requests read their new events, then write.

    All read before any writes: a write lets the engine's thread continue, whose forward empties the processor's caches.
    """
    writes = []
    for request in requests:
        if request.subscriber is not None and (write := request.subscriber()) is not None:
            writes.append(write)
    for write in writes:
        write()
