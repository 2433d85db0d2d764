"""Python processes that end with the block that started them, since pytest would wait for any left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 300.0  # seconds after which a test gives up; far more than any takes on a busy machine


def environment() -> dict[str, str]:
    """The environment of this process, with all the folders it imports from."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def heed_hangups() -> None:
    """In a new process: SIGHUP ends it, although tests that are run by nohup ignore the signal."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextmanager
def started(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """`python` with these arguments; at the end it is killed with the processes it forked."""
    options = {"env": environment(), "text": True, "start_new_session": True} | options
    if sys.platform != "win32":
        options = {"preexec_fn": heed_hangups} | options
    with subprocess.Popen([sys.executable, *arguments], **options) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
