"""The lines of one batch: read, put in the order of `slipstream batch`, and answered as there is room."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from slipstream.apps.server.answer_making import check_model
from slipstream.apps.server.answer_writer import AnswerWriter
from slipstream.apps.server.answering import collect, count_unknown, prepare
from slipstream.apps.server.batch_records import BatchRecord
from slipstream.apps.server.error_objects import ApiError
from slipstream.apps.server.live_request import LiveRequest
from slipstream.apps.server.openai_lines import answer_line, read_fields, refusal_line
from slipstream.core.types import Row
from slipstream.errors import SlipstreamError, UsageError
from slipstream.jobs.job_lines import FileLines, Line
from slipstream.jobs.job_output import ErrorFile, JobOutput
from slipstream.wiring.run_order import first_row, ordered

if TYPE_CHECKING:
    from slipstream.apps.server.batch_runner import BatchRunner
    from slipstream.apps.server.service import Service

FATAL = "the server ended while it answered this line and no other; it is not tried again"
PIECE = 1024  # lines read and put in order at a time


@dataclass(frozen=True)
class Prepared:
    """A line whose prompts are rendered; nothing of it is queued."""

    line: Line
    digest: str
    live: LiveRequest
    writer: AnswerWriter

    @property
    def rows(self) -> Sequence[Row]:
        """Its texts."""
        return [job.row for job in self.live.jobs]


class BatchLines:
    """The lines of one batch, as many at a time as the engine decodes."""

    def __init__(self, service: Service, runner: BatchRunner, record: BatchRecord) -> None:
        self._service, self._store, self._reader, self._record = service, runner.store, runner.reader, record
        self._under_way = runner.under_way
        self._places = asyncio.Semaphore(service.decoder.config.max_batch_size)
        self._writing = asyncio.Lock()
        self._source = FileLines(self._store.content(record.input_file_id))

    async def run(self) -> bool:
        """Answer what is not answered yet; returns whether the time for it ran out."""
        with await asyncio.to_thread(JobOutput, self._store.content(self._record.output)) as output:
            self._output = output
            self._check_answers()
            self._errors = ErrorFile(self._store.content(self._record.errors))
            self._record.completed, self._record.failed = len(output.answered), 0
            self._last = list[Line]()
            pending, expired = self._pending(), False
            failure: BaseException | None = None
            try:
                async with asyncio.TaskGroup() as tasks:
                    while not expired and (lines := await asyncio.to_thread(lambda: list(islice(pending, PIECE)))):
                        expired = await self._begin(lines, tasks)
                for line in () if expired else self._last:
                    expired = expired or await self._answered_alone(line)
            except* Exception as group:
                failure = group.exceptions[0]
            if failure is not None:
                raise failure
            return expired

    async def _begin(self, lines: list[Line], tasks: asyncio.TaskGroup) -> bool:
        """Begin lines as places become free, in a good order; returns whether the time for them ran out."""
        waiting = deque[Prepared]()
        try:
            for line in lines:
                if self._key(line) in self._under_way.suspects:
                    self._last.append(line)
                elif (one := await self._prepared(line)) is not None:
                    waiting.append(one)
            waiting = deque(ordered(waiting, first_row, self._service.decoder.shapes.reuse))
            while waiting:
                await self._places.acquire()
                if time.time() >= self._record.expires_at:
                    self._places.release()
                    return True
                tasks.create_task(self._answer_beside(waiting.popleft()))
            return False
        finally:
            for one in waiting:  # that never began
                self._service.release(one.live)

    def _key(self, line: Line) -> tuple[str, int]:
        return self._record.id, line.number

    async def _answered_alone(self, line: Line) -> bool:
        """A line that may have ended a server, beside no other; returns whether the time for it ran out."""
        async with self._under_way.entered(self._key(line)):
            if time.time() >= self._record.expires_at:
                return True
            if (one := await self._read(line)) is not None:
                await self._answer(one)
        self._under_way.acquit(self._key(line))
        return False

    async def _answer_beside(self, one: Prepared) -> None:
        try:
            async with self._under_way.entered(self._key(one.line)):
                await self._answer(one)
        finally:
            self._places.release()

    async def _prepared(self, line: Line) -> Prepared | None:
        """A line that can be answered; others are written down."""
        if self._key(line) in self._under_way.fatal:
            await self._refuse(line, self._reader.digests.of(line), ApiError(500, FATAL))
            return None
        async with self._under_way.entered(self._key(line)):
            return await self._read(line)

    def _check_answers(self) -> None:
        """Refuse to go on with the answers of another model."""
        for found in self._output.answered.values():
            if found.fingerprint != self._reader.fingerprint:
                raise SlipstreamError(
                    f"begun by a model with fingerprint {found.fingerprint}, loaded is {self._reader.fingerprint}"
                )

    def _pending(self) -> Iterator[Line]:
        return (line for line in self._source if str(line.id) not in self._output.answered)

    async def _read(self, line: Line) -> Prepared | None:
        """A line whose prompts can be rendered; others are written down."""
        service, record, digest = self._service, self._record, self._reader.digests.of(line)
        live: LiveRequest | None = None
        try:
            fields = read_fields(line)
            check_model(service.facts.name, fields.model)
            live = service.enter_background(record.endpoint, record.owner, digest, fields.cache_salt)
            writer = await prepare(service, live, fields)
            count_unknown(service, fields)
            return Prepared(line, digest, live, writer)
        except BaseException as error:
            if live is not None:
                service.release(live)
            await self._refuse(line, digest, error)
            return None

    async def _answer(self, one: Prepared) -> None:
        """One line; those that fail are counted and written down."""
        try:
            self._service.submit_background(one.live)
            answer = answer_line(one.line, one.digest, await collect(one.live, one.writer))
            await self._write(self._answered, answer)
        except Exception as error:
            await self._refuse(one.line, one.digest, error)
        finally:
            self._service.release(one.live)

    async def _refuse(self, line: Line, digest: str, error: BaseException) -> None:
        """Write down why a line has no answer; raises what is not the line's fault: the next server answers it then."""
        elsewhere = isinstance(error, SlipstreamError | OSError) and not isinstance(error, UsageError)
        if self._service.state != "ready" or elsewhere or not isinstance(error, Exception):
            raise error
        await self._write(self._failed, {"line": line.number} | refusal_line(line, digest, error))

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
