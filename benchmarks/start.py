"""Seconds from the command to the first token, and peak memory: the first start of a file, and the next ones.

    python benchmarks/start.py MODEL.gguf smollm2 --turns 5
    python benchmarks/start.py MODEL.gguf --checkout OTHER/FOLDER

The first start finds an empty cache but for compiled kernels: it reads the tokenizer, tries the model and measures its
forwards. A checkout's sources take turns with this one's. Needs Linux or macOS, and the file in the system's cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import typer
from rich.table import Table
from terminal import Count, console, run

from slipstream.errors import SlipstreamError
from slipstream.models.cache_folder import cache_folder

SOURCE = Path(__file__).parents[1] / "src"
UNIT = 1 if sys.platform == "darwin" else 1024  # of the peak memory that the system reports, in bytes


@dataclass(frozen=True)
class Start:
    """A start of `slipstream generate`."""

    seconds: float  # to the first character of the answer
    peak_bytes: int


def start(source: Path, target: str, cache: Path) -> Start:
    """Run the command of these sources. cache: the folder of what is kept between starts."""
    command = [sys.executable, "-m", "slipstream", "generate", "Name three rivers.", "-m", target, "--max-tokens", "8"]
    environment = os.environ | {"PYTHONPATH": str(source), "SLIPSTREAM_MODELS": str(cache), "PYTHONUNBUFFERED": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = ""  # the sources are compiled once, as in an installed package
    started = perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    first = process.stdout.read(1)
    seconds = perf_counter() - started
    process.stdout.read()
    errors = process.stderr.read().decode(errors="replace").strip().splitlines()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or not first:
        raise SlipstreamError(f"{target}: {errors[-1] if errors else 'no answer'}")
    return Start(seconds, usage.ru_maxrss * UNIT)


def main(
    targets: list[str],
    turns: Count = 3,
    checkout: Annotated[Path | None, typer.Option(help="folder of another checkout, to compare with")] = None,
) -> None:
    """Print the median of all next starts, the first start, and the largest peak of memory."""
    sources = {"here": SOURCE} | ({} if checkout is None else {str(checkout): checkout / "src"})
    table = Table("model", "sources", "first start, s", "next starts, s", "peak MB")
    for target in targets:
        kept = target if Path(target).exists() else str(cache_folder() / target)
        starts: dict[str, list[Start]] = {name: [] for name in sources}
        with tempfile.TemporaryDirectory() as folder:
            caches = {name: Path(folder) / str(number) for number, name in enumerate(sources)}
            for cache in caches.values():
                cache.mkdir()
                (cache / "kernels").symlink_to(cache_folder() / "kernels")
            for _ in range(turns + 1):
                for name, source in sources.items():
                    starts[name].append(start(source, kept, caches[name]))
        for name, (first, *others) in starts.items():
            seconds = median(other.seconds for other in others)
            peak = max(other.peak_bytes for other in (first, *others))
            table.add_row(target, name, f"{first.seconds:.2f}", f"{seconds:.2f}", f"{peak / 1e6:.0f}")
    console.print(table)


if __name__ == "__main__":
    run(main)
