"""The processor's instruction sets, those that the kernels support, and the usable memory.

Linux lists instruction sets in /proc/cpuinfo, macOS in sysctl. On Windows a prebuilt library asks the processor itself.
In the environment, SLIPSTREAM_ISA names the instructions to use instead of the best, and SLIPSTREAM_MEMORY limits the
memory to use, in gigabytes.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path

from slipstream.errors import UsageError

AMX = ("amx_tile", "amx_int8", "amx_bf16")  # used if Linux grants access to their registers, see `request_tiles`
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # of Linux on x86-64
CPU_INFO = Path("/proc/cpuinfo")
CONTROL_GROUP, CONTROL_GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
DETECTION = Path(__file__).with_name("prebuilt")  # holds the library of csrc/detection/, if the wheel has it
OF_APPLE = {"hw.optional.arm.FEAT_DotProd": "asimddp"}
ISA, MEMORY = "SLIPSTREAM_ISA", "SLIPSTREAM_MEMORY"
# flags that the processor must have, as Linux's /proc/cpuinfo names them; the best instructions first
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
NEEDED: Mapping[str, tuple[str, ...]] = {
    "amx": (*AVX512, "avx512_bf16", *AMX),
    "avx512": AVX512,
    "avxvnni": ("avx2", "fma", "f16c", "avx_vnni"),
    "avx2": ("avx2", "fma", "f16c"),
    "neon": ("asimddp",),
    "plain": (),
}
FORCED_ONLY = ("plain",)  # plain C is the specification and many times slower
# without contraction, as everywhere: see COMMON_FLAGS of kernel_libraries.py
OTHER_FLAGS = {"asimddp": "-march=armv8.2-a+dotprod", **{name: f"-m{name.replace('_', '-')}" for name in AMX}}


@dataclass(frozen=True)
class Processor:
    """A processor's name and instruction sets; empty if unknown."""

    model_name: str = ""
    flags: frozenset[str] = frozenset()  # instruction sets that programs may use, by Linux's names


def processor(file: Path = CPU_INFO) -> Processor:
    """The first processor of this machine."""
    if not file.exists():
        return processor_without_cpuinfo(sys.platform)
    described = parse(file.read_text(errors="replace", encoding="utf-8"))
    if AMX[0] in described.flags and not request_tiles():
        return Processor(described.model_name, described.flags.difference(AMX))
    return described


def memory_bytes() -> int | None:
    """The smallest of the machine's memory, the container's limit and SLIPSTREAM_MEMORY; None if all are unknown."""
    limits = [int(limit) for limit in group_limits("memory.max") if limit.isdecimal()]
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if chosen := os.environ.get(MEMORY):
        try:
            gigabytes = float(chosen)
        except ValueError:
            gigabytes = 0.0
        if not 0 < gigabytes < inf:
            raise UsageError(f"{MEMORY}={chosen!r}; allowed: a number of gigabytes above 0")
        limits.append(int(gigabytes * 1e9))
    return min(limits, default=None)


def group_limits(name: str) -> list[str]:
    """The contents of the file with this name in each of this program's Linux control groups.

    Reads only version 2 of control groups, which container engines have used since 2022.
    """
    if not CONTROL_GROUP.is_file():
        return []
    named = [line[3:] for line in CONTROL_GROUP.read_text(encoding="utf-8").splitlines() if line.startswith("0::/")]
    folder = CONTROL_GROUPS.joinpath(*(path.lstrip("/") for path in named[:1]))
    files = [group / name for group in (folder, *folder.parents) if group.is_relative_to(CONTROL_GROUPS)]
    return [file.read_text(encoding="utf-8").strip() for file in files if file.is_file()]


def request_tiles() -> bool:
    """Ask Linux for permission to use the registers of AMX; returns whether it was granted."""
    permitted = ctypes.CDLL(None).syscall(*map(ctypes.c_long, (ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)))
    return permitted == 0


def parse(text: str) -> Processor:
    """The processor that /proc/cpuinfo describes. text: its contents, for x86 (flags) or ARM (Features)."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features", "")
    name = fields.get("model name", "")
    if name and not re.search(r"\d", name) and "cpu family" in fields:  # virtual machines may hide the model
        name += f" (family {fields['cpu family']}, model {fields.get('model', 'unknown')})"
    return Processor(name, frozenset(flags.split()))


@cache
def processor_without_cpuinfo(platform: str) -> Processor:
    """The first processor of a machine that has no /proc/cpuinfo. platform: as `sys.platform`."""
    if platform == "darwin":
        library = ctypes.CDLL(None)
        flags = frozenset(flag for name, flag in OF_APPLE.items() if _sysctl(library, name)[:1] == b"\1")
        return Processor(_sysctl(library, "machdep.cpu.brand_string").rstrip(b"\0").decode(), flags)
    library_file = next(DETECTION.glob("detection-*"), None)
    return Processor() if library_file is None else detected(ctypes.CDLL(str(library_file)))


def detected(library: ctypes.CDLL) -> Processor:
    """The processor as the library of csrc/detection/ describes it."""
    name, flags = ctypes.create_string_buffer(64), ctypes.create_string_buffer(256)
    library.describe_processor(name, flags)
    return Processor(name.value.decode(errors="replace").strip(), frozenset(flags.value.decode().split()))


def _sysctl(library: ctypes.CDLL, name: str) -> bytes:
    """A value of macOS's sysctl; empty if it has none of this name."""
    value = ctypes.create_string_buffer(256)
    size = ctypes.c_size_t(len(value))
    failed = library.sysctlbyname(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0))
    return b"" if failed else value.raw[: size.value]


class NoKernelsError(Exception):
    """The kernels cannot be used here; the message is the reason."""


class NoCompilerError(NoKernelsError):
    """No C compiler is installed to build the kernels."""


def isas_of(processor: Processor, forced_isa: str | None) -> list[str]:
    """The instructions that can be used, best first; only `forced_isa` if it is set.

    Raises `NoKernelsError` if the processor supports none, `UsageError` if `forced_isa` is unknown or unsupported.
    """
    available = [name for name, flags in NEEDED.items() if set(flags) <= processor.flags]
    if forced_isa:
        if forced_isa not in available:
            reason = "this processor lacks them" if forced_isa in NEEDED else "no such instructions"
            raise UsageError(f"{ISA}={forced_isa!r}: {reason}; allowed here: {', '.join(available)}")
        return [forced_isa]
    usable = [name for name in available if name not in FORCED_ONLY]
    if not usable:
        raise NoKernelsError("they need a processor with AVX2, FMA and F16C, or an ARM processor with dot products")
    return usable


def compiler_flags(needed: tuple[str, ...]) -> tuple[str, ...]:
    """Compiler options that enable these instructions."""
    return tuple(OTHER_FLAGS.get(name) or "-m" + name.replace("_", "") for name in needed)
