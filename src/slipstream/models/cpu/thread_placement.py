"""Keeps computing threads on separate cores.

OpenMP threads wait for each other by spinning. If the scheduler leaves two of them on one core, each waits for the
other through whole time slices, and an operator of microseconds takes milliseconds. `OMP_PROC_BIND=true`, set before
PyTorch is imported, keeps them apart, and `OMP_PLACES=cores` keeps them off each other's hyperthreads; the command line
sets both. A container with a CPU quota gets one thread per granted core instead, unbound, since other containers would
be bound to the same cores. If PyTorch is running already, the number of threads is limited in the same way, and threads
that share a core are moved apart once; afterwards they may run anywhere again.

Binding also pins the thread that imports PyTorch, and all threads that it starts, to the first core; those that do not
compute with OpenMP are released. PyTorch is imported inside functions, because importing it starts OpenMP.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from slipstream.models.cpu.processor import group_limits

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("slipstream")

# environment variables with which users arrange threads themselves
CHOSEN = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_NUM_THREADS")
SLOW = 1e-3  # seconds; the operator of `step_seconds` takes some 20 microseconds if threads have separate cores
SAMPLES = 16
_TASKS = Path("/proc/self/task")
_PROCESSORS = Path("/sys/devices/system/cpu")
_USER, _SYSTEM, _PROCESSOR = 11, 12, 36  # of /proc/PID/task/TID/stat, counted from the field after the name


@cache
def first_processors() -> frozenset[int]:
    """The processors on which the thread of the first call may run, which is before OpenMP binds it; Linux only."""
    return frozenset(os.sched_getaffinity(0)) if sys.platform == "linux" else frozenset()


def bind_threads(environment: MutableMapping[str, str]) -> None:
    """Make OpenMP bind its threads to separate cores, unless the user arranged them; call it before importing PyTorch.

    In a container whose CPU quota is below its cores, set the number of threads to the quota instead.
    """
    processors = first_processors()  # also where the user binds threads, see `free_thread`
    if any(name in environment for name in CHOSEN):
        return
    share = share_of_time()
    if share is not None and share < physical_cores(processors):
        environment["OMP_NUM_THREADS"] = str(max(1, int(share)))
    else:
        environment.update(OMP_PROC_BIND="true", OMP_PLACES="cores")


def share_of_time() -> float | None:
    """The CPU quota of this program's Linux control groups, in cores; None if they set no limit."""
    limits = [limit.split() for limit in group_limits("cpu.max")]
    return min((int(granted) / int(period) for granted, period in limits if granted != "max"), default=None)


def physical_cores(processors: frozenset[int]) -> int:
    """The number of cores behind these processors; hyperthreads of one core count once."""
    files = [_PROCESSORS / f"cpu{processor}/topology/core_cpus_list" for processor in processors]
    return len({file.read_text(encoding="utf-8") if file.is_file() else file for file in files})


def free_thread() -> None:
    """If OpenMP binds threads, let the calling one, and those it starts, run on all processors of the program.

    For threads in which OpenMP does not compute. If the system refuses, the thread stays where it is.
    """
    if sys.platform == "linux" and "OMP_PROC_BIND" in os.environ:
        with suppress(OSError):
            os.sched_setaffinity(0, first_processors())


def limit_threads() -> None:
    """Limit PyTorch's threads to the cores that the container grants, unless the user arranged threads."""
    import torch

    share, threads = share_of_time(), torch.get_num_threads()
    if share is None or share >= threads or any(name in os.environ for name in CHOSEN):
        return
    torch.set_num_threads(max(1, int(share)))
    log.info("using %d threads, not %d: the container is granted %g cores", max(1, int(share)), threads, share)


def separate_threads(cores: set[int] | None = None) -> bool:
    """Move computing threads apart if two of them stay on one core. Returns whether it moved any.

    cores: where the threads may run; by default, where the program may.
    """
    import torch

    if cores is None:
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if any(name in os.environ for name in CHOSEN) or not 2 <= torch.get_num_threads() <= len(cores):
        return False
    if not _TASKS.is_dir() or step_seconds() < SLOW:
        return False
    try:
        workers = _workers()
        if not _share_a_core([os.getpid(), *workers]):
            return False  # slow only because the machine is busy
        free = sorted(cores - {_processor(os.getpid())})
        for worker, core in zip(workers, free, strict=False):
            os.sched_setaffinity(worker, {core})
            os.sched_setaffinity(worker, cores)
    except OSError:  # a thread has ended, or the system denies access to it
        return False
    log.info("computing threads shared a core and were moved apart; OMP_PROC_BIND=true at the start keeps them apart")
    return True


def step_seconds() -> float:
    """Median time of an operator that all threads compute, in seconds."""
    import torch

    numbers = torch.ones(1 << 16, dtype=torch.float32)
    return median(_timed(numbers) for _ in range(SAMPLES))


def _timed(numbers: Tensor) -> float:
    started = perf_counter()
    numbers.mul_(1.0)
    return perf_counter() - started


def _workers() -> list[int]:
    """The ids of the threads, except the first one, that work while operators run."""
    import torch

    before, end = _ticks_used(), perf_counter() + 0.1
    numbers = torch.ones(1 << 20, dtype=torch.float32)
    while perf_counter() < end:
        numbers.mul_(1.0)
    gained = {task: ticks - before.get(task, 0) for task, ticks in _ticks_used().items() if task != os.getpid()}
    busiest = sorted(gained, key=lambda task: -gained[task])[: torch.get_num_threads() - 1]
    return [task for task in busiest if gained[task] > 0]


def _share_a_core(tasks: list[int]) -> bool:
    """True if two of these threads share a core in more than nine tenths of the samples."""
    import torch

    numbers, shared = torch.ones(1 << 16, dtype=torch.float32), 0
    for _ in range(SAMPLES):
        numbers.mul_(1.0)
        shared += len({_processor(task) for task in tasks}) < len(tasks)
    return shared > 0.9 * SAMPLES


def _ticks_used() -> dict[int, int]:
    """Processor time of every thread of this process, in clock ticks."""
    tasks = [int(task.name) for task in _TASKS.iterdir()]
    return {task: int(_stat(task)[_USER]) + int(_stat(task)[_SYSTEM]) for task in tasks}


def _processor(task: int) -> int:
    """The core a thread ran on last."""
    return int(_stat(task)[_PROCESSOR])


def _stat(task: int) -> list[str]:
    return (_TASKS / str(task) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
