"""OpenAI's endpoints, from a request to its answer; and endpoints for models, tokens, health, version and metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from slipstream.apps.server.access import key_name
from slipstream.apps.server.error_objects import MESSAGES, ApiError, as_api_error, refused
from slipstream.apps.server.live_request import LiveRequest
from slipstream.apps.server.request_reading import check_extra, check_plain, encoder, rendered_messages
from slipstream.apps.server.request_rows import MakeWriter, check_model
from slipstream.apps.server.schemas import (
    ChatFields,
    CompletionFields,
    ConversationFields,
    Detokenized,
    DetokenizeFields,
    Fields,
    Status,
    Tokenized,
    TokenizeFields,
    TokenizerInfo,
    Version,
    answers,
)
from slipstream.apps.server.service import Service
from slipstream.apps.server.streaming import AnswerStream, until_disconnected
from slipstream.tokenization.tokenizer import Tokenizer, check_text
from slipstream.version import __version__

T = TypeVar("T")
STARTED = int(time.time())
HEALTH: dict[int | str, dict[str, Any]] = {200: {"model": Status}, 503: {"model": Status}}
log = logging.getLogger("slipstream.server")


async def answer(
    service: Service,
    http: Request,
    fields: ChatFields | CompletionFields,
    asked: Fields | None = None,
    make_writer: MakeWriter | None = None,
    refuse: Callable[[LiveRequest, ApiError], Response | None] = lambda live, error: None,
) -> Response:
    """Answer a chat or completions request.

    asked: the request in another API's form; make_writer: writes the answer in that form. refuse: makes the response to
    a refusal; None for the usual one.
    """
    service.check_ready()
    service.check_model(fields)
    if fields.stream_options is not None and not fields.stream:
        raise refused("stream_options without stream=true; allowed: together with it", "stream_options")
    owner: str = http.state.owner
    live = service.enter(http.scope["path"], owner, fields.cache_salt, http.state.caller)
    streaming = False
    try:
        writer = await until_gone(http, service.prepare(live, fields, make_writer))
        service.count_ignored(fields, asked)
        service.submit(live, [choice.job for choice in writer.choices])
        if fields.stream:
            streaming = True
            return AnswerStream(live, writer, lambda: _over(service, live, 200))
        whole_answer = await until_gone(http, writer.collect())
        _over(service, live, 200)
        return JSONResponse(whole_answer, headers=writer.headers)
    except Exception as error:
        refusal = as_api_error(error)
        log_answer(live, refusal.status, refusal.message)
        if (response := refuse(live, refusal)) is not None:
            return response
        return refusal.response(live.endpoint, f"req_{live.id}" if live.endpoint.startswith(MESSAGES) else "")
    finally:
        if not streaming:
            service.release(live)


def _over(service: Service, live: LiveRequest, status: int) -> None:
    log_answer(live, status)
    service.release(live)


def log_answer(live: LiveRequest, status: int, reason: str = "") -> None:
    """Log one line per request: numbers, the key's name and any failure, but no prompts or answers."""
    rows = [job.row for job in live.jobs]
    log.info(
        "request id=%s endpoint=%s status=%d key=%s rows=%d prompt_tokens=%d tokens=%d seconds=%.3f%s",
        live.id,
        live.endpoint,
        status,
        key_name(live.owner),
        len(rows),
        sum(row.prompt_length for row in rows),
        sum(row.num_output_tokens for row in rows),
        time.monotonic() - live.arrived,
        f" reason={json.dumps(reason)}" if reason else "",
    )


async def until_gone(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, which is cancelled if the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_disconnected(http.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has left")
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()


router = APIRouter()


def service_of(http: Request) -> Service:
    """The service of an app."""
    service: Service = http.app.state.service
    return service


@router.get("/v1/models", response_model=None)
@router.get("/v1/models/", include_in_schema=False)
async def models(http: Request) -> dict[str, Any]:
    """The one model that is served."""
    service = service_of(http)
    service.check_ready()
    return {"object": "list", "data": [_card(service, name) for name in service.names]}


@router.get("/v1/models/{name:path}", response_model=None)
async def model(http: Request, name: str) -> dict[str, Any]:
    """The model that is served, by its name."""
    service = service_of(http)
    service.check_ready()
    name = name if name in service.names else name.removesuffix("/")
    check_model(service.names, name)
    return _card(service, name)


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": STARTED,
        "owned_by": "slipstream",
        "max_model_len": service.rows.max_model_len,
        "system_fingerprint": service.facts.fingerprint,
    }


@router.post("/tokenize", response_model=None, responses=answers(Tokenized))
@router.post("/v1/tokenize", include_in_schema=False)
async def tokenize(http: Request, fields: TokenizeFields) -> dict[str, Any]:
    """Token ids of a string, or of messages in the model's chat format."""
    service = service_of(http)
    service.check_ready()
    service.check_model(fields)
    check_extra(fields, strict=service.settings.strict)
    if (fields.prompt is None) == (fields.messages is None):
        what = "prompt and messages are missing" if fields.prompt is None else "prompt with messages"
        raise refused(f"{what}; allowed: one of them", "prompt")
    for name in ConversationFields.model_fields if fields.messages is None else ():
        if getattr(fields, name) is not None:
            raise refused(f"{name} with prompt; allowed: with messages", name)

    reading = service.rows.reading

    def work(tokenizer: Tokenizer | None) -> list[int]:
        if tokenizer is None:
            raise refused("this model has no tokenizer", "prompt")
        if fields.messages is not None:
            return rendered_messages(fields, tokenizer, reading)[1]
        check_text("prompt", fields.prompt or "")
        if reading.plain_texts:
            check_plain([("prompt", fields.prompt or "")], tokenizer)
        return encoder(fields, tokenizer)(fields.prompt or "")

    tokens = await until_gone(http, service.text_pool.run(work, http.state.caller))
    service.count_ignored(fields)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": service.rows.max_model_len}


@router.post("/detokenize", response_model=None, responses=answers(Detokenized))
@router.post("/v1/detokenize", include_in_schema=False)
async def detokenize(http: Request, fields: DetokenizeFields) -> dict[str, str]:
    """The text of token ids."""
    service = service_of(http)
    service.check_ready()
    service.check_model(fields)
    service.count_ignored(fields)
    size = service.decoder.target.backend.vocab_size
    for token in fields.tokens:
        if token >= size:
            raise refused(f"tokens: token id {token}; allowed: 0 to {size - 1}", "tokens")

    def work(tokenizer: Tokenizer | None) -> str:
        if tokenizer is None:
            raise refused("this model has no tokenizer", "tokens")
        return tokenizer.decode(fields.tokens)

    return {"prompt": await until_gone(http, service.text_pool.run(work, http.state.caller))}


@router.get("/tokenizer_info", response_model=None, responses=answers(TokenizerInfo))
async def tokenizer_info(http: Request) -> dict[str, Any]:
    """The tokenizer's facts for clients that count tokens; the chat template is not revealed."""
    service = service_of(http)
    service.check_ready()
    decoder = service.decoder
    ends = decoder.target.end_ids
    names = {} if decoder.tokenizer is None else {i: name for name, i in decoder.tokenizer.vocabulary().items()}
    return {
        "eos_token": names.get(ends[0]) if ends else None,
        "eos_token_id": ends[0] if ends else None,
        "bos_token": None,
        "vocab_size": decoder.target.backend.vocab_size,
        "model_max_length": service.rows.max_model_len,
        "has_chat_template": decoder.tokenizer is not None and decoder.tokenizer.has_chat_template,
    }


@router.get("/health", responses=HEALTH)
@router.get("/ping", include_in_schema=False)
async def health(http: Request) -> JSONResponse:
    """Readiness: 503 while loading, stalled or shutting down, and after the engine has ended."""
    service = service_of(http)
    status = "stalled" if service.is_stalled else service.state
    ready = status == "ready" and service.engine is not None and service.engine.is_alive
    return JSONResponse({"status": status}, 200 if ready else 503)


@router.get("/live", responses=HEALTH)
async def live(http: Request) -> JSONResponse:
    """Liveness: 503 once the engine has ended."""
    state = service_of(http).state
    return JSONResponse({"status": state}, 503 if state == "ended" else 200)


@router.get("/version", response_model=None, responses=answers(Version))
async def version() -> dict[str, str]:
    """The running version of Slipstream."""
    return {"version": __version__}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(http: Request) -> Response:
    """Metrics for Prometheus."""
    service = service_of(http)
    service.check_ready()
    running, max_rows = service.engine_status.num_running, service.decoder.config.max_batch_size
    gauges = {
        "vllm:num_requests_running": running,
        "vllm:num_requests_waiting": service.num_waiting,
        "vllm:kv_cache_usage_perc": running / max_rows,
    }
    return Response(service.metrics.page(service.totals.fold(), gauges), media_type=CONTENT_TYPE_LATEST)
