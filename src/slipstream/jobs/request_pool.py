"""Continuous batching over requests: when one ends, the next takes its place."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from slipstream.core.rounds import Round
from slipstream.jobs.line_formats import Decoder, JobRequest


@dataclass
class Work:
    """Token counts of a job so far."""

    output_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def note(self, rounds: Iterable[Round]) -> None:
        for round in rounds:
            unforced = round.without_forced
            self.output_tokens += len(round.tokens)
            self.draft_tokens += unforced.num_draft_tokens
            self.accepted_tokens += unforced.num_accepted_tokens

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of drafted tokens; None if nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None


class RequestPool:
    """The requests that are queued or being decoded.

    The scheduler gets only as many rows as may soon be admitted, so a step takes the same time however many requests
    there are.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._scheduler = decoder.scheduler()
        self._max_rows = 2 * self._scheduler.max_batch_size
        self._queue: deque[JobRequest] = deque()
        self._numbers = count()
        self._running: dict[int, JobRequest] = {}  # by the index of a row
        self.work = Work()

    @property
    def has_room(self) -> bool:
        """True if more requests are needed to keep the batch full."""
        return len(self._queue) + len(self._running) < self._max_rows

    @property
    def unfinished(self) -> bool:
        """True if a request is waiting or being decoded."""
        return bool(self._queue or self._running)

    def add(self, requests: Iterable[JobRequest]) -> None:
        """Queue requests; they begin in this order."""
        self._queue.extend(requests)

    def step(self) -> list[JobRequest]:
        """One round of every running row; returns the requests that ended with it."""
        ended = self._begin()
        rounds = self._scheduler.step()
        self.work.note(rounds)
        finished_rows = [round.row for round in rounds if round.finish_reason is not None]
        requests = {id(request): request for request in map(self._running.pop, finished_rows)}
        for request in requests.values():
            if all(row.finish_reason is not None for row in request.rows):
                for row in request.rows:
                    row.call_rows = ()  # rows that refer to each other would be kept
                ended.append(request)
        return ended

    def await_together(self) -> None:
        """Note that no more requests will come: from now on only the end of the last row matters."""
        if not self._queue:
            requests = {id(request): request for request in self._running.values()}
            rows = [row for request in requests.values() for row in request.rows if row.finish_reason is None]
            for row in rows:
                row.call_rows = rows

    def _begin(self) -> list[JobRequest]:
        """Hand rows to the scheduler; returns requests without rows, which have ended already."""
        empty = []
        while self._queue and len(self._running) < self._max_rows:
            request = self._queue.popleft()
            for row in request.rows:
                row.index = next(self._numbers)
                self._running[row.index] = request
                self._scheduler.add(row)
            if not request.rows:
                empty.append(request)
        return empty
