"""Who is next: requests of the same caller in order of arrival, callers in turn."""

from __future__ import annotations

from collections import OrderedDict, deque

from slipstream.apps.server.live_request import Job


class WaitingLine:
    """Jobs that wait for a place in the batch. A caller with many jobs delays others by one of them at a time."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def add(self, job: Job) -> None:
        """Queue a job behind those of its caller."""
        self._lines.setdefault(job.request.owner, deque()).append(job)

    def take(self) -> Job | None:
        """The next job; its caller is the last to be served again."""
        while self._lines:
            owner, line = next(iter(self._lines.items()))
            job = line.popleft()
            if line:
                self._lines.move_to_end(owner)
            else:
                del self._lines[owner]
            if not job.over:
                return job
        return None

    def remove(self, job: Job) -> None:
        """Take a job out, if it is there."""
        line = self._lines.get(job.request.owner)
        if line is not None and job in line:
            line.remove(job)
            if not line:
                del self._lines[job.request.owner]
