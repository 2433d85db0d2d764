"""Runs the batches of a server, behind the requests of those who wait for an answer."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.apps.server.batch_lines import BatchLines
from slipstream.apps.server.batch_records import BatchRecord
from slipstream.apps.server.batch_store import BatchStore
from slipstream.apps.server.error_objects import ApiError, as_api_error
from slipstream.apps.server.lines_under_way import LinesUnderWay
from slipstream.errors import SlipstreamError, UsageError, first_line
from slipstream.jobs.job_lines import FileLines
from slipstream.jobs.line_formats import JobOptions, LineReader

if TYPE_CHECKING:
    from slipstream.apps.server.service import Service

log = logging.getLogger("slipstream.server")
MOST_PROBLEMS = 100  # that a batch repeats


class BatchRunner:
    """One task per unfinished batch, from the start of the server to its end. Used on the event loop alone."""

    def __init__(self, service: Service, store: BatchStore) -> None:
        self._service, self.store = service, store
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.reader = LineReader(service.decoder, JobOptions())
        self._stopped = False
        unfinished = {record.id for record in store.batches.values() if record.unfinished}
        self.under_way = LinesUnderWay(store.folder / "lines-under-way", unfinished)

    def start(self) -> None:
        """Go on with every batch that is not finished."""
        for record in self.store.batches.values():
            if record.unfinished:
                self.begin(record)

    def begin(self, record: BatchRecord) -> None:
        """Run a batch."""
        if not self._stopped:
            self._tasks[record.id] = asyncio.ensure_future(self._run(record))

    def cancel(self, record: BatchRecord) -> None:
        """End a batch; what is answered stays."""
        self.store.change(record, "cancelling")
        task = self._tasks.pop(record.id, None)
        if task is not None:
            task.cancel()
            task.add_done_callback(lambda _: self._cancelled(record))
        else:
            self._cancelled(record)

    def _cancelled(self, record: BatchRecord) -> None:
        if not self._stopped:  # since a restart the record may count less than there is
            record.completed = _whole_lines(self.store.content(record.output))
            record.failed = _whole_lines(self.store.content(record.errors))
            self._publish(record)
            self.store.change(record, "cancelled")

    def stop(self, *, orderly: bool) -> None:
        """End all tasks; the next server over the folder goes on with them. orderly: no line is the reason."""
        self._stopped = True
        self.under_way.close(orderly=orderly)
        for task in self._tasks.values():
            task.cancel()

    async def _run(self, record: BatchRecord) -> None:
        """A batch from wherever it is to its end."""
        try:
            if record.status == "cancelling":
                self._cancelled(record)
                return
            if record.status == "validating":
                self._begin_or_refuse(record, *await asyncio.to_thread(self._validated, record))
            if record.status == "in_progress":
                expired = await BatchLines(self._service, self, record).run()
                if not expired:
                    self.store.change(record, "finalizing")
            if record.status in ("in_progress", "finalizing"):
                self._publish(record)
                self.store.change(record, "completed" if record.status == "finalizing" else "expired")
        except (SlipstreamError, OSError) as error:
            self._fail(record, [_problem("batch_failed", first_line(error), None)])
        except ApiError as error:  # the server ends
            log.info("batch %s goes on when the server does: %s", record.id, error.message)
        except Exception as error:
            if not self._stopped:  # else it may be of the shutdown, and the next server tries again
                self._fail(record, [_problem("batch_failed", as_api_error(error).message, None)])
        finally:
            self._tasks.pop(record.id, None)

    def _validated(self, record: BatchRecord) -> tuple[int, list[dict[str, object]]]:
        """How many lines there are, and which are no requests of this batch; called in a thread."""
        problems, known, total = [], dict[str, int](), 0
        for line in FileLines(self.store.content(record.input_file_id)):
            total += 1
            try:
                if line.error:
                    raise UsageError(line.error)
                has_id = "custom_id" in line.item
                if line.item.get("url") != record.endpoint:
                    more = "" if has_id else ", and a custom_id"
                    raise UsageError(f"url={line.item.get('url')!r:.80}; allowed: {record.endpoint!r}{more}")
                if not has_id:
                    raise UsageError("custom_id is missing; allowed: one for each line")
                key = str(line.id)
                if key in known:
                    raise UsageError(f"custom_id {key!r:.80} is that of line {known[key]}; allowed: one for each line")
                known[key] = line.number
            except UsageError as error:
                problems.append(_problem("invalid_line", first_line(error), line.number))
        if not total:
            problems.append(_problem("empty_file", "the file has no lines; allowed: at least one", None))
        return total, problems[:MOST_PROBLEMS]

    def _begin_or_refuse(self, record: BatchRecord, total: int, problems: list[dict[str, object]]) -> None:
        record.total = total
        if problems:
            self._fail(record, problems)
        else:
            self.store.change(record, "in_progress")

    def _fail(self, record: BatchRecord, problems: list[dict[str, object]]) -> None:
        record.problems = problems
        self.store.change(record, "failed")

    def _publish(self, record: BatchRecord) -> None:
        """Make the files of an ended batch known to its owner."""
        for id, count, name in ((record.output, record.completed, "output"), (record.errors, record.failed, "errors")):
            if count and self.store.content(id).exists():
                self.store.register(id, record.owner, f"{record.id}_{name}.jsonl", "batch_output")


def _whole_lines(path: Path) -> int:
    """How many lines a file has, if it exists; a line that a killed server left unfinished is cut off."""
    if not path.exists():
        return 0
    count = end = 0
    with open(path, "r+b") as file:
        for line in file:
            if line.endswith(b"\n"):
                count, end = count + 1, end + len(line)
        file.truncate(end)
    return count


def _problem(code: str, message: str, line: int | None) -> dict[str, object]:
    return {"code": code, "message": message, "line": line, "param": None}
