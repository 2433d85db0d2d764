"""Threads that tokenise and render beside the engine, each with a tokenizer of its own: they cannot be shared."""

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
    """At most THREADS calls at a time; more wait their turn, and none waits for the engine."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._copies = [copy.deepcopy(tokenizer) for _ in range(THREADS)]
        self._own = threading.local()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, "slipstream-text", self._begin)

    async def run(self, function: Callable[[Tokenizer | None], T]) -> T:
        """What a function makes of a tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(self._own.tokenizer))

    def close(self) -> None:
        """End the threads; calls that wait are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        with self._lock:
            self._own.tokenizer = self._copies.pop()
