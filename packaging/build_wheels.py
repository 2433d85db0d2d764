"""Wheels with prebuilt kernels for four platforms, a wheel without for all others, and the source distribution.

    make wheels

zig, whose compiler and C libraries come from PyPI (`ziglang`), compiles for every platform on any of them. `tools` is a
Python with ziglang and setuptools; this script runs in one with Slipstream, whose recipes it follows.
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
WHEN = (2020, 1, 1, 0, 0, 0)  # of every file in a wheel, so that the same sources give the same bytes
DETECTION = Recipe("detection", (SOURCES / "detection" / "detection.c",), COMMON_FLAGS)
UNIX = ("-lpthread", "-ldl", "-lm")
X86 = (
    *map(block_recipe, ("avx512", "avxvnni", "avx2")),
    *map(bfloat16_recipe, ("avx512bf16", "avx512", "avx2")),
    DETECTION,
)
OF_LINUX = (block_recipe("amx"), bfloat16_recipe("amx"), *X86)  # which is asked for the tiles of AMX
ARM = (block_recipe("neon"), bfloat16_recipe("neon"))


@dataclass(frozen=True)
class Platform:
    """tag: of the wheel; target: zig's name; system: as `sys.platform`; recipes: of its libraries."""

    tag: str
    target: str
    system: str
    recipes: tuple[Recipe, ...]
    libraries: tuple[str, ...] = UNIX


PLATFORMS = {
    "linux-x86_64": Platform("manylinux_2_17_x86_64.manylinux2014_x86_64", "x86_64-linux-gnu.2.17", "linux", OF_LINUX),
    "linux-aarch64": Platform("manylinux_2_17_aarch64.manylinux2014_aarch64", "aarch64-linux-gnu.2.17", "linux", ARM),
    "macos-arm64": Platform("macosx_11_0_arm64", "aarch64-macos.11.0", "darwin", ARM),
    "windows-x86_64": Platform("win_amd64", "x86_64-windows-gnu", "win32", X86, ()),
}


def main() -> None:
    """Write the files to a folder and print their names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=sys.executable, help="a Python with ziglang and setuptools")
    parser.add_argument("--out", default="dist", help="folder of the files")
    parser.add_argument("--platforms", default=",".join(PLATFORMS), help=f"of {', '.join(PLATFORMS)}")
    given = parser.parse_args()
    chosen = given.platforms.split(",")
    if unknown := [name for name in chosen if name not in PLATFORMS]:
        parser.error(f"--platforms {unknown[0]!r}; allowed: {', '.join(PLATFORMS)}")
    if not (tools := shutil.which(given.tools)):
        parser.error(f"--tools {given.tools!r} is no program")
    tools = str(Path(tools).absolute())  # the builds run in folders of their own; a link into a venv must stay one
    out = Path(given.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    base = distributions(tools, out)
    for name in chosen:
        with tempfile.TemporaryDirectory() as scratch:
            libraries = compiled(PLATFORMS[name], tools, Path(scratch))
            print(with_libraries(base, PLATFORMS[name].tag, libraries, out).name, flush=True)


def distributions(tools: str, out: Path) -> Path:
    """Build the source distribution and the wheel without libraries, from a copy of the sources; returns the wheel."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in SOURCE:
            kind = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            kind(ROOT / name, Path(scratch) / name)
        shutil.rmtree(Path(scratch) / "src" / PREBUILT, ignore_errors=True)
        for function in ("build_sdist", "build_wheel"):
            call = f"import setuptools.build_meta as backend; backend.{function}({str(out)!r})"
            subprocess.run([tools, "-c", call], cwd=scratch, check=True, stdout=subprocess.DEVNULL)
    return max(out.glob("*-py3-none-any.whl"), key=lambda path: path.stat().st_mtime)


def compiled(platform: Platform, tools: str, folder: Path) -> list[Path]:
    """The libraries of a platform."""
    made = []
    for recipe in platform.recipes:
        library = folder / prebuilt_name(recipe, platform.system)
        compiler = [tools, "-m", "ziglang", "cc", "-target", platform.target, "-g0"]
        compile_library(compiler, of_zig(recipe), library, platform.libraries)
        made.append(library)
    return made


def of_zig(recipe: Recipe) -> Recipe:
    """The recipe with zig's name for ARM's instructions."""
    flags = tuple("-mcpu=generic+v8_2a+dotprod" if "dotprod" in flag else flag for flag in recipe.flags)
    return Recipe(recipe.name, recipe.sources, flags)


def with_libraries(base: Path, tag: str, libraries: list[Path], out: Path) -> Path:
    """A wheel for one platform: the files of `base` and the libraries."""
    made = out / base.name.replace("-any.whl", f"-{tag}.whl")
    with zipfile.ZipFile(base) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        records, record = [], ""
        for name, data in entries(old, tag, libraries):
            if name.endswith(".dist-info/RECORD"):
                record = name
                continue
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            records.append(f"{name},sha256={digest},{len(data)}\n")
            add(new, name, data)
        add(new, record, "".join([*records, f"{record},,\n"]).encode())
    return made


def entries(wheel: zipfile.ZipFile, tag: str, libraries: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of a platform's wheel."""
    for name in wheel.namelist():
        data = wheel.read(name)
        if name.endswith(".dist-info/WHEEL"):
            lines = [line for line in data.decode().splitlines() if line and not line.startswith(("Tag:", "Root-"))]
            tags = [f"Tag: py3-none-{part}" for part in tag.split(".")]
            data = "\n".join([*lines, "Root-Is-Purelib: false", *tags, ""]).encode()
        yield name, data
    for library in libraries:
        yield f"{PREBUILT}/{library.name}", library.read_bytes()


def add(wheel: zipfile.ZipFile, name: str, data: bytes) -> None:
    """Write one file into a wheel."""
    entry = zipfile.ZipInfo(name, WHEN)
    entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
    wheel.writestr(entry, data)


if __name__ == "__main__":
    main()
