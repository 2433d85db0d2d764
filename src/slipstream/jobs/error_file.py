"""What went wrong with which line: the error file of a job, written anew by every run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError, UsageError
from slipstream.jobs.job_output import line_bytes, no_output


class ErrorFile:
    """Failed lines are tried again by the next run, so a run begins without the errors of the last; no file if none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.exists():
                _check(path)
                path.unlink()
        except OSError as error:
            raise UsageError(f"the error file {str(path)!r} cannot be written: {error.strerror}") from error

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line."""
        try:
            with open(self.path, "ab") as file:
                file.write(line_bytes(line))
        except OSError as error:
            raise SlipstreamError(f"the error file {str(self.path)!r} cannot be written: {error.strerror}") from error


def _check(path: Path) -> None:
    """Refuse to delete what no job has written."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                item = json.loads(line)
            except ValueError:
                item = None
            if line.endswith(b"\n") and not (isinstance(item, dict) and "line" in item):
                raise no_output(path, number)
