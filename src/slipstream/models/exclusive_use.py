"""Loaded models are used by one thread at a time, and only in the process that loaded them.

All decoders over a model share its layers, its KV cache and the workspace of compiled kernels, so the lock is an
attribute of the model.

In a forked process PyTorch may wait forever: GNU's OpenMP expects threads that only the parent process had.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from slipstream.errors import UsageError

ATTRIBUTE = "_slipstream_lock"
CPU = torch.device("cpu")
IMPORTED_IN = os.getpid()
PARALLEL = 1 << 20  # numbers: enough that PyTorch divides an addition among its threads
TRIAL_SECONDS = 10.0  # time limit of that addition, which takes a millisecond

_ALLOWED = "allowed: processes started by multiprocessing's method 'spawn' or 'forkserver'"


class ModelLock:
    """A re-entrant lock kept as an attribute of a model; deep copies and pickles of the model leave it out."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.user: object = None
        self.stepping = False
        self.process = os.getpid()

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def lock_of(model: object) -> ModelLock:
    """The lock of a model, one per process."""
    attributes = vars(model)
    lock: ModelLock | None = attributes.setdefault(ATTRIBUTE, ModelLock())
    if lock is None or lock.process != os.getpid():  # a copy of a model, or one from before a fork
        lock = attributes[ATTRIBUTE] = ModelLock()
    return lock


def arithmetic() -> tuple[object, ...]:
    """The settings of PyTorch that decide how it multiplies; which layers are replaced depends on them, too."""
    onednn: Any = torch.backends.mkldnn
    return torch.get_float32_matmul_precision(), onednn.enabled, autocast_types()


def autocast_types() -> dict[str, torch.dtype]:
    """The types that the caller's `torch.autocast` computes with, by kind of device; empty without one."""
    return {name: torch.get_autocast_dtype(name) for name in ("cpu", "cuda") if torch.is_autocast_enabled(name)}


class ExclusiveUse:
    """A context in which the current thread alone uses the models; the same thread may enter it again.

    Inside, tensors created without a device are on the CPU, whatever the caller has set with
    `torch.set_default_device`: code that wants a GPU names it.
    """

    def __init__(self, models: Iterable[object]) -> None:
        if _may_be_forked() and not threads_work(os.getpid(), torch.get_num_threads()):
            raise UsageError(
                f"process {os.getpid()} was forked from one in which PyTorch had computed with several threads; they "
                f"are gone, and PyTorch would wait for them forever; {_ALLOWED}, or torch.set_num_threads(1) here"
            )
        # all threads take locks in the same order, so no two can wait for each other
        self._locks = sorted({lock_of(model) for model in models}, key=id)
        self._process = os.getpid()
        self._default_devices: list[torch.device | None] = []  # contexts entered, by depth

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            raise UsageError(
                f"this decoder was made in process {self._process} and this is process {os.getpid()}; {_ALLOWED}, and "
                "a decoder made in each of them"
            )
        for num_acquired, lock in enumerate(self._locks):
            try:
                lock.lock.acquire()
            except BaseException:  # Ctrl-C while waiting
                for acquired in self._locks[:num_acquired]:
                    acquired.lock.release()
                raise
        # a context makes every call of PyTorch slower, so it is entered only where it matters, and only once
        context = CPU if not self._default_devices and torch.get_default_device() != CPU else None
        self._default_devices.append(context)
        if context is not None:
            context.__enter__()

    def __exit__(self, *_: object) -> None:
        context = self._default_devices.pop()
        if context is not None:
            context.__exit__(None, None, None)
        for lock in self._locks:
            lock.lock.release()

    @contextmanager
    def step_of(self, user: object, prepare: Callable[[], None]) -> Iterator[None]:
        """A step of decoding, with exclusive use. Raises `UsageError` if it begins within another step.

        The re-entrant lock cannot refuse that: a drafter that decodes does so in the thread that holds the lock.
        prepare: called first if another user made the last step.
        """
        with self:
            if any(lock.stepping for lock in self._locks):
                raise UsageError(
                    "a drafter, logits processor or signal handler decodes with models that are in the middle of a "
                    "step; allowed: a decoder over other models"
                )
            changed = any(lock.user is not user for lock in self._locks)
            for lock in self._locks:
                lock.user, lock.stepping = user, True
            try:
                if changed:
                    prepare()
                yield
            finally:
                for lock in self._locks:
                    lock.stepping = False


def _may_be_forked() -> bool:
    """True if this process may be a fork on Linux, where PyTorch computes with GNU's OpenMP."""
    return sys.platform == "linux" and (os.getpid() != IMPORTED_IN or multiprocessing.parent_process() is not None)


@cache
def threads_work(process: int, threads: int) -> bool:
    """True if PyTorch can compute with this many threads here. A forked child tries it, since it may hang.

    process: this process's id, so that a fork does not reuse its parent's cached result.
    """
    if threads == 1:
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forking while other threads run
        trial = os.fork()
    if trial == 0:
        try:
            torch.zeros(PARALLEL).add_(1)
        finally:
            os._exit(0)
    until = time.monotonic() + TRIAL_SECONDS
    while time.monotonic() < until:
        if os.waitpid(trial, os.WNOHANG)[0]:
            return True
        time.sleep(0.001)
    os.kill(trial, signal.SIGKILL)
    os.waitpid(trial, 0)
    return False
