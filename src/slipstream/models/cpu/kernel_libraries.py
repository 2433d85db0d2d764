"""Slipstream's own kernels: prebuilt in a wheel, or compiled at first use and saved in the cache folder.

There are two libraries: one for bfloat16 weights (`csrc/*.c`) and one for blocks of quantized files
(`csrc/blocks/*.c`), each compiled for the best instructions of this processor. Blocks give the same bits with all
instructions. With bfloat16 weights, AMX gives its own bits, so does AVX-512 with bfloat16, and all other instructions
agree. The number of tokens never changes a bit.

A prebuilt library is used if it was made from exactly these sources. Otherwise a compiler is needed; its library is
reloaded only from a folder that only the user can have written to. Without either, or on a processor that lacks the
kernels' instructions, PyTorch's kernels are used and a warning tells why; SLIPSTREAM_KERNELS=off in the environment
selects them without a warning.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import UsageError, os_reason
from slipstream.models.cache_folder import cache_folder, users_cache_folder
from slipstream.models.cpu.processor import (
    ISA,
    NEEDED,
    NoCompilerError,
    NoKernelsError,
    Processor,
    compiler_flags,
    isas_of,
    processor,
)
from slipstream.models.cpu.thread_placement import free_thread
from slipstream.models.notices import announce, warn_slower

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("slipstream")
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
DESCRIPTORS = Path("/proc/self/fd")
CHECKSUM_BYTES = hashlib.sha256().digest_size
ROOT = 0
SOURCES, PREBUILT = Path(__file__).with_name("csrc"), Path(__file__).with_name("prebuilt")
BLOCK_SOURCES = sorted(SOURCES.joinpath("blocks").glob("*.c"))
# no contraction: only the source, never the compiler, fuses a product and a sum into one operation
COMMON_FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fPIC")
# calls between the kernels' files bind to this library, even if other libraries have functions of the same name
LIBRARIES = (*(("-Wl,-Bsymbolic",) if sys.platform == "linux" else ()), "-lpthread", "-ldl", "-lm")
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}
SWITCH = "SLIPSTREAM_KERNELS"
# command that installs a compiler, by system
COMPILERS = {"darwin": "xcode-select --install", "linux": "apt install gcc, or your system's package of it"}
BFLOAT16 = "avx512bf16"  # the variant of AVX-512 with bfloat16 products; `NEEDED` names the others
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "amx": NEEDED["amx"],
    BFLOAT16: (*NEEDED["avx512"], "avx512_bf16"),
    "avx512": NEEDED["avx512"],
    "avx2": NEEDED["avx2"],
    "neon": NEEDED["neon"],
    "plain": (),
}


# the functions that Python calls: arguments (p: pointer; n, i: integer of 64 or 32 bits; f: float) and, after >, result
SIGNATURES = {
    "set_pool_threads": "n",
    # bfloat16 weights
    "choose_codes": "pnnpp",
    "compress_weights": "pnnpppp",
    "multiply": "ppnpp",
    "race_contenders": "pnnp>n",
    "race_leaders": "pnnpfnpp",
    "race_winner": "pnnnfnffpp>n",
    "advance_states": "ppnpppp",
    # blocks
    "panel_bytes": "nn>n",
    "pack_panels": "npnnpi>i",
    "pack_pieces": "ipnpi>n",  # missing on Windows
    "unpack_rows": "pnpnp",
    "activation_bytes": "nnn>n",
    "multiply_blocks": "ppnnpp",
    "experts_scratch": "pn>n",
    "multiply_experts": "pppnppp",
    # layers of either kind of weights
    "layer_scratch": "pnn>n",
    "project_qkv_rope": "ppnpppp",
    "residual_mlp": "pppnpp",
    "whole_layer": "pppnpppp",
    "finish_layer": "ppppnpppp",
    "all_layers": "pnppnppp",
    "normalize_tokens": "ppnnp",
}
TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float, "": None}


class NotPrivateError(OSError):
    """The files of a folder cannot be trusted; the message is the reason."""


@contextmanager
def private_folder(folder: Path) -> Iterator[Path]:
    """Create a folder that only the user may write to, or restrict one that the user owns; yields a path to it.

    On Linux the path leads to the folder that was checked, even if a parent folder is renamed. A folder that belongs to
    the administrator, and that no one else may write to, is accepted, too. Raises `NotPrivateError` for any other, and
    OSError if it cannot be created. On Windows nothing is checked; the system's access rights protect the folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if not hasattr(os, "geteuid"):
        yield folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and status.st_mode & OTHERS_MAY_WRITE:
            os.fchmod(descriptor, 0o700)
        elif not _is_trusted(status):
            raise NotPrivateError(f"{folder} belongs to another user, or others may write to it")
        yield DESCRIPTORS / str(descriptor) if DESCRIPTORS.exists() else folder
    finally:
        os.close(descriptor)


def save(content: bytes, file: Path) -> None:
    """Write a file atomically, with a checksum at its end and without write access for others."""
    descriptor, scratch = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content + hashlib.sha256(content).digest())
        os.replace(scratch, file)
    except BaseException:
        os.unlink(scratch)
        raise


def is_whole(file: Path) -> bool:
    """True if `save` wrote this file for this user, and it is unchanged."""
    try:
        status = file.lstat()
        content = file.read_bytes() if stat.S_ISREG(status.st_mode) and _is_trusted(status) else b""
    except OSError:
        return False
    return hashlib.sha256(content[:-CHECKSUM_BYTES]).digest() == content[-CHECKSUM_BYTES:]


def _is_trusted(status: os.stat_result) -> bool:
    """True if only the user or the administrator owns this file or folder and may write to it."""
    if not hasattr(os, "geteuid"):
        return True
    return status.st_uid in (os.geteuid(), ROOT) and not status.st_mode & OTHERS_MAY_WRITE


def switched_on() -> bool:
    """True if the environment lets Slipstream use its own kernels."""
    switch = os.environ.get(SWITCH) or "on"
    if switch not in ("on", "off"):
        raise UsageError(f"{SWITCH}={switch!r}; allowed: 'on' or 'off'")
    return switch == "on"


def address(tensor: Tensor | None) -> int | None:
    """The address of a tensor's first element; None (a null pointer) without a tensor."""
    return None if tensor is None else tensor.data_ptr()


@dataclass(frozen=True)
class Recipe:
    """The name, C files and compiler flags of one library."""

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...]

    @property
    def headers(self) -> tuple[Path, ...]:
        """All headers, a superset of those that the sources include."""
        return tuple(sorted(SOURCES.rglob("*.h")))


def prebuilt_file(recipe: Recipe) -> Path | None:
    """The library in the wheel that was built from these sources; None if there is none."""
    name = prebuilt_name(recipe, sys.platform)
    if (PREBUILT / name).exists():
        return PREBUILT / name
    if others := sorted(PREBUILT.glob(f"{recipe.name}-*")):
        log.info("%s was built from other sources: the kernels are compiled", others[0].name)
    return None


def prebuilt_name(recipe: Recipe, platform: str) -> str:
    """The file name of a prebuilt library, with a digest of its sources. platform: as `sys.platform`."""
    return f"{recipe.name}-{_digest(recipe)}{SUFFIX.get(platform, '.so')}"


def built(folder: Path, environment: Mapping[str, str], recipe: Recipe) -> Path:
    """The compiled library in this folder. If it is missing or damaged, $CC, else gcc, else cc compiles it.

    folder: see `private_folder`.
    """
    candidates = [shlex.split(environment["CC"])] if environment.get("CC") else [["gcc"], ["cc"]]
    compiler = next((command for command in candidates if shutil.which(command[0])), None)
    if compiler is None:
        raise NoCompilerError(f"no C compiler found ({' or '.join(command[0] for command in candidates)})")
    library = folder / f"{version(*compiler, recipe=recipe)}.so"
    if is_whole(library):
        return library
    with _alone_in(folder):
        if not is_whole(library):  # else another process has compiled it meanwhile
            announce(f"compiling the {recipe.name} kernels with {compiler[0]} (once) ...")
            with tempfile.TemporaryDirectory() as scratch:
                linked = Path(scratch) / "library.so"
                compile_library(compiler, recipe, linked)
                save(linked.read_bytes(), library)
    return library


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let one process at a time into this block per folder, where the system supports locks."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def compile_library(compiler: list[str], recipe: Recipe, library: Path) -> None:
    """Compile and link a library. Raises `NoKernelsError` with the compiler's first line where it fails."""
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = [f"{scratch}/{source.stem}.o" for source in recipe.sources]
        commands = [
            [*compiler, *recipe.flags, "-c", str(source), "-o", target]
            for source, target in zip(recipe.sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count(), "compiling", free_thread) as compilers:
            list(compilers.map(_run, commands))
        _run([*compiler, "-shared", *objects, "-o", str(library), *LIBRARIES])


def version(*compiler: str, recipe: Recipe) -> str:
    """A name for these kernels, with a digest of their sources, compiler and flags."""
    return f"kernels-{_digest(recipe, *compiler)}"


def _digest(recipe: Recipe, *compiler: str) -> str:
    texts = [path.read_text(encoding="utf-8") for path in (*recipe.sources, *recipe.headers)]
    return hashlib.sha256("\0".join((*texts, *compiler, *recipe.flags)).encode()).hexdigest()[:16]


@cache
def loaded(recipe: Recipe) -> ctypes.CDLL:
    """The library, which computes with one thread. Raises `NoKernelsError`."""
    prebuilt = prebuilt_file(recipe)
    try:
        return typed(_compiled(recipe) if prebuilt is None else ctypes.CDLL(str(prebuilt)))
    except OSError as error:
        raise NoKernelsError(str(error)) from error


def _with_threads(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, which computes with as many threads as PyTorch."""
    import torch

    library.set_pool_threads(torch.get_num_threads())
    return library


def _compiled(recipe: Recipe) -> ctypes.CDLL:
    """The library in the cache folder, or in the user's default one if others may write to that; compiled if needed."""
    reasons = dict[Path, str]()
    for folder in dict.fromkeys(parent / "kernels" for parent in (cache_folder(), users_cache_folder())):
        try:
            with private_folder(folder) as private:
                library = built(private, os.environ, recipe)
                try:
                    return ctypes.CDLL(str(library))
                except OSError as error:  # another system that shares this folder compiled it
                    log.info("%s is compiled again: %s", folder / library.name, error)
                    library.unlink(missing_ok=True)
                    return ctypes.CDLL(str(built(private, os.environ, recipe)))
        except OSError as error:
            reasons[folder] = f"{folder} cannot be written ({os_reason(error)})" if error.strerror else str(error)
    raise NoKernelsError("; ".join(reasons.values()))


def with_remedy(error: NoKernelsError) -> str:
    """The reason and, if a compiler is missing, how to install one."""
    if not isinstance(error, NoCompilerError):
        return str(error)
    command = f" ({COMPILERS[sys.platform]})" if sys.platform in COMPILERS else ""
    return f"{error}; install one{command} or a Slipstream wheel with prebuilt kernels"


def first_that_loads(recipes: Sequence[Recipe]) -> Recipe:
    """The first recipe whose library can be loaded. Raises the last recipe's `NoKernelsError` if none can."""
    last_reason = ""  # logs a shared reason once, such as a folder that cannot be written
    for recipe in recipes[:-1]:
        try:
            loaded(recipe)
        except NoCompilerError:
            continue  # another one may be prebuilt
        except NoKernelsError as error:
            if str(error) != last_reason:
                log.info("the kernels %s are not used: %s", recipe.name, error)
            last_reason = str(error)
        else:
            return recipe
    loaded(recipes[-1])
    return recipes[-1]


def _run(command: list[str]) -> None:
    process = subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8", errors="replace")
    if process.returncode:
        reason = next(iter(process.stderr.strip().splitlines()), f"exit code {process.returncode}")
        raise NoKernelsError(f"{command[0]} failed: {reason}")


def variants_of(processor: Processor, forced_isa: str | None) -> list[str]:
    """The variants that can be used, best first. forced_isa: see `isas_of`, which raises the errors."""
    best = isas_of(processor, forced_isa)[0]
    below = list(NEEDED)[list(NEEDED).index(best) :]
    allowed = [name for name in VARIANTS if name in below or (name == BFLOAT16 and "avx512" in below)]
    usable = [name for name in allowed if set(VARIANTS[name]) <= processor.flags and name != "plain"]
    return usable or ["plain"]


def bfloat16_recipe(variant: str) -> Recipe:
    """The recipe for bfloat16 weights. variant: a key of `VARIANTS`."""
    flags = (*COMMON_FLAGS, *compiler_flags(VARIANTS[variant]))
    products = [path for path in BLOCK_SOURCES if path.stem != "float_layer"]
    return Recipe(f"bfloat16-{variant}", (*sorted(SOURCES.glob("*.c")), *products), flags)


def kernels() -> ctypes.CDLL | None:
    """The compiled functions of `csrc/`; None if they are not available or are switched off."""
    return kernels_for(os.environ.get(ISA)) if switched_on() else None


@cache
def kernels_for(forced_isa: str | None) -> ctypes.CDLL | None:
    """The result of `kernels` if they are switched on. forced_isa: the value of SLIPSTREAM_ISA."""
    try:
        return _with_threads(loaded(best_bfloat16_recipe(forced_isa)))
    except NoKernelsError as error:
        warn_slower(f"PyTorch's kernels are used, not Slipstream's own: {with_remedy(error)}")
        return None


def best_bfloat16_recipe(forced_isa: str | None) -> Recipe:
    """The recipe of the best variant that processor and compiler support, or only of `forced_isa`."""
    recipes = [bfloat16_recipe(variant) for variant in variants_of(processor(), forced_isa)]
    return first_that_loads(recipes[:1] if forced_isa else recipes)


def bfloat16_version() -> str:
    """A name for the kernels in use, see `version`."""
    return version(recipe=best_bfloat16_recipe(os.environ.get(ISA)))


def block_recipe(isa: str) -> Recipe:
    """The recipe for quantized files. isa: a key of `NEEDED`."""
    sources = (*BLOCK_SOURCES, *(SOURCES / f"{name}.c" for name in ("race", "recurrence", "team")))
    return Recipe(f"blocks-{isa}", sources, (*COMMON_FLAGS, *compiler_flags(NEEDED[isa])))


def block_kernels() -> ctypes.CDLL:
    """The compiled functions of `csrc/blocks/`. Raises `NoKernelsError` with the reason if they are not available."""
    return _with_threads(packing_kernels())


def packing_kernels() -> ctypes.CDLL:
    """The same functions before PyTorch is imported; only those that pack may be called."""
    if not switched_on():
        raise NoKernelsError("SLIPSTREAM_KERNELS is off")
    return loaded(best_block_recipe(os.environ.get(ISA)))


def best_block_recipe(forced_isa: str | None) -> Recipe:
    """The recipe of the best instructions that processor and compiler support, or only of `forced_isa`."""
    return first_that_loads([block_recipe(isa) for isa in isas_of(processor(), forced_isa)])


def typed(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the argument and result types of a library's functions, see `SIGNATURES`; returns the library."""
    for name, signature in SIGNATURES.items():
        if hasattr(library, name):
            arguments, _, returned = signature.partition(">")
            function = getattr(library, name)
            function.argtypes, function.restype = [TYPES[kind] for kind in arguments], TYPES[returned]
    return library


def block_version() -> str:
    """A name for the kernels in use, see `version`."""
    return version(recipe=best_block_recipe(os.environ.get(ISA)))
