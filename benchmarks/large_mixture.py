"""Runs a random mixture of experts in less memory than it takes, and compares texts, times and memory.

    python benchmarks/large_mixture.py FOLDER [--gigabytes 8] [--memory 4] [--tokens 16] [--whole]

Writes FOLDER/large.gguf in the shape of Qwen3-30B-A3B with fewer layers (Q4_K and Q6_K), and runs it in processes of
their own with SLIPSTREAM_MEMORY: twice with a panel file, which takes as much space again, then without room for one,
so that experts are packed when they are used. --whole adds a run without a limit. Prints a line of JSON for
each: seconds to load and per token, memory at the end (anonymous, and of files, which the system can take back), and
whether the text is that of the first run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from mixture_forwards import SHAPES, write

from slipstream.models.cache_folder import cache_folder
from slipstream.models.cpu.kernel_libraries import block_kernels, kernels

SHAPE = SHAPES["30b-a3b"]
LAYER_BYTES = SHAPE.experts * SHAPE.hidden * SHAPE.inner // 256 * (144 + 144 + 177)  # the last: Q4_K and Q6_K in turn
LARGEST_FILE = 1 << 20  # bytes: of the run without room on the disk
PROMPT = "The memory of this machine"


def main() -> None:
    """Write the file, run it and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--memory", type=float, default=4, help="gigabytes of memory to count on")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--whole", action="store_true", help="run it without a limit, too")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    file = arguments.folder / "large.gguf"
    if arguments.run:
        print(json.dumps(measured(file, arguments.tokens)))
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    block_kernels()  # compiled once, and before files are limited
    kernels()
    if not file.exists():
        write(file, SHAPE, max(1, round(arguments.gigabytes * 1e9 / LAYER_BYTES)))
    runs = {"panel file, first start": {}, "panel file, second start": {}, "experts as they are used": {"limit": "1"}}
    if arguments.whole:
        runs["without a limit"] = {"SLIPSTREAM_MEMORY": "1000"}
    texts = []
    for name, settings in runs.items():
        environment = os.environ | {"SLIPSTREAM_MEMORY": str(arguments.memory)} | settings
        # a cache folder of its own, with the kernels that are compiled already
        cache = arguments.folder / ("cache-full" if "limit" in settings else "cache")
        if not cache.exists():
            cache.mkdir()
            (cache / "kernels").symlink_to(cache_folder() / "kernels", target_is_directory=True)
        environment["SLIPSTREAM_MODELS"] = str(cache)
        command = [sys.executable, __file__, str(arguments.folder), "--tokens", str(arguments.tokens), "--run"]
        finished = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, encoding="utf-8")
        result = json.loads(finished.stdout.splitlines()[-1])
        texts.append(result.pop("text"))
        print(json.dumps({"run": name, **result, "same_text": texts[-1] == texts[0]}), flush=True)


def measured(file: Path, tokens: int) -> dict[str, Any]:
    """Load the file in this process and continue the prompt."""
    from slipstream import SamplingParams, SpeculativeDecoder

    if "limit" in os.environ:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    started = perf_counter()
    decoder = SpeculativeDecoder(str(file), drafter="none")
    loaded = perf_counter()
    result = decoder.generate(PROMPT, SamplingParams(max_tokens=tokens, ignore_eos=True).explicit, chat=False)
    seconds = perf_counter() - loaded
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    memory = {name: int(status[name].split()[0]) * 1024 / 1e9 for name in ("RssAnon", "RssFile")}
    return {
        "load_seconds": round(loaded - started, 2),
        "seconds_per_token": round(seconds / tokens, 3),
        "anonymous_gigabytes": round(memory["RssAnon"], 2),
        "file_gigabytes": round(memory["RssFile"], 2),
        "text": result.token_ids,
    }


if __name__ == "__main__":
    main()
