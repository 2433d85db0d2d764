"""The kernels of `csrc/` for bfloat16 weights, for the best instructions of this processor.

All sets of instructions give the same bits but AMX and AVX-512 with bfloat16, and each gives the same at any width;
bits of 4-bit drafts may depend on it.
SLIPSTREAM_ISA names the best that is used; where there is no variant for it, the next one below is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import cache

from slipstream.models.cpu.c_structs import check_layout
from slipstream.models.cpu.instruction_sets import ISA, NEEDED, NoKernelsError, compiler_flags, isa_of
from slipstream.models.cpu.kernel_build import (
    COMMON_FLAGS,
    SOURCES,
    Recipe,
    first_that_loads,
    loaded,
    switched_on,
    version,
)
from slipstream.models.cpu.processor import Processor, processor
from slipstream.models.fast_path_warnings import warn_slower

BFLOAT16 = "avx512bf16"  # the variant of AVX-512 with products of bfloat16 numbers; the others are named as in `NEEDED`
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "amx": NEEDED["amx"],
    BFLOAT16: (*NEEDED["avx512"], "avx512_bf16"),
    "avx512": NEEDED["avx512"],
    "avx2": NEEDED["avx2"],
    "neon": NEEDED["neon"],
    "plain": (),
}


def variants_of(processor: Processor, wanted: str | None) -> list[str]:
    """The variants that can be used, best first. wanted: see `isa_of`, which raises the errors."""
    best = isa_of(processor, wanted)
    below = list(NEEDED)[list(NEEDED).index(best) :]
    allowed = [name for name in VARIANTS if name in below or (name == BFLOAT16 and "avx512" in below)]
    found = [name for name in allowed if set(VARIANTS[name]) <= processor.flags and name != "plain"]
    return found or ["plain"]


def recipe_of(variant: str) -> Recipe:
    """How the kernels are compiled for these instructions."""
    flags = (*COMMON_FLAGS, *compiler_flags(VARIANTS[variant]))
    return Recipe(f"bfloat16-{variant}", tuple(sorted(SOURCES.glob("*.c"))), flags)


def kernels() -> ctypes.CDLL | None:
    """The compiled functions of `csrc/`, or None where they cannot be had or are switched off."""
    return kernels_for(os.environ.get(ISA)) if switched_on() else None


@cache
def kernels_for(wanted: str | None) -> ctypes.CDLL | None:
    """See `kernels`. wanted: of SLIPSTREAM_ISA."""
    try:
        library = loaded(best_recipe(wanted))
    except NoKernelsError as error:
        warn_slower(f"PyTorch's kernels are used, not Slipstream's own: {error}")
        return None
    check_layout(library)
    library.scratch_per_token.restype = ctypes.c_int64
    return library


def best_recipe(wanted: str | None) -> Recipe:
    """The best variant that can be had here; without `wanted` a lesser one where the compiler lacks the best."""
    found = [recipe_of(variant) for variant in variants_of(processor(), wanted)]
    return first_that_loads(found[:1] if wanted else found)


def bfloat16_version() -> str:
    """A name for the kernels in use, see `version`."""
    return version(recipe=best_recipe(os.environ.get(ISA)))
