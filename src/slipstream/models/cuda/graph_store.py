"""Captured computations and how many of them to keep: a CUDA graph per shape, replayed with one launch.

A body is a function without arguments that reads and writes fixed buffers only. Capturing it records the kernels it
launches together with the addresses they use; a replay runs them again on whatever the buffers hold by then. This
module knows nothing of shapes. See "CUDA Graphs" in the PyTorch documentation (notes/cuda.html).
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

log = logging.getLogger("slipstream")

MAX_GRAPHS = 64
MAX_BYTES = 2 << 30

Body = Callable[[], Tensor]


class Capturer(Protocol):
    """Turns a body into a replay: a function that does the same work and returns the same tensor, filled anew.

    bytes: device memory that the captures since the last reset hold, evicted ones included: a pool shared by graphs
    gives its memory back when the last of them is gone.
    """

    @property
    def bytes(self) -> int:
        """See the class."""

    def capture(self, body: Body) -> Body:
        """Capture a body. It may be run several times, so it must do the same thing each time."""

    def reset(self) -> None:
        """Wait for replays under way; all captures are about to be dropped."""


class Rerun:
    """The specification of a capture, for any device: a replay runs the body again."""

    bytes = 0

    def capture(self, body: Body) -> Body:
        """The body itself."""
        return body

    def reset(self) -> None:
        """Nothing is held."""


class CudaCapturer:
    """Captures CUDA graphs on a stream of its own, all in one memory pool.

    The graphs may share memory because they are only ever replayed one after the other on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._bytes = device, 0
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None

    @property
    def bytes(self) -> int:
        """Growth of the device's used memory over the captures, which covers the pool and the graphs themselves."""
        return self._bytes

    def capture(self, body: Body) -> Body:
        """Run the body twice to warm up, the second time refusing to wait for the device, then capture it."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            try:
                # this outer context restores the caller's stream even if the capture ends in an error
                with torch.cuda.stream(self._stream):
                    body()  # libraries choose kernels and allocate workspaces on first use
                    with _no_waiting():
                        body()
                    graph, out = self._record(body)
            finally:
                torch.cuda.current_stream().wait_stream(self._stream)

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def reset(self) -> None:
        """Wait for the device and start a new pool: one whose graphs are all gone must not be used again."""
        torch.cuda.synchronize(self._device)
        self._pool, self._bytes = None, 0

    def _record(self, body: Body) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        graph = torch.cuda.CUDAGraph()
        # "thread_local": what other threads of a server do with the device must not spoil the capture
        context = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with _no_collection(), context:
            out = body()
        torch.cuda.synchronize()
        self._bytes += max(0, free - torch.cuda.mem_get_info()[0])
        return graph, out


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Any operator that waits for the device raises: it could not be captured, and a failed capture is costlier."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls this mode a prototype, once
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: it might destroy another graph, which is not allowed during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class GraphMemory:
    """How many graphs a backend has captured, and the device memory they take in bytes."""

    count: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.count} CUDA graphs, {self.bytes / 1e6:.0f} MB"


class GraphStore:
    """Captured bodies by key, at most `max_graphs`, the least recently used dropped first.

    When they hold more than `max_bytes` all are dropped and captured again as needed, because a shared pool shrinks in
    no other way. The first failure turns capturing off for good, and `reason` says why.
    """

    def __init__(
        self, owner: str, capturer: Capturer, max_graphs: int = MAX_GRAPHS, max_bytes: int = MAX_BYTES
    ) -> None:
        self._owner, self._capturer = owner, capturer
        self._max_graphs, self._max_bytes = max_graphs, max_bytes
        self._saved: OrderedDict[Hashable, Body] = OrderedDict()
        self.reason: str | None = None

    def run(self, key: Hashable, body: Body) -> Tensor | None:
        """What the body returns, by a replay, captured first if need be; None if capturing is off.

        The tensor is the capture's own: the next run of any key may write over it.
        """
        if self.reason is not None:
            return None
        replay = self._saved.pop(key, None) or self._capture(key, body)
        if replay is None:
            return None
        self._saved[key] = replay
        return replay()

    def disable(self, reason: str) -> None:
        """Capture nothing from now on; says why once."""
        self.clear()
        self.reason = reason
        log.warning("%s runs without CUDA graphs: %s", self._owner, reason)

    def clear(self) -> None:
        """Drop all captures, as is needed when a buffer they use has moved."""
        if self._saved:
            self._capturer.reset()
            self._saved.clear()

    @property
    def memory(self) -> GraphMemory:
        """How many graphs there are, and the memory of all captures since the last time all were dropped."""
        return GraphMemory(len(self._saved), self._capturer.bytes if self._saved else 0)

    def _capture(self, key: Hashable, body: Body) -> Body | None:
        try:
            replay = self._capturer.capture(body)
            if self._capturer.bytes > self._max_bytes and self._saved:
                del replay
                self.clear()
                replay = self._capturer.capture(body)
        except Exception as error:  # a capture runs the model's own code, which may raise anything
            self.disable(first_line(error))
            return None
        # only now that the new graph holds the pool may old ones go
        while len(self._saved) >= self._max_graphs:
            self._saved.popitem(last=False)
        used = GraphMemory(len(self._saved) + 1, self._capturer.bytes)
        log.info("%s: captured %s; now %s", self._owner, key, used)
        return replay


def unsupported(model: Any) -> str | None:
    """Why a model cannot be captured, or None if nothing is known against it."""
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        return f"its weights are on several devices ({', '.join(devices)})"
    if any(getattr(module, "_hf_hook", None) is not None for module in model.modules()):
        return "accelerate moves its weights or inputs during the forward"
    if getattr(model, "quantization_method", None) == "bitsandbytes":
        return "it is quantised with bitsandbytes"
    return None


def first_line(error: Exception) -> str:
    """Of an error's message, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
