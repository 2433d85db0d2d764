"""How does decoding scale with a processor's cores, compared with its peers and with the memory's bandwidth?

    python benchmarks/cores.py runs/cores
    python benchmarks/cores.py runs/cores --target TARGET --draft DRAFT --threads 4,8,16 --json cores.json
    python benchmarks/cores.py runs/7b --shape 7b --gguf --json cores.json    # random weights, written to the folder
    python benchmarks/cores.py runs/small --small                             # tiny ones, to see that everything runs

For each number of threads it measures three things, each in a process of its own whose threads are bound to cores: a
copy of memory; single steps after long contexts; and `slipstream bench`, in which plain decoding, `auto` and the peers
take turns on the same prompts. Peers are Hugging Face's `generate`, plain and assisted, and for GGUF files llama.cpp
(llama-cpp-python), plain and with prompt lookup. The limit of a step is the time to read its weights, keys and values
at the speed of the copy, counting the bytes it reads and writes. At the end one process computes logits at
several widths with 1 to 33 threads, after 1,100 positions where the model has as many, and compares their bits.

Started again with the same folder, it continues after its last measurement. After --minutes it prints what it has and
exits with code 3. It exits with code 1 if a run failed, if a text differs from plain decoding's (except llama.cpp's,
which rounds differently), or if one of Slipstream's texts or the logits depend on the number of threads.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import Annotated, Any

import typer
from rich.table import Table
from terminal import Count, JsonFile, console, numbers, run, save

from slipstream.bench.arms import ASSISTED, HF, LLAMA, LLAMA_LOOKUP, LOOKUP, OF_LLAMA_CPP
from slipstream.bench.records import Run, read_records
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.cpu.thread_placement import physical_cores
from slipstream.models.weights.model_files import is_gguf
from slipstream.text.prompt_sets import builtin_prompts, read_prompts, spread

OURS = {"none": "plain", "auto": "auto"}
BITS_THREADS = (1, 2, 3, 5, 8, 16, 33)
WIDTHS = (1, 2, 5, 8, 16)
CONTEXT, CHUNK = 1100, 256  # positions before the compared ones; how many of them are read at a time
COPIED = 1 << 28  # bytes
TURNS, FILLED = 9, 512  # timed steps after each context; positions after which the random numbers repeat
ENVIRONMENT = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
OVERSUBSCRIBED = {"OMP_WAIT_POLICY": "passive", "OMP_PROC_BIND": "false"}
STOPPED = 3  # exit code

Line = dict[str, Any]


class TimeIsUpError(SlipstreamError):
    """The time of --minutes is over. Finished measurements are kept."""


def main(
    folder: Path,
    target: str = "smollm2",
    draft: str | None = None,
    shape: Annotated[
        str | None, typer.Option(help="measure a pair of random weights of this shape, see random_pair.py")
    ] = None,
    gguf: Annotated[bool, typer.Option("--gguf", help="with --shape: the pair as Q4_K_M files")] = False,
    threads: Annotated[
        str | None, typer.Option(help="separated by commas", show_default="1,2,4,... and all cores")
    ] = None,
    contexts: Annotated[
        str, typer.Option(help="positions before the single steps, separated by commas")
    ] = "128,8192,32768",
    prompt_file: Path | None = None,
    num_prompts: Count = 3,
    max_tokens: Count = 48,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="minutes after which to stop", show_default="never")
    ] = None,
    small: Annotated[
        bool, typer.Option("--small", help="try it out: shape tiny, short texts, 1 and 2 threads")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Print a line per number of threads and whether the logits agree; keep every measurement in FOLDER."""
    ends = None if minutes is None else monotonic() + 60 * minutes
    if small:
        shape, threads, contexts, num_prompts, max_tokens = "tiny", "1,2", "128,1024", 2, 16
    if gguf and shape is None:
        raise UsageError("--gguf without --shape; allowed: with it, or --target FILE.gguf")
    if shape is not None:
        target, draft, prompt_file = write_shape(shape, folder / "pair", gguf)
    counts = numbers("--threads", threads) if threads else up_to(all_cores())
    places = numbers("--contexts", contexts)
    plan: Line = {"target": target, "arms": arms_of(target, draft), "repeats": 1, "max_tokens": max_tokens}
    plan |= {"draft": draft} if draft else {}
    prompts = spread(read_prompts(prompt_file) if prompt_file else builtin_prompts(), num_prompts)
    begin(folder, {**plan, "report": False, "prompt_file": str((folder / "prompts.jsonl").resolve())})
    questions = [json.dumps({"category": prompt.category, "turns": [prompt.prompt]}) + "\n" for prompt in prompts]
    (folder / "prompts.jsonl").write_text("".join(questions), encoding="utf-8")
    stage, lines, bits = Stage(folder, ends), list[Line](), None
    try:
        for count in counts:
            speed = stage.measured(f"copy-{count}", "copy_speed", threads=count)["bytes_per_second"]
            steps = stage.measured(f"steps-{count}", "steps_after", target, *map(str, places), threads=count)
            stage.bench(count)
            _, runs = read_records(folder / f"threads-{count}")
            lines.append(summary(count, runs, steps["weight_bytes"] / speed))
            lines[-1]["contexts"] = [{**step, "limit_ms": 1e3 * step["bytes"] / speed} for step in steps["contexts"]]
        bits = stage.measured("bits", "compare_bits", target, threads=None)
    except TimeIsUpError:
        console.print(f"stopped after {minutes:g} minutes; run it with the same folder to continue", soft_wrap=True)
    compare_with_first(lines)
    print_report(lines, bits)
    save(json_file, {"plan": plan, "prompts": len(prompts), "threads": lines, "bits": bits})
    faults = ("errors", "different", "depend_on_threads", "bits_depend_on_threads")
    if (bits is not None and bits["different"]) or any(line[fault] for line in lines for fault in faults):
        raise typer.Exit(1)
    if bits is None:
        raise typer.Exit(STOPPED)


def write_shape(name: str, folder: Path, gguf: bool) -> tuple[str, str, Path]:
    """Write a pair of random weights unless it exists. Returns its target, its draft model and its prompts."""
    from random_pair import FILES, SHAPES, write_pair

    if name not in SHAPES:
        raise UsageError(f"--shape {name!r}; allowed: {', '.join(SHAPES)}")
    write_pair(name, folder, gguf=gguf)
    target, draft = (str((folder / (f"{file}.gguf" if gguf else file)).resolve()) for file in FILES)
    return target, draft, folder / "prompts.jsonl"


def arms_of(target: str, draft: str | None) -> list[str]:
    """Slipstream's arms, and the installed peers that can run the target's files."""
    if not is_gguf(target):
        return [*OURS, HF, ASSISTED if draft else LOOKUP]
    if find_spec("llama_cpp") is not None:
        return [*OURS, LLAMA, LLAMA_LOOKUP]
    console.print("llama.cpp is left out: llama-cpp-python is not installed")
    return [*OURS]


def all_cores() -> int:
    """Number of physical cores this program may run on."""
    if sys.platform == "linux":
        return physical_cores(frozenset(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def up_to(cores: int) -> list[int]:
    """The powers of two below the number of cores, and the number itself."""
    powers = takewhile(lambda count: count < cores, (1 << i for i in range(32)))
    return [*powers, cores]


def begin(folder: Path, plan: Line) -> None:
    """Write the plan that all processes follow; UsageError if the folder holds measurements of another plan."""
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
    """The environment of a process with these threads, each on its own core. None: the process sets their number."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    if threads is None:
        return inherited | OVERSUBSCRIBED
    return inherited | ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}


@dataclass(frozen=True)
class Stage:
    """Runs measurements in processes of their own and keeps them in a folder."""

    folder: Path
    ends: float | None  # when to stop, by `monotonic`

    def measured(self, name: str, function: str, *arguments: str, threads: int | None) -> Line:
        """The result of a function of this file with this many threads, from the folder if it is there."""
        file = self.folder / f"{name}.json"
        if not file.exists():
            code = f"import json, sys; sys.path.insert(0, sys.argv[1]); from cores import {function}"
            code += f"; print(json.dumps({function}(*sys.argv[2:])))"
            printed = self._run([sys.executable, "-c", code, str(Path(__file__).parent), *arguments], threads, (0,))
            scratch = file.with_suffix(".part")
            scratch.write_text(printed, encoding="utf-8")
            scratch.replace(file)
        line: Line = json.loads(file.read_text(encoding="utf-8"))
        return line

    def bench(self, threads: int) -> None:
        """Run `slipstream bench` with this many threads; it continues where it was stopped and records failed runs."""
        code = "from slipstream.apps.cli import main; main()"
        options = ["--plan", str(self.folder / "plan.json"), "--out", str(self.folder / f"threads-{threads}")]
        self._run([sys.executable, "-c", code, "bench", *options], threads, (0, 1))

    def _run(self, command: list[str], threads: int | None, allowed: tuple[int, ...]) -> str:
        """Run a process and return what it prints."""
        seconds = None if self.ends is None else max(0.0, self.ends - monotonic())
        pipe = subprocess.PIPE
        try:
            process = subprocess.run(command, stdout=pipe, encoding="utf-8", env=environment(threads), timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise TimeIsUpError("time is up") from error
        if process.returncode not in allowed:
            raise SlipstreamError(
                f"{threads or 'several'} threads: a process ended with exit code {process.returncode}"
            )
        return process.stdout


def copy_speed() -> Line:
    """Bytes per second that a copy by all threads reads and writes: the median of 15 copies."""
    import torch

    source, copy, seconds = torch.ones(COPIED // 4), torch.empty(COPIED // 4), list[float]()
    for _ in range(16):
        started = perf_counter()
        copy.copy_(source)
        seconds.append(perf_counter() - started)
    return {"bytes_per_second": 2 * COPIED / median(seconds[1:])}


def steps_after(target: str, *contexts: str) -> Line:
    """Median milliseconds of a step of one token after each of these contexts, which take turns.

    The contexts hold random keys and values; those longer than the model's are left out. bytes: the weights, keys and
    values that a step reads; digest: of its logits.
    """
    import torch

    backend = quiet_backend(target)
    lengths = [length for length in sorted(map(int, contexts)) if length < backend.max_length]
    backend.reserve(1, lengths[-1] + 1)

    def logits(length: int) -> Any:
        return backend.forward(torch.tensor([[1]]), [length], first_slot=0, logits=True)

    logits(lengths[-1])  # allocates the cache of the longest context
    cached = [keys for layer in backend.cache.layers for keys in (layer.keys, layer.values)]
    with torch.inference_mode():
        fill_with_random_numbers(cached)
    of_position = sum(keys[0, :, 0].nbytes for keys in cached)
    seconds, weights = {length: list[float]() for length in lengths}, weight_bytes(backend.model)
    for _ in range(TURNS + 1):
        for length in lengths:
            started = perf_counter()
            logits(length)
            seconds[length].append(perf_counter() - started)
    lines = [
        {
            "context": length,
            "step_ms": 1e3 * median(times[1:]),
            "bytes": weights + of_position * length,
            "digest": hashlib.sha256(logits(length).float().numpy().tobytes()).hexdigest(),
        }
        for length, times in seconds.items()
    ]
    return {"weight_bytes": weights, "contexts": lines}


def fill_with_random_numbers(cached: Sequence[Any]) -> None:
    """Fill keys or values [slots, heads, positions, size] with random numbers that repeat every FILLED positions."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for keys in cached:
        _, heads, positions, size = keys.shape
        block = torch.randn(heads, FILLED, size, generator=generator).to(keys.dtype)
        for first in range(0, positions, FILLED):
            part = keys[0, :, first : first + FILLED]
            part.copy_(block[:, : part.shape[1]])


def quiet_backend(target: str) -> Any:
    """The backend of plain decoding, whose attention reads exactly the positions before a token."""
    from slipstream import SpeculativeDecoder
    from slipstream.models.weights.model_files import quiet

    quiet()
    backend = SpeculativeDecoder(target, drafter="none").target.backend
    backend.attended_unit = 1
    return backend


def compare_bits(target: str) -> Line:
    """The numbers of threads and widths whose logits differ from those of one thread."""
    import torch

    backend = quiet_backend(target)
    length = min(CONTEXT, backend.max_length - max(WIDTHS))
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
    return {"context": length, "different": different}


def weight_bytes(model: Any) -> int:
    """Bytes of the matrices that a forward reads, as the kernels store them. Of an embedding it reads one row: 0."""
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
    """The figures of one number of threads. step_ms: of plain decoding without prompts; peers: tokens per second."""
    line: Line = {"threads": threads, "limit_ms": 1e3 * limit_seconds, "step_ms": None, "texts": {}, "peers": {}}
    line["errors"] = [f"{run.arm}: {run.error}" for run in runs if run.error]
    line["different"], line["verdicts"] = 0, {}
    by_arm = {arm: list[Run]() for arm in OURS}
    for measurement in runs:
        by_arm.setdefault(measurement.arm, []).extend([] if measurement.error else [measurement])
    for arm, of_arm in by_arm.items():
        seconds = sum(timed.seconds for timed in of_arm)
        speed = sum(timed.num_output_tokens for timed in of_arm) / seconds if seconds else None
        verdicts = [verdict for timed in of_arm for verdict in timed.verdicts]
        line["verdicts"][arm] = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
        if arm not in OF_LLAMA_CPP:
            line["different"] += verdicts.count("different")
        if arm in OURS:
            line[OURS[arm]] = speed
            line["texts"][arm] = {" ".join(timed.prompts): timed.texts for timed in of_arm}
        elif speed:
            line["peers"][arm] = speed
    plain_seconds = [step["seconds"] for run in runs if OURS.get(run.arm) == "plain" for step in run.rounds or []]
    steps = [
        total for _, _, verify, _, total in plain_seconds if verify
    ]  # a step that read the prompt verified nothing
    if steps:
        line["step_ms"] = 1e3 * median(steps)
    return line


def compare_with_first(lines: Sequence[Line]) -> None:
    """Add to each line how many of our texts, and of the logits after contexts, differ from the first line's."""
    for line in lines:
        pairs = [(line["texts"][arm], lines[0]["texts"][arm]) for arm in OURS]
        line["depend_on_threads"] = sum(texts.get(key) != text for texts, first in pairs for key, text in first.items())
        steps = zip(line.get("contexts", []), lines[0].get("contexts", []), strict=True)
        line["bits_depend_on_threads"] = sum(step["digest"] != first["digest"] for step, first in steps)


def print_report(lines: Sequence[Line], bits: Line | None) -> None:
    """Print the tables of texts and single steps, the fastest number of threads, and whether bits differ."""
    console.print(table_of(lines))
    console.print(steps_table(lines))
    if timed := [line for line in lines if line["step_ms"]]:
        best = min(timed, key=lambda line: line["step_ms"])
        gain = f"{timed[-1]['step_ms'] / best['step_ms']:.2f} times as fast as with {timed[-1]['threads']}"
        console.print(f"plain steps are fastest with {best['threads']} threads: {gain}", soft_wrap=True)
    if bits is not None:
        console.print(bits_line(bits), soft_wrap=True)


def ratio(number: float | None, divisor: float | None) -> str:
    """The quotient, or "-" if a number is missing or 0."""
    return f"{number / divisor:.2f}" if number and divisor else "-"


def table_of(lines: Sequence[Line]) -> Table:
    """A line per number of threads: tokens per second, how many texts are plain decoding's, and a plain step's time.

    auto / peer: over the fastest peer. scaling: how many times as fast as in the first line the step and its limit are.
    """
    peers = list(dict.fromkeys(arm for line in lines for arm in line["peers"]))
    table = Table("threads", *peers, "plain", "auto", "auto / peer", "step", "limit", "ratio", "scaling", "faults")
    for line in lines:
        faults = [f"{line['depend_on_threads']} texts depend on the threads"] if line["depend_on_threads"] else []
        scaling, possible = (ratio(lines[0][name], line[name]) for name in ("step_ms", "limit_ms"))
        table.add_row(
            str(line["threads"]),
            *(speed_cell(line["peers"].get(arm), line["verdicts"].get(arm)) for arm in peers),
            *(speed_cell(line[name], line["verdicts"][arm]) for arm, name in OURS.items()),
            ratio(line["auto"], max(line["peers"].values(), default=None)),
            f"{line['step_ms']:.2f} ms" if line["step_ms"] else "-",
            f"{line['limit_ms']:.2f} ms",
            ratio(line["step_ms"], line["limit_ms"]),
            f"{scaling} of {possible}",
            "; ".join([*faults, *line["errors"]]),
        )
    return table


def speed_cell(speed: float | None, verdicts: Line | None) -> str:
    """Tokens per second, and how many of the texts are plain decoding's, counting those that part at a tie."""
    if not speed or not verdicts:
        return "-"
    same = sum(verdicts.get(verdict, 0) for verdict in ("identical", "tie"))
    return f"{speed:.1f}" if "reference" in verdicts else f"{speed:.1f} ({same}/{sum(verdicts.values())})"


def steps_table(lines: Sequence[Line]) -> Table:
    """Single steps after contexts: their times, and what the longer context adds to the step and to its limit."""
    table = Table("threads", "context", "step", "limit", "step / limit", "step added", "limit added", "bits")
    for line in lines:
        first = line["contexts"][0]
        for step in line["contexts"]:
            added, added_limit = (step[name] - first[name] for name in ("step_ms", "limit_ms"))
            table.add_row(
                str(line["threads"]),
                f"{step['context']:,}",
                f"{step['step_ms']:.2f} ms",
                f"{step['limit_ms']:.2f} ms",
                ratio(step["step_ms"], step["limit_ms"]),
                f"{added:.2f} ms" if added_limit else "",
                f"{added_limit:.2f} ms" if added_limit else "",
                step["digest"][:8],
            )
    return table


def bits_line(bits: Line) -> str:
    """The result of comparing logits, in words."""
    threads, widths = (", ".join(map(str, counts)) for counts in (BITS_THREADS, WIDTHS))
    compared = f"logits after {bits['context']} positions at widths {widths} with {threads} threads"
    if not bits["different"]:
        return f"{compared}: the same bits"
    differs = "; ".join(f"width {case['width']} with {case['threads']} threads" for case in bits["different"])
    return f"{compared}: other bits at {differs}"


if __name__ == "__main__":
    run(main)
