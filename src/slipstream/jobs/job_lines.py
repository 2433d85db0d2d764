"""The input of a job (a file of JSON lines or a list of dictionaries), and the files it writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

from slipstream.checks import is_text, why_no_file, why_no_folder
from slipstream.constraints.grammar_text import nesting
from slipstream.errors import UsageError, os_reason
from slipstream.tokenization.tokenizer import check_text

LONGEST_ID = 512  # characters
ID = f"a string of 1 to {LONGEST_ID} characters, or a whole number"
SHOWN = 80  # characters of a value in a message
DEEPEST = 200  # levels of lists and objects, which Python reads and copies recursively
TOO_DEEP = f"lists and objects are nested too deeply; allowed: at most {DEEPEST} levels"


@dataclass(frozen=True)
class Line:
    """A line of the input."""

    number: int  # from 1
    item: Mapping[str, Any]  # the request; empty if there is an error
    error: str = ""  # why the line has no request

    @property
    def id(self) -> str | int:
        """The id by which the job knows this request; UsageError if it is missing or cannot be one."""
        name = "custom_id" if is_openai(self.item) else "id"
        value = self.item.get(name)
        if value is None:
            raise UsageError(f"no {name}; allowed: {ID}")
        if isinstance(value, bool) or not isinstance(value, str | int) or not 0 < len(str(value)) <= LONGEST_ID:
            raise UsageError(f"{name}={value!r:.{SHOWN}}; allowed: {ID}")
        check_text(name, str(value))
        return value


def is_openai(item: Mapping[str, Any]) -> bool:
    """True if a line has the format of OpenAI's batches."""
    return not item.keys().isdisjoint(("custom_id", "url", "body"))


class Lines:
    """The lines of a job in order, without blank ones; can be read more than once.

    source: a file with one JSON object per line, or dictionaries, which are numbered from 1.
    """

    def __init__(self, source: str | Path | Iterable[Mapping[str, Any]]) -> None:
        self.name = "the list of requests"  # for messages
        self._items: list[Mapping[str, Any]] | None = None
        if isinstance(source, str | Path):
            self.name = str(Path(source))
        else:
            self._items = list(source)

    def __iter__(self) -> Iterator[Line]:
        if self._items is not None:
            yield from map(_checked, count(1), self._items)
            return
        try:
            with open(self.name, "rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield _parsed(number, line)
        except OSError as error:
            raise UsageError(f"{self.name!r} cannot be read: {os_reason(error)}") from error


def _checked(number: int, item: Any) -> Line:
    if not isinstance(item, Mapping):
        return Line(number, {}, f"{type(item).__name__}; allowed: a dictionary")
    try:
        text = json.dumps(dict(item), sort_keys=True)  # as digests have it
    except RecursionError:
        return Line(number, {}, TOO_DEEP)
    except (TypeError, ValueError) as error:
        return Line(number, {}, f"not JSON: {error}; allowed: strings, numbers, lists and dictionaries of them")
    return Line(number, {}, TOO_DEEP) if _too_deep(text) else Line(number, item)


def _parsed(number: int, line: bytes) -> Line:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip()
        item = json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        return Line(number, {}, f"not UTF-8 at byte {error.start}; allowed: one JSON object")
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        return Line(number, {}, f"not JSON: {what} at character {error.pos + 1}; allowed: one JSON object")
    except RecursionError:
        return Line(number, {}, TOO_DEEP)
    except ValueError as error:
        return Line(number, {}, f"not JSON: {error}; allowed: one JSON object")
    if not isinstance(item, dict):
        return Line(number, {}, f"{text:.{SHOWN}}; allowed: one JSON object")
    return Line(number, {}, TOO_DEEP) if _too_deep(text) else Line(number, item)


def _too_deep(text: str) -> bool:
    """True if JSON text is nested deeper than DEEPEST."""
    # counting brackets is fast, and few of them cannot be nested deep
    return text.count("{") + text.count("[") > DEEPEST and nesting(text) > DEEPEST


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


@dataclass(frozen=True)
class JobFiles:
    """The files of a job, all of JSON lines."""

    lines: Lines
    output: Path
    errors: Path

    @classmethod
    def checked(
        cls, source: str | Path | Iterable[Mapping[str, Any]], output: str | Path, errors: str | Path | None = None
    ) -> JobFiles:
        """Check the names, and that a file holds a line, before anything is loaded; nothing is created."""
        if isinstance(source, Mapping | bytes | bytearray) or not isinstance(source, Path | Iterable):
            raise UsageError(f"source={source!r:.80}; allowed: the name of a file, or a list of dictionaries")
        path = _path("output", output)
        for parquet in (source, path):
            if isinstance(parquet, str | Path) and Path(parquet).suffix.lower() == ".parquet":
                raise UsageError(
                    f"{str(parquet)!r} is a Parquet file; allowed: JSON lines, or in Python a list of dictionaries"
                )
        refusals = path.with_name(f"{path.stem}.errors.jsonl") if errors is None else _path("errors", errors)
        others = {"the input": Path(source)} if isinstance(source, str | Path) else {}
        for name, file in (("the output", path), ("the error file", refusals)):
            _check(name, file, others)
            others[name] = file
        if isinstance(source, str | Path) and not (file := Path(source)).is_file():
            why = "it is not an ordinary file" if file.exists() else "no such file"
            why = "it is a folder" if file.is_dir() else "standard input is not read" if str(file) == "-" else why
            raise UsageError(f"{str(source)!r} cannot be read: {why}; allowed: a file with one request per line")
        lines = Lines(source)
        if isinstance(source, str | Path) and next(iter(lines), None) is None:
            raise UsageError(f"{str(source)!r} holds no requests; allowed: at least one line")
        return cls(lines, path, refusals)


def _path(name: str, value: Any) -> Path:
    if (not isinstance(value, PathLike) and not is_text(value)) or str(value) in ("", ".", "-") or "\0" in str(value):
        shown = str(value) if isinstance(value, PathLike) else value
        raise UsageError(f"{name}={shown!r:.80}; allowed: the name of a file")
    return Path(value)


def _check(name: str, path: Path, others: Mapping[str, Path]) -> None:
    for other_name, other_path in others.items():
        if path.absolute() == other_path.absolute() or (
            path.exists() and other_path.exists() and path.samefile(other_path)
        ):
            raise UsageError(f"{str(path)!r} is {name} and {other_name}; allowed: two files")
    why = why_no_file(path) or why_no_folder(path.parent)  # where it gets a lock file
    if path.exists() and not path.is_file() and not path.is_dir():
        why = "it is not an ordinary file"  # a pipe or a device cannot be read back, so no job could continue from it
    if why is not None:
        raise UsageError(f"{name} {str(path)!r} cannot be written: {why}")
