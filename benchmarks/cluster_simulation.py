"""Simulates a batch job over Ray on 1 to 1,000 nodes: when the driver becomes the limit, and what dying nodes cost.

    python benchmarks/cluster_simulation.py --measure    # times Ray itself on this machine
    python benchmarks/cluster_simulation.py --tokens-per-second 140 --start 20 --block-ms 4 --hours-between-failures 500

Each node runs one engine, which holds a few blocks, each with one request per row of its batch. When a short
request ends, one of the next block takes its row, so the engine always computes at full speed; but no block ends before
its longest request could. The driver hands out and writes one block at a time. The death of a node is noticed after a
while. Then its blocks go to other nodes, and a new node takes its place after the time an engine takes to start. The
job has the same number of requests per node at every size, so all sizes would take equally long if the driver were
free.
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
BLOCKS_HELD = 3  # by an engine, as in `slipstream.integrations.ray.ray_engine`
Positive = Annotated[float, typer.Option(min=1e-9)]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What the simulation assumes; times are in seconds."""

    speed: float  # tokens per second of an engine
    start: float  # until a new engine is ready
    block: float  # the driver's work on a block
    noticed: float  # until a death is noticed
    between_deaths: float  # of one node, on average; 0: none dies
    batch: int


@dataclass
class Outcome:
    """The figures of a job. driver: seconds that the driver worked; repeated: blocks handed out once more."""

    seconds: float = 0.0
    driver: float = 0.0
    tokens: int = 0
    blocks: int = 0
    repeated: int = 0
    deaths: int = 0


@dataclass
class _Node:
    """A place in the cluster. deaths: of nodes here; free: when its engine will have computed all its blocks.

    free is None while there is no engine.
    """

    deaths: int = 0
    free: float | None = None
    blocks: set[int] = field(default_factory=set)


class Simulation:
    """Plays a job event by event. blocks: for each block the output tokens of its requests."""

    def __init__(self, cluster: Cluster, nodes: int, blocks: list[list[int]], seed: int = 0) -> None:
        self._cluster, self._blocks, self._random = cluster, blocks, random.Random(seed)
        self._nodes = [_Node() for _ in range(nodes)]
        self._waiting, self._unfinished = deque(range(len(blocks))), set(range(len(blocks)))
        self._events: list[
            tuple[float, int, str, int, int, int]
        ] = []  # time, order, kind, node, its deaths so far, block
        self._num_events, self._driver_free = 0, 0.0
        self.outcome = Outcome(blocks=len(blocks), tokens=sum(map(sum, blocks)))

    def run(self) -> Outcome:
        """Play the job to its end."""
        for number in range(len(self._nodes)):
            self._schedule(self._cluster.start, "ready", number)
        while self._unfinished:
            now, _, kind, number, deaths, block = heapq.heappop(self._events)
            node = self._nodes[number]
            if kind == "lost":
                self._waiting.append(block)
                self._feed_the_idle(now)
            elif deaths != node.deaths:
                continue  # the node of this event has died since
            elif kind == "ready":
                self._begin(node, number, now)
            elif kind == "dies":
                self._die(node, number, now)
            else:
                self._end(node, number, block, now)
        return self.outcome

    def _schedule(self, time: float, kind: str, number: int, block: int = -1) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, kind, number, self._nodes[number].deaths, block))

    def _begin(self, node: _Node, number: int, now: float) -> None:
        node.free = now
        if self._cluster.between_deaths:
            self._schedule(now + self._random.expovariate(1 / self._cluster.between_deaths), "dies", number)
        self._feed(node, number, now)

    def _feed(self, node: _Node, number: int, now: float) -> None:
        while self._waiting and len(node.blocks) < BLOCKS_HELD:
            block, tokens = self._waiting[0], self._blocks[self._waiting.popleft()]
            begun, free = self._drive(now), now if node.free is None else node.free
            shortest = begun + max(tokens) * self._cluster.batch / self._cluster.speed
            node.free = max(free, begun) + sum(tokens) / self._cluster.speed
            node.blocks.add(block)
            self._schedule(max(node.free, shortest), "ends", number, block)

    def _drive(self, now: float) -> float:
        """Occupy the driver for half of its work on a block, handing it out or writing it; return when that is done."""
        self._driver_free = max(now, self._driver_free) + self._cluster.block / 2
        self.outcome.driver += self._cluster.block / 2
        return self._driver_free

    def _end(self, node: _Node, number: int, block: int, now: float) -> None:
        node.blocks.discard(block)
        self._unfinished.discard(block)
        self.outcome.seconds = max(self.outcome.seconds, self._drive(now))
        self._feed(node, number, now)

    def _die(self, node: _Node, number: int, now: float) -> None:
        self.outcome.deaths += 1
        self.outcome.repeated += len(node.blocks)
        node.deaths += 1
        for block in sorted(node.blocks):
            self._schedule(now + self._cluster.noticed, "lost", number, block)
        node.blocks.clear()
        node.free = None
        self._schedule(now + self._cluster.noticed + self._cluster.start, "ready", number)

    def _feed_the_idle(self, now: float) -> None:
        for number, node in enumerate(self._nodes):
            if node.free is not None and len(node.blocks) < BLOCKS_HELD:
                self._feed(node, number, now)


def blocks_of(nodes: int, each: int, batch: int) -> Iterator[list[int]]:
    """For every block the output tokens of its requests, as batch_jobs.py mixes them. each: requests per node."""
    lengths = [line["max_tokens"] for line in requests(min(each * nodes, 20_000))]
    for first in range(0, each * nodes, batch):
        yield [lengths[number % len(lengths)] for number in range(first, min(first + batch, each * nodes))]


def measured(blocks: int, batch: int, address: str) -> dict[str, float]:
    """Time a job whose engine answers at once: its first block, and each further one. Blocks are synced to disk."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from slipstream.integrations.ray.ray_options import ray_module

    ray: Any = ray_module()
    begun = perf_counter()
    ray.init(address=None if address == "local" else address, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    items = [{"number": i, "line": json.dumps(line)} for i, line in enumerate(requests(blocks * batch))]
    in_flight = {"max_tasks_in_flight_per_actor": 2 * BLOCKS_HELD, "max_concurrent_calls_per_actor": BLOCKS_HELD}
    pool = ray.data.ActorPoolStrategy(size=1, enable_true_multi_threading=True, **in_flight)
    answered = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
        _Echo, batch_size=None, compute=pool, num_cpus=1
    )
    first, count = 0.0, 0
    with tempfile.TemporaryFile() as out:
        for block in answered.iter_batches(batch_size=None, prefetch_batches=0):
            out.write("\n".join(map(str, block["line"])).encode())
            out.flush()
            os.fsync(out.fileno())
            first, count = first or perf_counter(), count + 1
    ended = perf_counter()
    ray.shutdown()
    return {"first_block_s": round(first - begun, 2), "block_ms": round(1e3 * (ended - first) / (count - 1), 2)}


class _Echo:
    """An engine that answers at once."""

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        return block


def main(
    tokens_per_second: Positive = 140.0,
    start: Annotated[float, typer.Option(min=0, help="seconds until an engine answers")] = 20.0,
    block_ms: Annotated[
        float, typer.Option(min=0, help="the driver's milliseconds per block; --measure finds them")
    ] = 4.0,
    noticed: Annotated[float, typer.Option(min=0, help="seconds until Ray notices that a node is dead")] = 15.0,
    hours_between_failures: Annotated[
        float, typer.Option(min=0, help="of a node, on average; 0: no node fails")
    ] = 500.0,
    batch: Count = 8,
    requests_per_node: Count = 5000,
    nodes: Annotated[list[int], typer.Option(min=1, help="size of the cluster; repeatable")] = NODES,
    measure: Annotated[bool, typer.Option("--measure", help="instead, time Ray on this machine")] = False,
    blocks: Annotated[int, typer.Option(min=2, help="with --measure: number of blocks")] = 300,
    address: Annotated[str, typer.Option(help="with --measure: local, auto or HOST:PORT")] = "local",
) -> None:
    """Print a line per number of nodes, or with --measure what Ray costs on this machine."""
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
    for column in (
        "nodes",
        "hours",
        "tokens/s",
        "of nodes x speed",
        "driver busy",
        "nodes that died",
        "blocks repeated",
    ):
        table.add_column(column, justify="right")
    for count in nodes:
        outcome = Simulation(cluster, count, list(blocks_of(count, requests_per_node, batch))).run()
        rate, share = outcome.tokens / outcome.seconds, outcome.tokens / outcome.seconds / (count * tokens_per_second)
        busy = f"{outcome.driver / outcome.seconds:.0%}"
        repeated = f"{outcome.repeated} of {outcome.blocks:,}"
        table.add_row(
            f"{count:,}",
            f"{outcome.seconds / 3600:.2f}",
            f"{rate:,.0f}",
            f"{share:.0%}",
            busy,
            str(outcome.deaths),
            repeated,
        )
    console.print(table)


if __name__ == "__main__":
    run(main)
