"""A call that another thread makes for a coroutine, which awaits its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from typing import Any, Generic, TypeVar

from slipstream.errors import with_class

T = TypeVar("T")


class ThreadCall(Generic[T]):
    """Made on the event loop; another thread calls `run`."""

    def __init__(self, function: Callable[..., T]) -> None:
        self._function, self._outcome, self.since = function, Future[T](), monotonic()
        self.result = asyncio.wrap_future(self._outcome)

    def run(self, *arguments: Any) -> None:
        """Call the function, whose value or error becomes the result, unless nothing waits for it any more."""
        if not self._outcome.set_running_or_notify_cancel():
            return
        try:
            self._outcome.set_result(self._function(*arguments))
        except Exception as error:
            self._outcome.set_exception(error)
        except BaseException as error:  # a panic of Rust code, say, which must not end the event loop
            self._outcome.set_exception(RuntimeError(with_class(error)))
