"""The page at `/` and its files, which come with the package.

An installation without them (some packagers leave out what is not Python) says so, and lists the endpoints.
"""

from __future__ import annotations

import hashlib
from importlib import resources

from fastapi import APIRouter, Request, Response

from slipstream.apps.server.error_objects import ApiError

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
    "svg": "image/svg+xml",
}
LIST = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Slipstream</title>
<h1>Slipstream</h1>
<p>The files of the page are missing from this installation. The server answers OpenAI's API; its endpoints:</p>
<ul>
%s
</ul>
</html>
"""


@router.get("/", include_in_schema=False)
async def index(http: Request) -> Response:
    """The page, or the list of endpoints."""
    page = _file("index.html")
    if page is None:
        paths = sorted({path for path in http.app.openapi()["paths"]})
        page = (LIST % "\n".join(f"<li><code>{path}</code></li>" for path in paths)).encode()
    return _answer(http, page, "html")


@router.get("/page/{name}", include_in_schema=False)
async def page_file(http: Request, name: str) -> Response:
    """A file of the page."""
    content = _file(name)
    if content is None:
        raise ApiError(404, f"/page/{name!r:.80}: there is no such file")
    return _answer(http, content, name.rpartition(".")[2])


def _file(name: str) -> bytes | None:
    """A file of the package's page folder; None if the folder has none of this name."""
    folder = resources.files("slipstream.apps.server") / "page"
    if not folder.is_dir():
        return None
    return next((file.read_bytes() for file in folder.iterdir() if file.name == name and _kind(name)), None)


def _kind(name: str) -> str | None:
    return KINDS.get(name.rpartition(".")[2])


def _answer(http: Request, content: bytes, kind: str) -> Response:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {
        "etag": tag,
        "cache-control": "no-cache",
        "content-security-policy": POLICY,
        "referrer-policy": "no-referrer",
    }
    if tag in http.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=KINDS[kind], headers=headers)
