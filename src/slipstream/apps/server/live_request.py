"""A request under way: its rows, and what happened to them, as the event loop sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import TypeVar
from uuid import uuid4

from slipstream.core.rounds import FinishReason, Round, TokenLogprobs
from slipstream.core.types import Row

T = TypeVar("T")


@dataclass(frozen=True)
class Started:
    """A row left the queue. cached: prompt tokens that need not be read again."""

    choice: int
    cached: int
    at: float


@dataclass(frozen=True)
class Scored:
    """A prompt's log-probabilities: of its second token, third, ..."""

    choice: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class Committed:
    """A round of a row."""

    choice: int
    round: Round
    at: float


@dataclass(frozen=True)
class Ended:
    """A row is over. error: why it failed."""

    choice: int
    reason: FinishReason
    at: float
    error: Exception | None = None


Event = Started | Scored | Committed | Ended
Listener = Callable[[], Callable[[], None] | None]
JOINED = 64  # events that are told together to those who wait for a whole answer


@dataclass(eq=False)
class Job:
    """One row of a request, for the engine. echo: score the prompt, with so many alternatives; None: do not.

    generate: False for a prompt that is only scored. limits: the field that leaves tokens out, if there is one.
    """

    request: LiveRequest
    choice: int
    row: Row
    echo: int | None = None
    generate: bool = True
    limits: str | None = None
    started: bool = False
    over: bool = False


@dataclass(eq=False)
class LiveRequest:
    """Events arrive from the engine in order and are read once, by the handler of the request.

    owner: the name of the caller's key; caller: by which turns go, the owner or an address.
    group: with whom its rows share cached prompts and what drafters learn.
    background: nobody waits for its answer now; others go first. listener: called to `read` what there is, instead of
    waking who waits for an error; it returns what is left to do once the listeners of other requests have read.
    """

    endpoint: str
    owner: str = ""
    group: str = ""
    id: str = field(default_factory=lambda: uuid4().hex)
    jobs: list[Job] = field(default_factory=list)
    arrived: float = field(default_factory=monotonic)
    error: Exception | None = None
    background: bool = False
    caller: str = ""
    watch: Callable[[LiveRequest, Event], None] = lambda request, event: None
    listener: Listener | None = None
    _events: deque[Event] = field(default_factory=deque)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: int = 0  # rows whose end has come
    _read: int = 0  # rows whose end the handler has read

    def put(self, event: Event) -> None:
        """Called on the event loop; `tell` follows once all events of a step are there."""
        self._ended += isinstance(event, Ended)
        self._events.append(event)
        self.watch(self, event)

    def tell(self) -> None:
        """Have the handler read what has happened."""
        tell_all([self])

    def fail(self, error: Exception) -> None:
        """The handler is told an error instead of the next event, unless the answer is whole; on the event loop."""
        if not self._is_complete or not self.jobs:
            self.error = self.error or error
            self.tell()

    async def before_failing(self, work: Awaitable[T]) -> T:
        """The result of work that precedes all events; given up for what the request fails with meanwhile."""
        task, failed = asyncio.ensure_future(work), asyncio.ensure_future(self._news.wait())
        try:
            await asyncio.wait({task, failed}, return_when=asyncio.FIRST_COMPLETED)
            if self.error is not None:
                raise self.error
            return await task
        finally:
            task.cancel()
            failed.cancel()

    @property
    def has_news(self) -> bool:
        """Whether something waits to be read."""
        return bool(self._events) or self.error is not None

    @property
    def all_read(self) -> bool:
        """Whether all rows have ended and the handler knows it."""
        return self._read == len(self.jobs)

    def read(self) -> Event | None:
        """The next that has happened, None if nothing waits; raises what the request failed with."""
        if self.all_read:
            return None
        if self.error is not None:  # it goes before events that wait: the reader may be slow
            raise self.error
        if not self._events:
            return None
        event = self._events.popleft()
        self._read += isinstance(event, Ended)
        return event

    async def tell_all_to(self, take: Callable[[Event], None]) -> None:
        """Call `take` with every event until all rows have ended; raises what the request failed with.

        Many events are told together, in the call that brings the last of them: to wake a task after each step would
        take longer than all that an answer of one piece needs.
        """
        over = asyncio.get_running_loop().create_future()

        def news() -> None:
            if over.done() or (self.error is None and not self._is_complete and len(self._events) < JOINED):
                return
            try:
                while (event := self.read()) is not None:
                    take(event)
            except Exception as error:
                over.set_exception(error)
            else:
                if self.all_read:
                    over.set_result(None)

        self.listener = news
        try:
            self.tell()  # of what came before
            await over
        finally:
            self.listener = None

    @property
    def _is_complete(self) -> bool:
        return self._ended == len(self.jobs)


def tell_all(requests: Iterable[LiveRequest]) -> None:
    """Have the handlers of these read what has happened.

    All read before any writes: a write lets the engine's thread go on, and what comes after finds cold caches.
    """
    writes = []
    for request in requests:
        if request.listener is None:
            request._news.set()
        elif (write := request.listener()) is not None:
            writes.append(write)
    for write in writes:
        write()
