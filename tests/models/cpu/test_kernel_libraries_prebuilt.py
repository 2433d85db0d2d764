"""Where kernels come from: a wheel's libraries if built from these sources, else a compiler, else PyTorch."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from slipstream.models.cpu import kernel_libraries
from slipstream.models.cpu.kernel_libraries import (
    SOURCES,
    Recipe,
    bfloat16_recipe,
    first_that_loads,
    loaded,
    prebuilt_file,
    prebuilt_name,
)
from slipstream.models.cpu.processor import AMX, NEEDED, NoKernelsError, Processor, detected, isas_of, processor

ROOT = Path(__file__).parents[3]
TOOLS = ROOT / ".wheels" / "bin" / "python"
RECIPE = bfloat16_recipe("plain")
# prints which libraries computed a GGUF product and a product of 12-bit weights, and whether it is right
USE = """
import json, torch
from slipstream.models.cpu import kernel_libraries
from slipstream.models.cpu.packed_linear import compressed_or_packed
layer = torch.nn.Linear(64, 48).bfloat16()
with torch.inference_mode():
    x = torch.ones(3, 64).bfloat16()
    made = compressed_or_packed(layer)
    close = torch.allclose(made(x), layer(x), atol=0.02)
blocks = kernel_libraries.block_kernels()
files = [kernel_libraries.kernels()._name, blocks._name]
print(json.dumps([type(made).__name__, bool(close), files, bool(blocks.uses_openmp())]))
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The folders of prebuilt libraries and of the cache."""
    monkeypatch.setattr(kernel_libraries, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(kernel_libraries, "cache_folder", lambda: tmp_path / "cache")
    (tmp_path / "prebuilt").mkdir()
    return tmp_path / "prebuilt", tmp_path / "cache"


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)


def test_a_prebuilt_library_of_these_sources_needs_no_compiler(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compiler(monkeypatch)
    library = folders[0] / prebuilt_name(RECIPE, sys.platform)
    library.touch()
    assert prebuilt_file(RECIPE) == library


def test_a_prebuilt_library_of_other_sources_is_not_used(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_compiler(monkeypatch)
    other = Recipe(RECIPE.name, RECIPE.sources[:-1], RECIPE.flags)
    (folders[0] / prebuilt_name(other, sys.platform)).touch()
    caplog.set_level("INFO", "slipstream")
    with pytest.raises(NoKernelsError, match=r"no C compiler found \(gcc or cc\)"):
        loaded(RECIPE)
    assert "was built from other sources: the kernels are compiled" in caplog.text


def test_the_next_best_kernels_are_used_where_the_best_fail_to_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For example where a compiler does not know the newest instructions."""

    def loaded(recipe: Recipe) -> None:
        if recipe.name in refused:
            raise NoKernelsError(f"gcc failed at {recipe.name}")

    recipes = [Recipe(name, (), ()) for name in ("best", "good", "fair")]
    monkeypatch.setattr(kernel_libraries, "loaded", loaded)
    caplog.set_level("INFO", "slipstream")
    refused = {"best"}
    assert first_that_loads(recipes).name == "good"
    assert "the kernels best are not used: gcc failed at best" in caplog.text
    refused = {"best", "good", "fair"}
    with pytest.raises(NoKernelsError, match="gcc failed at fair"):
        first_that_loads(recipes)


def test_a_folder_that_cannot_be_written_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path / "file"))
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    recipes = [Recipe(name, (), ()) for name in ("best", "good", "fair")]
    caplog.set_level("INFO", "slipstream")
    with pytest.raises(NoKernelsError, match=r"file.kernels cannot be written \([a-z]"):
        first_that_loads(recipes)
    assert caplog.text.count("are not used") == 1


def test_the_name_of_a_library_depends_on_sources_flags_and_system() -> None:
    flags = Recipe(RECIPE.name, RECIPE.sources, (*RECIPE.flags, "-g"))
    names = {prebuilt_name(recipe, system) for recipe in (RECIPE, flags) for system in ("linux", "darwin", "win32")}
    assert len(names) == 6 and {Path(name).suffix for name in names} == {".so", ".dylib", ".dll"}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_detection_finds_what_linux_reports(tmp_path: Path) -> None:
    if "avx" not in processor().flags:
        pytest.skip("needs an x86 processor, and Linux")
    library_file, used_flags = tmp_path / "detection.so", {flag for flags in NEEDED.values() for flag in flags} - {*AMX}
    subprocess.run(
        ["cc", "-shared", "-fPIC", str(SOURCES / "detection" / "detection.c"), "-o", str(library_file)], check=True
    )
    detected_processor = detected(ctypes.CDLL(str(library_file)))
    assert (
        detected_processor.flags == processor().flags & used_flags
        and processor().model_name.startswith(detected_processor.model_name)  # a bare name has its family behind it
    )


def test_arm_processors_are_recognized() -> None:
    assert isas_of(Processor("", frozenset(("asimd", "asimddp"))), None)[0] == "neon"
    with pytest.raises(NoKernelsError, match="ARM processor with dot products"):
        isas_of(Processor("", frozenset(("asimd", "fp"))), None)


@pytest.mark.slow
@pytest.mark.skipif(not TOOLS.exists(), reason="needs ziglang: .wheels, which `make wheels` sets up")
@pytest.mark.skipif("avx2" not in processor().flags, reason="builds the wheel for x86-64 Linux")
def test_an_installed_wheel_computes_where_there_is_no_compiler(tmp_path: Path) -> None:
    build = [sys.executable, str(ROOT / "packaging" / "build_wheels.py"), "--tools", str(TOOLS), "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run([*build, "--platforms", "linux-x86_64"], check=True, capture_output=True, env=environment)
    (wheel,) = tmp_path.glob("*manylinux*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as files:
        files.extractall(installed)
        (record,) = (name for name in files.namelist() if name.endswith("RECORD"))
        listed = {line.split(",")[0] for line in files.read(record).decode().splitlines()}
    assert listed == set(files.namelist())
    bare = {"PATH": "", "PYTHONPATH": str(installed), "HOME": str(tmp_path), "SLIPSTREAM_ISA": "avx2"}
    finished = subprocess.run(
        [sys.executable, "-c", USE], capture_output=True, text=True, env=bare, cwd=tmp_path, check=True
    )
    kind, close, files_used, shares_threads = json.loads(finished.stdout)
    assert kind == "CompressedLinear" and close and shares_threads
    assert all(Path(file).is_relative_to(installed) for file in files_used)
    for library in Path(files_used[0]).parent.glob("*avx2*"):
        library.unlink()
    finished = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, env=bare, cwd=tmp_path)
    assert finished.returncode and "no C compiler" in finished.stderr
