"""Threads that tokenise and render texts beside the engine, each with a tokenizer of its own: they cannot be shared."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeVar

from slipstream.tokenization.tokenizer import Tokenizer

T = TypeVar("T")
THREADS = 2
MAX_THREADS = 8  # where those there are do not come back
PATIENCE = 5.0  # seconds that a call waits before another thread is started
log = logging.getLogger("slipstream.server")


@dataclass(eq=False)
class _Call:
    function: Callable[[Tokenizer | None], Any]
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Any]
    since: float = field(default_factory=monotonic)


class TextPool:
    """A few calls at a time; more wait their turn, callers one after the other, and none waits for the engine.

    A call that does not come back keeps its thread: another takes its place, and the process does not wait for it when
    it ends.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)  # nobody's, to be copied
        self._news = threading.Condition()
        self._lines: OrderedDict[str, deque[_Call]] = OrderedDict()
        self._threads = self._idle = 0
        self._closed = False
        for _ in range(THREADS):
            self._begin()

    async def run(self, function: Callable[[Tokenizer | None], T], caller: str = "") -> T:
        """What a function makes of a tokenizer. caller: with whom calls take turns."""
        loop = asyncio.get_running_loop()
        call = _Call(function, loop, loop.create_future())
        with self._news:
            self._lines.setdefault(caller, deque()).append(call)
            self._news.notify()
        relief = loop.call_later(PATIENCE, self._relieve, call)
        try:
            result: T = await call.result
            return result
        finally:
            relief.cancel()
            with self._news:
                if call in self._lines.get(caller, ()):  # whoever waited has left
                    self._remove(caller, call)

    @property
    def waiting_seconds(self) -> float:
        """For how long the call that waits longest has waited for a thread."""
        with self._news:
            return max((monotonic() - line[0].since for line in self._lines.values()), default=0.0)

    def close(self) -> None:
        """End the threads; calls that wait are dropped."""
        with self._news:
            self._closed = True
            self._news.notify_all()

    def _begin(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name="slipstream-text", daemon=True).start()

    def _relieve(self, call: _Call) -> None:
        """A call has waited long."""
        with self._news:
            waits = any(call in line for line in self._lines.values())
            if waits and not self._idle and self._threads < MAX_THREADS:
                log.warning("texts are waited for since %g s: one more thread", PATIENCE)
                self._begin()

    def _work(self) -> None:
        with self._news:  # copies are made one at a time
            tokenizer = copy.deepcopy(self._tokenizer)
        while (call := self._next()) is not None:
            try:
                value = call.function(tokenizer)
            except BaseException as error:  # whoever waits must be told
                failure = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
                _tell(call, call.result.set_exception, failure)
            else:
                _tell(call, call.result.set_result, value)

    def _next(self) -> _Call | None:
        with self._news:
            self._idle += 1
            while not (self._lines or self._closed):
                self._news.wait()
            self._idle -= 1
            if self._closed:
                return None
            caller, line = next(iter(self._lines.items()))
            call = line[0]
            self._remove(caller, call)
            if caller in self._lines:
                self._lines.move_to_end(caller)
            return call

    def _remove(self, caller: str, call: _Call) -> None:
        line = self._lines[caller]
        line.remove(call)
        if not line:
            del self._lines[caller]


def _tell(call: _Call, outcome: Callable[[Any], None], value: Any) -> None:
    def tell() -> None:
        if not call.result.done():
            outcome(value)

    with suppress(RuntimeError):  # the event loop has ended, and nobody waits
        call.loop.call_soon_threadsafe(tell)
