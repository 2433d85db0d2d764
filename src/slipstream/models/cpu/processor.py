"""What the operating system says of the processor: its model name and its instruction sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Processor:
    """model_name: empty where it is not known; flags: instruction sets, none where they are not known."""

    model_name: str = ""
    flags: frozenset[str] = frozenset()


def processor(file: Path = CPU_INFO) -> Processor:
    """The first processor of this machine. Only Linux tells, in /proc/cpuinfo."""
    return parse(file.read_text(errors="replace")) if file.exists() else Processor()


def parse(text: str) -> Processor:
    """text: what /proc/cpuinfo holds."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return Processor(fields.get("model name", ""), frozenset(fields.get("flags", "").split()))
