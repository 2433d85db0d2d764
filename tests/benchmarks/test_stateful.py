"""The benchmark of stateful models runs and compares texts."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "stateful.py"


@pytest.mark.slow
def test_drafts_right_and_wrong_give_the_plain_text() -> None:
    sizes = ["--layers", "4", "--hidden", "64", "--vocab", "100", "--tokens", "8", "--prompts", "2"]
    done = subprocess.run([sys.executable, str(SCRIPT), *sizes], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = {words[1]: words for line in done.stdout.splitlines() if len(words := line.split()) > 3}
    assert all(" ".join(lines[arm][-4:-1]) == "2 of 2" for arm in ("none", "copies", "wrong"))
    assert "MB, besides its keys and values" in done.stdout
