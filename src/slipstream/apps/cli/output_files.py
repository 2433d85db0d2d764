"""Files and folders that a command will write, checked before it works."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slipstream.checks import why_unreadable
from slipstream.errors import UsageError

STANDARD = Path("-")  # standard input of files that are read, standard output of those that are written


def check_file(name: str) -> Callable[[Path | None], Path | None]:
    """A callback of the option `name` that refuses a file which cannot be written; nothing is created."""

    def check(path: Path | None) -> Path | None:
        if path not in (None, STANDARD):
            _refuse(name, path, _why_no_file(path))
        return path

    return check


def check_folder(name: str) -> Callable[[Path | None], Path | None]:
    """A callback of the option `name` that refuses a folder which can neither be used nor be made."""

    def check(path: Path | None) -> Path | None:
        if path is not None:
            _refuse(name, path, _why_no_folder(path))
        return path

    return check


def write_text(name: str, path: Path, text: str) -> None:
    """Write the file of the option `name`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{name} {str(path)!r} cannot be written: {error.strerror}") from error


def _refuse(name: str, path: Path, reason: str | None) -> None:
    if reason is not None:
        raise UsageError(f"{name} {str(path)!r} cannot be written: {reason}")


def _why_no_file(path: Path) -> str | None:
    try:
        if path.is_dir():
            return "it is a folder"
        with suppress(FileNotFoundError):
            path.stat()  # raises of links that lead nowhere but in a circle
        if path.exists():
            return None if os.access(path, os.W_OK) else "permission denied"
        if not path.parent.exists():
            return f"the folder {str(path.parent)!r} does not exist"
    except (OSError, ValueError) as error:
        return why_unreadable(error)
    return _why_no_folder(path.parent)


def _why_no_folder(path: Path) -> str | None:
    """Why nothing can be written into the folder, or into the nearest one above it that exists."""
    try:
        nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    except (OSError, ValueError) as error:
        return why_unreadable(error)
    if not nearest.is_dir():
        return f"{str(nearest)!r} is not a folder"
    return None if os.access(nearest, os.W_OK | os.X_OK) else f"no permission to write into {str(nearest)!r}"
