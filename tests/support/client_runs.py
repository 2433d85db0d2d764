"""Other projects' clients, each in an environment of its own, run as programs against a server on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes
from tests.support.processes import PATIENCE

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "clients" / "scripts"
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OMP_NUM_THREADS": "1",
    "OPENAI_API_KEY": "none",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
    "TOKENIZERS_PARALLELISM": "false",
}
AGENT_SETTINGS = ("ANTHROPIC_", "CLAUDE", "CODEX_", "OPENAI_", "OPENCODE", "SLIPSTREAM_")  # the user's own


def program(name: str, command: str) -> Path:
    """A program of a client's environment."""
    return ROOT / ".clients" / name / "bin" / command


def node_program(name: str, command: str) -> Path:
    """A program of a client that npm has installed."""
    return ROOT / ".clients" / name / "node_modules" / ".bin" / command


def needs(name: str) -> pytest.MarkDecorator:
    """Skips tests whose client is not installed."""
    absent = not (ROOT / ".clients" / name / ".installed").exists()
    return pytest.mark.skipif(absent, reason=f"needs the environment .clients/{name}: make clients")


def run_client(name: str, command: str, *arguments: str, folder: Path | None = None, seconds: float = PATIENCE) -> str:
    """What a client printed; if it fails, the test fails with its output."""
    with tempfile.TemporaryDirectory() as home:
        finished = subprocess.run(
            [str(program(name, command)), *arguments],
            env=os.environ | OFFLINE | {"HF_HOME": home},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    assert finished.returncode == 0, (
        f"{command} {' '.join(arguments)}\n{finished.stdout[-4000:]}\n{finished.stderr[-8000:]}"
    )
    return finished.stdout


def run_agent(words: list[str], home: Path, folder: Path, seconds: float = PATIENCE) -> str:
    """What a coding agent printed that ran in a folder; all its processes end with it.

    Its settings lie in an empty home folder, and it reaches no other machine.
    """
    places = [str(ROOT / ".clients" / name / "node_modules" / ".bin") for name in ("claude", "codex", "opencode")]
    variables = {
        "PATH": os.pathsep.join([*places, os.environ["PATH"]]),
        "HOME": str(home),
        "PWD": str(folder),  # opencode believes it
        **{f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "STATE", "CACHE")},
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"),
    }
    kept = {name: value for name, value in processes.environment().items() if not name.startswith(AGENT_SETTINGS)}
    with subprocess.Popen(
        words,
        env=kept | OFFLINE | variables,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, errors = process.communicate(timeout=seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{' '.join(words)}\n{printed[-4000:]}\n{errors[-8000:]}"
    return printed


def run_script(name: str, script: str, *arguments: str, folder: Path | None = None, seconds: float = PATIENCE) -> Any:
    """The JSON that a script prints as its last line, run by a client's Python."""
    printed = run_client(name, "python", str(SCRIPTS / script), *arguments, folder=folder, seconds=seconds)
    return json.loads(printed.strip().splitlines()[-1])
