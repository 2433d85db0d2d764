"""Records of measurements: `runs.jsonl` in a folder, one header line, then one line per finished run.

A line is written whole and flushed to the disk before the next measurement begins, so a killed process loses only the
measurement it was in. The header holds settings, versions and the machine; a folder holds no run under others.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch

from slipstream import durable_files
from slipstream.bench.arms import OF_LLAMA_CPP, Arm
from slipstream.bench.llama_cpp import versions as llama_versions
from slipstream.bench.plan import BenchPrompt, Key
from slipstream.checks import UNREADABLE, check_fields, why_unreadable
from slipstream.config import DecoderConfig
from slipstream.core.rounds import Round
from slipstream.errors import SlipstreamError, UsageError, os_reason
from slipstream.models.cpu.processor import memory_bytes, processor
from slipstream.sampling.params import SamplingParams
from slipstream.text.results import Stats
from slipstream.version import __version__

FILE = "runs.jsonl"
# types of the settings that are read from a header, and of a round's parts as `compact` writes them
SETTINGS = {
    **dict.fromkeys(("target", "reference"), str),
    **dict.fromkeys(("params", "config"), dict[str, Any]),
    "draft": str | None,
    "arms": list[str],
    "batch_sizes": list[int],
    "prompts": dict[str, str],
}
ROUND = {
    **dict.fromkeys(("row", "step", "start", "accepted"), int),
    **dict.fromkeys(("draft", "tokens", "path"), list[int]),
    "rejected": bool,
    "seconds": list[float],
}
VerdictName = Literal["identical", "tie", "different", "reference", "not compared"]


@dataclass(frozen=True)
class Header:
    """Facts that all runs of a folder share."""

    settings: dict[str, Any]  # everything that a resumed run must have in common
    versions: dict[str, str]
    machine: dict[str, Any]
    started: str
    prompts: dict[str, str] = field(default_factory=dict)  # prompts by the names that runs give them
    command: str = ""  # repeats the run; "" if it did not begin at a command line


@dataclass(frozen=True)
class Run:
    """One finished measurement: an arm on one group of prompts, once."""

    arm: str
    prompts: list[str]
    family: str
    batch: int
    repeat: int
    seconds: float = 0.0  # from the prompts' to the outputs' token ids, prompt processing included; 0 if it failed
    num_output_tokens: int = 0  # over all rows
    texts: list[list[int]] = field(default_factory=list)  # output token ids per prompt; empty if it failed
    verdicts: list[VerdictName] = field(default_factory=list)  # against plain decoding, per prompt; empty if it failed
    stats: dict[str, Any] | None = None  # `Stats.to_dict()`; None for baselines
    rounds: list[dict[str, Any]] | None = None  # see `compact`; None for baselines
    num_forwards: int | None = None  # of the target, for baselines; None for our own arms, whose rounds are recorded
    parts: dict[str, float] | None = None  # seconds of "prefill", "draft" and "verify", for baselines that report them
    error: str | None = None  # why it failed, in one line

    @property
    def key(self) -> Key:
        return self.arm, tuple(self.prompts), self.batch, self.repeat

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens per second, prompt processing included; None if it failed."""
        return self.num_output_tokens / self.seconds if self.error is None and self.seconds > 0 else None


def compact(decoded: Round) -> dict[str, Any]:
    """A round in the form in which it is recorded.

    "seconds" are [prefill, draft, verify, accept, total] of its whole step.
    """
    parts = decoded.seconds
    tree = {} if decoded.path is None else {"parents": list(decoded.parents or ()), "path": list(decoded.path)}
    return tree | {
        "row": decoded.row,
        "step": decoded.step,
        "start": decoded.start,
        "draft": list(decoded.draft),
        "tokens": list(decoded.tokens),
        "accepted": decoded.num_accepted_tokens,
        "rejected": decoded.rejected,
        "seconds": [round(s, 7) for s in (parts.prefill, parts.draft, parts.verify, parts.accept, parts.total)],
    }


def read_records(folder: Path) -> tuple[Header, list[Run]]:
    """The header and the finished runs of a folder; a torn last line is left out."""
    lines = _whole_lines(folder / FILE)
    if not lines:
        raise UsageError(f"{str(folder / FILE)!r} has no header; allowed: a folder written by a benchmark")
    header = _made(Header, "header", lines[0], folder, 1)
    return header, [_made(Run, "run", line, folder, number) for number, line in enumerate(lines[1:], 2)]


def exists(folder: Path) -> bool:
    """True if the folder already holds a header."""
    return os.path.exists(folder / FILE) and bool(_whole_lines(folder / FILE))


def start(folder: Path, header: Header) -> None:
    """Make the folder and write the header; a header that no run follows is replaced."""
    if exists(folder) and read_records(folder)[1]:
        raise UsageError(f"{str(folder)!r} already holds runs; allowed: an empty folder, or continuing those runs")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"folder {str(folder)!r} cannot be made: {os_reason(error)}") from error
    _write(folder / FILE, {"kind": "header"} | asdict(header), overwrite=True)


def append(folder: Path, run: Run) -> None:
    """Add a finished measurement, on the disk when this returns; a torn last line is overwritten."""
    _write(folder / FILE, {"kind": "run"} | asdict(run))


def finished(runs: Iterable[Run]) -> set[Key]:
    """The keys of the measurements that need not be repeated, failed ones included."""
    return {run.key for run in runs}


def _whole_lines(path: Path) -> list[bytes]:
    """The lines that end in a newline."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {os_reason(error)}") from error
    return text[: text.rfind(b"\n") + 1].splitlines()


def _write(path: Path, line: dict[str, Any], *, overwrite: bool = False) -> None:
    data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
    try:
        with open(path, "r+b" if os.path.exists(path) else "w+b", buffering=0) as file:
            durable_files.cut(file, 0 if overwrite else durable_files.size_of_whole_lines(file))
            durable_files.append(file, data)
    except OSError as error:
        raise SlipstreamError(
            f"{str(path)!r} cannot be written: {os_reason(error)}; finished runs in it are kept"
        ) from error


def _made(cls: Any, kind: str, line: bytes, folder: Path, number: int) -> Any:
    where = f"{str(folder / FILE)!r}, line {number}"
    try:
        item = json.loads(line)
    except UNREADABLE as error:
        raise UsageError(f"{where}: {why_unreadable(error)}; allowed: one JSON object per line") from error
    names: Sequence[str] = [f.name for f in fields(cls)]
    if not isinstance(item, dict) or item.pop("kind", None) != kind or set(item) != set(names):
        raise UsageError(f"{where}: not a benchmark's {kind}; allowed: kind {kind!r} with {', '.join(names)}")
    check_fields(where, item, get_type_hints(cls))
    if cls is Header:
        _check_settings(where, item["settings"])
    else:
        _check_run(where, item)
    return cls(**item)


def _check_settings(where: str, settings: Mapping[str, Any]) -> None:
    check_fields(f"{where}: settings", settings, {name: SETTINGS[name] for name in SETTINGS if name in settings})


def _check_run(where: str, run: Mapping[str, Any]) -> None:
    """Raise UsageError unless the parts of a run agree, and are those that `compact` and `Stats.to_dict` write."""
    if run["stats"] is not None:
        check_fields(f"{where}: stats", run["stats"], get_type_hints(Stats))
    for index, recorded in enumerate(run["rounds"] or ()):
        round = {"parents": [], "path": [], **recorded}
        check_fields(f"{where}: rounds[{index}]", round, ROUND)
        check_fields(f"{where}: rounds[{index}]", round, {"parents": list[int]}, low=-1)  # -1: the root
    if run["error"] is not None:
        return
    counts = {name: len(run[name]) for name in ("prompts", "texts", "verdicts")}
    if len(set(counts.values())) > 1 or not run["seconds"]:
        raise UsageError(
            f"{where}: seconds={run['seconds']} with {counts}; allowed: seconds above 0, and as many of each"
        )
    if run["num_output_tokens"] != sum(map(len, run["texts"])):
        raise UsageError(f"{where}: num_output_tokens={run['num_output_tokens']}; allowed: the texts' length")


def make_header(
    models: Mapping[str, str | None],
    arms: Sequence[Arm],
    prompts: Sequence[BenchPrompt],
    config: DecoderConfig,
    params: SamplingParams,
    command: str = "",
    **settings: Any,
) -> Header:
    """The header of a run.

    models: target and draft model as the user named them. command: the line that repeats the run.
    """
    llama = next((arm.name for arm in arms if arm.baseline in OF_LLAMA_CPP), None)
    return Header(
        settings={
            **models,
            "arms": [arm.name for arm in arms],
            **settings,
            "prompts": {prompt.id: prompt.digest for prompt in prompts},
            "config": vars(config),
            "params": params.explicit.to_dict(),
        },
        versions={
            "slipstream": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "transformers", "numpy")},
            **({} if llama is None else llama_versions(f"arm {llama!r}")),
        },
        machine=machine(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        prompts={prompt.id: prompt.text for prompt in prompts},
        command=command,
    )


def machine() -> dict[str, Any]:
    """Processor, cores, torch's threads, memory and accelerator."""
    memory = memory_bytes()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor().model_name or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),  # not this thread's affinity, as it may be bound to one core
        "threads": torch.get_num_threads(),
        "memory_gib": None if memory is None else round(memory / 2**30),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def open_folder(folder: Path, header: Header) -> list[Run]:
    """Begin a folder of runs, or continue one with the same settings; returns the runs that it already holds.

    UsageError names the first setting, version or fact about the machine that differs.
    """
    before, runs = read_records(folder) if exists(folder) else (header, [])
    if not runs:  # other settings can spoil nothing
        start(folder, header)
        return []
    for part in ("settings", "versions", "machine"):
        for name, now, then in differences(getattr(header, part), getattr(before, part)):
            raise UsageError(
                f"folder {str(folder)!r} was begun with {name}={then!r}, now {now!r}; "
                f"allowed: the same settings, or another folder; to start over: rm -r {shlex.quote(str(folder))}"
            )
    return runs


def differences(now: Any, then: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The leaves in which two settings differ, as (dotted name, now, then); compared as JSON values."""
    now, then = json.loads(json.dumps(now)), json.loads(json.dumps(then))
    if not (isinstance(now, dict) and isinstance(then, dict)):
        if now != then:
            yield name, now, then
        return
    for key in [*now, *(key for key in then if key not in now)]:
        yield from differences(now.get(key), then.get(key), f"{name}.{key}" if name else key)
