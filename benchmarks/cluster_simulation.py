"""A batch job over Ray on 1 to 1,000 nodes: where the driver becomes the limit, and what nodes cost that die.

    python benchmarks/cluster_simulation.py --measure             # here, with engines that answer at once
    python benchmarks/cluster_simulation.py --tokens-per-second 140 --start 20 --block-ms 4 --hours-between-failures 500

One engine a node. An engine holds some blocks of as many requests as its batch, so that a new one fills the places that
short requests leave: it computes at its full speed, but no block ends before its longest request could. The driver
hands out and writes one block at a time. A node that dies is noticed after a while; its blocks go to others, and
another node takes its place after the time that an engine takes to start. Every node gets as many requests whatever
their number is, so that all jobs would take equally long if nodes were all that counts.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Annotated, Any

import typer
from batch_jobs import requests
from rich import box
from rich.table import Table
from terminal import Count, console, run

from slipstream.errors import UsageError

NODES = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
BLOCKS_HELD = 3  # of an engine, as `slipstream.integrations.ray.ray_engine` has them
Positive = Annotated[float, typer.Option(min=1e-9)]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Tokens per second of an engine; seconds that an engine takes to start, that the driver takes for a block, that
    pass until a death is noticed, and on average between two deaths of a node (0: none dies)."""

    speed: float
    start: float
    block: float
    noticed: float
    between_deaths: float
    batch: int


@dataclass
class Outcome:
    """Seconds of the job and of the driver's work; output tokens; blocks; blocks handed out again; nodes that died."""

    seconds: float = 0.0
    driver: float = 0.0
    tokens: int = 0
    blocks: int = 0
    repeated: int = 0
    deaths: int = 0


@dataclass
class _Node:
    """born: how often a node has died here. free: when its engine has computed what it holds; None: it is not there."""

    born: int = 0
    free: float | None = None
    holds: set[int] = field(default_factory=set)


class Simulation:
    """A job, event by event. blocks: the output tokens of the requests of each block."""

    def __init__(self, cluster: Cluster, nodes: int, blocks: list[list[int]], seed: int = 0) -> None:
        self._cluster, self._blocks, self._random = cluster, blocks, random.Random(seed)
        self._nodes = [_Node() for _ in range(nodes)]
        self._waiting, self._left = deque(range(len(blocks))), set(range(len(blocks)))
        self._events: list[tuple[float, int, str, int, int, int]] = []  # when, number, what, node, its birth, block
        self._number, self._driver_free = 0, 0.0
        self.outcome = Outcome(blocks=len(blocks), tokens=sum(map(sum, blocks)))

    def run(self) -> Outcome:
        """What becomes of the job."""
        for number in range(len(self._nodes)):
            self._at(self._cluster.start, "ready", number)
        while self._left:
            now, _, what, number, born, block = heapq.heappop(self._events)
            node = self._nodes[number]
            if what == "lost":
                self._waiting.append(block)
                self._feed_the_idle(now)
            elif born != node.born:
                continue  # of a node that has died since
            elif what == "ready":
                self._begin(node, number, now)
            elif what == "dies":
                self._die(node, number, now)
            else:
                self._end(node, number, block, now)
        return self.outcome

    def _at(self, when: float, what: str, number: int, block: int = -1) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, what, number, self._nodes[number].born, block))

    def _begin(self, node: _Node, number: int, now: float) -> None:
        node.free = now
        if self._cluster.between_deaths:
            self._at(now + self._random.expovariate(1 / self._cluster.between_deaths), "dies", number)
        self._feed(node, number, now)

    def _feed(self, node: _Node, number: int, now: float) -> None:
        while self._waiting and len(node.holds) < BLOCKS_HELD:
            block, tokens = self._waiting[0], self._blocks[self._waiting.popleft()]
            begun, free = self._drive(now), now if node.free is None else node.free
            shortest = begun + max(tokens) * self._cluster.batch / self._cluster.speed
            node.free = max(free, begun) + sum(tokens) / self._cluster.speed
            node.holds.add(block)
            self._at(max(node.free, shortest), "ends", number, block)

    def _drive(self, now: float) -> float:
        """When the driver has done half of what it does for a block: handing it out, or writing it."""
        self._driver_free = max(now, self._driver_free) + self._cluster.block / 2
        self.outcome.driver += self._cluster.block / 2
        return self._driver_free

    def _end(self, node: _Node, number: int, block: int, now: float) -> None:
        node.holds.discard(block)
        self._left.discard(block)
        self.outcome.seconds = max(self.outcome.seconds, self._drive(now))
        self._feed(node, number, now)

    def _die(self, node: _Node, number: int, now: float) -> None:
        self.outcome.deaths += 1
        self.outcome.repeated += len(node.holds)
        node.born += 1
        for block in sorted(node.holds):
            self._at(now + self._cluster.noticed, "lost", number, block)
        node.holds.clear()
        node.free = None
        self._at(now + self._cluster.noticed + self._cluster.start, "ready", number)

    def _feed_the_idle(self, now: float) -> None:
        for number, node in enumerate(self._nodes):
            if node.free is not None and len(node.holds) < BLOCKS_HELD:
                self._feed(node, number, now)


def blocks_of(nodes: int, each: int, batch: int) -> Iterator[list[int]]:
    """The output tokens of the requests of every block; the mixture is that of batch_jobs.py."""
    lengths = [line["max_tokens"] for line in requests(min(each * nodes, 20_000))]
    for first in range(0, each * nodes, batch):
        yield [lengths[at % len(lengths)] for at in range(first, min(first + batch, each * nodes))]


def measured(blocks: int, batch: int, address: str) -> dict[str, float]:
    """Seconds to the first block and per further one of a job whose engines answer at once, each block synced."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from slipstream.integrations.ray.ray_options import ray_module

    ray: Any = ray_module()
    begun = perf_counter()
    ray.init(address=None if address == "local" else address, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    items = [{"number": at, "line": json.dumps(line)} for at, line in enumerate(requests(blocks * batch))]
    held = {"max_tasks_in_flight_per_actor": 2 * BLOCKS_HELD, "max_concurrent_calls_per_actor": BLOCKS_HELD}
    pool = ray.data.ActorPoolStrategy(size=1, enable_true_multi_threading=True, **held)
    answered = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
        _Echo, batch_size=None, compute=pool, num_cpus=1
    )
    first, got = 0.0, 0
    with tempfile.TemporaryFile() as out:
        for block in answered.iter_batches(batch_size=None, prefetch_batches=0):
            out.write("\n".join(map(str, block["line"])).encode())
            out.flush()
            os.fsync(out.fileno())
            first, got = first or perf_counter(), got + 1
    ended = perf_counter()
    ray.shutdown()
    return {"first_block_s": round(first - begun, 2), "block_ms": round(1e3 * (ended - first) / (got - 1), 2)}


class _Echo:
    """An engine that answers at once."""

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        return block


def main(
    tokens_per_second: Positive = 140.0,
    start: Annotated[float, typer.Option(min=0, help="seconds until an engine answers")] = 20.0,
    block_ms: Annotated[float, typer.Option(min=0, help="of the driver, see --measure")] = 4.0,
    noticed: Annotated[float, typer.Option(min=0, help="seconds until Ray notices that a node is dead")] = 15.0,
    hours_between_failures: Annotated[float, typer.Option(min=0, help="of one node; 0: none fails")] = 500.0,
    batch: Count = 8,
    requests_per_node: Count = 5000,
    nodes: Annotated[list[int], typer.Option(min=1)] = NODES,
    measure: Annotated[bool, typer.Option("--measure", help="what Ray costs here, instead")] = False,
    blocks: Annotated[int, typer.Option(min=2, help="of --measure")] = 300,
    address: Annotated[str, typer.Option(help="of --measure: local, auto or HOST:PORT")] = "local",
) -> None:
    """Print a line per number of nodes, or what Ray costs on this machine."""
    if measure:
        console.print(json.dumps(measured(blocks, batch, address)))
        return
    if requests_per_node < batch:
        raise UsageError(f"--requests-per-node {requests_per_node}; allowed: at least --batch, {batch}")
    cluster = Cluster(
        speed=tokens_per_second,
        start=start,
        block=block_ms / 1e3,
        noticed=noticed,
        between_deaths=3600 * hours_between_failures,
        batch=batch,
    )
    table = Table(box=box.SIMPLE, title=f"{requests_per_node:,} requests a node")
    for column in ("nodes", "hours", "tokens/s", "of nodes x speed", "driver busy", "nodes that died", "blocks again"):
        table.add_column(column, justify="right")
    for count in nodes:
        done = Simulation(cluster, count, list(blocks_of(count, requests_per_node, batch))).run()
        rate, share = done.tokens / done.seconds, done.tokens / done.seconds / (count * tokens_per_second)
        busy = f"{done.driver / done.seconds:.0%}"
        again = f"{done.repeated} of {done.blocks:,}"
        table.add_row(
            f"{count:,}", f"{done.seconds / 3600:.2f}", f"{rate:,.0f}", f"{share:.0%}", busy, str(done.deaths), again
        )
    console.print(table)


if __name__ == "__main__":
    run(main)
