"""OpenAI's endpoints, from a request to its answer; and endpoints for models, tokens, health, version and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from slipstream.apps.server.access import CLIENT_LEFT
from slipstream.apps.server.error_objects import ApiError, refused
from slipstream.apps.server.live_request import GONE
from slipstream.apps.server.request_reading import check_extra, check_plain, encoder, rendered_messages
from slipstream.apps.server.request_rows import MakeWriter
from slipstream.apps.server.schemas import (
    MAX_TOKENS,
    ChatCompletion,
    ChatFields,
    Completion,
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
    streamed,
)
from slipstream.apps.server.served_models import ServedModels
from slipstream.apps.server.service import Service
from slipstream.apps.server.streaming import AnswerStream, until_disconnected
from slipstream.tokenization.tokenizer import Tokenizer, check_text
from slipstream.version import __version__

T = TypeVar("T")
STARTED = int(time.time())
HEALTH: dict[int | str, dict[str, Any]] = {200: {"model": Status}, 503: {"model": Status}}


async def answer(
    http: Request,
    fields: ChatFields | CompletionFields,
    original: Fields | None = None,
    make_writer: MakeWriter | None = None,
) -> Response:
    """Answer a chat or completions request.

    original: the request in another API's form; make_writer: writes the answer in that form.
    """
    models = models_of(http)
    service = models.choose(fields)
    if fields.stream_options is not None and not fields.stream:
        raise refused("stream_options needs stream=true", "stream_options")
    live = http.state.live = service.enter(http.state.owner, fields.cache_salt, http.state.caller)
    streaming = False
    try:
        writer = await until_gone(http, models.prepare(service, live, fields, make_writer))
        service.count_ignored(fields, original)
        service.submit(live)
        if fields.stream:
            streaming = True
            return AnswerStream(live, writer, lambda: service.release(live))
        whole_answer = await until_gone(http, writer.collect())
        return JSONResponse(whole_answer, headers=writer.headers)
    finally:
        if not streaming:
            service.release(live)


def served_window(http: Request, model: str | None) -> int:
    """The most tokens of a prompt and its answer; a model that has not been loaded may turn out to have many."""
    service = models_of(http).answering(model)
    return MAX_TOKENS if service.known_facts is None else service.limits.window


async def until_gone(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, which is cancelled if the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_disconnected(http.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_LEFT, GONE)
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()


router = APIRouter()


# first, as addresses are tried in order, and these are called most
@router.post("/v1/chat/completions", responses=streamed(ChatCompletion, "chat.completion.chunk"))
async def chat_completions(http: Request, fields: ChatFields) -> Response:
    """Answer a conversation, whole or as a stream."""
    return await answer(http, fields)


@router.post("/v1/completions", responses=streamed(Completion, "text_completion"))
async def completions(http: Request, fields: CompletionFields) -> Response:
    """Continue texts, whole or as a stream."""
    return await answer(http, fields)


def models_of(http: Request) -> ServedModels:
    """The models that the application serves."""
    served: ServedModels = http.app.state.models
    return served


@router.get("/v1/models", response_model=None)
@router.get("/v1/models/", include_in_schema=False)
async def models(http: Request) -> dict[str, Any]:
    """The models that are served."""
    served = models_of(http)
    served.check_ready()
    return {"object": "list", "data": [_card(service, name) for service in served.services for name in service.names]}


@router.get("/v1/models/{name:path}", response_model=None)
async def model(http: Request, name: str) -> dict[str, Any]:
    """A model that is served, by its name."""
    served = models_of(http)
    served.check_ready()
    name = name if name in served.names else name.removesuffix("/")
    return _card(served.named(name), name)


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": STARTED,
        "owned_by": "slipstream",
        "max_model_len": None if service.known_facts is None else service.limits.window,
        "system_fingerprint": service.known_facts and service.known_facts.fingerprint,
        "status": {"value": service.state},
    }


@router.post("/tokenize", response_model=None, responses=answers(Tokenized))
@router.post("/v1/tokenize", include_in_schema=False)
async def tokenize(http: Request, fields: TokenizeFields) -> dict[str, Any]:
    """Token ids of a string, or of messages in the model's chat format."""
    served = models_of(http)
    service = served.choose(fields)
    check_extra(fields, strict=service.settings.strict)
    if (fields.prompt is None) == (fields.messages is None):
        what = "prompt and messages are missing" if fields.prompt is None else "prompt with messages"
        raise refused(f"{what}; allowed: one of them", "prompt")
    for name in ConversationFields.model_fields if fields.messages is None else ():
        if getattr(fields, name) is not None:
            raise refused(f"{name} with prompt; allowed: with messages", name)

    async with served.using(service):
        reading = service.loaded.rows.reading

        def work(tokenizer: Tokenizer | None) -> list[int]:
            if tokenizer is None:
                raise refused("this model has no tokenizer", "prompt")
            if fields.messages is not None:
                return rendered_messages(fields, tokenizer, reading).ids
            check_text("prompt", fields.prompt or "")
            if reading.plain_texts:
                check_plain([("prompt", fields.prompt or "")], tokenizer)
            return encoder(fields, tokenizer)(fields.prompt or "")

        tokens = await until_gone(http, service.loaded.text_pool.run(work, http.state.caller))
        service.count_ignored(fields)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.limits.window}


@router.post("/detokenize", response_model=None, responses=answers(Detokenized))
@router.post("/v1/detokenize", include_in_schema=False)
async def detokenize(http: Request, fields: DetokenizeFields) -> dict[str, str]:
    """The text of token ids."""
    served = models_of(http)
    async with served.using(served.choose(fields)) as service:
        service.count_ignored(fields)
        size = service.loaded.decoder.target.backend.vocab_size
        for token in fields.tokens:
            if token >= size:
                raise refused(f"tokens: token id {token}; allowed: 0 to {size - 1}", "tokens")

        def work(tokenizer: Tokenizer | None) -> str:
            if tokenizer is None:
                raise refused("this model has no tokenizer", "tokens")
            return tokenizer.decode(fields.tokens)

        return {"prompt": await until_gone(http, service.loaded.text_pool.run(work, http.state.caller))}


@router.get("/tokenizer_info", response_model=None, responses=answers(TokenizerInfo))
async def tokenizer_info(http: Request, model: str | None = None) -> dict[str, Any]:
    """The tokenizer's facts for clients that count tokens; the chat template is not revealed."""
    served = models_of(http)
    async with served.using(served.answering(model)) as service:
        decoder = service.loaded.decoder
        ends = decoder.target.end_ids
        names = {} if decoder.tokenizer is None else {i: name for name, i in decoder.tokenizer.vocabulary().items()}
        return {
            "eos_token": names.get(ends[0]) if ends else None,
            "eos_token_id": ends[0] if ends else None,
            "bos_token": None,
            "vocab_size": decoder.target.backend.vocab_size,
            "model_max_length": service.limits.window,
            "has_chat_template": decoder.tokenizer is not None and decoder.tokenizer.has_chat_template,
        }


@router.get("/health", responses=HEALTH)
@router.get("/ping", include_in_schema=False)
async def health(http: Request) -> JSONResponse:
    """Readiness: 503 while loading, stalled or shutting down, and after the engine has ended."""
    served = models_of(http)
    status = "stalled" if served.is_stalled else served.state
    return JSONResponse({"status": status}, 200 if served.is_healthy else 503)


@router.get("/live", responses=HEALTH)
async def live(http: Request) -> JSONResponse:
    """Liveness: 503 once the engine has ended."""
    state = models_of(http).state
    return JSONResponse({"status": state}, 503 if state == "ended" else 200)


@router.get("/version", response_model=None, responses=answers(Version))
async def version() -> dict[str, str]:
    """The running version of Slipstream."""
    return {"version": __version__}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(http: Request) -> Response:
    """The counters and times of all models in Prometheus' text format."""
    served = models_of(http)
    served.check_ready()
    return Response(served.metrics_page(), media_type=CONTENT_TYPE_LATEST)
