"""The web application: its routes, its protection and its errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware

from slipstream.apps.server import batch_routes, engine_routes, openai_routes, page_routes
from slipstream.apps.server.access import Access, ApiKeys, Scope
from slipstream.apps.server.batch_runner import BatchRunner
from slipstream.apps.server.batch_store import BatchStore
from slipstream.apps.server.error_objects import add_handlers
from slipstream.apps.server.openai_routes import answer, service_of
from slipstream.apps.server.schemas import REFUSALS, ChatCompletion, ChatFields, Completion, CompletionFields, streamed
from slipstream.apps.server.server_settings import ServerSettings
from slipstream.apps.server.service import Service
from slipstream.decoder import SpeculativeDecoder
from slipstream.version import __version__

METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
ROUTES = (openai_routes, engine_routes, page_routes, batch_routes)
Load = Callable[[], SpeculativeDecoder]


def make_app(settings: ServerSettings, load: Load, make_service: Callable[[], Service]) -> FastAPI:
    """The application. load: makes the decoder, in the engine's thread; make_service: called on the event loop.

    UsageError for files of keys and folders of batches that cannot be used.
    """
    keys, folder = ApiKeys.read(settings.api_key_file), settings.batch_folder
    store = BatchStore(Path(folder).expanduser(), settings.max_stored_bytes) if folder else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = app.state.service = make_service()
        batches = app.state.batches = None if store is None else BatchRunner(service, store)
        service.background = batches
        service.start(load)
        yield
        service.close()

    app = FastAPI(
        title="Slipstream",
        version=__version__,
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
        responses=REFUSALS,
    )
    add_handlers(app)

    @app.post("/v1/chat/completions", responses=streamed(ChatCompletion, "chat.completion.chunk"))
    async def chat_completions(http: Request, fields: ChatFields) -> Response:
        """Answer a conversation, whole or as a stream."""
        return await answer(service_of(http), http, fields)

    @app.post("/v1/completions", responses=streamed(Completion, "text_completion"))
    async def completions(http: Request, fields: CompletionFields) -> Response:
        """Continue texts, whole or as a stream."""
        return await answer(service_of(http), http, fields)

    for routes in ROUTES:  # after those above, which are called most: addresses are tried in turn
        app.include_router(routes.router)
    app.state.addresses = [*app.routes, *(route for routes in ROUTES for route in routes.router.routes)]
    if settings.allowed_origin:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.allowed_origin), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Access, keys=keys, settings=settings, count=_count)
    return app


def _count(scope: Scope, status: int) -> None:
    """Count an answer by its declared address; one refused before routing has none."""
    service: Service = scope["app"].state.service
    route = scope.get("route")
    method = scope["method"] if scope["method"] in METHODS else "other"  # clients may make up their own
    service.metrics.answered("" if route is None else route.path, method, status)
