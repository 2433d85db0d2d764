"""Slipstream's own endpoints: the engine's state, and a replay of a request without drafting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from time import monotonic
from typing import Annotated, Any, cast

from fastapi import APIRouter, Request, Response
from pydantic import Field, ValidationError
from starlette.responses import StreamingResponse

from slipstream.apps.server.answer_state import without_folders
from slipstream.apps.server.answers import HEADERS, encoded, event
from slipstream.apps.server.error_objects import refused, validation_error
from slipstream.apps.server.openai_routes import service_of, until_gone
from slipstream.apps.server.schemas import (
    ChatFields,
    CompletionFields,
    Fields,
    NumberRange,
    ReplayResult,
    TokenId,
    answers,
)
from slipstream.apps.server.service import Service
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
async def state(http: Request) -> dict[str, Any]:
    """Rows in progress, speed, acceptance, where the time goes, the queue, and the models."""
    return engine_state(service_of(http))


@router.get("/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
async def events(http: Request) -> Response:
    """The state, once per second, as server-sent events."""
    service = service_of(http)
    service.check_ready()

    async def states() -> AsyncIterator[bytes]:
        while service.state == "ready":
            yield event(encoded(engine_state(service)))
            await asyncio.sleep(INTERVAL_SECONDS)

    return StreamingResponse(states(), media_type="text/event-stream", headers=HEADERS)


def engine_state(service: Service) -> dict[str, Any]:
    """The report of `/state` and `/events`."""
    service.check_ready()
    decoder = service.decoder
    max_rows = decoder.config.max_batch_size
    return service.engine_status.state(service.totals.fold()) | {
        "waiting": service.num_waiting,
        "queue": {"waiting": service.num_waiting, "most": service.settings.max_queued_requests},
        "places": {"taken": service.engine_status.num_running, "most": max_rows},
        "model": service.facts.name,
        "draft": None if decoder.draft is None else without_folders(decoder.draft.name),
        "drafter": without_folders(decoder.drafter_name),
        "fingerprint": service.facts.fingerprint,
        "reproducible": service.facts.reproducible,
        "max_model_len": service.rows.max_model_len,
        "version": __version__,
    }


@router.post("/replay", response_model=None, responses=answers(ReplayResult))
async def replay(http: Request, fields: ReplayFields) -> dict[str, Any]:
    """Run a request again without drafting, and compare token ids."""
    service = service_of(http)
    service.check_ready()
    again = _plain(fields)
    service.check_model(again)
    service.count_ignored(fields)
    live = service.enter(http.scope["path"], cast(str, http.state.owner), again.cache_salt, http.state.caller)
    try:
        writer = await until_gone(http, service.prepare(live, again))
        if len(live.jobs) != 1:
            raise refused(f"request: {len(live.jobs)} outputs; allowed: one", "request")
        service.submit(live, live.jobs)
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
    try:
        again = kind.model_validate(fields.request | changed)
    except ValidationError as error:
        raise validation_error(error.errors()) from None
    if again.seed in (None, -1) and again.temperature != 0:
        raise refused("seed: a sampled request without one cannot be repeated; send the receipt's", "seed")
    return again
