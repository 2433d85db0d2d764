"""Runs the batches of a server: line by line, behind the requests of those who wait for an answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from slipstream.apps.server.answer_making import check_model
from slipstream.apps.server.answering import collect, prepare
from slipstream.apps.server.batch_records import BatchRecord
from slipstream.apps.server.batch_store import BatchStore
from slipstream.apps.server.error_objects import ApiError
from slipstream.apps.server.openai_lines import answer_line, read_fields, refusal_line
from slipstream.errors import SlipstreamError, UsageError, first_line
from slipstream.jobs.error_file import ErrorFile
from slipstream.jobs.job_lines import FileLines, Line
from slipstream.jobs.job_output import JobOutput
from slipstream.jobs.line_kinds import JobOptions, LineReader

if TYPE_CHECKING:
    from slipstream.apps.server.service import Service

log = logging.getLogger("slipstream.server")
PIECE = 64  # lines read at a time
MOST_PROBLEMS = 100  # that a batch repeats


class BatchRunner:
    """One task per unfinished batch, from the start of the server to its end. Used on the event loop alone."""

    def __init__(self, service: Service, store: BatchStore) -> None:
        self._service, self.store = service, store
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reader = LineReader(service.decoder, JobOptions())
        self._stopped = False

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
        if not self._stopped:
            self._publish(record)
            self.store.change(record, "cancelled")

    def stop(self) -> None:
        """End all tasks; the next server over the folder goes on with them."""
        self._stopped = True
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
                expired = await _BatchRun(self._service, self.store, self._reader, record).run()
                if not expired:
                    self.store.change(record, "finalizing")
            if record.status in ("in_progress", "finalizing"):
                self._publish(record)
                self.store.change(record, "completed" if record.status == "finalizing" else "expired")
        except (SlipstreamError, OSError) as error:
            self._fail(record, [_problem("batch_failed", first_line(error), None)])
        except ApiError as error:  # the server ends
            log.info("batch %s goes on when the server does: %s", record.id, error.message)
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
                if "custom_id" not in line.item or line.item.get("url") != record.endpoint:
                    raise UsageError(f"url={line.item.get('url')!r:.80}; allowed: {record.endpoint!r}, and a custom_id")
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


class _BatchRun:
    """The lines of one batch, as many at a time as the engine decodes."""

    def __init__(self, service: Service, store: BatchStore, reader: LineReader, record: BatchRecord) -> None:
        self._service, self._store, self._reader, self._record = service, store, reader, record
        self._places = asyncio.Semaphore(service.decoder.config.max_batch_size)
        self._writing = asyncio.Lock()
        self._source = FileLines(store.content(record.input_file_id))

    async def run(self) -> bool:
        """Answer what is not answered yet; returns whether the time for it ran out."""
        with await asyncio.to_thread(JobOutput, self._store.content(self._record.output)) as output:
            self._output = output
            self._errors = ErrorFile(self._store.content(self._record.errors))
            self._check_answers()
            self._record.completed, self._record.failed = len(output.answered), 0
            pending, expired = self._pending(), False
            failure: BaseException | None = None
            try:
                async with asyncio.TaskGroup() as tasks:
                    while not expired and (lines := await asyncio.to_thread(lambda: list(islice(pending, PIECE)))):
                        expired = await self._begin(lines, tasks)
            except* (SlipstreamError, OSError, ApiError) as group:
                failure = group.exceptions[0]
            if failure is not None:
                raise failure
            return expired

    async def _begin(self, lines: list[Line], tasks: asyncio.TaskGroup) -> bool:
        """Begin lines as places become free; returns whether the time for them ran out."""
        for line in lines:
            await self._places.acquire()
            if time.time() >= self._record.expires_at:
                self._places.release()
                return True
            tasks.create_task(self._answer(line))
        return False

    def _check_answers(self) -> None:
        """Refuse to go on with the answers of another model."""
        for found in self._output.answered.values():
            if found.fingerprint != self._reader.fingerprint:
                raise SlipstreamError(
                    f"begun by a model with fingerprint {found.fingerprint}, loaded is {self._reader.fingerprint}"
                )

    def _pending(self) -> Iterator[Line]:
        return (line for line in self._source if str(line.id) not in self._output.answered)

    async def _answer(self, line: Line) -> None:
        """One line; those that fail are counted and written down."""
        service, record, digest = self._service, self._record, self._reader.digests.of(line)
        live = service.enter_background(record.endpoint, record.owner, digest)
        try:
            fields = read_fields(line)
            check_model(service.facts.name, fields)
            writer = await prepare(service, live, fields)
            service.submit_background(live)
            answer = answer_line(line, digest, await collect(live, writer))
            await self._write(self._answered, answer)
        except Exception as error:
            if service.state != "ready":  # not the line's fault: it is answered by the next server
                raise
            if isinstance(error, SlipstreamError | OSError) and not isinstance(error, UsageError):
                raise
            await self._write(self._failed, {"line": line.number} | refusal_line(line, digest, error))
        finally:
            service.release(live)
            self._places.release()

    async def _write(self, write: Callable[[dict[str, Any]], None], line: dict[str, Any]) -> None:
        """Write a line in a thread, to its end even if the batch is cancelled meanwhile."""
        async with self._writing:
            work = asyncio.ensure_future(asyncio.to_thread(write, line))
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                await work
                raise

    def _answered(self, line: dict[str, Any]) -> None:
        self._output.append([line])
        self._record.completed += 1

    def _failed(self, line: dict[str, Any]) -> None:
        self._errors.add(line)
        self._record.failed += 1


def _problem(code: str, message: str, line: int | None) -> dict[str, object]:
    return {"code": code, "message": message, "line": line, "param": None}
