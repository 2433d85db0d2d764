"""A folder whose files can only be the user's own work: what is loaded from it runs with the user's rights."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
DESCRIPTORS = Path("/proc/self/fd")
CHECKSUM_BYTES = hashlib.sha256().digest_size
ROOT = 0


class NotPrivateError(OSError):
    """Why files of a folder cannot be trusted."""


@contextmanager
def private_folder(folder: Path) -> Iterator[Path]:
    """Make a folder that only the user may write to, or make it so if it is the user's; yields a path to it.

    On Linux the path leads to the very folder that was checked, whoever may rename those above it. A folder of the
    administrator's that nobody else may write to is as good. Raises `NotPrivateError` for any other, and OSError where
    there can be none. On Windows the system's own rights are relied upon.
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
        elif not _is_of_user(status):
            raise NotPrivateError(f"{folder} belongs to another user, or others may write to it")
        yield DESCRIPTORS / str(descriptor) if DESCRIPTORS.exists() else folder
    finally:
        os.close(descriptor)


def save(content: bytes, file: Path) -> None:
    """Write a file that nobody else may change, with a checksum at its end; it is there whole or not at all."""
    descriptor, scratch = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content + hashlib.sha256(content).digest())
        os.replace(scratch, file)
    except BaseException:
        os.unlink(scratch)
        raise


def is_whole(file: Path) -> bool:
    """Whether `save` has written a file, for this user, and nothing has changed it since."""
    try:
        status = file.lstat()
        content = file.read_bytes() if stat.S_ISREG(status.st_mode) and _is_of_user(status) else b""
    except OSError:
        return False
    return hashlib.sha256(content[:-CHECKSUM_BYTES]).digest() == content[-CHECKSUM_BYTES:]


def _is_of_user(status: os.stat_result) -> bool:
    """Whether nobody but the user and the administrator can have written this, or may."""
    if not hasattr(os, "geteuid"):
        return True
    return status.st_uid in (os.geteuid(), ROOT) and not status.st_mode & OTHERS_MAY_WRITE
