"""The sets of instructions that the kernels are written for, and which of them this processor has.

SLIPSTREAM_ISA in the environment names one instead of the best.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.errors import UsageError
from slipstream.models.cpu.processor import AMX, Processor

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
# without contraction, as everywhere: see COMMON_FLAGS of kernel_build.py
OTHER_FLAGS = {"asimddp": "-march=armv8.2-a+dotprod", **{name: f"-m{name.replace('_', '-')}" for name in AMX}}


class NoKernelsError(Exception):
    """Why the kernels cannot be used here."""


def isas_of(processor: Processor, wanted: str | None) -> list[str]:
    """The instructions that can be used, best first; `wanted` alone if there is one. Raises `NoKernelsError` if none of
    these are there, `UsageError` for a wrong name or one that this processor lacks."""
    there = [name for name, flags in NEEDED.items() if set(flags) <= processor.flags]
    if wanted:
        if wanted not in NEEDED or wanted not in there:
            what = "this processor lacks them" if wanted in NEEDED else "no such instructions"
            raise UsageError(f"{ISA}={wanted!r}: {what}; allowed here: {', '.join(there)}")
        return [wanted]
    usable = [name for name in there if name not in FORCED_ONLY]
    if not usable:
        raise NoKernelsError("they need a processor with AVX2, FMA and F16C or one of ARM with dot products")
    return usable


def isa_of(processor: Processor, wanted: str | None) -> str:
    """The best of `isas_of`."""
    return isas_of(processor, wanted)[0]


def compiler_flags(needed: tuple[str, ...]) -> tuple[str, ...]:
    """What tells a compiler of these instructions."""
    return tuple(OTHER_FLAGS.get(name) or "-m" + name.replace("_", "") for name in needed)
