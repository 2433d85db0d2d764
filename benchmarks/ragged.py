"""What ragged forwards save: rows that take different numbers of tokens, padded to the longest or one after another.

    python benchmarks/ragged.py smollm2
    python benchmarks/ragged.py TARGET --counts 1,1,1,16/4,1,4,2 --context 200 --turns 20

A line per list of counts: tokens of each row, milliseconds both ways (medians; the ways take turns), and whether the
logits are the same bits. Both are padded as in reproducible mode: the rectangle to its width, the ragged forward to its
number of tokens.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter

import torch
from rich import box
from rich.table import Table
from terminal import Count, JsonFile, console, run
from torch import Tensor

from slipstream.core.interfaces import RaggedForwards, RowSegment
from slipstream.core.session import Session
from slipstream.errors import UsageError
from slipstream.models.layouts import RaggedLayout, end_to_end, make_session
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.weights.model_files import quiet
from slipstream.reproducibility.calibration_cache import choose_shapes

COUNTS = "1,1,1,1,1,1,1,8/1,1,1,16,1,1,1,2/4,1,4,4,1,4,2,4/2,2,2,2,2,2,2,2/4,4,4,4,4,4,4,4"
LONGEST = 32  # tokens of a row in a round
READ = 256  # tokens of a context read in one forward


@dataclass(frozen=True)
class Line:
    """Median milliseconds for one list of counts, and whether the bits agree."""

    counts: list[int]
    rectangle: float
    ragged: float
    same: bool


def main(
    target: str,
    counts: str = COUNTS,
    dtype: str = "auto",
    context: Count = 200,
    turns: Count = 20,
    json_file: JsonFile = None,
) -> None:
    """Print the lines."""
    quiet()
    lists = [_counts(part) for part in counts.split("/")]
    loaded, rows = load(target, LoadOptions(dtype)), max(map(len, lists))
    shapes, _ = choose_shapes(loaded, "auto", rows)
    session = make_session(loaded.backend, shapes)
    if not isinstance(session.layout, RaggedLayout) or not session.layout.allowed(session.table):
        raise UsageError(
            f"model {target!r} has no ragged forwards here; allowed: models whose layers run in fewer operators"
        )
    starts = [context + slot for slot in range(rows)]  # no two alike, as in a batch
    session.reserve(rows, starts[-1] + 2 * LONGEST)
    tokens = torch.randint(
        1, loaded.backend.vocab_size, (rows, starts[-1] + LONGEST), generator=torch.Generator().manual_seed(1)
    )
    for slot, start in enumerate(starts):
        for at in range(0, start, READ):
            chunk = tokens[slot : slot + 1, at : min(at + READ, start)]
            loaded.backend.forward(chunk, [at], first_slot=slot, logits=False)
    lines = [_line(session, tokens, one, starts, turns) for one in lists]
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("tokens of each row", "rectangle", "ragged", "", "bits"):
        table.add_column(name, justify="right")
    for line in lines:
        ratio, bits = f"{line.ragged / line.rectangle:.2f}", "same" if line.same else "differ"
        times = f"{line.rectangle:.1f} ms", f"{line.ragged:.1f} ms"
        table.add_row(" ".join(map(str, line.counts)), *times, ratio, bits)
    console.print(f"{target}, {context} tokens before, {torch.get_num_threads()} threads, torch {torch.__version__}")
    console.print(table)
    if json_file:
        json_file.write_text(json.dumps([asdict(line) for line in lines], indent=2))


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",") if part.isdigit()]
    if len(counts) < 2 or len(counts) != len(text.split(",")) or not 1 <= min(counts) <= max(counts) <= LONGEST:
        raise UsageError(f"--counts {text!r}; allowed: tokens of two rows or more, 1 to {LONGEST} each, e.g. 1,4,2")
    return counts


def _line(session: Session, tokens: Tensor, counts: list[int], contexts: list[int], turns: int) -> Line:
    backend, rows, starts = session.backend, len(counts), contexts[: len(counts)]
    assert isinstance(backend, RaggedForwards)
    width = session.shapes.width_for(max(counts), rows)
    wide = torch.stack([row[start : start + width] for row, start in zip(tokens, starts, strict=False)])
    texts = [row[:count].tolist() for row, count in zip(wide, counts, strict=True)]
    inputs = end_to_end(texts, session.shapes.total_for(sum(counts)) or sum(counts))
    segments = [RowSegment(slot, start, count) for slot, (start, count) in enumerate(zip(starts, counts, strict=True))]
    seconds: tuple[list[float], list[float]] = [], []
    for turn in range(turns + 1):
        begun = perf_counter()
        rectangle = backend.forward(wide, starts, first_slot=0, logits=True)
        between = perf_counter()
        ragged = backend.forward_ragged(inputs, segments, widths=session.shapes.widths)
        if turn:  # the first warms up
            seconds[0].append(between - begun)
            seconds[1].append(perf_counter() - between)
    expected = torch.cat([row[:count] for row, count in zip(rectangle, counts, strict=True)])
    same = torch.equal(expected, ragged[: sum(counts)])
    return Line(counts, 1e3 * median(seconds[0]), 1e3 * median(seconds[1]), same)


if __name__ == "__main__":
    run(main)
