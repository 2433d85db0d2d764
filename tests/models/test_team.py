"""The kernels' own threads, which work where no OpenMP is loaded."""

import shutil
import subprocess
from pathlib import Path

import pytest

from slipstream.models.cpu.kernel_libraries import SOURCES


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_threads_share_work_callers_and_forks(tmp_path: Path) -> None:
    driver, made = Path(__file__).with_name("exercise_team.c"), tmp_path / "exercise"
    command = ["cc", "-O2", f"-I{SOURCES}", str(driver), str(SOURCES / "team.c"), "-lpthread", "-ldl", "-o", str(made)]
    subprocess.run(command, check=True)
    done = subprocess.run([str(made)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
