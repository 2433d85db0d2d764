"""Kernels of our own, compiled on the user's machine the first time they are wanted, then kept in the cache folder.

They need a compiler and a processor with the instructions they are written for; where either is missing, PyTorch's
kernels are used, and why is logged once. So they are with SLIPSTREAM_KERNELS=off in the environment. OpenMP's functions
are those that PyTorch has loaded, so that both share one set of threads.
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
from functools import cache
from pathlib import Path

from torch import Tensor

from slipstream.errors import UsageError
from slipstream.models.cache_folder import cache_folder

log = logging.getLogger("slipstream")

SOURCES = Path(__file__).with_name("csrc")
INSTRUCTIONS = ("avx512f", "avx512bw", "avx512vl", "avx512_bf16")
# no contraction: a product and a sum become one operation only where the source says so, whatever is inlined where
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fPIC",
    "-fopenmp",
    *("-m" + name.replace("_", "") for name in INSTRUCTIONS),
)
SWITCH = "SLIPSTREAM_KERNELS"
_CPU = Path("/proc/cpuinfo")


class NoKernelsError(Exception):
    """Why there are none here."""


def kernels() -> ctypes.CDLL | None:
    """The compiled functions of `csrc/`, or None where they cannot be had or are switched off."""
    wanted = os.environ.get(SWITCH) or "on"
    if wanted not in ("on", "off"):
        raise UsageError(f"{SWITCH}={wanted!r}; allowed: 'on' or 'off'")
    return _library() if wanted == "on" else None


@cache
def _library() -> ctypes.CDLL | None:
    try:
        check_processor(_CPU.read_text() if _CPU.exists() else "")
        library = ctypes.CDLL(str(built(cache_folder() / "kernels", os.environ)))
    except (NoKernelsError, OSError) as error:
        log.info("PyTorch's kernels are used, not Slipstream's own: %s", error)
        return None
    library.space_for.restype = ctypes.c_long
    return library


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers begin."""
    return None if tensor is None else tensor.data_ptr()


def check_processor(description: str) -> None:
    """Raise unless the text of /proc/cpuinfo has the instructions, and no better ones."""
    flags = next((line.split() for line in description.splitlines() if line.startswith("flags")), [])
    if missing := [name for name in INSTRUCTIONS if name not in flags]:
        raise NoKernelsError(f"they need a processor with {missing[0]}")
    if "amx_bf16" in flags:
        raise NoKernelsError("this processor multiplies matrices (AMX), which oneDNN makes use of")


def built(folder: Path, environment: Mapping[str, str]) -> Path:
    """The compiled library in this folder; compiled if it is not there. The compiler is $CC, else gcc, else cc."""
    wanted = [shlex.split(environment["CC"])] if environment.get("CC") else [["gcc"], ["cc"]]
    compiler = next((command for command in wanted if shutil.which(command[0])), None)
    if compiler is None:
        raise NoKernelsError(f"no C compiler ({' or '.join(command[0] for command in wanted)})")
    sources = sorted(SOURCES.glob("*.c"))
    library = folder / f"{version(*compiler)}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place) / "library.so"
            for source in sources:
                _run([*compiler, *FLAGS, "-c", str(source), "-o", f"{place}/{source.stem}.o"])
            objects = [f"{place}/{source.stem}.o" for source in sources]
            _run([*compiler, "-shared", *objects, "-o", str(made)])  # OpenMP is PyTorch's
            made.rename(library)
    return library


def version(*compiler: str) -> str:
    """What tells these kernels from other ones: by their source and the way they are compiled."""
    texts = [path.read_text() for path in sorted(SOURCES.glob("*.[ch]"))]
    return "kernels-" + hashlib.sha256("\0".join((*texts, *compiler, *FLAGS)).encode()).hexdigest()[:16]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
        raise NoKernelsError(f"{command[0]} failed: {reason}")
