"""The log of `slipstream serve` on standard error: lines of text or JSON objects, one for each answered request.

It never holds prompts, answers or keys, and names files without their folders. Tracebacks of requests have no message,
as it may quote the request, unless the level is debug.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, TextIO, get_args

from slipstream.errors import UsageError
from slipstream.text.terminal_text import harmless

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
HANDLER = "slipstream"  # the name of the command's own handler
UNQUOTED = ("id", "method", "path")  # strings that the text format writes without quotes
PRIVATE = {"is_private": True}  # `extra` of a record whose exception may quote a request
_ROOTS = "|".join(map(re.escape, sorted(os.listdir("/")))) if os.name == "posix" else ""
# an absolute path, in quotes or up to a blank, or with a drive; its last part is shown
_PATH = re.compile(
    rf"""(?<=['"])(?:/(?:{_ROOTS})|[A-Za-z]:)[/\\][^'"\n]*[/\\](?=[^'"\n]*['"])"""
    rf"""|(?<![\w/.:'"])(?:/(?:{_ROOTS})|[A-Za-z]:)[/\\](?:[^\s'":;,/\\]+[/\\])*"""
)
log = logging.getLogger("slipstream.server")


class _Lines(logging.Formatter):
    """Time and traceback, which both formats write alike."""

    @staticmethod
    def time(record: logging.LogRecord) -> str:
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")

    def exception(self, record: logging.LogRecord) -> str:
        """The traceback of a record; empty if it has none."""
        if not record.exc_info or record.exc_info[0] is None:
            return ""
        if hasattr(record, "is_private") and not log.isEnabledFor(logging.DEBUG):
            frames = "".join(traceback.format_tb(record.exc_info[2]))
            return without_folders(f"{frames}{record.exc_info[0].__name__}")
        return without_folders(self.formatException(record.exc_info))


class TextLines(_Lines):
    """2026-01-31T12:00:00.000+00:00 INFO request id=... method=POST path="/v1/completions" status=200 ..."""

    def format(self, record: logging.LogRecord) -> str:
        text = "\n".join(filter(None, (without_folders(record.getMessage()), self.exception(record))))
        return harmless(f"{self.time(record)} {record.levelname} {text}")


class JsonLines(_Lines):
    """One object with time, level, message, the fields of a request, and a traceback as `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, Any] | None = getattr(record, "fields", None)
        message = "request" if fields is not None else without_folders(record.getMessage()).strip()
        entry = {"time": self.time(record), "level": record.levelname.lower(), "message": message, **(fields or {})}
        if exception := self.exception(record):
            entry["exception"] = exception
        return json.dumps(entry)


class _JsonStream(io.TextIOBase):
    """A standard error whose lines become log records, so that everything that is printed there is JSON."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._line, self._lock = stream, "", threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._line = (self._line + text).split("\n")
            for line in filter(str.strip, lines):
                message = line.removeprefix("error: ")
                log.log(logging.INFO if message == line else logging.ERROR, "%s", message)
        return len(text)

    def fileno(self) -> int:
        return self._stream.fileno()


def use_format(kind: str) -> str:
    """Write the log of this process as text or JSON, and in JSON all else that it prints on standard error."""
    _check("format", kind, LogFormat)
    for handler in logging.getLogger().handlers:
        if handler.name == HANDLER:
            handler.setFormatter(JsonLines() if kind == "json" else TextLines())
    warnings.showwarning = lambda message, category, *place: log.warning("%s: %s", category.__name__, message)
    if kind == "json":
        sys.stderr = _JsonStream(sys.stderr)
        sys.excepthook = lambda *error: log.critical("the process ends", exc_info=error)
        threading.excepthook = lambda ended: log.error("a thread has ended", exc_info=ended.exc_value)
    return kind


def use_level(level: str) -> str:
    """Write the lines from a level on."""
    _check("level", level, LogLevel)
    logging.getLogger("slipstream").setLevel(level.upper())
    return level


def _check(name: str, value: str, allowed: Any) -> None:
    if value not in get_args(allowed):
        raise UsageError(f"--log-{name} {value!r}; allowed: {', '.join(get_args(allowed))}")


def without_folders(text: str) -> str:
    """A text with absolute paths shortened to their last part."""
    return _PATH.sub("", text)


def log_request(fields: Mapping[str, Any], level: int) -> None:
    """Log an answered request; fields that are None are left out."""
    if log.isEnabledFor(level):
        fields = {name: value for name, value in fields.items() if value is not None}
        words = [
            f"{name}={value if name in UNQUOTED else json.dumps(value, ensure_ascii=False)}"
            for name, value in fields.items()
        ]
        log.log(level, "request %s", " ".join(words), extra={"fields": fields})
