"""Slipstream's own endpoints: the engine's state, and a replay of a request without drafting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from time import monotonic
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.responses import StreamingResponse

from slipstream.apps.server.answer_state import public_name
from slipstream.apps.server.answers import HEADERS, encoded, event
from slipstream.apps.server.error_objects import refused, validated
from slipstream.apps.server.openai_routes import models_of, until_gone
from slipstream.apps.server.schemas import (
    ChatFields,
    CompletionFields,
    Fields,
    NumberRange,
    ReplayResult,
    TokenId,
    answers,
)
from slipstream.apps.server.served_models import ServedModels
from slipstream.certificate.parity import first_difference
from slipstream.version import __version__

router = APIRouter(prefix="/v1/slipstream")
INTERVAL_SECONDS = 1.0  # between two states of a stream


class ReplayFields(Fields):
    """Body of `POST /v1/slipstream/replay`."""

    request: dict[str, Any]  # the body that was sent
    token_ids: Annotated[list[TokenId], Field(max_length=1 << 20, fail_fast=True)]  # of the answer
    seed: Annotated[int, NumberRange(0, (1 << 63) - 1)] | None = None  # from the receipt


@router.get("/state")
async def state(http: Request, model: str | None = None) -> dict[str, Any]:
    """Rows in progress, speed, acceptance, where the time goes, the queue, and the models."""
    return engine_state(models_of(http), model)


@router.get("/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
async def events(http: Request, model: str | None = None) -> Response:
    """The state, once per second, as server-sent events."""
    served = models_of(http)
    served.answering(model)

    async def states() -> AsyncIterator[bytes]:
        while served.state == "ready":
            yield event(encoded(engine_state(served, model)))
            await asyncio.sleep(INTERVAL_SECONDS)

    return StreamingResponse(states(), media_type="text/event-stream", headers=HEADERS)


def engine_state(served: ServedModels, model: str | None) -> dict[str, Any]:
    """The report of `/state` and `/events` on a model, the first one by default."""
    service = served.answering(model)
    decoder = service.loaded.decoder if service.state == "loaded" else None
    facts = service.known_facts
    return service.engine_status.state(service.totals.fold()) | {
        "waiting": service.num_waiting,
        "queue": {"waiting": service.num_waiting, "most": service.settings.max_queued_requests},
        "places": {"taken": service.engine_status.num_running, "most": decoder and decoder.config.max_batch_size},
        "model": service.names[0],
        "models": {other.names[0]: other.state for other in served.services},
        "draft": public_name(decoder.draft.name) if decoder and decoder.draft else None,
        "drafter": decoder and public_name(decoder.drafter_name),
        "fingerprint": facts and facts.fingerprint,
        "reproducible": facts and facts.reproducible,
        "max_model_len": facts and service.limits.window,
        "version": __version__,
    }


@router.post("/replay", response_model=None, responses=answers(ReplayResult))
async def replay(http: Request, fields: ReplayFields) -> dict[str, Any]:
    """Run a request again without drafting, and compare token ids."""
    served = models_of(http)
    served.check_ready()
    request = _plain(fields)
    service = served.choose(request)
    live = http.state.live = service.enter(http.state.owner, request.cache_salt, http.state.caller)
    try:
        writer = await until_gone(http, served.prepare(service, live, request))
        service.count_ignored(fields)
        if len(live.jobs) != 1:
            raise refused(f"request: {len(live.jobs)} outputs; allowed: one", "request")
        service.submit(live)
        begun = monotonic()
        await until_gone(http, writer.collect())
        seconds = monotonic() - begun
    finally:
        service.release(live)
    difference = first_difference(writer.choices[0].token_ids, fields.token_ids)
    service.metrics.add("slipstream:replays", label="identical" if difference is None else "different")
    return {"identical": difference is None, "first_difference": difference, "seconds": seconds}


def _plain(fields: ReplayFields) -> ChatFields | CompletionFields:
    """The request without drafting and streaming, with the seed of its first run."""
    kind: type[ChatFields | CompletionFields] = ChatFields if "messages" in fields.request else CompletionFields
    changed: dict[str, Any] = {"num_draft_tokens": 0, "stream": False, "prediction": None}  # predictions are drafts
    if fields.seed is not None:
        changed["seed"] = fields.seed
    request = validated(kind, fields.request | changed)
    if request.seed in (None, -1) and request.temperature != 0:
        raise refused("seed: a sampled request without one cannot be repeated; send the receipt's", "seed")
    return request
