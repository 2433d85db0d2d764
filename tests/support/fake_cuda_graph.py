"""A stand-in for CUDA graphs on any device: it records operators with their tensors, and repeats exactly those.

Like a graph it keeps every Python number, shape and address of the capture, does not run the body's Python again, and
refuses what a capture refuses: waiting for a value from the device, and bringing values from the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FORBIDDEN = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "lift_fresh", "equal")


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[tuple[int, Tensor]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.removeprefix("aten::") in FORBIDDEN:
            raise RuntimeError(f"operation not permitted during a capture: {func._schema.name}")
        input_storages = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        output = func(*args, **kwargs)
        fresh = [
            (i, t)
            for i, t in enumerate(tree_leaves(output))
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in input_storages
        ]
        if fresh or func._schema.is_mutable:  # a view needs no repeating: it shows the same memory
            self.steps.append((func, args, kwargs, fresh))
        return output


class Tape:
    """A `Capturer` for tests. captured: the number of bodies; size: bytes that each pretends to hold."""

    def __init__(self, size: int = 1, fail: Callable[[int], str | None] = lambda _: None) -> None:
        self.captured = self.replayed = self.resets = self.bytes = 0
        self._size, self._fail = size, fail

    def capture(self, body: Callable[[], Tensor]) -> Callable[[], Tensor]:
        message = self._fail(self.captured)
        if message is not None:
            raise RuntimeError(message)
        body()
        recorder = _Recorder()
        with recorder:
            output = body()
        self.captured += 1
        self.bytes += self._size
        for _, _, _, fresh in recorder.steps:
            for _, tensor in fresh:
                poison(tensor)  # a capture computes nothing; only a replay fills its tensors

        def replay() -> Tensor:
            self.replayed += 1
            for func, args, kwargs, fresh in recorder.steps:
                new_outputs = tree_leaves(func(*args, **kwargs))
                for i, tensor in fresh:
                    tensor.copy_(new_outputs[i])
            return output

        return replay

    def reset(self) -> None:
        self.resets += 1
        self.bytes = 0


def poison(tensor: Tensor) -> None:
    """Fills a tensor with values that spoil any result."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
