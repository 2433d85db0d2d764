"""All sets of instructions give the same bits, ARM's on an emulator; the drivers are C, so it needs no Python.

Of the kernels for bfloat16 weights that holds for those that widen numbers to float32: not for AMX and AVX-512 with
bfloat16.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

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
)
from slipstream.models.cpu.processor import AMX, NEEDED, processor

CROSS, EMULATOR = "aarch64-linux-gnu-gcc", ("qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu")
BLOCKS, BFLOAT16 = (block_recipe, "exercise.c", SOURCES / "blocks"), (bfloat16_recipe, "exercise_bfloat16.c", SOURCES)
Kernels = tuple[Callable[[str], Recipe], str, Path]
EMULATED = Path(__file__).with_name("emulated_tiles.h")
OF_PAIRS = ("amx", "avx512bf16")  # multiply pairs of bfloat16 numbers
of_both = pytest.mark.parametrize("kernels", [BLOCKS, BFLOAT16], ids=["blocks", "bfloat16"])
pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]


def printed(kernels: Kernels, isa: str, folder: Path) -> str:
    """What the driver prints: a checksum of every result."""
    recipe_of, driver, headers = kernels
    is_arm = isa == "neon"
    compiler = CROSS if is_arm else "gcc"
    recipe = recipe_of(isa)
    if is_arm:  # not compiled for other tests too: in less time
        recipe = replace(recipe, flags=("-Og", *recipe.flags[1:]))
    (cache_folder() / "kernels").mkdir(mode=0o700, parents=True, exist_ok=True)
    library, made = built(cache_folder() / "kernels", {"CC": compiler}, recipe), folder / isa
    command = [compiler, *recipe.flags, f"-I{headers}", str(Path(__file__).with_name(driver)), str(library), "-lm"]
    subprocess.run([*command, "-o", str(made)], check=True)
    done = subprocess.run([*(EMULATOR if is_arm else ()), str(made)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-500:]
    return done.stdout


@cache
def specification(kernels: Kernels, folder: Path) -> str:
    return printed(kernels, "plain", folder)


def others(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name != "plain" and set(NEEDED[name]) <= processor().flags]


@of_both
def test_arm_gives_the_bits_of_plain_c(kernels: Kernels, tmp_path: Path) -> None:
    if missing := [name for name in (CROSS, EMULATOR[0]) if shutil.which(name) is None]:
        pytest.skip(f"needs {missing[0]}")
    assert printed(kernels, "neon", tmp_path) == specification(kernels, tmp_path)


@of_both
def test_this_machines_instructions_do_too(kernels: Kernels, tmp_path: Path) -> None:
    names = tuple(NEEDED) if kernels is BLOCKS else tuple(name for name in VARIANTS if name not in OF_PAIRS)
    for isa in others(names):
        assert printed(kernels, isa, tmp_path) == specification(kernels, tmp_path), isa


@pytest.mark.parametrize("variant", OF_PAIRS)
def test_other_roundings_would_be_noticed(variant: str, tmp_path: Path) -> None:
    """Those of products of pairs."""
    if missing := set(VARIANTS[variant]) - processor().flags:
        pytest.skip(f"needs a processor with {min(missing)}")
    assert printed(BFLOAT16, variant, tmp_path) != specification(BFLOAT16, tmp_path)


@of_both
def test_tiles_give_what_they_should(kernels: Kernels, tmp_path: Path) -> None:
    """The kernels for AMX over tiles in plain C, and over its own where there are any."""
    recipe_of, driver, headers = kernels
    recipe = recipe_of("avx512" if kernels is BLOCKS else "avx512bf16")
    if missing := set(NEEDED["amx"]) - {*AMX} - processor().flags:
        pytest.skip(f"needs a processor with {min(missing)}")
    emulated = ["-include", str(EMULATED), "-D__AMX_INT8__", "-D__AMX_BF16__", f"-I{headers}"]
    sources, made = [str(file) for file in recipe.sources if not file.stem.endswith("layout")], tmp_path / "emulated"
    flags = ["-O2", *(flag for flag in recipe.flags if flag not in ("-O3", "-fPIC"))]
    command = ["gcc", *flags, *emulated, str(Path(__file__).with_name(driver)), *sources, *LIBRARIES, "-o", str(made)]
    subprocess.run(command, check=True)
    found = subprocess.run([str(made)], capture_output=True, text=True, check=True).stdout
    assert kernels is not BLOCKS or found == specification(kernels, tmp_path)
    assert not {*AMX} <= processor().flags or found == printed(kernels, "amx", tmp_path)


@of_both
def test_sanitizers_find_nothing(kernels: Kernels, tmp_path: Path) -> None:
    """Buffers of the exact size, under the address and the undefined behaviour sanitizer."""
    recipe_of, driver, headers = kernels
    needed = NEEDED if kernels is BLOCKS else VARIANTS
    recipe = recipe_of(next(name for name, flags in needed.items() if set(flags) <= processor().flags))
    sources = [str(file) for file in recipe.sources if not file.stem.endswith("layout")]
    flags = [flag for flag in recipe.flags if flag not in ("-O3", "-fPIC")]
    checked = ["-Og", "-g0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{headers}"]
    made = tmp_path / "exercise"
    build = ["gcc", *flags, *checked, str(Path(__file__).with_name(driver)), *sources, *LIBRARIES, "-o", str(made)]
    done = subprocess.run(build, capture_output=True, text=True)
    if "cannot find -lasan" in done.stderr or "libasan" in done.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert done.returncode == 0, done.stderr
    ran = subprocess.run([str(made)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-200:] + ran.stderr
