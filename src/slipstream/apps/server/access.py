"""Access control: API keys, Host header, CORS origins.

All checks read `scope["path"]`, the path that the routes match. If there are keys, every path needs one unless it is
listed as open.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from time import monotonic
from urllib.parse import quote, urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.apps.server.error_objects import OVERLOADED, ApiError, as_api_error, error_answer, shortened
from slipstream.apps.server.live_request import LiveRequest
from slipstream.apps.server.server_log import log_request
from slipstream.apps.server.server_settings import REQUEST_SECONDS, ServerSettings, is_address
from slipstream.checks import counted, expanded, why_unreadable
from slipstream.errors import UsageError

log = logging.getLogger("slipstream.server")
Count = Callable[[Scope, int], None]  # called with the status of every answer

OPEN = frozenset({"/", "/health", "/live", "/ping"})  # these need no key, nor do the page's own files
PAGE = "/page/"
ENDLESS = "/v1/slipstream/events"  # its GET never ends, so HEAD is not served through it
MIN_KEY_LENGTH = 8
UNNAMED = "sha256:"  # prefix of the name given to the owner of an unnamed key
BUSY = (429, 503, OVERLOADED)  # statuses of a server that has too much to do, is loading or is ending
CLIENT_LEFT = 499  # status of an answer that no client has waited for


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
            lines = expanded(file).read_text(encoding="utf-8-sig").splitlines()
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
        if self._current_version() != self._version:
            self.read_again()
        return self._keys

    def read_again(self) -> None:
        """Replace the keys by those that the file has now, if they are valid; the log says what has happened."""
        if not self._file:
            log.warning("there is no --api-key-file to read again")
            return
        self._version = self._current_version()
        try:
            self._keys = ApiKeys.read(self._file)
            log.info("--api-key-file %r is read again: %s", self._file, counted(len(self._keys.digests), "key"))
        except UsageError as error:
            log.error("%s; the earlier keys stay in use", error)

    def _current_version(self) -> tuple[int, ...]:
        if not self._file:  # else it would be the current folder
            return ()
        try:
            status = expanded(self._file).stat()
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_size, status.st_ino


class _Answer:
    """An answer that is sent: counted, given the header that forbids browsers to guess types, and logged at its end.

    The reason of a refusal or failure, and the request if it has reached the engine, are in `scope["state"]`.
    """

    def __init__(self, scope: Scope, send: Send, count: Count) -> None:
        self._scope, self._send, self._count = scope, send, count
        self._method, self._begun = scope["method"], monotonic()
        self._is_logged = False
        self.status = 0  # 0 until it is sent

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), (b"x-content-type-options", b"nosniff")]
            self.status = message["status"]
            self._count(self._scope, self.status)
        elif not message.get("more_body", False):
            self.log()
        await self._send(message)

    def log(self) -> None:
        """Log the request unless that has been done."""
        if self._is_logged:
            return
        self._is_logged = True
        state, status = self._scope["state"], self.status or CLIENT_LEFT
        live: LiveRequest | None = state.get("live")
        reason = state.get("refusal") or (None if live is None else live.failure)
        owner = state.get("owner", "")
        fields = {
            "id": live and live.id,
            "method": self._method,
            "path": shortened(quote(self._scope["path"])),  # without the query, which may have a key
            "status": status,
            "model": live and live.model,
            "key": "unnamed" if owner.startswith(UNNAMED) else owner or None,
            "client": state["client"],
            **({} if live is None else live.figures()),
            "seconds": round(monotonic() - self._begun, 3),
            "reason": reason,
        }
        if live is None and reason is None:  # the engine does not see these: health, metrics, the page
            level = logging.DEBUG
        elif status in BUSY:
            level = logging.WARNING
        else:
            level = logging.ERROR if status >= 500 else logging.INFO
        log_request(fields, level)


class Access:
    """An ASGI layer that passes requests to an app or refuses them.

    It adds two names to `scope["state"]`: `owner`, of the key, and `caller`, by which callers take turns: the owner, or
    the client's address if there are no keys.
    count: see `Count`.
    """

    def __init__(self, app: ASGIApp, keys: KeyFile, settings: ServerSettings, count: Count) -> None:
        self._app, self._keys, self._settings, self._count = app, keys, settings, count
        self._proxies = [ip_network(proxy, strict=False) for proxy in settings.trusted_proxy]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["client"] = self._client(scope)
        scope = _in_origin_form(scope)
        answer = _Answer(scope, send, self._count)
        if scope["method"] == "HEAD" and scope["path"] != ENDLESS:
            scope["method"] = "GET"  # uvicorn still sees HEAD and sends no body
        try:
            state["owner"] = self._check(scope)
            state["caller"] = state["owner"] or state["client"]
            await self._app(scope, self._bounded_receive(receive), answer.send)
        except Exception as error:
            refusal = as_api_error(error)
            if answer.status == 0:
                response = error_answer(scope, refusal)
                if _has_two_lengths(scope):
                    response.headers["connection"] = "close"
                # without these headers the browser would hide the answer from the page
                for origin in filter(self._is_listed, _headers(scope, b"origin")):
                    response.headers.update({"access-control-allow-origin": origin, "vary": "Origin"})
                await response(scope, receive, answer.send)
        finally:
            answer.log()

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

    def _check(self, scope: Scope) -> str:
        if scope["http_version"] not in ("1.0", "1.1"):  # the preface of HTTP/2 looks like a request
            raise ApiError(505, f"HTTP/{scope['http_version']} is not served; allowed: HTTP/1.1")
        if _has_two_lengths(scope):  # a proxy may read the other one, and take a part of the body for a request
            raise ApiError(400, "content-length with transfer-encoding; allowed: one of them")
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
        """The client's address: the connection's, or the one that the last trusted proxy names."""
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


def _in_origin_form(scope: Scope) -> Scope:
    """The request with a path, even if its target is a whole URL, whose host then counts (RFC 9112, section 3.2.2)."""
    scheme, separator, rest = scope["path"].partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        return dict(scope)
    host, _, path = rest.partition("/")
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    raw_path = b"/" + scope["raw_path"].partition(b"://")[2].partition(b"/")[2]
    return {
        **scope,
        "path": f"/{path}",
        "raw_path": raw_path,
        "headers": [*headers, (b"host", host.encode("utf-8", "replace"))],
    }


def _has_two_lengths(scope: Scope) -> bool:
    return bool(_headers(scope, b"transfer-encoding")) and bool(_headers(scope, b"content-length"))


def _host_name(host: str) -> str:
    """The name in `host:port`; empty if it has another form."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _headers(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]
