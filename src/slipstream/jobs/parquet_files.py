"""Parquet files as rows of plain values; needs pyarrow, which is optional."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError, UsageError, first_line

ROWS = 1024  # read and written at a time


def is_parquet(path: str | Path) -> bool:
    """Whether a file's name says that it is one."""
    return Path(path).suffix.lower() == ".parquet"


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise SlipstreamError("Parquet files need pyarrow; run: pip install 'slipstream-lm[parquet]'") from error
    return pyarrow


def parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a file, in order."""
    pyarrow = _pyarrow()
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS):
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"{str(path)!r} cannot be read as Parquet: {first_line(error)}") from error


def write_parquet(path: Path, rows: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
    """Write a file whole or not at all. rows: read twice. Lists and dictionaries become JSON text."""
    pyarrow = _pyarrow()
    temporary, columns = path.with_name(f".{path.name}.part"), _columns(rows())
    types = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()}
    schema = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])
    try:
        with pyarrow.parquet.ParquetWriter(temporary, schema) as writer:
            for part in _parts(rows()):
                flat = [{name: _cell(row.get(name), kind) for name, kind in columns.items()} for row in part]
                writer.write_table(pyarrow.Table.from_pylist(flat, schema=schema))
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise SlipstreamError(f"{str(path)!r} cannot be written: {first_line(error)}") from error


def _columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, type]:
    """The columns of all rows and what they hold; text where rows differ or none has a value."""
    found: dict[str, type] = {}
    for row in rows:
        for name, value in row.items():
            kind = type(value) if isinstance(value, str | int | float) else type(None) if value is None else str
            known = found.setdefault(name, kind)
            if kind not in (known, type(None)):
                found[name] = kind if known is type(None) else str
    return {name: str if kind is type(None) else kind for name, kind in found.items()}


def _cell(value: Any, kind: type) -> Any:
    if value is None or isinstance(value, kind):
        return value
    return json.dumps(value, ensure_ascii=False)


def _parts(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    found = iter(rows)
    for first in found:
        yield [first, *islice(found, ROWS - 1)]


def check_pyarrow(*paths: str | Path) -> None:
    """Refuse Parquet files where pyarrow is missing."""
    if any(map(is_parquet, chain(paths))):
        _pyarrow()
