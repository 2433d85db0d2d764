"""Files that a killed process or a full disk leaves whole, and locks between processes.

A file is replaced at once, or appended line by line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from filelock import BaseFileLock, FileLock, Timeout

WINDOWS = os.name == "nt"
BLOCK = 1 << 16  # bytes read at a time


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder, for this process alone; the file written there replaces `path`.

    After an exception the temporary file is deleted and `path` is as it was.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        sync(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def append(file: IO[bytes], data: bytes) -> None:
    """Write all of `data` to an unbuffered file; it is on the disk when this returns."""
    while data:  # on an almost full disk a write may store a part of the data only
        data = data[file.write(data) :]
    os.fsync(file.fileno())


def cut(file: IO[bytes], size: int) -> None:
    """Cut a file to its first `size` bytes and go to their end."""
    if file.seek(0, os.SEEK_END) > size:
        file.truncate(size)
        os.fsync(file.fileno())
        file.seek(size)


def size_of_whole_lines(file: IO[bytes]) -> int:
    """Number of bytes up to and including the last newline: all, unless the last write was torn."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - BLOCK)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


def locked(path: Path, wait: bool = False) -> BaseFileLock | None:
    """Hold this lock file until `release()` or the end of the process; None if another holder has it.

    wait: wait for the other holder instead. Raises OSError if the file cannot be made.
    """
    lock = FileLock(path, timeout=-1 if wait else 0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


def sync(path: Path) -> None:
    """Put a file's content, or a folder's new names, on the disk."""
    is_folder = path.is_dir()
    if is_folder and WINDOWS:
        return  # Windows opens no folders, and keeps their names in its journal
    descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)  # Windows flushes only what may be written
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
