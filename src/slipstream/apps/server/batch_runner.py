"""Runs the batches of a server, behind the requests of clients that wait for an answer.

A batch's lines are requests of the server's endpoints, put in the order of `slipstream batch` and answered as there is
room. An answer depends on nothing but its request and the model: what differs from run to run (times, the statistics
of drafts, which prompt tokens were cached) is left out, and `created` is 0.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from slipstream.apps.server.answer_state import ModelFacts
from slipstream.apps.server.answers import AnswerWriter
from slipstream.apps.server.batch_store import BatchRecord, BatchStore, LineKey, folder_fault
from slipstream.apps.server.error_objects import INTERNAL, ApiError, as_api_error, refused, sent, validation_error
from slipstream.apps.server.live_request import Committed, Ended, LiveRequest, Scored, Started
from slipstream.apps.server.request_reading import count_unknown_fields
from slipstream.apps.server.request_rows import RowMaker, check_model, writer_of
from slipstream.apps.server.schemas import ChatFields, CompletionFields
from slipstream.apps.server.server_settings import ServerSettings
from slipstream.apps.server.service import Service
from slipstream.core.rounds import TokenLogprobs
from slipstream.core.scheduler import PROMPT_BUDGET
from slipstream.core.types import Row
from slipstream.errors import SlipstreamError, UsageError, did_you_mean, first_line
from slipstream.jobs.job_lines import FileLines, Line
from slipstream.jobs.job_output import ROW_PREFIX, ErrorFile, JobOutput
from slipstream.jobs.line_formats import JobOptions, LineReader, seed_of
from slipstream.tokenization.tokenizer import Tokenizer
from slipstream.wiring.prompt_scores import PromptScores
from slipstream.wiring.run_order import first_row, ordered

if TYPE_CHECKING:
    from slipstream.decoder import SpeculativeDecoder

log = logging.getLogger("slipstream.server")
URLS: dict[str, type[ChatFields | CompletionFields]] = {
    "/v1/chat/completions": ChatFields,
    "/v1/completions": CompletionFields,
}
LINE_FIELDS = ("custom_id", "method", "url", "body")
TIMED_PARTS = ("timings", "metrics")  # parts of an answer that differ from run to run
VARYING_USAGE = ("prompt_tokens_details", "completion_tokens_details")  # parts of its usage that do
FATAL = "the server died twice while it answered this line; it is not tried again"
MAX_ENDS = 2  # how often a server may die while it answers a line; the second time the line was alone in its batch
LINES_AT_ONCE = 1024  # lines read and put in order at a time
MAX_PROBLEMS = 100  # invalid lines that a failed batch lists
FULL_DISK_SECONDS = 60.0  # after which a batch that found its disk full tries again


def read_fields(line: Line) -> ChatFields | CompletionFields:
    """The request of a line; ApiError says what is not allowed."""
    item = line.item
    if unknown := [name for name in item if name not in LINE_FIELDS]:
        near = did_you_mean(str(unknown[0]), *LINE_FIELDS)
        raise refused(f"unknown field {unknown[0]!r:.80}; allowed: {', '.join(LINE_FIELDS)}{near}", unknown[0])
    if item.get("method", "POST") != "POST":
        raise refused(f"method={item['method']!r:.80}; allowed: 'POST'", "method")
    url, body = item.get("url"), item.get("body")
    if not isinstance(url, str) or url not in URLS:
        near = did_you_mean(str(url), *URLS)
        raise refused(f"url={url!r:.80}; allowed: {', '.join(URLS)}{near}", "url")
    if not isinstance(body, dict):
        what = "body is missing" if body is None else sent("body", body)
        raise refused(f"{what}; allowed: a JSON object, the request", "body")
    try:
        fields = URLS[url].model_validate(body)
    except ValidationError as error:
        raise validation_error(error.errors()) from None
    if fields.stream:
        raise refused("stream=true in a batch; allowed: false", "stream")
    if fields.slipstream is not None:
        raise refused("slipstream: rounds are not reported in a batch", "slipstream")
    if fields.seed in (None, -1):
        fields.seed = seed_of(str(line.id))
    return fields


@dataclass(frozen=True)
class Prepared:
    """A line whose prompts are rendered, and the writer of its answer; its rows are not queued yet."""

    line: Line
    digest: str
    live: LiveRequest
    writer: AnswerWriter

    @property
    def rows(self) -> Sequence[Row]:
        return [job.row for job in self.live.jobs]


@dataclass(frozen=True)
class OpenAIRequest(Prepared):
    """A line that a job answers outside a server."""

    kind: OpenAILines = field(repr=False)

    @property
    def rows(self) -> Sequence[Row]:
        """Rows that are generated; a prompt that is only scored has none."""
        return [job.row for job in self.live.jobs if job.generate]

    def answer(self) -> dict[str, Any]:
        """The line of the output; raises ApiError, or the error that a row failed with."""
        for job in self.live.jobs:
            row = job.row
            events: list[Any] = [Started(job.choice, 0, 0.0)]
            if job.echo is not None:
                events.append(Scored(job.choice, self.kind.scored(row, job.echo)))
            events += [Committed(job.choice, round, 0.0) for round in row.rounds]
            reason = row.finish_reason or "length"
            for event in [*events, Ended(job.choice, reason, 0.0, row.error)]:
                self.writer.note(event)
        return answer_line(self.line, self.digest, self.writer.whole())


def answer_line(line: Line, digest: str, answer: dict[str, Any]) -> dict[str, Any]:
    """An answer as a line of the output."""
    body = {name: value for name, value in answer.items() if name not in TIMED_PARTS} | {"created": 0}
    body["usage"] = {name: count for name, count in body["usage"].items() if name not in VARYING_USAGE}
    return _line(line, digest, 200, body)


def refusal_line(line: Line, digest: str, error: Exception) -> dict[str, Any]:
    """A refusal or failure as a line of the error file."""
    refusal = as_api_error(error)
    reason = {"code": refusal.code or refusal.body["error"]["type"], "message": refusal.message}
    return _line(line, digest, refusal.status, refusal.body) | {"error": reason}


def _line(line: Line, digest: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    try:
        custom_id = line.id
    except UsageError:
        custom_id = str(line.item.get("custom_id"))[:80]
    response = {"status_code": status, "request_id": digest, "body": body}
    return {"id": f"{ROW_PREFIX}{digest}", "custom_id": custom_id, "response": response, "error": None}


class OpenAILines:
    """Reads lines for one decoder, outside a server."""

    def __init__(self, decoder: SpeculativeDecoder, options: JobOptions) -> None:
        self._decoder = decoder
        self._tokenizer: Tokenizer | None = copy.deepcopy(decoder.tokenizer)
        self._facts = ModelFacts.of(decoder, options.model_name)
        self._rows = RowMaker.of(decoder, ServerSettings(max_model_len=0))
        self._named = set[str]()  # fields without effect that are in the log already

    def request_of(self, line: Line, digest: str) -> OpenAIRequest:
        """The rows of a line; ApiError or UsageError says what is not allowed."""
        fields = read_fields(line)
        check_model(self._facts.name, fields.model)
        live = LiveRequest(str(line.item["url"]), id=digest)
        writer = writer_of(self._rows, self._facts, live, fields, self._tokenizer)
        count_unknown_fields(fields, self._tokenizer, self._named)
        return OpenAIRequest(line, digest, live, writer, self)

    def scored(self, row: Row, count: int) -> tuple[TokenLogprobs, ...]:
        """The log-probabilities of a prompt's tokens from its second on."""
        prompt = Row(0, row.tokens[: row.prompt_length], row.params, row.seed)
        scores: PromptScores | None = None
        while scores is None or not scores.finished:
            scores = self._decoder.score_prompt(scores, prompt, count, PROMPT_BUDGET)
        return tuple(scores.values)


class AnotherModelError(SlipstreamError):
    """A batch has answers of another model than the loaded one."""


class BatchLines:
    """Answers the lines of one batch, as many at a time as fit into the engine's batch."""

    def __init__(self, service: Service, runner: BatchRunner, record: BatchRecord) -> None:
        self._service, self._store, self._reader, self._record = service, runner.store, runner.reader, record
        self._under_way = runner.under_way
        self._places = asyncio.Semaphore(service.decoder.config.max_batch_size)
        self._writing = asyncio.Lock()
        self._source = FileLines(self._store.content(record.input_file_id))

    async def run(self) -> bool:
        """Answer what is not answered yet; returns whether time ran out."""
        with await asyncio.to_thread(JobOutput, self._store.content(self._record.output)) as output:
            self._output = output
            self._check_answers()
            self._errors = ErrorFile(self._store.content(self._record.errors))
            self._record.completed, self._record.failed = len(output.answered), 0
            self._suspects = list[Line]()
            pending = (line for line in self._source if str(line.id) not in output.answered)
            expired = False
            failure: BaseException | None = None
            try:
                async with asyncio.TaskGroup() as tasks:
                    while not expired and (
                        lines := await asyncio.to_thread(lambda: list(islice(pending, LINES_AT_ONCE)))
                    ):
                        expired = await self._begin(lines, tasks)
                for line in self._suspects:  # each may have killed a server, so one at a time
                    expired = expired or self._is_expired
                    if expired:
                        break
                    if (prepared := await self._prepared(line)) is not None:
                        await self._answer(prepared)
            except* Exception as group:
                failure = group.exceptions[0]
            if failure is not None:
                raise failure
            return expired

    async def _begin(self, lines: list[Line], tasks: asyncio.TaskGroup) -> bool:
        """Begin lines as places become free, those with a common beginning together; returns whether time ran out."""
        waiting = deque[Prepared]()
        try:
            for line in lines:
                num_ends = self._under_way.num_ends(self._key(line))
                if num_ends >= MAX_ENDS:
                    await self._refuse(line, self._reader.digests.of(line), ApiError(500, FATAL))
                elif num_ends:
                    self._suspects.append(line)
                elif (prepared := await self._prepared(line)) is not None:
                    waiting.append(prepared)
            waiting = deque(ordered(waiting, first_row, self._service.decoder.shapes.reuse))
            while waiting:
                await self._places.acquire()
                if self._is_expired:
                    self._places.release()
                    return True
                tasks.create_task(self._answer_beside(waiting.popleft()))
            return False
        finally:
            for prepared in waiting:  # these never began
                self._service.release(prepared.live)

    @property
    def _is_expired(self) -> bool:
        return time.time() >= self._record.expires_at

    def _key(self, line: Line) -> LineKey:
        return self._record.id, line.number

    async def _answer_beside(self, prepared: Prepared) -> None:
        try:
            await self._answer(prepared)
        finally:
            self._places.release()

    def _check_answers(self) -> None:
        """Refuse to go on with a batch that another model began."""
        for answered in self._output.answered.values():
            if answered.fingerprint != self._reader.fingerprint:
                raise AnotherModelError(
                    f"begun by a model with fingerprint {answered.fingerprint}, loaded is {self._reader.fingerprint}"
                )

    async def _prepared(self, line: Line) -> Prepared | None:
        """A line with its prompts rendered; None for an invalid line, which goes to the error file."""
        service, record, digest = self._service, self._record, self._reader.digests.of(line)
        live: LiveRequest | None = None
        try:
            fields = read_fields(line)
            check_model(service.facts.name, fields.model)
            live = service.enter_background(record.endpoint, record.owner, digest, fields.cache_salt)
            with self._under_way.entered(self._key(line)):
                writer = await service.prepare(live, fields)
            service.count_unknown(fields)
            return Prepared(line, digest, live, writer)
        except BaseException as error:
            if live is not None:
                service.release(live)
            await self._refuse(line, digest, error)
            return None

    async def _answer(self, prepared: Prepared) -> None:
        """Answer one line; a failure goes to the error file."""
        try:
            with self._under_way.entered(self._key(prepared.line)):
                self._service.submit(prepared.live, prepared.live.jobs)
                answer = answer_line(prepared.line, prepared.digest, await prepared.writer.collect())
                await self._write(self._answered, answer)
        except Exception as error:
            await self._refuse(prepared.line, prepared.digest, error)
        finally:
            self._service.release(prepared.live)

    async def _refuse(self, line: Line, digest: str, error: BaseException) -> None:
        """Write to the error file why a line has no answer; re-raises an error that is not the line's fault."""
        is_our_fault = isinstance(error, SlipstreamError | OSError) and not isinstance(error, UsageError)
        if self._service.state != "ready" or is_our_fault or not isinstance(error, Exception):
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


class BatchRunner:
    """One task per unfinished batch, from the start of the server to its end. Used on the event loop alone."""

    def __init__(self, service: Service, store: BatchStore) -> None:
        self._service, self.store = service, store
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopped = False
        self.under_way = store.under_way

    def start(self) -> None:
        """Go on with every batch that is not finished; the models are loaded."""
        self.reader = LineReader(self._service.decoder, JobOptions())
        for record in self.store.batches.values():
            if record.is_unfinished:
                self.begin(record)

    def begin(self, record: BatchRecord) -> None:
        """Run a batch in a task of its own, unless the server is ending."""
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
        if self._stopped:
            return
        try:
            # after a restart the record may count fewer lines than the files have
            record.completed = _whole_lines(self.store.content(record.output))
            record.failed = _whole_lines(self.store.content(record.errors))
            self._publish(record)
            self.store.change(record, "cancelled")
        except OSError as error:
            log.warning("batch %s is cancelled when the server starts again: %s", record.id, first_line(error))

    def stop(self, *, orderly: bool) -> None:
        """End all tasks; the folder's next server goes on with the batches. orderly: no line caused the end."""
        self._stopped = True
        for task in self._tasks.values():
            task.cancel()
        try:
            self.under_way.close(orderly=orderly)
        except OSError as error:  # the next server suspects the lines under way, which costs a little time
            log.warning("the batch folder cannot be written: %s", first_line(error))

    def close(self) -> None:
        """Let another server use the folder."""
        self.store.close()

    async def _run(self, record: BatchRecord) -> None:
        """Take a batch from its current status to its end. While the disk is full, it waits."""
        try:
            while not await self._ended(record):
                await asyncio.sleep(FULL_DISK_SECONDS)
        except OSError as error:
            log.warning("batch %s goes on when the server starts again: %s", record.id, first_line(error))
        finally:
            self._tasks.pop(record.id, None)

    async def _ended(self, record: BatchRecord) -> bool:
        """Go on with a batch; returns whether there is nothing left to do, False if the disk is full."""
        try:
            if record.status == "cancelling":
                self._cancelled(record)
                return True
            if record.status == "validating":
                record.total, problems = await asyncio.to_thread(self._validated, record)
                if problems:
                    self._fail(record, problems)
                else:
                    self.store.change(record, "in_progress")
            if record.status == "in_progress":
                expired = await BatchLines(self._service, self, record).run()
                if not expired:
                    self.store.change(record, "finalizing")
            if record.status in ("in_progress", "finalizing"):
                self._publish(record)
                self.store.change(record, "completed" if record.status == "finalizing" else "expired")
        except (SlipstreamError, OSError) as error:
            if _is_full(error):
                log.warning("batch %s waits until the disk of the batch folder has room", record.id)
                return False
            log.error("batch %s failed: %s", record.id, first_line(error))
            self._fail(record, [_problem("batch_failed", _reason(error), None)])
        except ApiError as error:  # the server ends
            log.info("batch %s goes on when the server does: %s", record.id, error.message)
        except Exception as error:
            if not self._stopped:  # else the shutdown may have caused it, and the next server tries again
                self._fail(record, [_problem("batch_failed", as_api_error(error).message, None)])
        return True

    def _validated(self, record: BatchRecord) -> tuple[int, list[dict[str, object]]]:
        """The number of lines, and the problems of the invalid ones; called in a thread."""
        problems, line_numbers, total = [], dict[str, int](), 0
        for line in FileLines(self.store.content(record.input_file_id)):
            total += 1
            try:
                if line.error:
                    raise UsageError(line.error)
                has_id = "custom_id" in line.item
                if line.item.get("url") != record.endpoint:
                    more = "" if has_id else ", and a custom_id"
                    near = did_you_mean(str(line.item.get("url")), record.endpoint)
                    raise UsageError(f"url={line.item.get('url')!r:.80}; allowed: {record.endpoint!r}{more}{near}")
                if not has_id:
                    raise UsageError("custom_id is missing; allowed: one for each line")
                key = str(line.id)
                if key in line_numbers:
                    raise UsageError(
                        f"custom_id {key!r:.80} is that of line {line_numbers[key]}; allowed: one for each line"
                    )
                line_numbers[key] = line.number
            except UsageError as error:
                problems.append(_problem("invalid_line", first_line(error), line.number))
        if not total:
            problems.append(_problem("empty_file", "the file has no lines; allowed: at least one", None))
        return total, problems[:MAX_PROBLEMS]

    def _fail(self, record: BatchRecord, problems: list[dict[str, object]]) -> None:
        record.problems = problems
        self.store.change(record, "failed")

    def _publish(self, record: BatchRecord) -> None:
        """Make the files of an ended batch known to its owner."""
        for id, count, name in ((record.output, record.completed, "output"), (record.errors, record.failed, "errors")):
            if count and self.store.content(id).exists():
                self.store.register(id, record.owner, f"{record.id}_{name}.jsonl", "batch_output")


def _is_full(error: BaseException | None) -> bool:
    """Whether a full disk caused the error."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or (error is not None and _is_full(error.__cause__))


def _reason(error: Exception) -> str:
    """Why a batch failed, in words for its owner: only the log names files of this machine."""
    if isinstance(error, AnotherModelError):
        return first_line(error)
    fault = error if isinstance(error, OSError) else error.__cause__
    return folder_fault(fault) if isinstance(fault, OSError) else INTERNAL


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
