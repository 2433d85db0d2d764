"""Slipstream's own kernels: prebuilt libraries of a wheel, or compiled when first needed and saved in the cache folder.

A prebuilt library is used if it was made of these very sources. Otherwise a compiler is needed; what it makes is loaded
again only from a folder that nobody but the user can have written to. Without either, or on a processor without the
instructions that the kernels are written for, PyTorch's kernels are used and a warning says why; SLIPSTREAM_KERNELS=off
in the environment does so without a warning.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from slipstream.errors import UsageError
from slipstream.models.cache_folder import cache_folder, users_cache_folder
from slipstream.models.cpu.instruction_sets import NoKernelsError
from slipstream.models.cpu.private_folder import is_whole, private_folder, save

log = logging.getLogger("slipstream")

SOURCES, PREBUILT = Path(__file__).with_name("csrc"), Path(__file__).with_name("prebuilt")
# no contraction: a product and a sum become one operation only where the source says so, whatever is inlined where
COMMON_FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fPIC")
LIBRARIES = ("-lpthread", "-ldl", "-lm")
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}
SWITCH = "SLIPSTREAM_KERNELS"


def switched_on() -> bool:
    """Whether the environment lets Slipstream use its own kernels."""
    switch = os.environ.get(SWITCH) or "on"
    if switch not in ("on", "off"):
        raise UsageError(f"{SWITCH}={switch!r}; allowed: 'on' or 'off'")
    return switch == "on"


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers begin."""
    return None if tensor is None else tensor.data_ptr()


@dataclass(frozen=True)
class Recipe:
    """What is compiled to one library, and how. name: the library's; sources: its C files."""

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...]

    @property
    def headers(self) -> tuple[Path, ...]:
        """All headers: those that the sources include are among them."""
        return tuple(sorted(SOURCES.rglob("*.h")))


def prebuilt_file(recipe: Recipe) -> Path | None:
    """The prebuilt library of these sources; None if there is none."""
    name = prebuilt_name(recipe, sys.platform)
    if (PREBUILT / name).exists():
        return PREBUILT / name
    if others := sorted(PREBUILT.glob(f"{recipe.name}-*")):
        log.info("%s was built of other sources: the kernels are compiled", others[0].name)
    return None


def prebuilt_name(recipe: Recipe, platform: str) -> str:
    """The name of a prebuilt library, which tells its sources. platform: as `sys.platform`."""
    return f"{recipe.name}-{_digest(recipe)}{SUFFIX.get(platform, '.so')}"


def built(folder: Path, environment: Mapping[str, str], recipe: Recipe) -> Path:
    """The compiled library in this folder; compiled if it is not there whole, by $CC, else gcc, else cc.

    folder: see `private_folder`.
    """
    candidates = [shlex.split(environment["CC"])] if environment.get("CC") else [["gcc"], ["cc"]]
    compiler = next((command for command in candidates if shutil.which(command[0])), None)
    if compiler is None:
        raise NoKernelsError(f"no C compiler ({' or '.join(command[0] for command in candidates)})")
    library = folder / f"{version(*compiler, recipe=recipe)}.so"
    if not is_whole(library):
        with tempfile.TemporaryDirectory() as scratch:
            linked = Path(scratch) / "library.so"
            compile_library(compiler, recipe, linked)
            save(linked.read_bytes(), library)
    return library


def compile_library(compiler: list[str], recipe: Recipe, library: Path, libraries: tuple[str, ...] = LIBRARIES) -> None:
    """Compile and link a library. Raises `NoKernelsError` with the compiler's first line where it fails."""
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = [f"{scratch}/{source.stem}.o" for source in recipe.sources]
        commands = [
            [*compiler, *recipe.flags, "-c", str(source), "-o", made]
            for source, made in zip(recipe.sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as compilers:
            list(compilers.map(_run, commands))
        _run([*compiler, "-shared", *objects, "-o", str(library), *libraries])


def version(*compiler: str, recipe: Recipe) -> str:
    """A name for these kernels: a digest of their source and of the way they are compiled."""
    return f"kernels-{_digest(recipe, *compiler)}"


def _digest(recipe: Recipe, *compiler: str) -> str:
    texts = [path.read_text(encoding="utf-8") for path in (*recipe.sources, *recipe.headers)]
    return hashlib.sha256("\0".join((*texts, *compiler, *recipe.flags)).encode()).hexdigest()[:16]


@cache
def loaded(recipe: Recipe) -> ctypes.CDLL:
    """The library, ready to compute with as many threads as PyTorch. Raises `NoKernelsError`."""
    prebuilt = prebuilt_file(recipe)
    try:
        library = _compiled(recipe) if prebuilt is None else ctypes.CDLL(str(prebuilt))
    except OSError as error:
        raise NoKernelsError(str(error)) from error
    library.set_pool_threads(ctypes.c_int64(torch.get_num_threads()))
    return library


def _compiled(recipe: Recipe) -> ctypes.CDLL:
    """The library from the cache folder, compiled if need be; from the user's own where that one is shared."""
    reasons = dict[Path, str]()
    for folder in dict.fromkeys(parent / "kernels" for parent in (cache_folder(), users_cache_folder())):
        try:
            with private_folder(folder) as private:
                library = built(private, os.environ, recipe)
                try:
                    return ctypes.CDLL(str(library))
                except OSError as error:  # compiled by another system that has this folder too
                    log.info("%s is compiled again: %s", folder / library.name, error)
                    library.unlink(missing_ok=True)
                    return ctypes.CDLL(str(built(private, os.environ, recipe)))
        except OSError as error:
            reasons[folder] = str(error)
    raise NoKernelsError("; ".join(reasons.values()))


def first_that_loads(recipes: Sequence[Recipe]) -> Recipe:
    """The first recipe whose library can be had. Raises the last one's `NoKernelsError` if none can."""
    for recipe in recipes[:-1]:
        try:
            loaded(recipe)
        except NoKernelsError as error:
            log.info("%s cannot be had: %s", recipe.name, error)
        else:
            return recipe
    loaded(recipes[-1])
    return recipes[-1]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
        raise NoKernelsError(f"{command[0]} failed: {reason}")
