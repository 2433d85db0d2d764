"""The kernels of `csrc/` for bfloat16 weights, for the best instructions of this processor.

All sets of instructions give the same bits but AVX-512 with bfloat16, and each gives the same at any width.
SLIPSTREAM_ISA names the best that is used; where there is no variant for it, the next one below is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import cache

from slipstream.models.cpu.c_structs import check_layout
from slipstream.models.cpu.instruction_sets import ISA, NEEDED, NoKernelsError, compiler_flags, isa_of
from slipstream.models.cpu.kernel_build import COMMON_FLAGS, SOURCES, Recipe, loaded, switched_on, version
from slipstream.models.cpu.processor import Processor, processor
from slipstream.models.fast_path_warnings import warn_slower

LARGE = 1_000_000_000  # weights of a model that is left to AMX
BFLOAT16 = "avx512bf16"  # the variant of AVX-512 with products of bfloat16 numbers; the others are named as in `NEEDED`
VARIANTS: Mapping[str, tuple[str, ...]] = {
    BFLOAT16: (*NEEDED["avx512"], "avx512_bf16"),
    "avx512": NEEDED["avx512"],
    "avx2": NEEDED["avx2"],
    "neon": NEEDED["neon"],
    "plain": (),
}


def variant_of(processor: Processor, wanted: str | None) -> str:
    """The variant to use. wanted: see `isa_of`, which raises the errors."""
    best = isa_of(processor, wanted)
    below = list(NEEDED)[list(NEEDED).index(best) :]
    allowed = [name for name in VARIANTS if name in below or (name == BFLOAT16 and best == "avx512")]
    found = next(name for name in allowed if set(VARIANTS[name]) <= processor.flags)
    if found == "plain" != wanted:
        raise NoKernelsError("they need a processor with AVX2, FMA and F16C")
    return found


def left_to_onednn(weights: int, processor: Processor, wanted: str | None) -> bool:
    """Whether oneDNN suits a model better, which multiplies by AMX where the processor has it.

    These kernels take half to two thirds of oneDNN's time for a token and as long for 8 to 16; a prompt takes three to
    six times as long. The larger the model, the more tokens must follow a prompt before they are faster in all
    (docs/speed.md). wanted: of SLIPSTREAM_ISA, which asks for these kernels.
    """
    return "amx_bf16" in processor.flags and not wanted and weights >= LARGE


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
        library = loaded(recipe_of(variant_of(processor(), wanted)))
    except NoKernelsError as error:
        warn_slower(f"PyTorch's kernels are used, not Slipstream's own: {error}")
        return None
    check_layout(library)
    library.scratch_per_token.restype = ctypes.c_int64
    return library


def bfloat16_version() -> str:
    """A name for the kernels in use, see `version`."""
    return version(recipe=recipe_of(variant_of(processor(), os.environ.get(ISA))))
