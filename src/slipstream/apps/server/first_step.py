"""The first step of a coroutine, taken without a task; most writes to a socket need no other."""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Any


def first_step(work: Awaitable[None]) -> Awaitable[None] | None:
    """Run some work until it waits for something. None if it never did; else what is left, to be awaited by a task.

    There is no current task meanwhile, so the work must need none before it waits.
    """
    steps: Generator[Any, None, None] = work.__await__()
    try:
        waited_for = next(steps)
    except StopIteration:
        return None
    return _Rest(steps, waited_for)


class _Rest:
    """Work that waits. waited_for: what its first step left to the event loop."""

    def __init__(self, steps: Generator[Any, None, None], waited_for: Any) -> None:
        self._steps, self._waited_for = steps, waited_for

    def __await__(self) -> Generator[Any, None, None]:
        try:
            yield self._waited_for
        except BaseException:  # the task was cancelled
            self._steps.close()
            raise
        yield from self._steps
