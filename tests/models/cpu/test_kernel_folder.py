"""Compiled kernels are loaded only where nobody else can have put them, and made anew where they are damaged."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.models.cpu import kernel_libraries
from slipstream.models.cpu.kernel_libraries import COMMON_FLAGS, Recipe, loaded
from slipstream.models.cpu.processor import NoKernelsError

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
    pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders have no owner here"),
]
OTHER_USER = 12345
SOURCE = "void set_pool_threads(long count) {{ (void)count; }}\nint answer(void) {{ return {}; }}\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A short file of C in the place of the kernels."""
    source = tmp_path / "short.c"
    source.write_text(SOURCE.format(42))
    return Recipe("short", (source,), COMMON_FLAGS)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where the environment lets models and kernels be kept, and the user's own folder of kernels."""
    shared, home = tmp_path / "models", tmp_path / "home"
    shared.mkdir()
    home.mkdir()
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(shared))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(kernel_libraries, "PREBUILT", tmp_path / "prebuilt")
    loaded.cache_clear()
    return shared / "kernels", home / ".cache" / "slipstream" / "models" / "kernels"


def answer(recipe: Recipe) -> int:
    """Of the library, as a new process would load it: the system knows one that is open by its name."""
    loaded.cache_clear()
    library = loaded(recipe)
    found = int(library.answer())
    _ctypes.dlclose(library._handle)
    return found


def plant(recipe: Recipe, library: Path, *, sealed: bool = True) -> None:
    """What another user would have this one run, under the name that everybody can tell."""
    other = library.parent.parent / "other.c"
    other.write_text(SOURCE.format(666))
    made = other.with_suffix(".so")
    kernel_libraries.compile_library(["cc"], Recipe("other", (other,), COMMON_FLAGS), made)
    kernel_libraries.save(made.read_bytes(), library) if sealed else shutil.copy(made, library)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_libraries_are_built_where_nobody_else_may_write(recipe: Recipe, folders: tuple[Path, Path]) -> None:
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
@pytest.mark.parametrize("taken", [belongs_to_another, is_anothers_and_open, is_a_link_to_anothers])
def test_what_is_in_anothers_folder_is_not_loaded(
    taken: Callable[[Path], None], recipe: Recipe, folders: tuple[Path, Path]
) -> None:
    assert answer(recipe) == 42
    (library,) = folders[0].iterdir()
    plant(recipe, library)
    taken(folders[0])
    assert answer(recipe) == 42
    assert [file.name for file in folders[1].iterdir()] == [library.name] and mode(folders[1]) == 0o700


def belongs(library: Path) -> None:
    os.chown(library, OTHER_USER, OTHER_USER)


def is_a_link(library: Path) -> None:
    real = library.with_name("linked.so")
    library.rename(real)
    library.symlink_to(real)


@pytest.mark.skipif(os.geteuid() != 0 if hasattr(os, "geteuid") else True, reason="only root gives files away")
@pytest.mark.parametrize("odd", [belongs, is_a_link, lambda file: file.chmod(0o666), lambda file: file.chmod(0o620)])
def test_a_file_that_others_may_have_written_is_made_anew(
    odd: Callable[[Path], None], recipe: Recipe, folders: tuple[Path, Path]
) -> None:
    assert answer(recipe) == 42
    (library,) = folders[0].iterdir()
    plant(recipe, library)
    odd(library)
    assert answer(recipe) == 42 and not library.is_symlink() and library.stat().st_uid == os.geteuid()


def test_a_folder_of_the_users_own_is_closed_to_others(recipe: Recipe, folders: tuple[Path, Path]) -> None:
    folders[0].mkdir()
    folders[0].chmod(0o777)
    assert answer(recipe) == 42 and mode(folders[0]) == 0o700 and not folders[1].exists()


@pytest.mark.skipif(os.geteuid() != 0 if hasattr(os, "geteuid") else True, reason="only root gives folders away")
def test_where_no_folder_can_be_trusted_the_reason_says_which(recipe: Recipe, folders: tuple[Path, Path]) -> None:
    for folder in folders:
        folder.mkdir(parents=True)
        os.chown(folder, OTHER_USER, OTHER_USER)
    with pytest.raises(NoKernelsError, match=f"{folders[0]} belongs to another user, or others may write to it; .*"):
        answer(recipe)


@pytest.mark.parametrize("kept", [0, 1, 100, 4096, -1, -33])
def test_a_library_that_was_cut_short_is_made_anew(kept: int, recipe: Recipe, folders: tuple[Path, Path]) -> None:
    assert answer(recipe) == 42
    (library,) = folders[0].iterdir()
    whole = library.read_bytes()
    library.write_bytes(whole[:kept])
    assert answer(recipe) == 42 and len(library.read_bytes()) == len(whole)


@pytest.mark.parametrize("at", [5, 3000, -100, -1])
def test_a_library_with_a_wrong_byte_is_made_anew(at: int, recipe: Recipe, folders: tuple[Path, Path]) -> None:
    assert answer(recipe) == 42
    (library,) = folders[0].iterdir()
    whole = bytearray(library.read_bytes())
    whole[at] ^= 0xFF
    library.write_bytes(bytes(whole))
    assert answer(recipe) == 42 and kernel_libraries.is_whole(library)


def test_a_library_of_another_system_is_made_anew(recipe: Recipe, folders: tuple[Path, Path]) -> None:
    assert answer(recipe) == 42
    (library,) = folders[0].iterdir()
    kernel_libraries.save(b"\x7fELF of a system with another C library", library)
    assert answer(recipe) == 42
    assert ctypes.CDLL(str(library)).answer() == 42


def test_a_library_without_a_checksum_is_made_anew(recipe: Recipe, folders: tuple[Path, Path]) -> None:
    assert answer(recipe) == 42
    (library,) = folders[0].iterdir()
    plant(recipe, library, sealed=False)
    assert answer(recipe) == 42
