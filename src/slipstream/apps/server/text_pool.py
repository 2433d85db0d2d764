"""Threads that tokenize and render prompts while the engine runs; each has its own tokenizer: they cannot share one."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from time import monotonic
from typing import Any, TypeVar

from slipstream.apps.server.thread_call import ThreadCall
from slipstream.tokenization.tokenizer import Tokenizer

T = TypeVar("T")
THREADS = 2


class TextPool:
    """Runs a few calls at a time; callers of the others take turns, and no call waits for the engine.

    The process can end without waiting for a call.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)  # copied for every thread, used by none
        self._changed = threading.Condition()
        self._queues: OrderedDict[str, deque[ThreadCall[Any]]] = OrderedDict()
        self._closed = False
        for _ in range(THREADS):
            threading.Thread(target=self._work, name="slipstream-text", daemon=True).start()

    async def run(self, function: Callable[[Tokenizer | None], T], caller: str = "") -> T:
        """Call a function with a thread's tokenizer. caller: callers take turns."""
        call = ThreadCall(function)
        with self._changed:
            self._queues.setdefault(caller, deque()).append(call)
            self._changed.notify()
        try:
            return await call.result
        finally:
            with self._changed:
                if call in self._queues.get(caller, ()):  # the caller gave up before the call's turn
                    self._remove(caller, call)

    @property
    def waiting_seconds(self) -> float:
        """Seconds that the oldest waiting call has waited for a thread."""
        with self._changed:
            return max((monotonic() - queue[0].since for queue in self._queues.values()), default=0.0)

    def close(self) -> None:
        """End the threads; waiting calls are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        with self._changed:  # copies are made one at a time
            tokenizer = copy.deepcopy(self._tokenizer)
        while (call := self._next()) is not None:
            call.run(tokenizer)
            del call  # else what it holds, such as an unloaded model, stays until the next call

    def _next(self) -> ThreadCall[Any] | None:
        with self._changed:
            while not (self._queues or self._closed):
                self._changed.wait()
            if self._closed:
                return None
            caller, queue = next(iter(self._queues.items()))
            call = queue[0]
            self._remove(caller, call)
            if caller in self._queues:
                self._queues.move_to_end(caller)
            return call

    def _remove(self, caller: str, call: ThreadCall[Any]) -> None:
        queue = self._queues[caller]
        queue.remove(call)
        if not queue:
            del self._queues[caller]
