"""Output files and folders, checked before the command starts its work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from slipstream.checks import why_no_file, why_no_folder
from slipstream.errors import UsageError

STANDARD = Path("-")  # standard input of files that are read, standard output of those that are written


def check_file(name: str) -> Callable[[Path | None], Path | None]:
    """A callback of the option `name` that refuses a file that cannot be written; nothing is created."""

    def check(path: Path | None) -> Path | None:
        if path not in (None, STANDARD):
            _refuse(name, path, why_no_file(path))
        return path

    return check


def check_folder(name: str) -> Callable[[Path | None], Path | None]:
    """A callback of the option `name` that refuses a folder that can neither be used nor be made."""

    def check(path: Path | None) -> Path | None:
        if path is not None:
            _refuse(name, path, why_no_folder(path))
        return path

    return check


def _refuse(name: str, path: Path, reason: str | None) -> None:
    if reason is not None:
        raise UsageError(f"{name} {str(path)!r} cannot be written: {reason}")
