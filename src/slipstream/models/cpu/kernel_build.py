"""Slipstream's own kernels, compiled on the user's machine when first needed and saved in the cache folder.

They need a compiler and a processor with the instructions they are written for. Where either is missing, PyTorch's
kernels are used and a warning says why; SLIPSTREAM_KERNELS=off in the environment does so without a warning. They use
the OpenMP that PyTorch has loaded, so that both share one set of threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch import Tensor

from slipstream.errors import UsageError
from slipstream.models.cache_folder import cache_folder
from slipstream.models.cpu.c_structs import check_layout
from slipstream.models.cpu.processor import Processor, processor
from slipstream.models.fast_path_warnings import warn_slower

log = logging.getLogger("slipstream")

SOURCES = Path(__file__).with_name("csrc")
INSTRUCTIONS = ("avx512f", "avx512bw", "avx512vl", "avx512_bf16")
# no contraction: a product and a sum become one operation only where the source says so, whatever is inlined where
COMMON_FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fPIC", "-fopenmp")
FLAGS = (
    *COMMON_FLAGS,
    *("-m" + name.replace("_", "") for name in INSTRUCTIONS),
)
SWITCH = "SLIPSTREAM_KERNELS"


class NoKernelsError(Exception):
    """Why the kernels cannot be used here. slower: whether PyTorch's are slower."""

    def __init__(self, reason: str, slower: bool = True) -> None:
        super().__init__(reason)
        self.slower = slower


def switched_on() -> bool:
    """Whether the environment lets Slipstream use its own kernels."""
    switch = os.environ.get(SWITCH) or "on"
    if switch not in ("on", "off"):
        raise UsageError(f"{SWITCH}={switch!r}; allowed: 'on' or 'off'")
    return switch == "on"


def kernels() -> ctypes.CDLL | None:
    """The compiled functions of `csrc/`, or None where they cannot be had or are switched off."""
    return _library() if switched_on() else None


@cache
def _library() -> ctypes.CDLL | None:
    try:
        check_processor(processor())
        library = ctypes.CDLL(str(built(cache_folder() / "kernels", os.environ)))
    except (NoKernelsError, OSError) as error:
        reason = f"PyTorch's kernels are used, not Slipstream's own: {error}"
        if isinstance(error, NoKernelsError) and not error.slower:
            log.info(reason)
        else:
            warn_slower(reason)
        return None
    check_layout(library)
    library.scratch_per_token.restype = ctypes.c_long
    return library


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers begin."""
    return None if tensor is None else tensor.data_ptr()


def check_processor(processor: Processor) -> None:
    """Raise unless the processor has the instructions, and no better ones."""
    if missing := [name for name in INSTRUCTIONS if name not in processor.flags]:
        raise NoKernelsError(f"they need a processor with {missing[0]}")
    if "amx_bf16" in processor.flags:
        raise NoKernelsError("this processor multiplies matrices (AMX), which oneDNN uses", slower=False)


@dataclass(frozen=True)
class Recipe:
    """What is compiled to one library, and how. sources: the folder of its C files."""

    sources: Path
    flags: tuple[str, ...]


def built(folder: Path, environment: Mapping[str, str], recipe: Recipe | None = None) -> Path:
    """The compiled library in this folder; compiled if it is not there. The compiler is $CC, else gcc, else cc.

    recipe: by default that of the kernels for bfloat16.
    """
    recipe = Recipe(SOURCES, FLAGS) if recipe is None else recipe
    candidates = [shlex.split(environment["CC"])] if environment.get("CC") else [["gcc"], ["cc"]]
    compiler = next((command for command in candidates if shutil.which(command[0])), None)
    if compiler is None:
        raise NoKernelsError(f"no C compiler ({' or '.join(command[0] for command in candidates)})")
    sources = sorted(recipe.sources.glob("*.c"))
    library = folder / f"{version(*compiler, recipe=recipe)}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            linked = Path(scratch) / "library.so"
            objects = [f"{scratch}/{source.stem}.o" for source in sources]
            commands = [
                [*compiler, *recipe.flags, "-c", str(source), "-o", made]
                for source, made in zip(sources, objects, strict=True)
            ]
            with ThreadPoolExecutor(os.cpu_count()) as compilers:
                list(compilers.map(_run, commands))
            _run([*compiler, "-shared", *objects, "-o", str(linked)])  # OpenMP is PyTorch's
            linked.rename(library)
    return library


def version(*compiler: str, recipe: Recipe | None = None) -> str:
    """A name for these kernels: a digest of their source and of the way they are compiled."""
    recipe = Recipe(SOURCES, FLAGS) if recipe is None else recipe
    texts = [path.read_text() for path in sorted(recipe.sources.glob("*.[ch]"))]
    return "kernels-" + hashlib.sha256("\0".join((*texts, *compiler, *recipe.flags)).encode()).hexdigest()[:16]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
        raise NoKernelsError(f"{command[0]} failed: {reason}")
