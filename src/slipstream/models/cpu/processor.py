"""What the operating system or the processor says of itself: its model name and its instruction sets.

Linux tells in /proc/cpuinfo, macOS by sysctl. On Windows a function of the prebuilt kernels asks the processor.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

AMX = ("amx_tile", "amx_int8", "amx_bf16")  # used where the system gives its registers to a program that asks
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # of Linux on x86-64
CPU_INFO = Path("/proc/cpuinfo")
DETECTION = Path(__file__).with_name("prebuilt")  # of csrc/detection/, where a wheel has it
OF_APPLE = {"hw.optional.arm.FEAT_DotProd": "asimddp"}


@dataclass(frozen=True)
class Processor:
    """model_name: empty where it is not known; flags: instruction sets that programs may use, by Linux's names, none
    where they are not known."""

    model_name: str = ""
    flags: frozenset[str] = frozenset()


def processor(file: Path = CPU_INFO) -> Processor:
    """The first processor of this machine."""
    if not file.exists():
        return elsewhere(sys.platform)
    found = parse(file.read_text(errors="replace"))
    if AMX[0] in found.flags and not gives_tiles():
        return Processor(found.model_name, found.flags.difference(AMX))
    return found


def memory_bytes() -> int | None:
    """The memory of this machine; None where the system does not tell."""
    names = getattr(os, "sysconf_names", {})
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if "SC_PHYS_PAGES" in names else None


def gives_tiles() -> bool:
    """Whether Linux lets this process use the registers of AMX; it does from now on if it can."""
    permitted = ctypes.CDLL(None).syscall(*map(ctypes.c_long, (ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)))
    return permitted == 0


def parse(text: str) -> Processor:
    """text: what /proc/cpuinfo holds, of x86 (flags) or ARM (Features)."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features", "")
    return Processor(fields.get("model name", ""), frozenset(flags.split()))


@cache
def elsewhere(platform: str) -> Processor:
    """Where there is no /proc/cpuinfo. platform: as `sys.platform`."""
    if platform == "darwin":
        library = ctypes.CDLL(None)
        flags = frozenset(flag for name, flag in OF_APPLE.items() if _sysctl(library, name)[:1] == b"\1")
        return Processor(_sysctl(library, "machdep.cpu.brand_string").rstrip(b"\0").decode(), flags)
    library_file = next(DETECTION.glob("detection-*"), None)
    return Processor() if library_file is None else asked(ctypes.CDLL(str(library_file)))


def asked(library: ctypes.CDLL) -> Processor:
    """What the processor says of itself. library: of csrc/detection/."""
    name, flags = ctypes.create_string_buffer(64), ctypes.create_string_buffer(256)
    library.describe_processor(name, flags)
    return Processor(name.value.decode(errors="replace").strip(), frozenset(flags.value.decode().split()))


def _sysctl(library: ctypes.CDLL, name: str) -> bytes:
    """A value of macOS's sysctl; empty if there is none of this name."""
    value = ctypes.create_string_buffer(256)
    size = ctypes.c_size_t(len(value))
    failed = library.sysctlbyname(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0))
    return b"" if failed else value.raw[: size.value]
