"""All instruction sets give the same bits; ARM's run in an emulator, which is why the drivers are written in C.

Exceptions are the kernels for bfloat16 weights that multiply pairs of bfloat16 numbers: AMX, and AVX-512 with bfloat16.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from slipstream.models.cache_folder import cache_folder
from slipstream.models.cpu.kernel_libraries import (
    LIBRARIES,
    SOURCES,
    VARIANTS,
    Recipe,
    bfloat16_recipe,
    block_recipe,
    built,
    version,
)
from slipstream.models.cpu.processor import AMX, NEEDED, processor

CROSS, EMULATOR = "aarch64-linux-gnu-gcc", ("qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu")
BLOCKS, BFLOAT16 = (block_recipe, "exercise.c", SOURCES / "blocks"), (bfloat16_recipe, "exercise_bfloat16.c", SOURCES)
Kernels = tuple[Callable[[str], Recipe], str, Path]
EMULATED = Path(__file__).with_name("emulated_tiles.h")
OF_PAIRS = ("amx", "avx512bf16")  # these multiply pairs of bfloat16 numbers
NAMES = {BLOCKS: tuple(NEEDED), BFLOAT16: tuple(name for name in VARIANTS if name not in OF_PAIRS)}
of_both = pytest.mark.parametrize("kernels", [BLOCKS, BFLOAT16], ids=["blocks", "bfloat16"])
pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]


def program(command: list[str], sources: tuple[Path, ...], *linked: str) -> Path:
    """The compiled program, kept beside the kernels until its files or its compiler's options change."""
    name = version(*command, *linked, recipe=Recipe("exercise", sources, ()))
    program_file = cache_folder() / "kernels" / f"exercise-{name}"
    if not program_file.is_file():
        with TemporaryDirectory(dir=program_file.parent) as scratch:
            compiled = [str(file) for file in sources if file.suffix == ".c"]
            build = [*command, *compiled, *linked, "-o", f"{scratch}/exercise"]
            subprocess.run(build, check=True, capture_output=True, text=True)
            os.replace(f"{scratch}/exercise", program_file)
    return program_file


def checksums_of(kernels: Kernels, isa: str, optimization: str = "-O3") -> str:
    """What the driver prints: a checksum of every result."""
    recipe_of, driver, headers = kernels
    is_arm = isa == "neon"
    compiler = CROSS if is_arm else "gcc"
    recipe = recipe_of(isa)
    recipe = replace(recipe, flags=(optimization, *recipe.flags[1:]))
    (cache_folder() / "kernels").mkdir(mode=0o700, parents=True, exist_ok=True)
    library = built(cache_folder() / "kernels", {"CC": compiler}, recipe)
    program_file = program(
        [compiler, *recipe.flags, f"-I{headers}"], (Path(__file__).with_name(driver),), str(library), "-lm"
    )
    finished = subprocess.run([*(EMULATOR if is_arm else ()), str(program_file)], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-200:] + finished.stderr[-500:]
    return finished.stdout


def files_of(recipe: Recipe, driver: str) -> tuple[Path, ...]:
    """The driver and the kernels themselves."""
    return (Path(__file__).with_name(driver), *recipe.sources)


@cache
def specification(kernels: Kernels) -> str:
    return checksums_of(kernels, "plain", "-O1")


def others(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name != "plain" and set(NEEDED[name]) <= processor().flags]


@pytest.mark.exhaustive
@of_both
def test_arm_gives_the_bits_of_plain_c(kernels: Kernels) -> None:
    if missing := [name for name in (CROSS, EMULATOR[0]) if shutil.which(name) is None]:
        pytest.skip(f"needs {missing[0]}")
    assert checksums_of(kernels, "neon", "-O1") == specification(kernels)


def test_the_best_kernels_for_bfloat16_give_the_bits_of_plain_c() -> None:
    """test_block_linear.py compares the best ones for blocks."""
    assert checksums_of(BFLOAT16, others(NAMES[BFLOAT16])[0], "-O1") == specification(BFLOAT16)


@pytest.mark.exhaustive
@of_both
def test_this_machines_instruction_sets_give_the_bits_of_plain_c(kernels: Kernels) -> None:
    for isa in others(NAMES[kernels]):
        assert checksums_of(kernels, isa) == specification(kernels), isa


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", OF_PAIRS)
def test_kernels_that_round_differently_are_noticed(variant: str) -> None:
    if missing := set(VARIANTS[variant]) - processor().flags:
        pytest.skip(f"needs a processor with {min(missing)}")
    assert checksums_of(BFLOAT16, variant) != specification(BFLOAT16)


@pytest.mark.exhaustive
@of_both
def test_kernels_for_tiles_give_the_same_bits_on_emulated_tiles(kernels: Kernels) -> None:
    """Runs the kernels for AMX on emulated tiles and compares them with the processor's own tiles, if it has any."""
    recipe_of, driver, headers = kernels
    recipe = recipe_of("avx512" if kernels is BLOCKS else "avx512bf16")
    if missing := set(NEEDED["amx"]) - {*AMX} - processor().flags:
        pytest.skip(f"needs a processor with {min(missing)}")
    emulated = ["-include", str(EMULATED), "-D__AMX_INT8__", "-D__AMX_BF16__", f"-I{headers}"]
    flags = ["-O2", *(flag for flag in recipe.flags if flag not in ("-O3", "-fPIC"))]
    program_file = program(["gcc", *flags, *emulated], (EMULATED, *files_of(recipe, driver)), *LIBRARIES)
    checksums = subprocess.run([str(program_file)], capture_output=True, text=True, check=True).stdout
    assert kernels is not BLOCKS or checksums == specification(kernels)
    assert not {*AMX} <= processor().flags or checksums == checksums_of(kernels, "amx")


@pytest.mark.exhaustive  # compiling takes a minute for each
@of_both
def test_sanitizers_find_nothing(kernels: Kernels) -> None:
    """Runs the drivers, whose buffers have the exact size, with the address and undefined behavior sanitizers."""
    recipe_of, driver, headers = kernels
    needed = NEEDED if kernels is BLOCKS else VARIANTS
    recipe = recipe_of(next(name for name, flags in needed.items() if set(flags) <= processor().flags))
    flags = [flag for flag in recipe.flags if flag not in ("-O3", "-fPIC")]
    checked = ["-Og", "-g0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{headers}"]
    try:
        program_file = program(["gcc", *flags, *checked], files_of(recipe, driver), *LIBRARIES)
    except subprocess.CalledProcessError as error:
        if "cannot find -lasan" in error.stderr or "libasan" in error.stderr:
            pytest.skip("the compiler has no sanitizers")
        raise AssertionError(error.stderr) from error
    finished = subprocess.run([str(program_file)], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-200:] + finished.stderr
