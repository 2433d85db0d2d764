"""Grouped attention against transformers' own "sdpa" attention, one call on CPU, over widths and attended lengths.

    python benchmarks/attention.py                                   # shapes of SmolLM2-135M and Qwen2.5-1.5B
    python benchmarks/attention.py --model smollm2 --widths 1,2,5 --lengths 512
    python benchmarks/attention.py --shape 32/8/128 --dtypes bfloat16 --rows 4 --json FILE

Keys and values are laid out as in a decoder's KV cache: slices of longer buffers, a pair per layer, so that processor
caches are as cold as in a model. The queries are the last positions. A turn passes once over all layers with each
attention; the two alternate and change places. Each attention gets the mask it gets in a model, where it is made once
per forward, so making it is not timed. The answers are compared before anything is timed.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import exp, log
from statistics import mean, median
from time import perf_counter
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from terminal import Count, JsonFile, console, numbers, run
from torch import Tensor
from transformers import AutoConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.decoder.attention import group_mask, grouped_attention, repeats_of
from slipstream.models.weights.model_files import quiet
from slipstream.models.weights.resolve import resolve

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the answers, which are averages of unit normals


@dataclass(frozen=True)
class Heads:
    """The attention shape of a model: query heads, key heads, size of a head."""

    name: str
    heads: int
    key_heads: int
    size: int

    def __post_init__(self) -> None:
        if min(self.heads, self.key_heads, self.size) < 1 or self.heads % self.key_heads:
            raise UsageError(
                f"shape {self.heads}/{self.key_heads}/{self.size}; allowed: HEADS/KEY_HEADS/SIZE of whole numbers "
                "above 0, HEADS a multiple of KEY_HEADS"
            )

    @classmethod
    def parse(cls, text: str) -> Heads:
        """ "9/3/64": nine query heads, three key heads of size 64."""
        parts = text.split("/")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            raise UsageError(f"shape {text!r}; allowed: HEADS/KEY_HEADS/SIZE, for example 9/3/64")
        heads, key_heads, size = map(int, parts)
        return cls(text, heads, key_heads, size)

    @classmethod
    def of_model(cls, source: str) -> Heads:
        """From the configuration of a folder, a hub id or a name of the model cache; no weights are read."""
        try:
            config = AutoConfig.from_pretrained(resolve(source)).get_text_config()
        except (OSError, ValueError) as error:
            raise UsageError(f"model {source!r} has no readable configuration: {str(error).splitlines()[0]}") from error
        repeats = repeats_of(config)
        if repeats is None:
            raise UsageError(f"model {source!r} does not share key heads evenly; allowed: one count for all layers")
        heads = config.num_attention_heads
        return cls(source, heads, heads // repeats, getattr(config, "head_dim", None) or config.hidden_size // heads)


DEFAULTS = (Heads("SmolLM2-135M", 9, 3, 64), Heads("Qwen2.5-1.5B", 12, 2, 128))


@dataclass(frozen=True)
class Case:
    """What one call computes: `rows` sequences, `width` queries each, over `length` keys."""

    shape: Heads
    dtype: torch.dtype
    rows: int
    width: int
    length: int


@dataclass(frozen=True)
class Timing:
    """Microseconds per call, fastest and median turn, of both attentions."""

    grouped_fastest: float
    grouped_median: float
    sdpa_fastest: float
    sdpa_median: float

    @property
    def fastest(self) -> float:
        """How many times as fast the grouped attention is, by the fastest turns."""
        return self.sdpa_fastest / self.grouped_fastest

    @property
    def typical(self) -> float:
        """The same by the medians."""
        return self.sdpa_median / self.grouped_median


def main(
    model: Annotated[list[str], typer.Option(help="read the shape from a model's configuration")] = [],  # noqa: B006
    shape: Annotated[list[str], typer.Option(help="HEADS/KEY_HEADS/SIZE")] = [],  # noqa: B006
    widths: str = "1,2,3,4,5,6,7,8,16,32",
    lengths: str = "256,512,1024,2048,4096",
    dtypes: str = "bfloat16,float32",
    rows: Count = 1,
    layers: Count = 8,
    turns: Count = 20,
    json_file: JsonFile = None,
) -> None:
    """Print a table of ratios per shape and precision."""
    quiet()
    shapes = [*map(Heads.of_model, model), *map(Heads.parse, shape)] or list(DEFAULTS)
    wide, far = numbers("--widths", widths), numbers("--lengths", lengths)
    if max(wide) > min(far):
        raise UsageError(f"widths up to {max(wide)}, lengths from {min(far)}; allowed: no width above a length")
    lines = list[dict[str, Any]]()
    for one in shapes:
        for dtype in _dtypes(dtypes):
            found = {(w, n): measure(Case(one, dtype, rows, w, n), layers, turns) for n in far for w in wide}
            title = f"{one.name}, {one.heads}/{one.key_heads}/{one.size}, {_name(dtype)}"
            console.print(
                f"{title}: how many times as fast as sdpa, by the fastest turn (by the median)", soft_wrap=True
            )
            console.print(table_of(found))
            fastest, typical = means(found)
            console.print(f"geometric mean {fastest:.2f} ({typical:.2f})")
            lines += [
                {**asdict(one), "dtype": _name(dtype), "rows": rows, "width": w, "length": n, **asdict(timing)}
                | {"ratio_fastest": timing.fastest, "ratio_median": timing.typical}
                for (w, n), timing in found.items()
            ]
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads of {os.cpu_count()}, torch {torch.__version__}"
    console.print(f"{machine}; rows {rows}, {layers} layers, {turns} turns")
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine, "layers": layers, "turns": turns, "lines": lines}) + "\n")


@torch.inference_mode()
def measure(case: Case, layers: int, turns: int) -> Timing:
    """Time both attentions on random numbers. Raises `SlipstreamError` where their answers differ."""
    calls = attentions(case, layers)
    _compare(case, *(call(0) for call in calls))
    seconds: list[list[float]] = [[], []]
    for turn in range(turns + 1):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            started = perf_counter()
            for layer in range(layers):
                calls[which](layer)
            seconds[which].append(perf_counter() - started)
    grouped, plain = ([1e6 * taken / layers for taken in one[1:]] for one in seconds)  # the first turn warms up
    return Timing(min(grouped), median(grouped), min(plain), median(plain))


def attentions(case: Case, layers: int) -> tuple[Callable[[int], Tensor], Callable[[int], Tensor]]:
    """The grouped attention and transformers' own, as functions of the layer; both return [B, W, heads, D]."""
    shape, generator = case.shape, torch.Generator().manual_seed(1)
    repeats = shape.heads // shape.key_heads

    def normal(heads: int, count: int) -> Tensor:
        states = torch.randn(case.rows, heads, count, shape.size, generator=generator)
        return states.to(case.dtype)

    query = normal(shape.heads, case.width)
    cached = [normal(shape.key_heads, case.length + 256)[:, :, : case.length] for _ in range(2 * layers)]
    positions = torch.arange(case.length)
    allowed = (positions <= positions[-case.width :, None]).expand(case.rows, 1, -1, -1)
    module, mask = SimpleNamespace(num_key_value_groups=repeats), group_mask(allowed, repeats, case.dtype)
    scaling = shape.size**-0.5

    def grouped(layer: int) -> Tensor:
        keys, values = cached[2 * layer : 2 * layer + 2]
        return grouped_attention(module, query, keys, values, mask, scaling=scaling)[0]

    def plain(layer: int) -> Tensor:
        keys, values = cached[2 * layer : 2 * layer + 2]
        out: Tensor = sdpa_attention_forward(module, query, keys, values, allowed, scaling=scaling)[0]
        return out

    return grouped, plain


def _compare(case: Case, got: Tensor, expected: Tensor) -> None:
    apart = (got.float() - expected.float()).abs().max().item()
    if not apart <= TOLERANCE[case.dtype]:
        raise SlipstreamError(f"{case}: the answers differ by {apart:.1g}, expected at most {TOLERANCE[case.dtype]}")


def table_of(found: dict[tuple[int, int], Timing]) -> Table:
    """Ratios by width (lines) and attended length (columns)."""
    table = Table("width")
    widths, lengths = (list(dict.fromkeys(pair[i] for pair in found)) for i in (0, 1))
    for length in lengths:
        table.add_column(f"length {length}", justify="right")
    for width in widths:
        timings = [found[width, length] for length in lengths]
        table.add_row(str(width), *(f"{t.fastest:.2f} ({t.typical:.2f})" for t in timings))
    return table


def means(found: dict[tuple[int, int], Timing]) -> tuple[float, float]:
    """Geometric means of the ratios: by the fastest turns, by the medians."""
    logs = [(log(timing.fastest), log(timing.typical)) for timing in found.values()]
    return exp(mean(one for one, _ in logs)), exp(mean(two for _, two in logs))


def _dtypes(text: str) -> list[torch.dtype]:
    known = {_name(dtype): dtype for dtype in TOLERANCE}
    if unknown := [name for name in text.split(",") if name not in known]:
        raise UsageError(f"dtypes={unknown[0]!r}; allowed: {', '.join(known)}, separated by commas")
    return [known[name] for name in text.split(",")]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    run(main)
