"""Thousands of requests on a server, good, broken, hostile, slow and given up: what became of them, and what is left.

    python benchmarks/storm_on_server.py --target toy --requests 2000

starts `slipstream serve` on a free port (or takes a running one: --url) and checks that

- every text that came whole is the one that its request has alone, decoded plainly;
- /health says ready all the time, and no answer is an internal error;
- in the end no place, queue entry, task, thread or connection is held, and no memory has been lost: of the second
  half of the requests at most a few MiB.

It prints one line of JSON, and ends with code 1 if one of these does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from server_processes import end_on_signals, slipstream_serve
from terminal import in_one_line, positive

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.server_storm import HOSTILE, KINDS, Storm

PATIENCE = 120.0  # seconds until a server is ready, or has nothing left to do
LOST = 48 << 20  # bytes that the second half of the requests may leave behind: allocators keep some
ERRORS = "internal errors"
SENT = KINDS | {kind: share for kind, share in HOSTILE.items() if kind != "fault"}
HELD = ("slipstream:tasks", "slipstream:threads", "process_open_fds")


class Watch:
    """Asks a server for its health while other things happen. ill: how often it was not ready."""

    def __init__(self, client: httpx.Client) -> None:
        self._client, self._over = client, threading.Event()
        self.asked = self.ill = 0

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self.asked += 1
            self.ill += self._client.get("/health").status_code != 200


def figures(client: httpx.Client) -> dict[str, float]:
    """The server's own figures, those of several labels added up."""
    found: dict[str, float] = {ERRORS: 0.0}
    for line in client.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            if 'status="5' in name and 'status="503"' not in name:
                found[ERRORS] = found.get(ERRORS, 0.0) + float(value)
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


def settled(client: httpx.Client) -> dict[str, float]:
    """Figures once nothing runs or waits any more; of a server that never comes to rest those of the end."""
    for _ in range(int(PATIENCE / 0.1)):
        found = figures(client)
        if not (found["vllm:num_requests_running"] or found["vllm:num_requests_waiting"]):
            break
        time.sleep(0.1)
    time.sleep(0.5)  # connections are closed
    return figures(client)


def wrong_texts(client: httpx.Client, texts: dict[str, set[str]]) -> list[str]:
    """Requests whose text is not the one they have alone, decoded plainly."""
    found = []
    for body, seen in texts.items():
        answer = client.post("/v1/completions", json=json.loads(body) | {"num_draft_tokens": 0})
        if answer.status_code != 200 or seen != {answer.json()["choices"][0]["text"]}:
            found.append(f"{answer.status_code} {body}")
    return found


def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Two storms and what is left of them."""
    with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as client, Watch(client) as watch:
        begun, storms, left = time.monotonic(), [], [settled(client)]
        for seed in (options.seed, options.seed + 1):
            size = options.requests // 2
            storms.append(Storm(url, size, seed, options.at_once, options.longest, kinds=SENT).run())
            left.append(settled(client))
        seconds = time.monotonic() - begun
        texts = storms[0].texts
        for body, seen in storms[1].texts.items():
            texts.setdefault(body, set()).update(seen)
        wrong = wrong_texts(client, texts)
    memory = [round(one["process_resident_memory_bytes"] / 2**20) for one in left]
    start, end = left[0], left[-1]
    state = {name: [int(one[name]) for one in left] for name in HELD}
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
        and memory[2] - memory[1] <= LOST >> 20
        and all(end[name] <= start[name] + 2 for name in HELD)  # connections of this program that are kept open
        and not end["vllm:num_requests_running"] + end["vllm:num_requests_waiting"],
    }


def main(arguments: list[str] | None = None) -> int:
    """Run two storms and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a running server; by default one is started")
    parser.add_argument("--target", default="toy")
    parser.add_argument("--draft")
    parser.add_argument("--requests", type=positive, default=2000)
    parser.add_argument("--at-once", type=positive, default=24)
    parser.add_argument("--longest", type=positive, default=1500, help="tokens of long texts")
    parser.add_argument("--request-timeout", default="4", help="seconds that the started server gives a request")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    end_on_signals()
    if given.url:
        found = measure(given.url, given)
    else:
        started = ["--target", given.target, "--request-timeout", given.request_timeout]
        started += ["--draft", given.draft] if given.draft else []
        with TemporaryDirectory() as folder, slipstream_serve([*started, "--batch-folder", folder]) as url:
            found = measure(url, given)
    print(json.dumps(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    in_one_line(main)
