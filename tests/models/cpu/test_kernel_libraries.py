"""Compiled kernels are loaded only from where nobody else can write, and compiled again if damaged."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slipstream.models.cpu import kernel_libraries
from slipstream.models.cpu.kernel_libraries import COMMON_FLAGS, SOURCES, Recipe, loaded
from slipstream.models.cpu.processor import NoKernelsError

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
    pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders have no owner here"),
]
OTHER_USER = 12345
SOURCE = "void set_pool_threads(long count) {{ (void)count; }}\nint answer(void) {{ return {}; }}\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A short C file instead of the kernels."""
    source = tmp_path / "short.c"
    source.write_text(SOURCE.format(42))
    return Recipe("short", (source,), COMMON_FLAGS)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The folder of kernels that the environment names, and the one in the user's home."""
    shared, home = tmp_path / "models", tmp_path / "home"
    shared.mkdir()
    home.mkdir()
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(shared))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(kernel_libraries, "PREBUILT", tmp_path / "prebuilt")
    loaded.cache_clear()
    return shared / "kernels", home / ".cache" / "slipstream" / "models" / "kernels"


def answer(recipe: Recipe) -> int:
    """The answer of the library as a new process loads it: the system does not load an open library again."""
    loaded.cache_clear()
    library = loaded(recipe)
    number = int(library.answer())
    _ctypes.dlclose(library._handle)
    return number


def plant(recipe: Recipe, library: Path, *, sealed: bool = True) -> None:
    """Replaces the library by one that another user wants this user to run."""
    other = library.parent.parent / "other.c"
    other.write_text(SOURCE.format(666))
    library_file = other.with_suffix(".so")
    kernel_libraries.compile_library(["cc"], Recipe("other", (other,), COMMON_FLAGS), library_file)
    kernel_libraries.save(library_file.read_bytes(), library) if sealed else shutil.copy(library_file, library)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_libraries_are_built_where_only_the_user_can_write(recipe: Recipe, folders: tuple[Path, Path]) -> None:
    before = os.umask(0o002)
    try:
        assert answer(recipe) == 42
    finally:
        os.umask(before)
    (library,) = folders[0].iterdir()
    assert mode(folders[0]) == 0o700 and mode(library) == 0o600 and not folders[1].exists()
    assert answer(recipe) == 42


def belongs_to_another(folder: Path) -> None:
    os.chown(folder, OTHER_USER, OTHER_USER)


def is_anothers_and_open(folder: Path) -> None:
    os.chown(folder, OTHER_USER, OTHER_USER)
    folder.chmod(0o777)


def is_a_link_to_anothers(folder: Path) -> None:
    real = folder.with_name("elsewhere")
    folder.rename(real)
    os.chown(real, OTHER_USER, OTHER_USER)
    folder.symlink_to(real)


@pytest.mark.skipif(os.geteuid() != 0 if hasattr(os, "geteuid") else True, reason="only root gives folders away")
@pytest.mark.parametrize("take_over", [belongs_to_another, is_anothers_and_open, is_a_link_to_anothers])
def test_a_library_in_another_users_folder_is_not_loaded(
    take_over: Callable[[Path], None], recipe: Recipe, folders: tuple[Path, Path]
) -> None:
    assert answer(recipe) == 42
    (library,) = folders[0].iterdir()
    plant(recipe, library)
    take_over(folders[0])
    assert answer(recipe) == 42
    assert [file.name for file in folders[1].iterdir()] == [library.name] and mode(folders[1]) == 0o700


def is_anothers(library: Path) -> None:
    os.chown(library, OTHER_USER, OTHER_USER)


def is_writable_to_all(library: Path) -> None:
    library.chmod(0o666)


def is_writable_to_the_group(library: Path) -> None:
    library.chmod(0o620)


def is_a_link(library: Path) -> None:
    real = library.with_name("linked.so")
    library.rename(real)
    library.symlink_to(real)


@pytest.mark.skipif(os.geteuid() != 0 if hasattr(os, "geteuid") else True, reason="only root gives files away")
@pytest.mark.parametrize("tamper", [is_anothers, is_a_link, is_writable_to_all, is_writable_to_the_group])
def test_a_library_that_others_may_have_written_is_compiled_again(
    tamper: Callable[[Path], None], recipe: Recipe, folders: tuple[Path, Path]
) -> None:
    assert answer(recipe) == 42
    (library,) = folders[0].iterdir()
    plant(recipe, library)
    tamper(library)
    assert answer(recipe) == 42 and not library.is_symlink() and library.stat().st_uid == os.geteuid()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds calls to functions of the same name elsewhere")
def test_the_files_of_a_library_call_each_others_functions(tmp_path: Path) -> None:
    """Also one that has the name of a function of the C library."""
    files = tmp_path / "caller.c", tmp_path / "called.c"
    files[0].write_text("int rand(void);\nint answer(void) { return rand(); }\n")
    files[1].write_text("int rand(void) { return -42; }\n")
    kernel_libraries.compile_library(["gcc"], Recipe("named", files, COMMON_FLAGS), tmp_path / "library.so")
    assert ctypes.CDLL(str(tmp_path / "library.so")).answer() == -42


def test_the_users_folder_is_made_private(recipe: Recipe, folders: tuple[Path, Path]) -> None:
    folders[0].mkdir()
    folders[0].chmod(0o777)
    assert answer(recipe) == 42 and mode(folders[0]) == 0o700 and not folders[1].exists()


@pytest.mark.skipif(os.geteuid() != 0 if hasattr(os, "geteuid") else True, reason="only root gives folders away")
def test_a_refusal_names_the_folder_that_cannot_be_trusted(recipe: Recipe, folders: tuple[Path, Path]) -> None:
    for folder in folders:
        folder.mkdir(parents=True)
        os.chown(folder, OTHER_USER, OTHER_USER)
    with pytest.raises(NoKernelsError, match=f"{folders[0]} belongs to another user, or others may write to it; .*"):
        answer(recipe)


@pytest.mark.parametrize("length", [0, 1, 100, 4096, -1, -33])
def test_a_truncated_library_is_compiled_again(length: int, recipe: Recipe, folders: tuple[Path, Path]) -> None:
    assert answer(recipe) == 42
    (library,) = folders[0].iterdir()
    content = library.read_bytes()
    library.write_bytes(content[:length])
    assert answer(recipe) == 42 and len(library.read_bytes()) == len(content)


@pytest.mark.parametrize("index", [5, 3000, -100, -1])
def test_a_library_with_a_wrong_byte_is_compiled_again(index: int, recipe: Recipe, folders: tuple[Path, Path]) -> None:
    assert answer(recipe) == 42
    (library,) = folders[0].iterdir()
    content = bytearray(library.read_bytes())
    content[index] ^= 0xFF
    library.write_bytes(bytes(content))
    assert answer(recipe) == 42 and kernel_libraries.is_whole(library)


def test_a_library_of_another_system_is_compiled_again(recipe: Recipe, folders: tuple[Path, Path]) -> None:
    assert answer(recipe) == 42
    (library,) = folders[0].iterdir()
    kernel_libraries.save(b"\x7fELF of a system with another C library", library)
    assert answer(recipe) == 42
    assert ctypes.CDLL(str(library)).answer() == 42


def test_a_library_without_a_checksum_is_compiled_again(recipe: Recipe, folders: tuple[Path, Path]) -> None:
    assert answer(recipe) == 42
    (library,) = folders[0].iterdir()
    plant(recipe, library, sealed=False)
    assert answer(recipe) == 42


def test_a_library_is_compiled_once_for_all_who_start_together(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_library, compiled = kernel_libraries.compile_library, list[Path]()

    def counted(compiler: list[str], recipe: Recipe, library: Path) -> None:
        compiled.append(library)
        compile_library(compiler, recipe, library)

    monkeypatch.setattr(kernel_libraries, "compile_library", counted)
    with ThreadPoolExecutor(4) as starting:
        built = set(starting.map(lambda _: kernel_libraries.built(tmp_path, os.environ, recipe), range(4)))
    assert len(compiled) == len(built) == 1


def exercised(tmp_path: Path, compiler: str, *libraries: str, arguments: tuple[str, ...] = ()) -> str:
    """What the driver prints; it must exit with 0."""
    driver, program = Path(__file__).with_name("exercise_team.c"), tmp_path / "exercise"
    command = [compiler, "-O2", f"-I{SOURCES}", str(driver), str(SOURCES / "team.c"), *libraries, "-o", str(program)]
    subprocess.run(command, check=True)
    environment = os.environ | {"OMP_NUM_THREADS": "3"}
    finished = subprocess.run([str(program), *arguments], capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_own_threads_serve_concurrent_callers_and_forks(tmp_path: Path) -> None:
    assert exercised(tmp_path, "cc", "-lpthread", "-ldl") == ""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs gcc and its OpenMP")
def test_openmp_threads_serve_concurrent_callers(tmp_path: Path) -> None:
    libraries = ("-Wl,--no-as-needed", "-lgomp", "-lpthread", "-ldl")
    assert exercised(tmp_path, "gcc", *libraries, arguments=("openmp",)) == ""
