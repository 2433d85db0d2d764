"""Files stay whole, whatever ends the process that writes them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.durable_files import BLOCK, append, cut, locked, replaced, size_of_whole_lines, sync


def test_a_failed_replacement_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replaced(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["file"]
    with replaced(path) as partial:
        partial.write_text("new")
    assert path.read_text() == "new" and [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("torn", [b"", b"torn", b"torn" * BLOCK], ids=["none", "short", "long"])
def test_a_torn_last_line_is_cut_before_the_next_line_is_appended(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n" + torn)
    with open(path, "r+b", buffering=0) as file:
        cut(file, size_of_whole_lines(file))
        append(file, b"three\n")
    assert path.read_bytes() == b"one\ntwo\nthree\n"


def test_a_partial_write_is_continued(tmp_path: Path) -> None:
    class Stingy:
        """A file on an almost full disk: each call writes two bytes."""

        def __init__(self) -> None:
            self.file = open(tmp_path / "file", "wb", buffering=0)  # noqa: SIM115

        def write(self, data: bytes) -> int:
            return self.file.write(data[:2])

        def fileno(self) -> int:
            return self.file.fileno()

    stingy = Stingy()
    append(stingy, b"seven b")
    stingy.file.close()
    assert (tmp_path / "file").read_bytes() == b"seven b"


def test_a_lock_is_released_when_its_holder_dies(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    hold = (
        "import pathlib, sys; from slipstream.durable_files import locked; "
        f"held = locked(pathlib.Path({str(path)!r})); print(1, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        assert locked(path) is None
        other.kill()
    lock = locked(path)
    assert lock is not None and locked(path) is None
    lock.release()
    second = locked(path, wait=True)
    assert second is not None
    second.release()


def test_folders_are_not_synced_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("text")
    opened = list[tuple[object, int]]()
    real = os.open
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", lambda path, flags: opened.append((path, flags)) or real(path, flags))
        sync(tmp_path)
        sync(tmp_path / "file")
        patched.setattr("slipstream.durable_files.WINDOWS", True)
        sync(tmp_path)
    assert opened == [(tmp_path, os.O_RDONLY), (tmp_path / "file", os.O_RDWR)]
