"""The web application: its routes, its protection and its errors, and the page at `/` with its files."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import resources

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Scope

from slipstream.apps.server import engine_routes, messages_api, ollama_api, openai_routes, responses_api
from slipstream.apps.server.access import Access, KeyFile
from slipstream.apps.server.error_objects import ApiError, add_handlers
from slipstream.apps.server.responses_api import ResponseStore
from slipstream.apps.server.schemas import ErrorBody, refusals
from slipstream.apps.server.served_models import ServedModels
from slipstream.apps.server.server_settings import ServerSettings
from slipstream.version import __version__

router = APIRouter()
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # no text becomes markup or code, whatever the page's own script does
        "trusted-types 'none'",
    )
)
KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
}
PAGE = resources.files("slipstream.apps.server") / "page"  # the folder of the page's files


@router.get("/", include_in_schema=False)
async def index(http: Request) -> Response:
    """The page for chatting and for watching the engine."""
    return await page_file(http, "index.html")


@router.get("/page/{name}", include_in_schema=False)
async def page_file(http: Request, name: str) -> Response:
    """A file of the page."""
    if name.rpartition(".")[2] not in KINDS or name not in {file.name for file in PAGE.iterdir()}:
        raise ApiError(404, f"/page/{name!r:.80}: there is no such file")
    content = (PAGE / name).read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {
        "etag": tag,
        "cache-control": "no-cache",
        "content-security-policy": POLICY,
        "referrer-policy": "no-referrer",
    }
    if tag in http.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=KINDS[name.rpartition(".")[2]], headers=headers)


METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
APIS = (openai_routes, messages_api, responses_api, ollama_api, engine_routes)
ROUTERS = (*(api.router for api in APIS), router)


def make_app(settings: ServerSettings, make_models: Callable[[], ServedModels]) -> FastAPI:
    """The application. make_models: called on the event loop.

    UsageError if the key file cannot be used.
    """
    keys = KeyFile(settings.api_key_file)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        models = app.state.models = make_models()
        models.start()
        yield
        models.close()

    app = FastAPI(
        title="Slipstream",
        version=__version__,
        docs_url=None,  # FastAPI's pages load scripts from other sites
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
        responses=refusals(ErrorBody),
    )
    app.state.responses, app.state.keys = ResponseStore(), keys
    add_handlers(app)

    for routes in ROUTERS:
        app.include_router(routes)
    app.state.addresses = [*app.routes, *(route for routes in ROUTERS for route in routes.routes)]
    if settings.allowed_origin:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.allowed_origin), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Access, keys=keys, settings=settings, count=_count)
    return app


def _count(scope: Scope, status: int) -> None:
    """Count an answer by its declared path; a request refused before routing has none."""
    models: ServedModels = scope["app"].state.models
    route = scope.get("route")
    method = scope["method"] if scope["method"] in METHODS else "other"  # clients may make up their own
    models.metrics.answered("" if route is None else route.path, method, status)
