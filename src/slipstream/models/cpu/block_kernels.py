"""The kernels of `csrc/blocks/` for quantised files, compiled for the best instructions of this processor.

They are independent of those for bfloat16 weights: VNNI or AVX2 is enough. SLIPSTREAM_ISA in the environment names a
set of instructions instead of the best; all give the same bits.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import cache

from slipstream.errors import UsageError
from slipstream.models.cache_folder import cache_folder
from slipstream.models.cpu.block_structs import BLOCK_CONSTANTS, BLOCK_MIRRORS
from slipstream.models.cpu.c_structs import check_layout
from slipstream.models.cpu.kernel_build import (
    COMMON_FLAGS,
    SOURCES,
    NoKernelsError,
    Recipe,
    built,
    switched_on,
    version,
)
from slipstream.models.cpu.processor import Processor, processor

ISA = "SLIPSTREAM_ISA"
# what the processor must have, best first, by the names of /proc/cpuinfo
NEEDED: Mapping[str, tuple[str, ...]] = {
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"),
    "avxvnni": ("avx2", "fma", "f16c", "avx_vnni"),
    "avx2": ("avx2", "fma", "f16c"),
    "plain": (),
}
FORCED_ONLY = ("plain",)  # plain C is the specification, many times slower


def isa_of(processor: Processor, wanted: str | None) -> str:
    """The instructions to compile for. Raises `NoKernelsError` if none of these are there, `UsageError` for a wrong
    name or one that this processor lacks."""
    there = [name for name, flags in NEEDED.items() if set(flags) <= processor.flags]
    if wanted:
        if wanted not in NEEDED or wanted not in there:
            what = "this processor lacks them" if wanted in NEEDED else "no such instructions"
            raise UsageError(f"{ISA}={wanted!r}: {what}; allowed here: {', '.join(there)}")
        return wanted
    usable = [name for name in there if name not in FORCED_ONLY]
    if not usable:
        raise NoKernelsError("they need a processor with AVX2")
    return usable[0]


def recipe_for(isa: str) -> Recipe:
    """How the kernels are compiled for these instructions."""
    return Recipe(SOURCES / "blocks", (*COMMON_FLAGS, *("-m" + name.replace("_", "") for name in NEEDED[isa])))


def chosen_isa() -> str:
    """See `isa_of`; of this machine and environment."""
    return isa_of(processor(), os.environ.get(ISA))


def block_kernels() -> ctypes.CDLL:
    """The compiled functions. Raises `NoKernelsError` with the reason where they cannot be had."""
    if not switched_on():
        raise NoKernelsError("SLIPSTREAM_KERNELS is off", slower=False)
    return library_for(chosen_isa())


@cache
def library_for(isa: str) -> ctypes.CDLL:
    """The functions compiled for these instructions."""
    try:
        library = ctypes.CDLL(str(built(cache_folder() / "kernels", os.environ, recipe_for(isa))))
    except OSError as error:
        raise NoKernelsError(str(error)) from error
    check_layout(library, BLOCK_MIRRORS, BLOCK_CONSTANTS)
    for function in (library.panel_bytes, library.activation_bytes, library.float_scratch):
        function.restype = ctypes.c_int64
    return library


def block_version() -> str:
    """A name for the kernels in use: a digest of their source and of the way they are compiled."""
    return version(recipe=recipe_for(chosen_isa()))
