"""The folder of a server's files and batches. Everything in it survives the server, however the server ends.

Files and batches are OpenAI's objects. Names in the folder are made here; nothing that a client sends becomes a part of
a path.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import uuid4

from slipstream.apps.server.error_objects import ApiError, refused
from slipstream.durable_files import locked, replaced, sync
from slipstream.errors import SlipstreamError, UsageError, first_line, os_reason

log = logging.getLogger("slipstream.server")
MAX_NAME_LENGTH = 255  # characters of a file's name
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
WINDOW_S = 24 * 3600  # seconds of the only completion window
MAX_RECORDS = 10_000  # files, and batches, of a key
MAX_UPLOADS = 4  # of a key at a time
LineKey = tuple[str, int]  # the id of a batch, and the number of a line
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


def printable(name: str) -> str:
    """The name with replacement characters for what cannot be printed, such as lone surrogates."""
    return "".join(character if character.isprintable() else "\ufffd" for character in name)


@dataclass
class FileRecord:
    """A file. owner: the name of the key that uploaded it; filename: the client's name for it, never a local path."""

    id: str
    owner: str
    filename: str
    bytes: int
    created_at: int
    purpose: str

    def __post_init__(self) -> None:
        self.filename = printable(self.filename)[:MAX_NAME_LENGTH]

    def to_dict(self) -> dict[str, Any]:
        return {"object": "file"} | {k: v for k, v in asdict(self).items() if k != "owner"} | {"status": "processed"}


@dataclass
class BatchRecord:
    """A batch. Times are in seconds since 1970; `output` and `errors` are the ids of its files, from the beginning."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    output: str
    errors: str
    created_at: int
    expires_at: int
    completion_window: str
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    problems: list[dict[str, Any]] = field(default_factory=list)
    times: dict[str, int] = field(default_factory=dict)  # when it entered each status
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def is_unfinished(self) -> bool:
        return self.status in UNFINISHED

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's object. Its files are named once it is finished."""
        has_files = not self.is_unfinished and self.status != "failed"
        shown: dict[str, Any] = {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.problems} if self.problems else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output if has_files and self.completed else None,
            "error_file_id": self.errors if has_files and self.failed else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
        }
        for name in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"):
            shown[f"{name}_at"] = self.times.get(name)
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        return shown | {"request_counts": counts, "metadata": self.metadata}


Record = TypeVar("Record", FileRecord, BatchRecord)


class BatchStore:
    """Files and batches by id, for one thread. One server at a time uses a folder.

    max_bytes: a key whose files together have this many bytes may upload no more. under_way: the lines that are being
    answered.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._uploads = Counter[str]()
        with _usable(folder):
            for name in ("files", "batches", "uploads"):
                (folder / name).mkdir(parents=True, exist_ok=True)
            lock = locked(folder / "lock")  # held as long as the server lives
            if lock is None:
                raise SlipstreamError(f"batch_folder={str(folder)!r} is used by another server")
            self._lock = lock
            for leftover in (folder / "uploads").iterdir():
                leftover.unlink()
        self.files = {record.id: record for record in _read(folder / "files", FileRecord)}
        self.batches = {record.id: record for record in _read(folder / "batches", BatchRecord)}
        with _usable(folder):
            unfinished = {record.id for record in self.batches.values() if record.is_unfinished}
            self.under_way = LinesUnderWay(folder / "interrupted-lines", unfinished)

    def close(self) -> None:
        """Let another server use the folder."""
        self.under_way.close(orderly=False)
        self._lock.release()

    def content(self, file_id: str) -> Path:
        """Where a file's content is, or will be."""
        return self.folder / "files" / f"{file_id}.jsonl"

    @contextmanager
    def upload(self, owner: str) -> Iterator[Path]:
        """Where a file can be written while it arrives; ApiError if its owner has no room for one more."""
        files = [file for file in self.files.values() if file.owner == owner]
        size = sum(file.bytes for file in files)
        if len(files) >= MAX_RECORDS or size >= self.max_bytes:
            raise refused(
                f"{len(files)} files of {size} bytes; allowed: fewer than {MAX_RECORDS} files and "
                f"{self.max_bytes} bytes, delete some",
                "file",
            )
        if self._uploads[owner] >= MAX_UPLOADS:
            raise ApiError(429, f"{MAX_UPLOADS} files are arriving already; try again later", code="too_many_uploads")
        self._uploads[owner] += 1
        path = self.folder / "uploads" / uuid4().hex
        try:
            with write_errors_named():
                yield path
        finally:
            path.unlink(missing_ok=True)
            self._uploads[owner] -= 1
            self._uploads += Counter()  # leaves out zeros

    def add_file(self, owner: str, filename: str, purpose: str, content: Path) -> FileRecord:
        """Keep an upload that is on the disk."""
        id = f"file-{uuid4().hex}"
        content.replace(self.content(id))
        try:
            return self.register(id, owner, filename, purpose)
        except OSError:
            self.content(id).unlink(missing_ok=True)  # no record names it, so nobody could delete it
            raise

    def register(self, id: str, owner: str, filename: str, purpose: str) -> FileRecord:
        """List a file whose content is in the folder."""
        size = self.content(id).stat().st_size
        record = FileRecord(id, owner, filename, size, int(time.time()), purpose)
        _write(self.folder / "files" / f"{id}.json", record)
        self.files[id] = record
        return record

    def delete_file(self, record: FileRecord) -> None:
        """Remove a file that no unfinished batch needs."""
        if any(batch.input_file_id == record.id and batch.is_unfinished for batch in self.batches.values()):
            raise refused(f"file {record.id!r} belongs to a batch that is not finished", "file_id")
        (self.folder / "files" / f"{record.id}.json").unlink(missing_ok=True)
        self.content(record.id).unlink(missing_ok=True)
        del self.files[record.id]

    def add_batch(self, owner: str, file_id: str, endpoint: str, metadata: dict[str, str] | None) -> BatchRecord:
        self._forget_old_batches(owner)
        now, key = int(time.time()), uuid4().hex
        record = BatchRecord(
            f"batch_{key}",
            owner,
            endpoint,
            file_id,
            f"file-{uuid4().hex}",
            f"file-{uuid4().hex}",
            now,
            now + WINDOW_S,
            "24h",
            metadata=metadata,
        )
        self.save(record)
        self.batches[record.id] = record
        return record

    def _forget_old_batches(self, owner: str) -> None:
        """Make room for one more of a key; the files of a forgotten batch stay."""
        batches = [batch for batch in self.batches.values() if batch.owner == owner]
        finished = [batch for batch in batches if not batch.is_unfinished]
        if len(batches) - len(finished) >= MAX_RECORDS:
            raise refused(f"{len(batches) - len(finished)} batches are not finished; allowed: at most {MAX_RECORDS}")
        for batch in sorted(finished, key=lambda batch: batch.created_at)[: max(0, len(batches) - MAX_RECORDS + 1)]:
            del self.batches[batch.id]
            (self.folder / "batches" / f"{batch.id}.json").unlink()

    def change(self, record: BatchRecord, status: Status) -> None:
        """Set a batch's status, in the folder first: if writing fails, the batch keeps its old status."""
        changed = replace(record, status=status, times=record.times | {status: int(time.time())})
        self.save(changed)
        record.status, record.times = changed.status, changed.times

    def save(self, record: BatchRecord) -> None:
        """Write a batch to the disk."""
        _write(self.folder / "batches" / f"{record.id}.json", record)


def owned(records: dict[str, Record], id: str, owner: str, kind: str) -> Record:
    """The record of an id, if it belongs to this owner; to others it does not exist."""
    record = records.get(id)
    if record is None or record.owner != owner:
        raise ApiError(404, f"there is no {kind} {id!r:.100}", param=f"{kind}_id", code="not_found")
    return record


def _write(path: Path, record: FileRecord | BatchRecord) -> None:
    """Write a record aside, then replace its file."""
    with replaced(path) as partial:
        partial.write_text(json.dumps(asdict(record)), encoding="utf-8")
    sync(path.parent)


@contextmanager
def write_errors_named() -> Iterator[None]:
    """An OSError inside becomes the answer that the batch folder cannot be used, and why."""
    try:
        yield
    except OSError as error:
        log.error("%s", first_line(error))
        raise ApiError(507, folder_fault(error), code="batch_folder") from error


def folder_fault(error: OSError) -> str:
    """An error of the folder in words for clients, which do not learn where the folder is."""
    return f"the batch folder cannot be used: {os_reason(error)}"


@contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """An OSError inside becomes a UsageError that names the folder."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"batch_folder={str(folder)!r} cannot be used: {os_reason(error)}") from error


def _read(folder: Path, cls: type[Record]) -> list[Record]:
    """The records of a folder, the oldest first."""
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            values: dict[str, Any] = json.loads(path.read_bytes())
            records.append(cls(**values))
        except (OSError, ValueError, TypeError) as error:
            raise SlipstreamError(f"{str(path)!r} is not what a server has written: {error}") from error
    return sorted(records, key=lambda record: record.created_at)


class LinesUnderWay:
    """Counts for every line how many servers have died while they answered it: the line may be the cause.

    A line adds +1 to the file when it begins and -1 when it ends; the sum is the number of servers that died meanwhile.
    unfinished: the ids of batches that go on; the counts of other batches are dropped.
    """

    def __init__(self, path: Path, unfinished: Collection[str]) -> None:
        self._path = path
        self._ends = Counter({key: count for key, count in _read_ends(path).items() if count and key[0] in unfinished})
        self._file: int | None = self._rewritten()

    def num_ends(self, key: LineKey) -> int:
        """How many servers have died while this line was under way."""
        return self._ends[key]

    @contextmanager
    def entered(self, key: LineKey) -> Iterator[None]:
        """The line is under way inside the block."""
        self._note(key, 1)
        try:
            yield
        finally:
            self._note(key, -1)

    def close(self, *, orderly: bool) -> None:
        """Record nothing more. orderly: the server ends on request, so no line is to blame."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            if orderly:
                os.close(self._rewritten())

    def _rewritten(self) -> int:
        """A new file with the counts so far, open for more."""
        temporary = self._path.with_suffix(".part")
        temporary.write_bytes(b"".join(_change(key, count) for key, count in sorted(self._ends.items())))
        temporary.replace(self._path)
        return os.open(self._path, os.O_WRONLY | os.O_APPEND)

    def _note(self, key: LineKey, change: int) -> None:
        if self._file is None:
            return
        line = _change(key, change)
        part = os.write(self._file, line)  # it survives the process, which is enough; no sync
        if part < len(line):
            os.ftruncate(self._file, os.lseek(self._file, 0, os.SEEK_END) - part)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _change(key: LineKey, change: int) -> bytes:
    return json.dumps([*key, change]).encode() + b"\n"


def _read_ends(path: Path) -> Counter[LineKey]:
    ends = Counter[LineKey]()
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"\n"):  # a dying process may leave a line unfinished
            try:
                batch, number, change = json.loads(line)
                ends[batch, number] += change
            except (ValueError, TypeError) as error:
                raise SlipstreamError(f"{str(path)!r} is not what a server has written: {error}") from error
    return ends
