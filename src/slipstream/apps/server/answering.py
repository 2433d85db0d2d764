"""From a request to its answer: admitted, rendered, queued, then written whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from slipstream.apps.server.answer_forms import compiles_slowly
from slipstream.apps.server.answer_making import check_model, writer_of
from slipstream.apps.server.answer_stream import AnswerStream
from slipstream.apps.server.answer_writer import AnswerWriter
from slipstream.apps.server.error_objects import ApiError, as_api_error, refused
from slipstream.apps.server.live_request import LiveRequest
from slipstream.apps.server.prompt_rendering import name_unknown
from slipstream.apps.server.request_fields import ChatFields, CompletionFields, Fields
from slipstream.apps.server.service import Service

log = logging.getLogger("slipstream.server")
T = TypeVar("T")


async def answer(service: Service, http: Request, fields: ChatFields | CompletionFields) -> Response:
    """Answer a chat or completions request."""
    service.check_ready()
    check_model(service.facts.name, fields.model)
    if fields.stream_options is not None and not fields.stream:
        raise refused("stream_options without stream=true; allowed: together with it", "stream_options")
    owner: str = http.state.owner
    live = service.enter(http.scope["path"], owner, fields.cache_salt, http.state.caller)
    streaming = False
    try:
        writer = await until_gone(http, prepare(service, live, fields))
        count_unknown(service, fields)
        service.submit(live, [choice.job for choice in writer.choices])
        if fields.stream:
            streaming = True
            return AnswerStream(live, writer, lambda: _over(service, live, 200))
        whole = await until_gone(http, collect(live, writer))
        _over(service, live, 200)
        return JSONResponse(whole)
    except Exception as error:
        told = as_api_error(error)
        log_answer(live, told.status)
        raise told from error
    finally:
        if not streaming:
            service.release(live)


def count_unknown(service: Service, fields: Fields) -> None:
    """Name each field without effect once in the log, and count them all."""
    for _ in range(name_unknown(fields, service.facts.tokenizer, service.unknown_fields)):
        service.metrics.add("slipstream:unknown_fields")


async def prepare(service: Service, live: LiveRequest, fields: ChatFields | CompletionFields) -> AnswerWriter:
    """Render the prompts and make the rows, in the text pool; nothing is queued yet."""
    pool = service.compiling_pool if compiles_slowly(fields) else service.pool
    work = pool.run(lambda tokenizer: writer_of(service.rows, service.facts, live, fields, tokenizer), live.caller)
    return await live.before_failing(work)


async def collect(live: LiveRequest, writer: AnswerWriter) -> dict[str, Any]:
    """The whole answer, once it is there."""
    await live.tell_all_to(writer.note)
    return writer.whole()


def _over(service: Service, live: LiveRequest, status: int) -> None:
    log_answer(live, status)
    service.release(live)


def log_answer(live: LiveRequest, status: int) -> None:
    """One line per request: numbers alone, no texts."""
    rows = [job.row for job in live.jobs]
    log.info(
        "request id=%s endpoint=%s status=%d rows=%d prompt_tokens=%d tokens=%d seconds=%.3f",
        live.id,
        live.endpoint,
        status,
        len(rows),
        sum(row.prompt_length for row in rows),
        sum(row.num_output_tokens for row in rows),
        time.monotonic() - live.arrived,
    )


async def until_gone(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is given up if the client leaves."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has left")
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
