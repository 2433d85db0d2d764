"""What a folder of runs has in common: settings, versions and the machine; runs under others are not mixed in."""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from slipstream import __version__
from slipstream.bench.arms import OF_LLAMA_CPP
from slipstream.bench.llama_cpp_model import versions as llama_versions
from slipstream.bench.plan import BenchPrompt
from slipstream.bench.records import Arm, Header, Run, exists, read_records, start
from slipstream.config import DecoderConfig
from slipstream.errors import UsageError
from slipstream.models.cpu.processor import memory_bytes, processor
from slipstream.sampling.params import SamplingParams


def make_header(
    models: Mapping[str, str | None],
    arms: Sequence[Arm],
    prompts: Sequence[BenchPrompt],
    config: DecoderConfig,
    params: SamplingParams,
    **settings: Any,
) -> Header:
    """The header of a run. models: target and draft as the user named them; prompts go in as digests of their text."""
    llama = next((arm.name for arm in arms if arm.baseline in OF_LLAMA_CPP), None)
    return Header(
        settings={
            **models,
            "arms": [arm.name for arm in arms],
            **settings,
            "prompts": {prompt.id: prompt.digest for prompt in prompts},
            "config": vars(config),
            "params": params.to_dict(),
        },
        versions={
            "slipstream": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "transformers", "numpy")},
            **({} if llama is None else llama_versions(f"arm {llama!r}")),
        },
        machine=machine(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def machine() -> dict[str, Any]:
    """Processor, usable cores, torch's threads, memory and accelerator."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),  # the affinity of this thread says less: it may be bound to one of them
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def open_folder(folder: Path, header: Header) -> list[Run]:
    """Begin a folder of runs, or go on with one of the same settings; the runs it holds already.

    Other settings, versions or machines are refused, naming the first that differs.
    """
    before, runs = read_records(folder) if exists(folder) else (header, [])
    if not runs:  # nothing is finished that other settings could spoil
        start(folder, header)
        return []
    for part in ("settings", "versions", "machine"):
        for name, mine, theirs in differences(getattr(header, part), getattr(before, part)):
            raise UsageError(
                f"folder {str(folder)!r} was begun with {name}={theirs!r}, now {mine!r}; "
                f"allowed: the same settings, or another folder; to start anew: rm -r {shlex.quote(str(folder))}"
            )
    return runs


def differences(mine: Any, theirs: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The leaves in which two settings differ, as (dotted name, mine, theirs); compared as JSON holds them."""
    mine, theirs = json.loads(json.dumps(mine)), json.loads(json.dumps(theirs))
    if not (isinstance(mine, dict) and isinstance(theirs, dict)):
        if mine != theirs:
            yield name, mine, theirs
        return
    for key in [*mine, *(key for key in theirs if key not in mine)]:
        yield from differences(mine.get(key), theirs.get(key), f"{name}.{key}" if name else key)


def _processor() -> str:
    """The processor's name, where the system tells."""
    return processor().model_name or platform.processor() or platform.machine()


def _memory_gib() -> int | None:
    memory = memory_bytes()
    return None if memory is None else round(memory / 2**30)
