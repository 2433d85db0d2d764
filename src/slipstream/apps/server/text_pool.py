"""Threads that tokenise and render beside the engine, each with a tokenizer of its own: they cannot be shared.

Requests whose constraint takes seconds to compile have threads of their own, so that no other request waits for them.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from slipstream.text.detokenizer import Tokenizer

T = TypeVar("T")
THREADS = 2


class TextPool:
    """At most THREADS quick and as many slow calls at a time; more wait their turn, and none waits for the engine."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._copies = [copy.deepcopy(tokenizer) for _ in range(2 * THREADS)]
        self._own = threading.local()
        self._lock = threading.Lock()
        self._quick = ThreadPoolExecutor(THREADS, "slipstream-text", self._begin)
        self._slow = ThreadPoolExecutor(THREADS, "slipstream-constraint", self._begin)

    async def run(self, function: Callable[[Tokenizer | None], T], *, is_slow: bool = False) -> T:
        """What a function makes of a tokenizer. is_slow: it may take seconds."""
        threads = self._slow if is_slow else self._quick
        return await asyncio.get_running_loop().run_in_executor(threads, lambda: function(self._own.tokenizer))

    def close(self) -> None:
        """End the threads; calls that wait are dropped."""
        for threads in (self._quick, self._slow):
            threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        with self._lock:
            self._own.tokenizer = self._copies.pop()
