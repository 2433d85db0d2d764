"""The kernels' threads: their own, which work where no OpenMP is loaded, and those of OpenMP."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.models.cpu.kernel_libraries import SOURCES


def exercised(tmp_path: Path, compiler: str, *libraries: str, arguments: tuple[str, ...] = ()) -> str:
    """What the driver prints; it ends with 0."""
    driver, made = Path(__file__).with_name("exercise_team.c"), tmp_path / "exercise"
    command = [compiler, "-O2", f"-I{SOURCES}", str(driver), str(SOURCES / "team.c"), *libraries, "-o", str(made)]
    subprocess.run(command, check=True)
    environment = os.environ | {"OMP_NUM_THREADS": "3"}
    done = subprocess.run([str(made), *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_threads_share_work_callers_and_forks(tmp_path: Path) -> None:
    assert exercised(tmp_path, "cc", "-lpthread", "-ldl") == ""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs gcc and its OpenMP")
def test_threads_of_openmp_do_so_too_and_stand_ready(tmp_path: Path) -> None:
    libraries = ("-Wl,--no-as-needed", "-lgomp", "-lpthread", "-ldl")
    assert exercised(tmp_path, "gcc", *libraries, arguments=("openmp",)) == ""
