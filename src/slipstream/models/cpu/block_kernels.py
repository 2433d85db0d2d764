"""The kernels of `csrc/blocks/` for quantised files, for the best instructions of this processor.

They are independent of those for bfloat16 weights. All instructions give the same bits.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

from slipstream.models.cpu.block_structs import BLOCK_CONSTANTS, BLOCK_MIRRORS
from slipstream.models.cpu.c_structs import check_layout
from slipstream.models.cpu.instruction_sets import ISA, NEEDED, NoKernelsError, compiler_flags, isas_of
from slipstream.models.cpu.kernel_build import (
    COMMON_FLAGS,
    SOURCES,
    Recipe,
    first_that_loads,
    loaded,
    switched_on,
    version,
)
from slipstream.models.cpu.processor import processor


def recipe_for(isa: str) -> Recipe:
    """How the kernels are compiled for these instructions."""
    sources = (*sorted(SOURCES.joinpath("blocks").glob("*.c")), SOURCES / "team.c")
    return Recipe(f"blocks-{isa}", sources, (*COMMON_FLAGS, *compiler_flags(NEEDED[isa])))


def block_kernels() -> ctypes.CDLL:
    """The compiled functions. Raises `NoKernelsError` with the reason where they cannot be had."""
    if not switched_on():
        raise NoKernelsError("SLIPSTREAM_KERNELS is off")
    return library_of(best_recipe(os.environ.get(ISA)))


def best_recipe(wanted: str | None) -> Recipe:
    """The best instructions that can be had here; without `wanted` lesser ones where the compiler lacks the best."""
    return first_that_loads([recipe_for(isa) for isa in isas_of(processor(), wanted)])


def library_for(isa: str) -> ctypes.CDLL:
    """The functions compiled for these instructions."""
    return library_of(recipe_for(isa))


@cache
def library_of(recipe: Recipe) -> ctypes.CDLL:
    """The functions of a recipe."""
    library = loaded(recipe)
    check_layout(library, BLOCK_MIRRORS, BLOCK_CONSTANTS)
    for name in ("panel_bytes", "activation_bytes", "float_scratch", "pack_pieces"):
        if hasattr(library, name):  # `pack_pieces` is not there on Windows
            getattr(library, name).restype = ctypes.c_int64
    return library


def block_version() -> str:
    """A name for the kernels in use: a digest of their source and of the way they are compiled."""
    return version(recipe=best_recipe(os.environ.get(ISA)))
