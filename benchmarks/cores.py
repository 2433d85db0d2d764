"""How does decoding scale with a processor's cores, beside Hugging Face's `generate` and what the memory allows?

    python benchmarks/cores.py runs/cores
    python benchmarks/cores.py runs/cores --target TARGET --draft DRAFT --threads 4,8,16 --json cores.json

For each number of threads a process of its own, bound to cores, runs `slipstream bench`: plain decoding, `auto` and
Hugging Face's `generate` in turns on the same prompts, each once. The limit is the time to read a plain step's weights
at the rate of a copy, read and written, by as many threads. At the end one process computes logits at several widths,
behind more than 1,024 positions where the model has as many, with 1 to 33 threads, and compares them to the bit.

Started again with the same folder, it goes on after its last measurement. Exit code 1 if a run failed, if a text is
different from plain decoding's, if a text of ours depends on the threads, or if bits do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import typer
from rich.table import Table
from terminal import Count, JsonFile, console, numbers, run

from slipstream.bench.records import Run, read_records
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.cpu.thread_placement import physical_cores
from slipstream.text.prompt_sets import builtin_prompts, read_prompts, spread

ARMS = {"plain": "none", "auto": "auto", "hf": "hf"}
OURS = ("plain", "auto")
BITS_THREADS = (1, 2, 3, 5, 8, 16, 33)
WIDTHS = (1, 2, 5, 8, 16)
CONTEXT, CHUNK = 1100, 256  # positions before the compared ones; tokens of them that are read at a time
COPIED = 1 << 28  # bytes
ENVIRONMENT = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
OVERSUBSCRIBED = {"OMP_WAIT_POLICY": "passive", "OMP_PROC_BIND": "false"}

Line = dict[str, Any]


def main(
    folder: Path,
    target: str = "smollm2",
    draft: str | None = None,
    threads: str | None = typer.Option(None, help="numbers of threads  [default: 1, 2, 4, ... up to all cores]"),
    prompt_file: Path | None = None,
    num_prompts: Count = 3,
    max_tokens: Count = 48,
    json_file: JsonFile = None,
) -> None:
    """Print a line per number of threads and whether bits agree; keep every measurement in a folder."""
    counts = numbers("--threads", threads) if threads else up_to(all_cores())
    plan: Line = {"target": target, "arms": [*ARMS.values()], "repeats": 1, "max_tokens": max_tokens}
    plan |= {"draft": draft} if draft else {}
    prompts = spread(read_prompts(prompt_file) if prompt_file else builtin_prompts(), num_prompts)
    begin(folder, {**plan, "report": False, "prompt_file": str((folder / "prompts.jsonl").resolve())})
    questions = [json.dumps({"category": prompt.category, "turns": [prompt.prompt]}) + "\n" for prompt in prompts]
    (folder / "prompts.jsonl").write_text("".join(questions), encoding="utf-8")
    bits = measured(folder / "bits.json", "compare_bits", target, threads=None)
    lines = list[Line]()
    for count in counts:
        speed = measured(folder / f"copy-{count}.json", "copy_speed", threads=count)
        bench(folder, count)
        _, runs = read_records(folder / f"threads-{count}")
        lines.append(summary(count, runs, bits["weight_bytes"] / speed["bytes_per_second"]))
    compare_texts(lines)
    console.print(table_of(lines))
    console.print(bits_line(bits), soft_wrap=True)
    if json_file is not None:
        report = {"plan": plan, "prompts": len(prompts), "threads": lines, "bits": bits}
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if bits["different"] or any(line["errors"] or line["different"] or line["depend_on_threads"] for line in lines):
        raise typer.Exit(1)


def all_cores() -> int:
    """How many cores this program may run on, hyperthreads counted once."""
    if sys.platform == "linux":
        return physical_cores(frozenset(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def up_to(cores: int) -> list[int]:
    """1, 2, 4, ... and all cores."""
    powers = takewhile(lambda count: count < cores, (1 << i for i in range(32)))
    return [*powers, cores]


def begin(folder: Path, plan: Line) -> None:
    """Write the plan that all processes follow, or see that it is the one of what the folder holds."""
    file = folder / "plan.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else plan
    except (OSError, ValueError) as error:
        raise UsageError(f"folder {str(folder)!r} cannot be used: {error}; allowed: a new folder") from error
    if earlier != plan:
        name = next(name for name in plan if earlier.get(name) != plan[name])
        raise UsageError(f"{name} {plan[name]!r}; allowed: {earlier.get(name)!r} as in {str(file)!r}, or a new folder")
    file.write_text(json.dumps(plan), encoding="utf-8")


def environment(threads: int | None) -> dict[str, str]:
    """Of a process with so many threads, each on a core of its own; None: it sets their number itself."""
    free = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    if threads is None:
        return free | OVERSUBSCRIBED
    return free | ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}


def measured(file: Path, function: str, *arguments: str, threads: int | None) -> Line:
    """What a function of this file returns in a process of its own; read back if it has been measured before."""
    if not file.exists():
        code = f"import json, sys; sys.path.insert(0, sys.argv[1]); from cores import {function}"
        code += f"; print(json.dumps({function}(*sys.argv[2:])))"
        command = [sys.executable, "-c", code, str(Path(__file__).parent), *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", env=environment(threads))
        if done.returncode:
            raise SlipstreamError(f"{function}: a process ended with exit code {done.returncode}")
        scratch = file.with_suffix(".part")
        scratch.write_text(done.stdout, encoding="utf-8")
        scratch.replace(file)
    line: Line = json.loads(file.read_text(encoding="utf-8"))
    return line


def bench(folder: Path, threads: int) -> None:
    """Run `slipstream bench` with so many threads; it goes on where it was stopped, and records runs that fail."""
    code = "from slipstream.apps.cli import main; main()"
    out = str(folder / f"threads-{threads}")
    command = [sys.executable, "-c", code, "bench", "--plan", str(folder / "plan.json"), "--out", out]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, env=environment(threads))
    if done.returncode not in (0, 1):
        raise SlipstreamError(f"{threads} threads: the benchmark ended with exit code {done.returncode}")


def copy_speed() -> Line:
    """Bytes per second, read and written, of a copy by all threads: the median of 15."""
    import torch

    source, copy, seconds = torch.ones(COPIED // 4), torch.empty(COPIED // 4), list[float]()
    for _ in range(16):
        started = perf_counter()
        copy.copy_(source)
        seconds.append(perf_counter() - started)
    return {"bytes_per_second": 2 * COPIED / median(seconds[1:])}


def compare_bits(target: str) -> Line:
    """Which numbers of threads give other logits than one, by width; and the bytes of a plain step's weights."""
    import torch

    from slipstream import SpeculativeDecoder
    from slipstream.models.weights.model_files import quiet

    quiet()
    backend = SpeculativeDecoder(target, drafter="none").target.backend
    length = min(CONTEXT, backend.max_length - max(WIDTHS))
    backend.attended_unit = 1
    backend.reserve(1, length + max(WIDTHS))
    size = length + max(WIDTHS), min(1000, backend.vocab_size)
    text = torch.randint(size[1], (1, size[0]), generator=torch.Generator().manual_seed(0))
    expected, different = dict[int, Any](), list[Line]()
    for threads in BITS_THREADS:
        torch.set_num_threads(threads)
        for first in range(0, length, CHUNK):
            backend.forward(text[:, first : min(first + CHUNK, length)], [first], first_slot=0, logits=False)
        for width in WIDTHS:
            logits = backend.forward(text[:, length : length + width], [length], first_slot=0, logits=True)
            if not torch.equal(logits, expected.setdefault(width, logits)):
                different.append({"threads": threads, "width": width})
    return {"context": length, "different": different, "weight_bytes": weight_bytes(backend.model)}


def weight_bytes(model: Any) -> int:
    """Bytes of the matrices of a forward, as the kernels read them; of an embedding a row is read."""
    from torch import nn

    from slipstream.models.cpu.block_linear import BlockLinear
    from slipstream.models.cpu.packed_linear import KernelLinear, PackedLinear

    total = 0
    for module in model.modules():
        if isinstance(module, KernelLinear):
            total += sum(array.nbytes for array in module._arrays if array is not None)
        elif isinstance(module, BlockLinear):
            total += sum(part.data.nbytes for part in module.parts)
        elif isinstance(module, (nn.Linear, PackedLinear)):
            total += module.in_features * module.out_features * model.dtype.itemsize
    return total


def summary(threads: int, runs: Sequence[Run], limit_seconds: float) -> Line:
    """The figures of one number of threads. step_ms: of plain decoding, prompts left out."""
    line: Line = {"threads": threads, "limit_ms": 1e3 * limit_seconds, "step_ms": None, "texts": {}}
    line["errors"] = [f"{run.arm}: {run.error}" for run in runs if run.error]
    for name, arm in ARMS.items():
        of_arm = [run for run in runs if run.arm == arm and not run.error]
        seconds = sum(run.seconds for run in of_arm)
        line[name] = sum(run.num_output_tokens for run in of_arm) / seconds if seconds else None
        line["texts"][name] = {" ".join(run.prompts): run.texts for run in of_arm}
    of_plain = [step["seconds"] for run in runs if run.arm == ARMS["plain"] for step in run.rounds or []]
    steps = [total for _, _, verify, _, total in of_plain if verify]  # a step that read the prompt verified nothing
    if steps:
        line["step_ms"] = 1e3 * median(steps)
    verdicts = [verdict for run in runs for verdict in run.verdicts]
    line |= {verdict: verdicts.count(verdict) for verdict in ("identical", "tie", "different")}
    return line


def compare_texts(lines: Sequence[Line]) -> None:
    """Into each line: how many of our texts are not those of the first number of threads."""
    for line in lines:
        pairs = [(line["texts"][name], lines[0]["texts"][name]) for name in OURS]
        line["depend_on_threads"] = sum(texts.get(key) != text for texts, first in pairs for key, text in first.items())


def table_of(lines: Sequence[Line]) -> Table:
    """A line per number of threads."""
    speeds = ("hf", "plain", "auto", "auto / hf")
    table = Table("threads", *speeds, "plain step", "limit", "step / limit", "scaling", "of the limit", "texts")

    def ratio(number: float | None, divisor: float | None) -> str:
        return f"{number / divisor:.2f}" if number and divisor else "-"

    first = lines[0]
    for line in lines:
        cells = [f"{line[name]:.1f}" if line[name] else "-" for name in ("hf", "plain", "auto")]
        step = f"{line['step_ms']:.2f} ms" if line["step_ms"] else "-"
        texts = [f"{line[name]} {name}" for name in ("identical", "tie", "different") if line[name]]
        texts += [f"{line['depend_on_threads']} depend on the threads"] if line["depend_on_threads"] else []
        table.add_row(
            str(line["threads"]),
            *cells,
            ratio(line["auto"], line["hf"]),
            step,
            f"{line['limit_ms']:.2f} ms",
            ratio(line["step_ms"], line["limit_ms"]),
            ratio(first["step_ms"], line["step_ms"]),
            ratio(first["limit_ms"], line["limit_ms"]),
            ", ".join([*texts, *line["errors"]]),
        )
    return table


def bits_line(bits: Line) -> str:
    """What the comparison of logits found, in words."""
    threads, widths = (", ".join(map(str, several)) for several in (BITS_THREADS, WIDTHS))
    of = f"logits after {bits['context']} positions at widths {widths} with {threads} threads"
    if not bits["different"]:
        return f"{of}: the same bits"
    differs = "; ".join(f"width {case['width']} with {case['threads']} threads" for case in bits["different"])
    return f"{of}: other bits at {differs}"


if __name__ == "__main__":
    run(main)
