"""Access control: API keys, Host header, CORS origins.

All checks read `scope["path"]`, the path that the routes match. If there are keys, every path needs one unless it is
listed as open.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from pathlib import Path
from urllib.parse import quote, urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.apps.server.error_objects import ApiError, shortened
from slipstream.apps.server.server_settings import REQUEST_SECONDS, ServerSettings, is_address
from slipstream.checks import why_unreadable
from slipstream.errors import UsageError

log = logging.getLogger("slipstream.server")
Count = Callable[[Scope, int], None]  # called with the status of every answer

OPEN = frozenset({"/", "/health", "/live", "/ping"})  # these need no key, nor do the page's own files
PAGE = "/page/"
ENDLESS = "/v1/slipstream/events"  # its GET never ends, so HEAD is not served through it
MIN_KEY_LENGTH = 8
UNNAMED = "sha256:"  # prefix of the name given to the owner of an unnamed key


@dataclass(frozen=True)
class ApiKeys:
    """Digests of the keys, with their owners' names; a key without a name is named by its digest."""

    digests: tuple[tuple[str, bytes], ...] = ()

    @staticmethod
    def read(file: str) -> ApiKeys:
        """The keys of a file, one per line: KEY or NAME:KEY; lines that begin with # are left out.

        UsageError for an invalid key, and for a name or key that occurs twice, as its owners could not be told apart.
        """
        if not file:
            return ApiKeys()
        try:
            lines = Path(file).expanduser().read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key-file {file!r} cannot be read: {why_unreadable(error)}") from error
        keys: list[tuple[str, bytes]] = []
        seen: dict[str | bytes, int] = {}
        for number, line in enumerate(map(str.strip, lines), 1):
            if not line or line.startswith("#"):
                continue
            name, _, key = (part.strip() for part in line.rpartition(":"))
            if len(key) < MIN_KEY_LENGTH or not (key.isascii() and key.isprintable()) or " " in key:
                raise UsageError(
                    f"--api-key-file {file!r}, line {number}: a key of {len(key)} characters; allowed: at least "
                    f"{MIN_KEY_LENGTH} printable ASCII characters without spaces"
                )
            digest = _digest(key)
            if name.startswith(UNNAMED) or not name.isprintable():
                raise UsageError(
                    f"--api-key-file {file!r}, line {number}: the name {name!r:.80}; allowed: printable characters, "
                    f"not {UNNAMED!r} in front"
                )
            name = name or f"{UNNAMED}{digest.hex()[:32]}"
            for what, part in (("key", digest), ("name", name)):
                if part in seen:
                    raise UsageError(
                        f"--api-key-file {file!r}, line {number}: the {what} is that of line {seen[part]}; "
                        f"allowed: each {what} once"
                    )
                seen[part] = number
            keys.append((name, digest))
        if not keys:
            raise UsageError(f"--api-key-file {file!r} holds no keys; allowed: one per line")
        return ApiKeys(tuple(keys))

    def owner(self, key: str) -> str | None:
        """The name of a key's owner; None for a key that is not listed. Constant time."""
        digest, owner = _digest(key), None
        for name, key_digest in self.digests:
            if hmac.compare_digest(key_digest, digest):
                owner = name
        return owner


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyFile:
    """The keys of a file, read again when it changes; if they are then invalid, the earlier ones stay."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._version, self._keys = self._current_version(), ApiKeys.read(file)

    def keys(self) -> ApiKeys:
        if (version := self._current_version()) != self._version:
            self._version = version
            try:
                self._keys = ApiKeys.read(self._file)
                log.info("--api-key-file %r is read again: %d keys", self._file, len(self._keys.digests))
            except UsageError as error:
                log.error("%s; the earlier keys stay in use", error)
        return self._keys

    def _current_version(self) -> tuple[int, ...]:
        try:
            status = Path(self._file).expanduser().stat()
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_size, status.st_ino


class Access:
    """An ASGI layer that passes requests to an app or refuses them.

    It adds two names to `scope["state"]`: `owner`, of the key, and `caller`, by which callers take turns: the owner, or
    the client's address if there are no keys. It logs the reason that a refusal leaves there as `refusal`.
    count: see `Count`.
    """

    def __init__(self, app: ASGIApp, keys: KeyFile, settings: ServerSettings, count: Count) -> None:
        self._app, self._keys, self._settings, self._count = app, keys, settings, count
        self._proxies = [ip_network(proxy, strict=False) for proxy in settings.trusted_proxy]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD" and scope["path"] != ENDLESS:
            scope = {**scope, "method": "GET"}  # uvicorn still sees HEAD and sends no body
        state = scope.setdefault("state", {})
        state["client"] = self._client(scope)
        try:
            scope = _in_origin_form(scope)
            state["owner"] = self._check(scope)
            state["caller"] = state["owner"] or state["client"]
        except ApiError as error:
            state["refusal"] = error.message
            response = error.response(scope["path"])
            # without these headers the browser would hide the answer from the page
            for origin in filter(self._is_listed, _headers(scope, b"origin")):
                response.headers.update({"access-control-allow-origin": origin, "vary": "Origin"})
            await response(scope, receive, self._counting_send(scope, send))
            return
        await self._app(scope, self._bounded_receive(receive), self._counting_send(scope, send))

    def _bounded_receive(self, receive: Receive) -> Receive:
        """A `receive` that raises if a body is too large or does not arrive in time."""
        size, ended = 0, False
        deadline = asyncio.get_running_loop().time() + (self._settings.request_timeout or REQUEST_SECONDS)

        async def receiving() -> Message:
            nonlocal size, ended
            if ended:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408) from None
            ended = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self._settings.max_body_bytes:
                raise HTTPException(413)
            return message

        return receiving

    def _counting_send(self, scope: Scope, send: Send) -> Send:
        """A `send` that counts answers, logs refusals, and adds the header that forbids browsers to guess types."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-content-type-options", b"nosniff")]
                self._count(scope, message["status"])
                state = scope["state"]
                if "refusal" in state:
                    log.info(
                        "request method=%s endpoint=%s status=%d client=%s key=%s reason=%s",
                        scope["method"],
                        shortened(quote(scope["path"])),  # without the query, which may have a key
                        message["status"],
                        json.dumps(state["client"]),
                        key_name(state.get("owner", "")),
                        json.dumps(state["refusal"]),
                    )
            await send(message)

        return sending

    def _check(self, scope: Scope) -> str:
        if scope["http_version"] not in ("1.0", "1.1"):  # the preface of HTTP/2 looks like a request
            raise ApiError(505, f"HTTP/{scope['http_version']} is not served; allowed: HTTP/1.1")
        host = self._check_host(_headers(scope, b"host"))
        path: str = scope["path"]
        is_page = path == "/" or path.startswith(PAGE)
        if not is_page:  # a proxy may have rewritten the host, and the page must load to show why its calls are refused
            for origin in _headers(scope, b"origin"):  # other sites' pages may not call the server
                if not self._is_listed(origin) and origin not in (f"http://{host}", f"https://{host}"):
                    raise ApiError(403, f"origin {origin!r:.80} is not allowed; see --allowed-origin")
        largest = self._settings.max_body_bytes
        for length in _headers(scope, b"content-length"):  # `_bounded_receive` counts the bytes that arrive
            if length.isdigit() and (len(length) > 12 or int(length) > largest):
                raise ApiError(413, f"the request body is too large; allowed: {largest} bytes")
        keys = self._keys.keys()
        if not keys.digests or is_page or path in OPEN or self._is_allowed_preflight(scope):
            return ""
        bearers, sent = _headers(scope, b"authorization"), _headers(scope, b"x-api-key")
        kind, _, key = (bearers[0] if len(bearers) == 1 else "").partition(" ")
        candidates = [key] * (kind.lower() == "bearer") + sent * (len(sent) == 1)  # some clients send both
        owner = next((owner for key in candidates if (owner := keys.owner(key.strip())) is not None), None)
        if owner is None:
            why = "no valid API key; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise ApiError(401, f"{why} (of NAME:KEY, only the part after the colon)", code="invalid_api_key")
        return owner

    def _is_allowed_preflight(self, scope: Scope) -> bool:
        """True for a preflight request from a listed site; browsers send those without the key."""
        is_preflight = bool(_headers(scope, b"access-control-request-method"))
        return is_preflight and scope["method"] == "OPTIONS" and any(map(self._is_listed, _headers(scope, b"origin")))

    def _is_listed(self, origin: str) -> bool:
        return origin in self._settings.allowed_origin

    def _client(self, scope: Scope) -> str:
        """The client's address: that of the connection, or the one that the last trusted proxy names."""
        client = str((scope.get("client") or [""])[0])
        names = [name.strip() for header in _headers(scope, b"x-forwarded-for") for name in header.split(",")]
        while names and is_address(client) and any(ip_address(client) in network for network in self._proxies):
            name = names.pop()
            name = name if is_address(name) else _host_name(name)  # some proxies add the port
            if not is_address(name):
                break
            client = name
        return client

    def _check_host(self, hosts: Sequence[str]) -> str:
        """Refuse host names that another site may have pointed at this machine, unless keys protect it.

        HTTP/1.0 health checks send no host name; browsers always do.
        """
        host = hosts[0] if len(hosts) == 1 else ",".join(hosts)
        name = _host_name(host)
        names = {"localhost", self._settings.host.lower(), *map(str.lower, self._settings.allowed_host)}
        any_name = bool(self._settings.api_key_file) and not self._settings.allowed_host and not self._settings.is_local
        if host and not (name and (any_name or name in names or is_address(name))):
            raise ApiError(403, f"host {host!r:.80} is not served here; see --allowed-host")
        return host


def key_name(owner: str) -> str:
    """A key's name in the log: its owner's name in quotes, or a digest, which helps to tell unnamed keys apart."""
    if owner.startswith(UNNAMED):
        return "unnamed"
    return json.dumps(owner, ensure_ascii=False) if owner else "none"


def _in_origin_form(scope: Scope) -> Scope:
    """The request with a path, even if its target is a whole URL, whose host then counts (RFC 9112, section 3.2.2)."""
    scheme, separator, rest = scope["path"].partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        return scope
    host, _, path = rest.partition("/")
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    raw_path = b"/" + scope["raw_path"].partition(b"://")[2].partition(b"/")[2]
    return {
        **scope,
        "path": f"/{path}",
        "raw_path": raw_path,
        "headers": [*headers, (b"host", host.encode("utf-8", "replace"))],
    }


def _host_name(host: str) -> str:
    """The name in `host:port`; empty if it has another form."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _headers(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]
