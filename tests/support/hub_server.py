"""A stand-in for the Hugging Face Hub: lists repositories, redirects to files elsewhere, and fails as it is told."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

LISTING = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")
FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class HubServer:
    """The repositories, how the server fails, and what it was asked."""

    repositories: dict[str, Mapping[str, bytes]]
    tokens: dict[str, str] = field(default_factory=dict)  # of gated repositories
    cuts: list[int] = field(default_factory=list)  # bytes after which the next answers with a file end
    statuses: list[int] = field(default_factory=list)  # of the next answers with a file, instead of it
    sends_parts: bool = True
    changes_bytes: bool = False  # on the way, unlike the digest
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def asked(self, method: str, beginning: str) -> list[dict[str, str]]:
        """The headers of the requests of a method for paths with this beginning."""
        return [headers for verb, path, headers in self.requests if verb == method and path.startswith(beginning)]


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def commit(repository: str) -> str:
    return hashlib.sha1(repository.encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub: HubServer = self.server.hub
        path = unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, {name.lower(): value for name, value in self.headers.items()}))
        if path.startswith("/cdn/"):
            return self._content(hub, path.removeprefix("/cdn/"))
        match = LISTING.fullmatch(path) or FILE.fullmatch(path)
        if match is None:
            return self._answer(200)
        repository, revision = match[1], match[2] or "main"
        files = hub.repositories.get(repository)
        if files is None:
            return self._answer(404, X_Error_Code="RepoNotFound")
        if revision not in ("main", commit(repository)):
            return self._answer(404, X_Error_Code="RevisionNotFound")
        if match.re is LISTING:
            listed = [
                {
                    "rfilename": name,
                    "size": len(content),
                    "lfs": {"sha256": digest(content), "size": len(content), "pointerSize": 130},
                }
                for name, content in files.items()
            ]
            facts = {"id": repository, "sha": commit(repository), "siblings": listed}
            return self._answer(200, json.dumps(facts).encode(), Content_Type="application/json")
        token = hub.tokens.get(repository)
        if token is not None and self.headers.get("Authorization") != f"Bearer {token}":
            return self._answer(401 if "Authorization" not in self.headers else 403, X_Error_Code="GatedRepo")
        content = files.get(match[3])
        if content is None:
            return self._answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit(repository))
        return self._answer(
            302,
            Location=f"http://localhost:{hub.port}/cdn/{repository}/{match[3]}",  # another host
            X_Repo_Commit=commit(repository),
            ETag='"something else"',
            X_Linked_Etag=f'"{digest(content)}"',
            X_Linked_Size=str(len(content)),
        )

    def _content(self, hub: HubServer, path: str) -> None:
        owner, name, file = path.split("/", 2)
        content = hub.repositories[f"{owner}/{name}"][file]
        if self.command == "GET" and hub.statuses:
            return self._answer(hub.statuses.pop(0))
        begin = int(re.sub(r"\D", "", self.headers.get("Range", ""))) if "Range" in self.headers else 0
        begin = begin if hub.sends_parts else 0
        body = content[begin:]
        if hub.changes_bytes:
            body = bytes([body[0] ^ 1]) + body[1:]
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            cut = hub.cuts.pop(0) if hub.cuts else len(body)
            self.wfile.write(body[:cut])
            self.close_connection = cut < len(body)
        return None


@contextmanager
def hub_server(repositories: dict[str, Mapping[str, bytes]]) -> Iterator[HubServer]:
    """Serve these repositories on a free port of this machine until the block ends."""
    hub = HubServer(repositories)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = hub  # type: ignore[attr-defined]
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def connect(monkeypatch: pytest.MonkeyPatch, hub: HubServer, cache: str) -> None:
    """Let huggingface_hub, which has read the environment already, ask this server and use this cache."""
    from slipstream.models.weights import hub as checks
    from slipstream.models.weights import hub_files

    for name, value in {
        "HF_HUB_OFFLINE": False,
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": cache,
    }.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr(checks, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(hub_files, "PAUSE_SECONDS", 0.0)
    checks._why_unreachable.cache_clear()
