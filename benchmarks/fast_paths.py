"""What the fast paths on CPU bring: one forward of few tokens, by weight format and kernels.

    python benchmarks/fast_paths.py smollm2
    python benchmarks/fast_paths.py TARGET --ways plain,packed,int4

plain: the model as transformers loads it, with the same KV cache. packed: PyTorch's kernels, that is layers of one
input fused, weights in oneDNN's layout, query heads grouped, decoder layers in fewer operators, attended lengths as
short as possible; own-layers: all of this but the layers; full-length: all but the last. stacked: Slipstream's own
kernels; compiled: the same, decoder layers called one by one. int4, int8: in few bits, as draft models are loaded, by
its own kernels where it has them. The tokens come after --context others. The ways take turns; medians of many turns
count. Beside them the largest difference of a logit from the plain model's, relative to the largest logit, and how
often the most likely token is the same.
"""

from __future__ import annotations

import json
import os
from statistics import median
from time import perf_counter

import torch
import typer
from rich import box
from rich.table import Table
from terminal import Count, JsonFile, console, numbers, run

from slipstream.core.interfaces import set_attended_lengths
from slipstream.core.kv_slots import EXACT_FIT
from slipstream.models.cpu.kernel_libraries import SWITCH, kernels
from slipstream.models.decoder.fused_layer import is_fused
from slipstream.models.hf.backend import HFBackend
from slipstream.models.load import load
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.models.weights.model_files import quiet

WAYS = ("plain", "own-layers", "full-length", "packed", "compiled", "stacked", "int4", "int8")
OWN_KERNELS = ("compiled", "stacked")
ATTENDED_UNIT = 512


def main(
    target: str,
    ways: str = ",".join(WAYS),
    widths: str = "1,2,4,5,8,16",
    dtype: str = "auto",
    turns: Count = 20,
    context: int = 200,
    json_file: JsonFile = None,
) -> None:
    """Print a line per way: milliseconds and ratio to the plain model for every width."""
    quiet()
    chosen, sizes = ways.split(","), numbers("--widths", widths)
    if unknown := [way for way in chosen if way not in WAYS]:
        raise typer.BadParameter(f"--ways {unknown[0]!r}; allowed: {', '.join(WAYS)}")
    if context < 0:
        raise typer.BadParameter(f"--context {context}; allowed: from 0")
    if set(OWN_KERNELS) & set(chosen) and kernels() is None:
        chosen = [way for way in chosen if way not in OWN_KERNELS]
        console.print("no compiled kernels here: they need a C compiler and a processor with AVX2")
    models = {way: _load(target, way, dtype) for way in dict.fromkeys(["plain", *chosen])}
    tokens = torch.randint(1, 1000, (1, context + max(32, *sizes)), generator=torch.Generator().manual_seed(1))
    for way, loaded in models.items():
        set_attended_lengths(
            loaded.backend, ATTENDED_UNIT, () if way in ("plain", "full-length") else EXACT_FIT.attended_lengths
        )
        loaded.backend.reserve(1, tokens.shape[1])
        if context:
            loaded.backend.forward(tokens[:, :context], [0], first_slot=0, logits=False)
    seconds = _timed(models, tokens, context, sizes, turns)
    found = {way: _compared(models["plain"], loaded, tokens, context) for way, loaded in models.items()}
    console.print(
        f"{target}, {models['plain'].model.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("weights", *(f"{width} wide" for width in sizes), "logits off by", "same choice"):
        table.add_column(name, justify="right")
    for way, facts in found.items():
        for width in sizes:
            facts[f"ratio_{width}"] = median(seconds["plain", width]) / median(seconds[way, width])
            facts[f"median_ms_{width}"] = 1e3 * median(seconds[way, width])
            facts[f"fastest_ms_{width}"] = 1e3 * min(seconds[way, width])
        cells = [f"{facts[f'median_ms_{width}']:.1f} ms {facts[f'ratio_{width}']:.2f}x" for width in sizes]
        table.add_row(way, *cells, f"{facts['logits_off_by']:.1%}", f"{facts['same_choice']:.0%}")
    console.print(table)
    if json_file:
        json_file.write_text(json.dumps(found, indent=2))


def _load(target: str, way: str, dtype: str) -> Loaded:
    quantise = way if way in ("int4", "int8") else None
    os.environ[SWITCH] = "on" if way in (*OWN_KERNELS, "int4", "int8") else "off"
    loaded = load(target, LoadOptions(dtype, fast=way != "plain", quantise=quantise))
    if way == "own-layers":
        for layer in filter(is_fused, loaded.model.modules()):
            del layer.forward
    if way == "compiled" and isinstance(loaded.backend, HFBackend):
        loaded.backend.stack = None
    return loaded


def _timed(
    models: dict[str, Loaded], tokens: torch.Tensor, context: int, widths: list[int], turns: int
) -> dict[tuple[str, int], list[float]]:
    """Seconds of every forward; the ways take turns."""
    seconds: dict[tuple[str, int], list[float]] = {(way, width): [] for way in models for width in widths}
    for turn in range(turns + 1):
        for (way, width), taken in seconds.items():
            started = perf_counter()
            _logits(models[way], tokens[:, context : context + width], context).argmax(-1).tolist()
            if turn:  # the first warms up
                taken.append(perf_counter() - started)
    return seconds


def _compared(plain: Loaded, other: Loaded, tokens: torch.Tensor, context: int) -> dict[str, float]:
    """How far logits are from the plain model's, in forwards of so few tokens that quantised weights are used."""
    expected, got = (
        torch.cat([_logits(one, tokens[:, at : at + 4], at) for at in range(context, tokens.shape[1] - 3, 4)])
        for one in (plain, other)
    )
    off = float((got - expected).abs().max() / expected.abs().max())
    return {"logits_off_by": off, "same_choice": float((got.argmax(-1) == expected.argmax(-1)).float().mean())}


def _logits(loaded: Loaded, tokens: torch.Tensor, start: int) -> torch.Tensor:
    return loaded.backend.forward(tokens, [start], first_slot=0, logits=True)[0].float()


if __name__ == "__main__":
    run(main)
