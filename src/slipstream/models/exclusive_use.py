"""Loaded models are used by one thread at a time, and only in the process that loaded them.

A model's layers, its KV cache and the workspace of compiled kernels are shared by every decoder over it, so the lock
stays with the model itself.

In a forked process PyTorch may wait for ever: GNU's OpenMP expects threads that only the parent process had.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterable
from functools import cache

import torch

from slipstream.errors import UsageError

ATTRIBUTE = "_slipstream_lock"
CPU = torch.device("cpu")
IMPORTED_IN = os.getpid()
PARALLEL = 1 << 20  # numbers: so many that PyTorch divides them among its threads
TRIAL_SECONDS = 10.0  # limit of a sum of so many, which takes a millisecond

_ALLOWED = "allowed: processes by multiprocessing's start method 'spawn' or 'forkserver'"


class ModelLock:
    """A re-entrant lock kept as an attribute of a model; deep copies and pickles of the model go without it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.user: object = None
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


def autocast_types() -> dict[str, torch.dtype]:
    """What the caller's `torch.autocast` computes with, by type of device; empty without one."""
    return {name: torch.get_autocast_dtype(name) for name in ("cpu", "cuda") if torch.is_autocast_enabled(name)}


class ExclusiveUse:
    """A context in which the current thread alone uses the models; the same thread may enter it again.

    Inside, tensors without a device of their own are made on the CPU, whatever the caller has set by
    `torch.set_default_device`: what is sent to a GPU says so.
    """

    def __init__(self, models: Iterable[object]) -> None:
        if _may_be_forked() and not threads_work(os.getpid(), torch.get_num_threads()):
            raise UsageError(
                f"process {os.getpid()} was forked from one in which PyTorch had computed with several threads, which "
                f"are gone, and would wait for them for ever; {_ALLOWED}, or torch.set_num_threads(1) in this one"
            )
        # everybody takes several locks in the same order, so that two threads cannot wait for each other
        self._locks = sorted({lock_of(model) for model in models}, key=id)
        self._process = os.getpid()
        self._default_devices: list[torch.device | None] = []  # contexts entered, by depth

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            raise UsageError(
                f"this decoder was made in process {self._process} and this is process {os.getpid()}; {_ALLOWED}, and "
                "a decoder made in each"
            )
        for num_acquired, lock in enumerate(self._locks):
            try:
                lock.lock.acquire()
            except BaseException:  # Ctrl-C while waiting
                self._release(num_acquired)
                raise
        # a context makes every call of PyTorch slower, so it is entered where it matters alone, and once
        context = CPU if not self._default_devices and torch.get_default_device() != CPU else None
        self._default_devices.append(context)
        if context is not None:
            context.__enter__()

    def __exit__(self, *_: object) -> None:
        context = self._default_devices.pop()
        if context is not None:
            context.__exit__(None, None, None)
        self._release(len(self._locks))

    def changes_to(self, user: object) -> bool:
        """Note who uses the models now; returns whether somebody else used them the last time."""
        changed = any(lock.user is not user for lock in self._locks)
        for lock in self._locks:
            lock.user = user
        return changed

    def _release(self, num_acquired: int) -> None:
        for lock in reversed(self._locks[:num_acquired]):
            lock.lock.release()


def _may_be_forked() -> bool:
    """Whether this process may have come from another by fork, and PyTorch's threads are those of GNU's OpenMP."""
    return sys.platform == "linux" and (os.getpid() != IMPORTED_IN or multiprocessing.parent_process() is not None)


@cache
def threads_work(process: int, threads: int) -> bool:
    """Whether PyTorch can compute with this many threads in this process: tried in a fork, which may hang in its place.

    process: its id, a key of the cache that forks do not share.
    """
    if threads == 1:
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside other threads
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
