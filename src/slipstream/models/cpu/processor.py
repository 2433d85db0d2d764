"""What the processor is: its model name and its instruction sets, and which of those the kernels are written for.

Linux tells in /proc/cpuinfo, macOS by sysctl. On Windows a function of the prebuilt kernels asks the processor.
SLIPSTREAM_ISA in the environment names the instructions to use instead of the best.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slipstream.errors import UsageError

AMX = ("amx_tile", "amx_int8", "amx_bf16")  # used where the system gives its registers to a program that asks
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # of Linux on x86-64
CPU_INFO = Path("/proc/cpuinfo")
DETECTION = Path(__file__).with_name("prebuilt")  # of csrc/detection/, where a wheel has it
OF_APPLE = {"hw.optional.arm.FEAT_DotProd": "asimddp"}
ISA = "SLIPSTREAM_ISA"
# what the processor must have, best first, by the names of Linux's /proc/cpuinfo
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
NEEDED: Mapping[str, tuple[str, ...]] = {
    "amx": (*AVX512, "avx512_bf16", *AMX),
    "avx512": AVX512,
    "avxvnni": ("avx2", "fma", "f16c", "avx_vnni"),
    "avx2": ("avx2", "fma", "f16c"),
    "neon": ("asimddp",),
    "plain": (),
}
FORCED_ONLY = ("plain",)  # plain C is the specification, many times slower
# without contraction, as everywhere: see COMMON_FLAGS of kernel_libraries.py
OTHER_FLAGS = {"asimddp": "-march=armv8.2-a+dotprod", **{name: f"-m{name.replace('_', '-')}" for name in AMX}}


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
    described = parse(file.read_text(errors="replace", encoding="utf-8"))
    if AMX[0] in described.flags and not gives_tiles():
        return Processor(described.model_name, described.flags.difference(AMX))
    return described


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


class NoKernelsError(Exception):
    """Why the kernels cannot be used here."""


class NoCompilerError(NoKernelsError):
    """There is nothing here that compiles them."""


def isas_of(processor: Processor, forced_isa: str | None) -> list[str]:
    """The instructions that can be used, best first; only `forced_isa` if it is set.

    Raises `NoKernelsError` if the processor has none of them, `UsageError` for a wrong name or one that it lacks.
    """
    there = [name for name, flags in NEEDED.items() if set(flags) <= processor.flags]
    if forced_isa:
        if forced_isa not in NEEDED or forced_isa not in there:
            what = "this processor lacks them" if forced_isa in NEEDED else "no such instructions"
            raise UsageError(f"{ISA}={forced_isa!r}: {what}; allowed here: {', '.join(there)}")
        return [forced_isa]
    usable = [name for name in there if name not in FORCED_ONLY]
    if not usable:
        raise NoKernelsError("they need a processor with AVX2, FMA and F16C or one of ARM with dot products")
    return usable


def compiler_flags(needed: tuple[str, ...]) -> tuple[str, ...]:
    """What tells a compiler of these instructions."""
    return tuple(OTHER_FLAGS.get(name) or "-m" + name.replace("_", "") for name in needed)
