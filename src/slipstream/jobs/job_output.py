"""The output of a job: one line per answered request, on the disk before it counts as answered.

Lines are only ever appended. A line that a killed process left unfinished is cut off when the file is opened again.
Refused lines and the reasons go to the error file, which every run rewrites.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.durable_files import append, cut, locked, sync
from slipstream.errors import SlipstreamError, UsageError, os_reason

BEGINNINGS = (b'{"id":', b'{"line":')  # of the lines that jobs write
ROW_PREFIX = "batch_req_"  # of the ids of OpenAI's lines


@dataclass(frozen=True)
class Answered:
    """An answer that the output holds."""

    number: int  # of its line
    digest: str  # of the request
    fingerprint: str  # of the model


class JobOutput:
    """An output file, locked for this process.

    UsageError if it is not the output of a job, SlipstreamError if another process writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answered: dict[str, Answered] = {}  # by id
        try:
            new = not path.exists()
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115  # closed by `close`
        except OSError as error:
            raise UsageError(f"{str(path)!r} cannot be written: {os_reason(error)}") from error
        try:
            lock = locked(path.with_name(f".{path.name}.lock"))
        except OSError as error:
            self._file.close()
            raise UsageError(f"{str(path)!r} cannot be locked: {os_reason(error)}") from error
        if lock is None:
            self._file.close()
            raise SlipstreamError(f"{str(path)!r} is being written by another process")
        self._lock = lock
        try:
            if new:
                sync(path.parent)
            self._read()
        except BaseException:
            self.close()
            raise

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines; they are on the disk when this returns."""
        data = b"".join(line_bytes(line) for line in lines)
        if not data:
            return
        try:
            append(self._file, data)
        except OSError as error:
            raise SlipstreamError(
                f"{str(self.path)!r} cannot be written: {os_reason(error)}; the lines in it stay"
            ) from error

    def close(self) -> None:
        """Let other processes write the file."""
        self._file.close()
        self._lock.release()

    def _read(self) -> None:
        """Read the whole lines, and cut off a torn last line if it looks like the beginning of a job's line.

        After a power failure a file may end in zero bytes.
        """
        end = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    self._note(number, _parsed(self.path, number, line))
                    end += len(line)
                    continue
                torn = line.rstrip(b"\0") if end else line
                if not any(torn.startswith(begin[: len(torn)]) for begin in BEGINNINGS):
                    raise no_output(self.path, number)
        cut(self._file, end)

    def _note(self, number: int, item: Mapping[str, Any]) -> None:
        try:
            openai = "custom_id" in item
            body = item["response"]["body"] if openai else {}
            key = str(item["custom_id" if openai else "id"])
            digest = item["id"].removeprefix(ROW_PREFIX) if openai else item["request"]
            answered = Answered(number, str(digest), str(body["system_fingerprint"] if openai else item["fingerprint"]))
        except (KeyError, TypeError, AttributeError):
            raise no_output(self.path, number) from None
        if key in self.answered:
            other = self.answered[key].number
            raise UsageError(
                f"{str(self.path)!r}, line {number}: id {key!r:.80} is that of line {other}; allowed: each id once"
            )
        self.answered[key] = answered


def line_bytes(line: Mapping[str, Any]) -> bytes:
    """A line as bytes: the same bytes for the same values."""
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace") + b"\n"


def _parsed(path: Path, number: int, line: bytes) -> Mapping[str, Any]:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        item = None
    if not isinstance(item, dict):
        raise no_output(path, number)
    return item


def no_output(path: Path, number: int) -> UsageError:
    """The error for a file that was not written by a job."""
    return UsageError(
        f"{str(path)!r}, line {number}: not a line of a job's output; allowed: a new file, or the output of this job"
    )


class ErrorFile:
    """The failures of this run, line by line; every run deletes the last one's file and tries those lines again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.exists():
                with open(path, "rb") as file:
                    for number, line in enumerate(file, 1):
                        if line.endswith(b"\n") and "line" not in _parsed(path, number, line):
                            raise no_output(path, number)  # a file that was not written by a job is not deleted
                path.unlink()
        except OSError as error:
            raise UsageError(f"the error file {str(path)!r} cannot be written: {os_reason(error)}") from error

    def add(self, line: Mapping[str, Any]) -> None:
        try:
            with open(self.path, "ab") as file:
                file.write(line_bytes(line))
        except OSError as error:
            raise SlipstreamError(f"the error file {str(self.path)!r} cannot be written: {os_reason(error)}") from error
