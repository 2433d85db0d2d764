"""Captures computations and decides how many to keep: one CUDA graph per shape, replayed with one launch.

A body is a function without arguments that reads and writes only fixed buffers. Capturing it records the kernels that
it launches, with the addresses that they use; a replay runs them again on the buffers' current contents. This module
knows nothing about shapes. See "CUDA Graphs" in the PyTorch documentation (notes/cuda.html).
"""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.errors import first_line

log = logging.getLogger("slipstream")

MAX_GRAPHS = 64
MAX_BYTES = 2 << 30
REPLAYS = 100  # that take about as long as a capture
FEWEST_CALLS, MOST_CALLS = 16, 1 << 16  # before the next attempt: after the first failed capture, and after many

Body = Callable[[], Tensor]


class Capturer(Protocol):
    """Turns a body into a replay: a function that does the same work and returns the same tensor with new content.

    bytes: device memory held by all captures since the last reset, including evicted ones: graphs share a pool, which
    is freed with the last of them.
    """

    @property
    def bytes(self) -> int:
        """Device memory that captures hold; see the class."""

    def capture(self, body: Body) -> Body:
        """Capture a body. It may be run several times, so it must do the same thing each time."""

    def reset(self) -> None:
        """Wait for running replays; all captures will be dropped next."""


class Rerun:
    """The specification of a capture, for any device: a replay runs the body again."""

    bytes = 0

    def capture(self, body: Body) -> Body:
        """Returns the body itself."""
        return body

    def reset(self) -> None:
        """Nothing to do."""


class CudaCapturer:
    """Captures CUDA graphs on a stream of its own, all in one memory pool.

    The graphs can share memory because they are always replayed one after another on one stream.
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
                    with NoWaiting():
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
        # "thread_local": a server's other threads may use the device without spoiling the capture
        context = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with _no_collection(), context:
            out = body()
        torch.cuda.synchronize()
        self._bytes += max(0, free - torch.cuda.mem_get_info()[0])
        return graph, out


class NoWaiting(TorchDispatchMode):
    """Raises at any operator of this thread that waits for the device.

    Such an operator cannot be captured, and a failed capture costs more than this check. PyTorch's own check
    (`set_sync_debug_mode`) affects the whole process, whose other threads may wait for the device.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if _waits(func, args, options):
            raise RuntimeError(f"operation not permitted during a capture: {func._schema.name}")
        return func(*args, **options)


def _waits(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """True if the host needs numbers from the device: an operator's result, or the shape of its result."""
    name = func._schema.name.removeprefix("aten::")
    if name in ("_to_copy", "copy_"):
        source = args[0] if name == "_to_copy" else args[1]
        target = options.get("device") if name == "_to_copy" else args[0].device
        blocks = not (options.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        return blocks and target is not None and torch.device(target).type != source.device.type
    if name in ("index", "index_put", "index_put_", "_unsafe_index"):  # counts the elements that a mask selects
        return any(index.dtype in (torch.bool, torch.uint8) for index in tree_leaves(args[1]) if index is not None)
    if options.get("output_size") is not None:  # `repeat_interleave` with a known length
        return False
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause garbage collection, which might destroy another graph; that is not allowed during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class GraphMemory:
    """The number of captured graphs, and their device memory in bytes."""

    count: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.count} CUDA graphs, {self.bytes / 1e6:.0f} MB"


class GraphStore:
    """Captured bodies by key, at most `max_graphs`: a new one replaces the least recently used, if that pays.

    Without a capture the body itself runs, so a shape's bits never change. Once captures hold more than `max_bytes`, or
    more than twice the first capture's memory if that is larger, nothing new is captured until replays have paid for
    the current captures. Then all are dropped and captured again as needed, because a shared pool cannot shrink
    otherwise. A failed capture, often due to another process's use of memory, is retried after more and more calls.
    reason: why nothing is ever captured; None if captures are tried.
    """

    def __init__(
        self, owner: str, capturer: Capturer, max_graphs: int = MAX_GRAPHS, max_bytes: int = MAX_BYTES
    ) -> None:
        self._owner, self._capturer = owner, capturer
        self._max_graphs, self._max_bytes = max_graphs, max_bytes
        self._saved: OrderedDict[Hashable, Body] = OrderedDict()
        self._captures = self._replays = self._first_bytes = 0  # since the last time all were dropped
        self._failures = self._calls_to_wait = 0
        self.reason: str | None = None

    def run(self, key: Hashable, body: Body) -> Tensor | None:
        """The body's result, by a replay, captured first if needed; None if captures are off or the body fails.

        The tensor belongs to the capture: the next run of any key may overwrite it.
        """
        if self.reason is not None:
            return None
        replay = self._saved.pop(key, None) or self._capture(key, body)
        if replay is None:
            return self._uncaptured(body)
        self._saved[key] = replay
        self._replays += 1
        return replay()

    def disable(self, reason: str) -> None:
        """Capture nothing from now on, and log the reason."""
        self.clear()
        self.reason = reason
        log.warning("%s runs without CUDA graphs: %s", self._owner, reason)

    def clear(self) -> None:
        """Drop all captures; required after a buffer that they use has moved."""
        if self._saved:
            self._drop()

    @property
    def memory(self) -> GraphMemory:
        """The number of graphs, and the memory of all captures since the last time all were dropped."""
        return GraphMemory(len(self._saved), self._capturer.bytes if self._saved else 0)

    def _drop(self) -> None:
        self._capturer.reset()
        self._saved.clear()
        self._captures = self._replays = self._first_bytes = 0

    def _capture(self, key: Hashable, body: Body) -> Body | None:
        """A new capture; None if it fails or has to wait."""
        if self._calls_to_wait:
            self._calls_to_wait -= 1
            return None
        if self._capturer.bytes > max(self._max_bytes, 2 * self._first_bytes):
            if self._replays < REPLAYS * self._captures:
                return None
            self.clear()
        if len(self._saved) >= self._max_graphs and self._replays < REPLAYS * (self._captures - 2 * self._max_graphs):
            return None  # more shapes take turns than fit, so each capture would evict the next shape's
        try:
            replay = self._capturer.capture(body)
        except Exception as error:  # a capture runs the model's own code, which may raise anything
            self._note_failure(error)
            return None
        self._captures, self._failures = self._captures + 1, 0
        self._first_bytes = self._first_bytes or self._capturer.bytes
        # drop old graphs only now that the new one keeps the pool alive
        while len(self._saved) >= self._max_graphs:
            self._saved.popitem(last=False)
        used = GraphMemory(len(self._saved) + 1, self._capturer.bytes)
        log.info("%s: captured %s; now %s", self._owner, key, used)
        return replay

    def _note_failure(self, error: Exception) -> None:
        """Free all memory and wait for twice as many calls as the last time; warns of the first failure only."""
        self._drop()
        self._calls_to_wait = min(FEWEST_CALLS << self._failures, MOST_CALLS)
        level = logging.INFO if self._failures else logging.WARNING
        log.log(level, "%s runs without CUDA graphs for now: %s", self._owner, first_line(error))
        self._failures += 1

    def _uncaptured(self, body: Body) -> Tensor | None:
        try:
            return body()
        except Exception as error:  # the caller's eager forward needs less memory, and raises any error that persists
            log.info("%s: %s", self._owner, first_line(error))
            return None


def why_not_captured(model: Any) -> str | None:
    """The reason a model cannot be captured; None if no reason is known."""
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        return f"its weights are on several devices ({', '.join(devices)})"
    if any(getattr(module, "_hf_hook", None) is not None for module in model.modules()):
        return "accelerate moves its weights or inputs during the forward"
    if getattr(model, "quantization_method", None) == "bitsandbytes":
        return "it is quantized with bitsandbytes"
    return None
