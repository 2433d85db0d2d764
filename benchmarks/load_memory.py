"""How much memory does loading a model take at its peak? (Linux only.)

    python benchmarks/load_memory.py smollm2
    python benchmarks/load_memory.py TARGET --quantise int4

Sampled every 5 milliseconds while the model is loaded: the process's anonymous memory, which is all but the pages of
mapped files (the system takes those back when it needs them). Given over the size of the weight files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from threading import Event, Thread
from typing import Annotated

import torch
import typer
from terminal import JsonFile, console, run

from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.cpu.quantised_linear import BITS
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.weights.model_files import quiet
from slipstream.models.weights.resolve import resolve

ROLLUP = Path("/proc/self/smaps_rollup")
EVERY_S = 0.005


class Watch(Thread):
    """Keeps the most anonymous memory, in bytes, that was seen between `start` and `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.most = _anonymous()
        self._over = Event()

    def run(self) -> None:
        """Until `stop`."""
        while not self._over.wait(EVERY_S):
            self.most = max(self.most, _anonymous())

    def stop(self) -> int:
        """What came on top of the memory at the start, at most."""
        self._over.set()
        self.join()
        return self.most - self.before


def main(
    target: str, dtype: str = "auto", quantise: Annotated[str | None, typer.Option()] = None, json_file: JsonFile = None
) -> None:
    """Print the size of the weight files, the peak while they are loaded, and what stays."""
    quiet()
    if quantise not in (None, *BITS):
        raise UsageError(f"--quantise {quantise!r}; allowed: {', '.join(BITS)}")
    if not ROLLUP.exists():
        raise SlipstreamError(f"{ROLLUP} does not exist; this needs Linux")
    weights = sum(file.stat().st_size for file in Path(resolve(target)).glob("*.safetensors"))
    if not weights:
        raise UsageError(f"target {target!r}; allowed: a model whose folder here holds .safetensors files")
    torch.ones(1) @ torch.ones(1)  # what the first product loads is not the model's
    watch = Watch()
    watch.start()
    loaded = load(target, LoadOptions(dtype, quantise=quantise))
    stays = _anonymous() - watch.before
    found = {"weights": weights, "peak": watch.stop(), "stays": stays}
    ratio = found["peak"] / weights
    sizes = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in found.items())
    console.print(f"{target}, {loaded.model.dtype if loaded.model else dtype}: {sizes}; peak over weights {ratio:.2f}")
    if json_file is not None:
        json_file.write_text(json.dumps({"target": target, "ratio": ratio, **found}) + "\n")


def _anonymous() -> int:
    found = re.search(r"^Anonymous:\s+(\d+) kB", ROLLUP.read_text(), re.M)
    if found is None:
        raise SlipstreamError(f"{ROLLUP} does not say how much is anonymous; this needs a newer Linux")
    return int(found[1]) * 1024


if __name__ == "__main__":
    run(main)
