"""Who is next: callers in turn, of a caller its requests in turn, and of a request its rows in order."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from slipstream.apps.server.live_request import Job, LiveRequest


class WaitingLine:
    """Jobs that wait for a place in the batch. A caller, or a request, with many delays others by one at a time."""

    def __init__(self) -> None:
        self._callers: OrderedDict[str, OrderedDict[LiveRequest, deque[Job]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(line) for requests in self._callers.values() for line in requests.values())

    def add(self, job: Job) -> None:
        """Queue a job behind those of its request."""
        requests = self._callers.setdefault(job.request.caller, OrderedDict())
        requests.setdefault(job.request, deque()).append(job)

    def take(self, may_begin: Callable[[Job], bool] = lambda job: True) -> Job | None:
        """The next job of those that may begin; its request and its caller are the last to be served again."""
        jobs = (line[0] for requests in self._callers.values() for line in requests.values())
        job = next(filter(may_begin, jobs), None)
        if job is not None:
            self.remove(job)
            if (requests := self._callers.get(job.request.caller)) is not None:
                self._callers.move_to_end(job.request.caller)
                if job.request in requests:
                    requests.move_to_end(job.request)
        return job

    def remove(self, job: Job) -> None:
        """Take a job out, if it is there."""
        requests = self._callers.get(job.request.caller, OrderedDict())
        line = requests.get(job.request, deque())
        if job in line:
            line.remove(job)
            if not line:
                del requests[job.request]
            if not requests:
                del self._callers[job.request.caller]
