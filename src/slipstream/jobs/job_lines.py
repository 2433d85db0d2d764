"""The requests of a job as they are written: a file of JSON lines, a Parquet file, or a list of dictionaries."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from slipstream.constraints.grammar_text import nesting
from slipstream.errors import UsageError
from slipstream.jobs.parquet_files import is_parquet, parquet_rows
from slipstream.text.prompt_sets import check_text

LONGEST_ID = 512  # characters
SHOWN = 80  # characters of a value in a message
DEEPEST = 200  # lists and objects within one another; Python reads and copies them recursively
TOO_DEEP = f"lists and objects are nested too deep; allowed: at most {DEEPEST} within one another"


@dataclass(frozen=True)
class Line:
    """A line of the input. number: from 1; item: what it says; error: why it says nothing, item is then empty."""

    number: int
    item: Mapping[str, Any]
    error: str = ""

    @property
    def id(self) -> str | int:
        """What tells this request from the others of its job; UsageError without a good one."""
        name = "custom_id" if is_openai(self.item) else "id"
        given = self.item.get(name)
        if isinstance(given, bool) or not isinstance(given, str | int) or not 0 < len(str(given)) <= LONGEST_ID:
            raise UsageError(
                f"{name}={given!r:.{SHOWN}}; allowed: a text of 1 to {LONGEST_ID} characters, or a whole number"
            )
        check_text(name, str(given))
        return given


def is_openai(item: Mapping[str, Any]) -> bool:
    """Whether a line has the format of OpenAI's batches."""
    return not item.keys().isdisjoint(("custom_id", "url", "body"))


class Lines(Protocol):
    """Lines that can be read more than once, in order. name: where they are, for messages."""

    @property
    def name(self) -> str:
        """Where the lines are."""

    def __iter__(self) -> Iterator[Line]:
        """Every line that is not blank."""


def lines_of(source: str | Path | Iterable[Mapping[str, Any]]) -> Lines:
    """The lines of a file (JSON lines, or Parquet by its name), or those of a list of dictionaries."""
    if not isinstance(source, str | Path):
        return ListedLines(list(source))
    return ParquetLines(Path(source)) if is_parquet(source) else FileLines(Path(source))


@dataclass(frozen=True)
class FileLines:
    """A file with one JSON object per line."""

    path: Path

    @property
    def name(self) -> str:
        """The file."""
        return str(self.path)

    def __iter__(self) -> Iterator[Line]:
        try:
            with open(self.path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield _parsed(number, line)
        except OSError as error:
            raise UsageError(f"{self.name!r} cannot be read: {error.strerror}") from error


@dataclass(frozen=True)
class ListedLines:
    """Dictionaries, numbered from 1."""

    items: list[Mapping[str, Any]]
    name: str = "the list of requests"

    def __iter__(self) -> Iterator[Line]:
        for number, item in enumerate(self.items, 1):
            if isinstance(item, Mapping):
                yield _checked(number, item)
            else:
                yield Line(number, {}, f"{type(item).__name__}; allowed: a dictionary")


@dataclass(frozen=True)
class ParquetLines:
    """A Parquet file with one request per row; a column without a value is left out.

    A body may be JSON text."""

    path: Path

    @property
    def name(self) -> str:
        """The file."""
        return str(self.path)

    def __iter__(self) -> Iterator[Line]:
        for number, row in enumerate(parquet_rows(self.path), 1):
            item = {name: value for name, value in row.items() if value is not None}
            if is_openai(item) and isinstance(item.get("body"), str):
                item["body"] = _parsed(number, item["body"].encode()).item or item["body"]
            yield _checked(number, item)


def _checked(number: int, item: Mapping[str, Any]) -> Line:
    """A line that can be written as JSON."""
    try:
        text = json.dumps(dict(item), sort_keys=True)  # as digests have it
    except RecursionError:
        return Line(number, {}, TOO_DEEP)
    except (TypeError, ValueError) as error:
        return Line(number, {}, f"not JSON: {error}; allowed: texts, numbers, lists and dictionaries of them")
    return Line(number, {}, TOO_DEEP) if _too_deep(text) else Line(number, item)


def _parsed(number: int, line: bytes) -> Line:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip()
        item = json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        return Line(number, {}, f"not UTF-8 at byte {error.start}; allowed: one JSON object")
    except json.JSONDecodeError as error:
        return Line(number, {}, f"not JSON: {error.msg} at character {error.pos + 1}; allowed: one JSON object")
    except RecursionError:
        return Line(number, {}, TOO_DEEP)
    except ValueError as error:
        return Line(number, {}, f"not JSON: {error}; allowed: one JSON object")
    if not isinstance(item, dict):
        return Line(number, {}, f"a JSON {type(item).__name__}; allowed: one JSON object")
    return Line(number, {}, TOO_DEEP) if _too_deep(text) else Line(number, item)


def _too_deep(text: str) -> bool:
    """Whether JSON text is nested deeper than is read; few brackets are counted fast."""
    return text.count("{") + text.count("[") > DEEPEST and nesting(text) > DEEPEST


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
