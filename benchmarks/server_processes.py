"""Servers in processes of their own, on free ports of this machine, that end with a block."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from slipstream.errors import SlipstreamError, UsageError

COMMAND = "from slipstream.apps.cli import main; main()"
CLIENTS = Path(__file__).parents[1] / ".clients"
PATIENCE = 120.0  # seconds until a server must have ended


def client_program(environment: str, program: str) -> Path:
    """A program of one of the clients' environments; UsageError if that was not made."""
    found = CLIENTS / environment / "bin" / program
    if not found.exists():
        raise UsageError(f"{str(found)!r} does not exist; allowed: after `make clients`")
    return found


def end_on_signals() -> None:
    """Let a signal that ends this program end its servers, too: blocks are left as by an exception."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@contextmanager
def slipstream_serve(arguments: Sequence[str]) -> Iterator[str]:
    """The address of `slipstream serve` with these options."""
    command = [sys.executable, "-c", COMMAND, "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if " at http://" in line:
                break
        else:
            raise SlipstreamError(f"slipstream serve did not start: {_last(said)}")
        threading.Thread(target=process.stderr.read, daemon=True).start()  # it never waits for a full pipe
        yield said[-1].split()[-1]
    finally:
        process.terminate()
        process.wait(PATIENCE)


@contextmanager
def transformers_serve(program: str, folder: str, options: Sequence[str]) -> Iterator[str]:
    """The address of `transformers serve` of a model's folder, with continuous batching."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [program, "serve", folder, "--continuous-batching", "--host", "127.0.0.1", "--port", str(port), *options]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | offline)
        url = f"http://127.0.0.1:{port}"
        try:
            with httpx.Client(trust_env=False) as client:
                while not _is_ready(client, url):
                    if process.poll() is not None:
                        said.seek(0)
                        raise SlipstreamError(f"transformers serve ended: {_last(said.readlines())}")
                    time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait(PATIENCE)


def _last(said: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")


def _is_ready(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False
