"""Where a job reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import UsageError
from slipstream.jobs.job_lines import Lines, lines_of
from slipstream.jobs.parquet_files import check_pyarrow, is_parquet


@dataclass(frozen=True)
class JobFiles:
    """The files of a job. output: JSON lines, beside a Parquet file its journal `NAME.parquet.jsonl`."""

    lines: Lines
    output: Path
    errors: Path
    parquet: Path | None = None

    @classmethod
    def of(
        cls, source: str | Path | Iterable[Mapping[str, Any]], output: str | Path, errors: str | Path | None = None
    ) -> JobFiles:
        """Check the names before anything is loaded; nothing is created."""
        path = Path(output)
        check_pyarrow(*(one for one in (source, output) if isinstance(one, str | Path)))
        parquet = path if is_parquet(path) else None
        journal = path if parquet is None else path.with_name(f"{path.name}.jsonl")
        refusals = path.with_name(f"{path.stem}.errors.jsonl") if errors is None else Path(errors)
        taken = {"the input": Path(source)} if isinstance(source, str | Path) else {}
        for name, one in (("the output", journal), ("the error file", refusals)):
            _check(name, one, taken)
            taken[name] = one
        if isinstance(source, str | Path) and not Path(source).is_file():
            raise UsageError(f"{str(source)!r} cannot be read; allowed: a file with one request per line")
        return cls(lines_of(source), journal, refusals, parquet)


def _check(name: str, one: Path, taken: Mapping[str, Path]) -> None:
    for other, known in taken.items():
        if one.absolute() == known.absolute() or (one.exists() and known.exists() and one.samefile(known)):
            raise UsageError(f"{str(one)!r} is {name} and {other}; allowed: two files")
    if one.is_dir() or not one.absolute().parent.is_dir():
        why = "it is a folder" if one.is_dir() else f"the folder {str(one.parent)!r} does not exist"
        raise UsageError(f"{name} {str(one)!r} cannot be written: {why}")
