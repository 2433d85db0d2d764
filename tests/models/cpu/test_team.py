"""The kernels' threads: their own where no OpenMP is loaded, and otherwise OpenMP's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.models.cpu.kernel_libraries import SOURCES


def exercised(tmp_path: Path, compiler: str, *libraries: str, arguments: tuple[str, ...] = ()) -> str:
    """What the driver prints; it must exit with 0."""
    driver, program = Path(__file__).with_name("exercise_team.c"), tmp_path / "exercise"
    command = [compiler, "-O2", f"-I{SOURCES}", str(driver), str(SOURCES / "team.c"), *libraries, "-o", str(program)]
    subprocess.run(command, check=True)
    environment = os.environ | {"OMP_NUM_THREADS": "3"}
    finished = subprocess.run([str(program), *arguments], capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_own_threads_serve_concurrent_callers_and_forks(tmp_path: Path) -> None:
    assert exercised(tmp_path, "cc", "-lpthread", "-ldl") == ""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs gcc and its OpenMP")
def test_openmp_threads_serve_concurrent_callers(tmp_path: Path) -> None:
    libraries = ("-Wl,--no-as-needed", "-lgomp", "-lpthread", "-ldl")
    assert exercised(tmp_path, "gcc", *libraries, arguments=("openmp",)) == ""
