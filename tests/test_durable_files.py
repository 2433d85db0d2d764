"""Files that are whole whatever ends the process that writes them."""

from pathlib import Path

import pytest

from slipstream.durable_files import BLOCK, append, cut, replaced, size_of_whole_lines


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
def test_a_torn_last_line_is_cut_and_the_next_follows_the_whole_ones(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n" + torn)
    with open(path, "r+b", buffering=0) as file:
        cut(file, size_of_whole_lines(file))
        append(file, b"three\n")
    assert path.read_bytes() == b"one\ntwo\nthree\n"


def test_a_write_that_takes_a_part_is_continued(tmp_path: Path) -> None:
    class Stingy:
        """A file on an almost full disk: two bytes a call."""

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
