"""Requests that are decoded together: each ends by itself, and its place is taken by the next."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from slipstream.core.rounds import Round
from slipstream.core.types import Row
from slipstream.jobs.line_formats import Asked, Decoder


@dataclass
class Work:
    """What a job has done so far, in tokens."""

    output_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def note(self, rounds: Iterable[Round]) -> None:
        """Count the rounds of a step."""
        for done in rounds:
            own = done.without_forced
            self.output_tokens += len(done.tokens)
            self.draft_tokens += own.num_draft_tokens
            self.accepted_tokens += own.num_accepted_tokens

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of drafted tokens; None if nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None


class RequestPool:
    """Continuous batching over requests.

    Only as many rows wait in the scheduler as may soon get a place, so a step costs the same however many requests
    there are.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._scheduler = decoder.scheduler()
        self._most = 2 * self._scheduler.max_batch_size
        self._queue: deque[Asked] = deque()
        self._numbers = count()
        self._running: dict[int, Asked] = {}  # by the index of a row
        self._open: Counter[int] = Counter()  # rows that have not ended, by request
        self.work = Work()

    @property
    def hungry(self) -> bool:
        """Whether more requests are needed to keep the batch full."""
        return len(self._queue) + len(self._running) < self._most

    @property
    def unfinished(self) -> bool:
        """Whether a request is waiting or under way."""
        return bool(self._queue or self._running)

    def add(self, requests: Iterable[Asked]) -> None:
        """Queue requests; they begin in this order."""
        self._queue.extend(requests)

    def step(self) -> list[Asked]:
        """One round of every running row; returns the requests that ended with it."""
        ended = self._begin()
        rounds = self._scheduler.step()
        self.work.note(rounds)
        for done in rounds:
            if done.finish_reason is not None:
                request = self._running.pop(done.row)
                self._open[id(request)] -= 1
                if not self._open[id(request)]:
                    del self._open[id(request)]
                    for row in request.rows:
                        row.call_rows = ()  # rows that refer to each other would be kept
                    ended.append(request)
        return ended

    def await_together(self) -> None:
        """Nothing else will come: what counts from now on is when the last row ends."""
        if not self._queue:
            rows = self._unfinished_rows()
            for row in rows:
                row.call_rows = rows

    def _begin(self) -> list[Asked]:
        """Hand rows to the scheduler; returns requests that have none."""
        empty = []
        while self._queue and len(self._running) < self._most:
            request = self._queue.popleft()
            self._open[id(request)] = len(request.rows)
            for row in request.rows:
                row.index = next(self._numbers)
                self._running[row.index] = request
                self._scheduler.add(row)
            if not request.rows:
                del self._open[id(request)]
                empty.append(request)
        return empty

    def _unfinished_rows(self) -> list[Row]:
        requests = {id(request): request for request in self._running.values()}
        return [row for request in requests.values() for row in request.rows if row.finish_reason is None]
