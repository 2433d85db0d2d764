"""Threads get cores of their own: bound by the command line, moved apart elsewhere, unless the user arranged them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from slipstream.errors import UsageError
from slipstream.models.cpu import kernel_libraries, processor
from slipstream.models.cpu import thread_placement as threads
from slipstream.models.cpu.kernel_libraries import Recipe
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from tests.support.processes import PATIENCE

T = TypeVar("T")
TRAP = """
import json, os, torch
from slipstream.models.cpu import thread_placement as threads
workers, cores = threads._workers(), os.sched_getaffinity(0)
core = {min(cores)}
for task in [0, *workers]:
    os.sched_setaffinity(task, core)
threads.step_seconds()
trapped = threads._share_a_core([os.getpid(), *workers])
found = threads.separate_threads(cores)
after = [sorted(os.sched_getaffinity(task)) for task in workers]
print(json.dumps([torch.get_num_threads(), len(workers), trapped, found, after, sorted(cores)]))
"""


def without_choice() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in (*threads.CHOSEN, "MKL_NUM_THREADS", "OMP_WAIT_POLICY")
    }


def run(code: str, **environment: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", code],
        env=without_choice() | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


needs_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two cores"
)


@pytest.mark.slow
@needs_cores
def test_threads_trapped_on_one_core_are_separated_and_unbound() -> None:
    count, workers, trapped, separated, affinities, cores = json.loads(run(TRAP))
    assert count >= 2 and workers == count - 1
    assert trapped and separated
    assert affinities == [cores] * workers


@pytest.mark.slow
@needs_cores
def test_nothing_is_moved_where_the_user_arranged_threads() -> None:
    assert json.loads(run(TRAP, OMP_PROC_BIND="false"))[3] is False


def in_bound_thread(call: Callable[[], T]) -> T:
    """The result of a call in a new thread that is bound to one core: the affinity mask belongs to a thread."""
    core = {min(os.sched_getaffinity(0))}
    with ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, core)) as bound:
        return bound.submit(call).result()


@needs_cores
def test_free_thread_unbinds_only_threads_that_openmp_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def freed() -> set[int]:
        threads.free_thread()
        return os.sched_getaffinity(0)

    cores = os.sched_getaffinity(0)
    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    monkeypatch.setattr(threads, "first_processors", lambda: frozenset(cores))
    assert in_bound_thread(freed) == {min(cores)}
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    assert in_bound_thread(freed) == cores
    monkeypatch.setattr(threads, "first_processors", lambda: frozenset({9999}))  # a core that is gone
    assert in_bound_thread(freed) == {min(cores)}


@needs_cores
def test_compilers_do_not_share_the_core_of_the_thread_that_imported_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled() -> None:
        kernel_libraries.compile_library(["cc"], Recipe("two", (Path("a.c"), Path("b.c")), ()), tmp_path / "library.so")

    cores, affinities = os.sched_getaffinity(0), list[set[int]]()
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    monkeypatch.setattr(threads, "first_processors", lambda: frozenset(cores))
    monkeypatch.setattr(kernel_libraries, "_run", lambda command: affinities.append(os.sched_getaffinity(0)))
    in_bound_thread(compiled)
    assert affinities == [cores, cores, {min(cores)}]  # the last one links


def test_threads_are_not_looked_at_while_operators_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in threads.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(threads, "step_seconds", lambda: threads.SLOW / 2)
    monkeypatch.setattr(threads, "_workers", lambda: pytest.fail("looked for threads without need"))
    assert not threads.separate_threads()


@pytest.mark.parametrize("name", threads.CHOSEN)
def test_the_command_line_binds_unless_the_user_chose(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(threads, "share_of_time", lambda: None)
    threads.bind_threads(environment)
    assert environment == {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
    user_choice = {name: "2"}
    threads.bind_threads(user_choice)
    assert user_choice == {name: "2"}


def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, siblings: list[str], **limits: str) -> frozenset[int]:
    """A Linux machine with these processors, in nested control groups with these limits."""
    for number, core_cpus in enumerate(siblings):
        topology = tmp_path / f"cpu/cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "core_cpus_list").write_text(core_cpus)
    group_folder = tmp_path / "groups/outer/inner"
    group_folder.mkdir(parents=True)
    for group, limit in limits.items():
        (tmp_path / {"outer": "groups/outer", "inner": "groups/outer/inner"}[group] / "cpu.max").write_text(limit)
    (tmp_path / "cgroup").write_text("1:cpu:/elsewhere\n0::/outer/inner\n")
    monkeypatch.setattr(threads, "_PROCESSORS", tmp_path / "cpu")
    monkeypatch.setattr(processor, "CONTROL_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(processor, "CONTROL_GROUP", tmp_path / "cgroup")
    processors = frozenset(range(len(siblings)))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: processors, raising=False)
    return processors


BOUND = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}


@pytest.mark.parametrize(
    "limits, expected",
    [
        ({}, BOUND),
        ({"inner": "max 100000"}, BOUND),
        ({"inner": "400000 100000"}, BOUND),  # as much time as four cores
        ({"inner": "350000 100000"}, {"OMP_NUM_THREADS": "3"}),
        ({"outer": "200000 100000", "inner": "max 100000"}, {"OMP_NUM_THREADS": "2"}),
        ({"outer": "200000 100000", "inner": "50000 100000"}, {"OMP_NUM_THREADS": "1"}),
    ],
)
def test_a_containers_share_of_time_limits_the_number_of_threads(
    limits: dict[str, str], expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On four cores of two hyperthreads each."""
    processors = machine(tmp_path, monkeypatch, ["0-1", "0-1", "2-3", "2-3", "4-5", "4-5", "6-7", "6-7"], **limits)
    assert threads.physical_cores(processors) == 4
    environment: dict[str, str] = {}
    monkeypatch.setattr(threads, "first_processors", lambda: processors)
    threads.bind_threads(environment)
    assert environment == expected


def test_the_command_line_binds_threads_before_pytorch_is_imported() -> None:
    code = (
        "import sys; import slipstream; assert 'torch' not in sys.modules\n"
        "import slipstream.models.cpu.thread_placement as t; real = t.bind_threads\n"
        "t.bind_threads = lambda e: print('torch' in sys.modules, real(e), t.first_processors.cache_info().currsize)\n"
        "t.share_of_time = lambda: None\n"
        "import slipstream.apps.cli, os; print(os.environ['OMP_PROC_BIND'], os.environ['OMP_PLACES'])"
    )
    assert run(code).split() == ["False", "None", "1", "true", "cores"]


@pytest.mark.slow
@needs_cores
def test_threads_are_freed_too_where_the_user_binds_them() -> None:
    code = (
        "import slipstream.apps.cli, torch, os; from slipstream.models.cpu.thread_placement import free_thread\n"
        "torch.ones(1 << 20).sum(); free_thread(); print(len(os.sched_getaffinity(0)))"
    )
    assert int(run(code, OMP_PROC_BIND="true")) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("share, expected", [(2.5, 2), (0.5, 1), (4.0, 4), (9.0, 4), (None, 4)])
def test_a_library_user_computes_with_the_containers_share_of_processors(
    share: float | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path, monkeypatch, [], inner="max 100000" if share is None else f"{int(share * 1e5)} 100000")
    for name in threads.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        load("toy", LoadOptions())
        assert torch.get_num_threads() == expected
        torch.set_num_threads(4)
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        load("toy", LoadOptions())
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_the_memory_of_a_container_is_what_it_is_granted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, monkeypatch, [])
    whole = processor.memory_bytes()
    (tmp_path / "groups/outer/memory.max").write_text("1000000\n")
    (tmp_path / "groups/outer/inner/memory.max").write_text("max\n")
    assert whole is not None and whole > 1000000 == processor.memory_bytes()
    monkeypatch.setenv("SLIPSTREAM_MEMORY", "0.0004")
    assert processor.memory_bytes() == 400000
    monkeypatch.setenv("SLIPSTREAM_MEMORY", "2")
    assert processor.memory_bytes() == 1000000
    for wrong in ("-1", "2GB", "nan", "inf"):
        monkeypatch.setenv("SLIPSTREAM_MEMORY", wrong)
        with pytest.raises(UsageError, match=f"SLIPSTREAM_MEMORY='{wrong}'; allowed: a number of gigabytes above 0"):
            processor.memory_bytes()
