"""Sends a server thousands of requests, some broken, hostile or aborted: are all texts right, is anything leaked?

    python benchmarks/server_soak.py storm --target toy --requests 2000
    make clients                                            # once: schemathesis in an environment of its own
    python benchmarks/server_soak.py fuzz --seconds 300

`storm` starts `slipstream serve` on a free port (or takes a running one: --url) and checks that

- every complete text is the one that plain decoding gives to its request alone;
- /health is always ready, and no answer is an internal error;
- in the end no row, queue entry, task, thread or connection is still held, and the second half of the requests has
  leaked at most a few MiB of memory.

It prints one line of JSON, and exits with code 1 if one of these does not hold.

`fuzz` runs schemathesis on the server's OpenAPI document, with requests that follow it and requests that do not. It
fails on answers with a 5xx status, on statuses, content types and bodies that the document does not declare, and on
bodies that the server accepts although the document forbids them. It does not check that the server accepts all that
the document allows, which depends on the model.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from terminal import in_one_line, positive

from slipstream.errors import SlipstreamError, UsageError

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.server_storm import HOSTILE, KINDS, Storm

COMMAND = "from slipstream.apps.cli import main; main()"
CLIENTS = Path(__file__).parents[1] / ".clients"
PATIENCE_SECONDS = 120.0  # the longest wait until a server is ready, idle or gone
MAX_LEAKED_BYTES = 48 << 20  # that the second half of the requests may leave, as allocators keep some memory
ERRORS = "internal errors"
SENT = KINDS | {kind: share for kind, share in HOSTILE.items() if kind != "fault"}
HELD = ("slipstream:tasks", "slipstream:threads", "process_open_fds")
CONFIG = Path(__file__).with_name("schemathesis.toml")
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
ENDLESS = "/v1/slipstream/events"  # a stream that ends with the server


def client_program(environment: str, program: str) -> Path:
    """A program in one of the clients' environments; UsageError if it is not installed."""
    path = CLIENTS / environment / "bin" / program
    if not path.exists():
        raise UsageError(f"{str(path)!r} does not exist; allowed: after `make clients`")
    return path


def end_on_signals() -> None:
    """Turn SIGTERM into an exception, so that `with` blocks end the servers they have started."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@contextmanager
def slipstream_serve(arguments: Sequence[str]) -> Iterator[str]:
    """Run `slipstream serve` with these options; yields its address."""
    command = [sys.executable, "-c", COMMAND, "serve", "--port", "0", *arguments]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}, encoding="utf-8"
    )
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if " at http://" in line:
                break
        else:
            raise SlipstreamError(f"slipstream serve did not start: {last_line(lines)}")
        threading.Thread(target=process.stderr.read, daemon=True).start()  # so that the pipe never fills up
        yield lines[-1].split()[-1]
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


def last_line(lines: Sequence[str]) -> str:
    """The last line that is not empty."""
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


class Watch:
    """Polls a server's health in a thread. asked: number of requests; ill: how often it was not ready."""

    def __init__(self, client: httpx.Client) -> None:
        self._client, self._stopped = client, threading.Event()
        self.asked = self.ill = 0

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(0.1):
            self.asked += 1
            self.ill += self._client.get("/health").status_code != 200


def figures(client: httpx.Client) -> dict[str, float]:
    """The server's metrics, summed over labels, and its number of internal errors."""
    totals: dict[str, float] = {ERRORS: 0.0}
    for line in client.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            if 'status="5' in name and 'status="503"' not in name:
                totals[ERRORS] = totals.get(ERRORS, 0.0) + float(value)
            name = name.partition("{")[0]
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def settled(client: httpx.Client) -> dict[str, float]:
    """Wait until no request runs or waits, at most PATIENCE_SECONDS, and return the figures."""
    for _ in range(int(PATIENCE_SECONDS / 0.1)):
        totals = figures(client)
        if not (totals["vllm:num_requests_running"] or totals["vllm:num_requests_waiting"]):
            break
        time.sleep(0.1)
    time.sleep(0.5)  # for connections to close
    return figures(client)


def wrong_texts(client: httpx.Client, texts: dict[str, set[str]]) -> list[str]:
    """Requests whose text is not the one that plain decoding gives to them alone."""
    wrong = []
    for body, seen in texts.items():
        answer = client.post("/v1/completions", json=json.loads(body) | {"num_draft_tokens": 0})
        if answer.status_code != 200 or seen != {answer.json()["choices"][0]["text"]}:
            wrong.append(f"{answer.status_code} {body}")
    return wrong


def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run two storms and report their outcomes and what they left behind."""
    with (
        httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_SECONDS) as client,
        Watch(client) as watch,
    ):
        begun, storms, settled_totals = time.monotonic(), [], [settled(client)]
        for seed in (options.seed, options.seed + 1):
            size = options.requests // 2
            storms.append(Storm(url, size, seed, options.at_once, options.longest, kinds=SENT).run())
            settled_totals.append(settled(client))
        seconds = time.monotonic() - begun
        texts = storms[0].texts
        for body, seen in storms[1].texts.items():
            texts.setdefault(body, set()).update(seen)
        wrong = wrong_texts(client, texts)
    memory = [round(totals["process_resident_memory_bytes"] / 2**20) for totals in settled_totals]
    start, end = settled_totals[0], settled_totals[-1]
    state = {name: [int(totals[name]) for totals in settled_totals] for name in HELD}
    return {
        "outcomes": dict(storms[0].outcomes + storms[1].outcomes),
        "seconds": round(seconds, 1),
        "texts": len(texts),
        "wrong_texts": wrong,
        "health": {"asked": watch.asked, "not_ready": watch.ill},
        "memory_mib": memory,
        "held": state,
        "running_or_waiting": end["vllm:num_requests_running"] + end["vllm:num_requests_waiting"],
        "internal_errors": int(end[ERRORS]),
        "ok": not wrong
        and not watch.ill
        and not end[ERRORS]
        and memory[2] - memory[1] <= MAX_LEAKED_BYTES >> 20
        and all(end[name] <= start[name] + 2 for name in HELD)  # this client's open connections
        and not end["vllm:num_requests_running"] + end["vllm:num_requests_waiting"],
    }


def storm(options: argparse.Namespace) -> int:
    """Run two storms and print the report."""
    if options.url:
        report = measure(options.url, options)
    else:
        arguments = ["--target", options.target, "--request-timeout", options.request_timeout]
        arguments += ["--draft", options.draft] if options.draft else []
        with slipstream_serve(arguments) as url:
            report = measure(url, options)
    print(json.dumps(report))
    return 0 if report["ok"] else 1


def fuzz(options: argparse.Namespace) -> int:
    """Run schemathesis and return its exit code."""
    program = client_program("schemathesis", "schemathesis")
    with slipstream_serve(["--target", "toy", "--max-model-len", "512", "--request-timeout", "20"]) as url:
        command = [str(program), "--config-file", str(CONFIG), "run", f"{url}/openapi.json"]
        command += ["--checks", options.checks, "--exclude-path", ENDLESS]
        command += ["--max-time", str(options.seconds), "--workers", str(options.workers), "--seed", str(options.seed)]
        command += ["--phases", "examples,coverage,fuzzing", "--request-timeout", "30", "--continue-on-failure"]
        command += ["--generation-database", "none", "--warnings", "off"]
        return subprocess.run(command, env=os.environ | {"NO_PROXY": "127.0.0.1"}).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the storm or schemathesis; returns 0 if every check passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("storm", help="many concurrent clients of every kind")
    command.set_defaults(run=storm)
    command.add_argument("--url", help="address of a running server; by default one is started")
    command.add_argument("--target", default="toy")
    command.add_argument("--draft")
    command.add_argument("--requests", type=positive, default=2000)
    command.add_argument("--at-once", type=positive, default=24, help="concurrent clients")
    command.add_argument("--longest", type=positive, default=1500, help="tokens of long texts")
    command.add_argument("--request-timeout", default="4", help="seconds that the started server gives a request")
    command.add_argument("--seed", type=int, default=0)
    command = commands.add_parser("fuzz", help="schemathesis on the OpenAPI document")
    command.set_defaults(run=fuzz)
    command.add_argument("--seconds", type=positive, default=300)
    command.add_argument("--workers", type=positive, default=1)
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--checks", default=",".join(CHECKS))
    options = parser.parse_args(arguments)
    end_on_signals()
    return int(options.run(options))


if __name__ == "__main__":
    in_one_line(main)
