"""Builds wheels with prebuilt kernels for four platforms, one without for all others, and the source distribution.

    make wheels

zig compiles for every platform on any of them; its compiler and C libraries come from PyPI (`ziglang`). --tools is a
Python with ziglang and setuptools. This script itself runs in a Python with Slipstream, whose recipes it follows.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.models.cpu.kernel_libraries import (
    COMMON_FLAGS,
    SOURCES,
    Recipe,
    bfloat16_recipe,
    block_recipe,
    compile_library,
    prebuilt_name,
)

ROOT, PREBUILT = Path(__file__).parents[1], "slipstream/models/cpu/prebuilt"
SOURCE = ("src", "pyproject.toml", "README.md", "LICENSE")
FILE_TIME = (2020, 1, 1, 0, 0, 0)  # of every file in a wheel, so that the same sources give the same bytes
DETECTION = Recipe("detection", (SOURCES / "detection" / "detection.c",), COMMON_FLAGS)
UNIX_LIBRARIES = ("-lpthread", "-ldl", "-lm")
LINUX_LIBRARIES = ("-Wl,-Bsymbolic", *UNIX_LIBRARIES)  # as `LIBRARIES` of kernel_libraries.py
X86 = (
    *map(block_recipe, ("avx512", "avxvnni", "avx2")),
    *map(bfloat16_recipe, ("avx512bf16", "avx512", "avx2")),
    DETECTION,
)
X86_LINUX = (block_recipe("amx"), bfloat16_recipe("amx"), *X86)  # AMX must be requested from Linux
ARM = (block_recipe("neon"), bfloat16_recipe("neon"))


@dataclass(frozen=True)
class Platform:
    """A platform with its own wheel. tag: of the wheel; target: the platform in zig; system: its `sys.platform`."""

    tag: str
    target: str
    system: str
    recipes: tuple[Recipe, ...]
    libraries: tuple[str, ...] = UNIX_LIBRARIES


PLATFORMS = {
    "linux-x86_64": Platform(
        "manylinux_2_17_x86_64.manylinux2014_x86_64", "x86_64-linux-gnu.2.17", "linux", X86_LINUX, LINUX_LIBRARIES
    ),
    "linux-aarch64": Platform(
        "manylinux_2_17_aarch64.manylinux2014_aarch64", "aarch64-linux-gnu.2.17", "linux", ARM, LINUX_LIBRARIES
    ),
    "macos-arm64": Platform("macosx_11_0_arm64", "aarch64-macos.11.0", "darwin", ARM),
    "windows-x86_64": Platform("win_amd64", "x86_64-windows-gnu", "win32", X86, ()),
}


def main() -> None:
    """Build the distributions and print the names of the platforms' wheels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=sys.executable, help="a Python with ziglang and setuptools")
    parser.add_argument("--out", default="dist", help="folder for the distributions")
    parser.add_argument(
        "--platforms", default=",".join(PLATFORMS), help="separated by commas (default: all: %(default)s)"
    )
    options = parser.parse_args()
    names = options.platforms.split(",")
    if unknown := [name for name in names if name not in PLATFORMS]:
        parser.error(f"--platforms {unknown[0]!r}; allowed: {', '.join(PLATFORMS)}")
    if not (tools := shutil.which(options.tools)):
        parser.error(f"--tools {options.tools!r} is not a program")
    tools = str(Path(tools).absolute())  # the builds run in folders of their own; a link into a venv must stay one
    out = Path(options.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    base = build_distributions(tools, out)
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            libraries = compile_libraries(PLATFORMS[name], tools, Path(scratch))
            print(add_libraries(base, PLATFORMS[name].tag, libraries, out).name, flush=True)


def build_distributions(tools: str, out: Path) -> Path:
    """Build the source distribution and the wheel without libraries from a copy of the sources; return the wheel."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in SOURCE:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(scratch) / name)
        shutil.rmtree(Path(scratch) / "src" / PREBUILT, ignore_errors=True)
        for function in ("build_sdist", "build_wheel"):
            call = f"import setuptools.build_meta as backend; backend.{function}({str(out)!r})"
            subprocess.run([tools, "-c", call], cwd=scratch, check=True, stdout=subprocess.DEVNULL)
    return max(out.glob("*-py3-none-any.whl"), key=lambda path: path.stat().st_mtime)


def compile_libraries(platform: Platform, tools: str, folder: Path) -> list[Path]:
    """Compile the libraries of a platform into a folder."""
    libraries = []
    for recipe in platform.recipes:
        library = folder / prebuilt_name(recipe, platform.system)
        compiler = [tools, "-m", "ziglang", "cc", "-target", platform.target, "-g0"]
        compile_library(compiler, for_zig(recipe), library, platform.libraries)
        libraries.append(library)
    return libraries


def for_zig(recipe: Recipe) -> Recipe:
    """The recipe, with ARM's instructions named as zig names them."""
    flags = tuple("-mcpu=generic+v8_2a+dotprod" if "dotprod" in flag else flag for flag in recipe.flags)
    return Recipe(recipe.name, recipe.sources, flags)


def add_libraries(base: Path, tag: str, libraries: list[Path], out: Path) -> Path:
    """Write a platform's wheel: the files of the wheel `base`, and the libraries."""
    wheel = out / base.name.replace("-any.whl", f"-{tag}.whl")
    with zipfile.ZipFile(base) as old, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        records, record = [], ""
        for name, data in entries(old, tag, libraries):
            if name.endswith(".dist-info/RECORD"):
                record = name
                continue
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            records.append(f"{name},sha256={digest},{len(data)}\n")
            add_file(new, name, data)
        add_file(new, record, "".join([*records, f"{record},,\n"]).encode())
    return wheel


def entries(wheel: zipfile.ZipFile, tag: str, libraries: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files in a platform's wheel."""
    for name in wheel.namelist():
        data = wheel.read(name)
        if name.endswith(".dist-info/WHEEL"):
            lines = [line for line in data.decode().splitlines() if line and not line.startswith(("Tag:", "Root-"))]
            tags = [f"Tag: py3-none-{part}" for part in tag.split(".")]
            data = "\n".join([*lines, "Root-Is-Purelib: false", *tags, ""]).encode()
        yield name, data
    for library in libraries:
        yield f"{PREBUILT}/{library.name}", library.read_bytes()


def add_file(wheel: zipfile.ZipFile, name: str, data: bytes) -> None:
    """Write one file into a wheel."""
    entry = zipfile.ZipInfo(name, FILE_TIME)
    entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
    wheel.writestr(entry, data)


if __name__ == "__main__":
    main()
