"""One GGUF file in our kernels and in llama.cpp: times of forwards by width, prompts and cold starts, and memory.

    python benchmarks/beside_llama_cpp.py MODEL.gguf
    python benchmarks/beside_llama_cpp.py MODEL.gguf --beside FOLDER --turns 15 --json FILE

Needs llama-cpp-python (extra `llama`) and Linux. Each engine runs in a process of its own, all with the same number of
threads. They take turns, and the medians are printed. A forward of N tokens follows --context other tokens and returns
the likeliest token after each of the N. The time of a prompt ends with its first new token. A cold start lasts from the
start of a process to the first token of an answer, with the file in the system's cache. The memory's bandwidth is
measured between the turns, by summing a large tensor with all threads.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from terminal import Child, Count, JsonFile, console, numbers, run, save

from slipstream.bench.llama_cpp import bindings, gguf_file
from slipstream.errors import SlipstreamError

WORKER = str(Path(__file__).with_name("forward_worker.py"))
LLAMA = "llama.cpp"
MESSAGE = "Name three rivers."
FLOATS = 1 << 28  # 1 GiB, more than any cache


@dataclass(frozen=True)
class Engine:
    """An engine and its model."""

    name: str  # in tables
    kind: str  # as `forward_worker.py` calls the engine
    target: str

    def command(self, task: str) -> list[str]:
        """The worker's command line. task: the number of context tokens, or `first MESSAGE`."""
        return [sys.executable, WORKER, self.kind, self.target, task]

    def cold_start(self) -> float:
        """Seconds from the start of a process to the first token."""
        started, pipe = perf_counter(), subprocess.PIPE
        with subprocess.Popen(
            self.command(f"first {MESSAGE}"), stdout=pipe, stderr=pipe, text=True, encoding="utf-8"
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            answer = process.stdout.readline()
            seconds = perf_counter() - started
            if not answer:
                errors = process.stderr.read().strip().splitlines() or ["no answer"]
                raise SlipstreamError(f"{self.name}: {errors[-1]}")
        return seconds


def main(
    target: str,
    widths: str = "1,4,8,16",
    prompt: Count = 256,
    turns: Count = 9,
    cold: Annotated[int, typer.Option(min=0, help="cold starts of each engine")] = 3,
    context: Count = 200,
    beside: Annotated[str | None, typer.Option(help="another model for our kernels, such as the same in bf16")] = None,
    json_file: JsonFile = None,
) -> None:
    """Print median times, their ratios to llama.cpp's and to one token's, memory and bandwidth."""
    file, _ = gguf_file(target, "this command"), bindings("this command")
    engines = [Engine("slipstream", "slipstream", str(file)), Engine(LLAMA, LLAMA, str(file))]
    engines += [] if beside is None else [Engine(beside, "slipstream", beside)]
    forwards, prompts = [f"tokens {width}" for width in numbers("--widths", widths)], [f"prompt {prompt}"]
    large = torch.ones(FLOATS)
    times, bandwidth = {}, list[float]()
    with ExitStack() as stack:
        workers = [stack.enter_context(Child(engine.name, engine.command(str(context)))) for engine in engines]
        for requests in forwards, prompts:  # a prompt takes the place of the context
            for turn in range(turns + 1):
                for request in requests:
                    for worker in workers:
                        milliseconds = worker.ask(request)
                        if turn:  # the first turn warms up
                            times.setdefault((worker.name, request), []).append(milliseconds)
                bandwidth.append(_bandwidth(large))
        del large
        memory = {worker.name: worker.ask("memory") for worker in workers}
    medians = {key: median(values) for key, values in times.items()}
    console.print(f"{file.name}: {file.stat().st_size / 1e6:.0f} MB, {torch.get_num_threads()} threads")
    console.print(f"memory bandwidth: {median(bandwidth):.1f} GB/s, at most {max(bandwidth):.1f}")
    console.print(_forwards([engine.name for engine in engines], forwards + prompts, medians))
    starts = {engine.name: [engine.cold_start() for _ in range(cold + 1)][1:] for engine in engines} if cold else {}
    console.print(_processes([engine.name for engine in engines], memory, starts))
    by_name = {f"{name}, {request}": values for (name, request), values in times.items()}
    result = {"target": target, "bandwidth": bandwidth, "milliseconds": by_name, "memory": memory, "starts": starts}
    save(json_file, result)


def _bandwidth(large: torch.Tensor) -> float:
    """GB/s of reading the tensor once."""
    started = perf_counter()
    large.sum()
    return large.numel() * large.element_size() / (perf_counter() - started) / 1e9


def _forwards(names: Sequence[str], requests: Sequence[str], medians: dict[tuple[str, str], float]) -> Table:
    table = Table("median ms", *names, "relative to one token", f"{LLAMA} / slipstream", title_justify="left")
    ours = names[0]
    for request in requests:
        relative = ", ".join(f"{medians[name, request] / medians[name, requests[0]]:.2f}" for name in names)
        cells = [f"{medians[name, request]:.1f}" for name in names]
        table.add_row(request, *cells, relative, f"{medians[LLAMA, request] / medians[ours, request]:.2f}")
    return table


def _processes(names: Sequence[str], memory: dict[str, Any], starts: dict[str, list[float]]) -> Table:
    table = Table("process", *names)
    for kind in ("resident", "anonymous"):
        table.add_row(f"{kind} MB", *(f"{memory[name][kind] / 1e6:.0f}" for name in names))
    if starts:
        table.add_row("cold start, s", *(f"{median(starts[name]):.2f}" for name in names))
    return table


if __name__ == "__main__":
    run(main)
