"""OpenAI's API over HTTP, as far as a chat needs it. Whatever goes wrong at the other end is one line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPMessage
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from slipstream.errors import SlipstreamError, UsageError, first_line

KEYS = ("SLIPSTREAM_API_KEY", "OPENAI_API_KEY")  # environment variables, the first that is set counts
TIMEOUT = 600.0  # seconds without a sign of life


class _NoRedirects(HTTPRedirectHandler):
    """The key is for the address that was given, so no answer sends it elsewhere."""

    def http_error_302(self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage) -> None:
        """Refuse: the answer becomes an error."""

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


_opener = build_opener(_NoRedirects)


@dataclass(frozen=True)
class RemoteApi:
    """A server. url: without /v1; key: None to send none."""

    url: str
    key: str | None = field(default=None, repr=False)

    @staticmethod
    def at(url: str) -> RemoteApi:
        """The server of an address, with or without /v1, and the key of the environment. UsageError for no address."""
        if not _is_address(url):
            shown = "with a user or password" if "@" in url else repr(url)  # which is for nobody else to see
            raise UsageError(f"--url {shown}; allowed: an address such as http://127.0.0.1:8000")
        name = next((name for name in KEYS if os.environ.get(name)), None)
        key = None if name is None else os.environ[name]
        if key is not None and not (key.isascii() and key.isprintable()):
            raise UsageError(f"{name} is no key that can be sent; allowed: printable ASCII characters")
        return RemoteApi(url.rstrip("/").removesuffix("/v1"), key)

    def models(self) -> list[str]:
        """The names of its models."""
        with self._failing(), self._open("/v1/models", None) as answer:
            listed = _json(answer.read()).get("data")
        ids = [one.get("id") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        return [name for name in ids if isinstance(name, str)]

    def pieces(self, body: dict[str, Any]) -> Iterator[str]:
        """The text of a streamed chat completion as it comes."""
        with self._failing(), self._open("/v1/chat/completions", body) as answer:
            for line in answer:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                chunk = _json(data)
                if chunk.get("error"):
                    raise SlipstreamError(f"{self.url}: {_message(chunk)}")
                yield from _content(chunk)

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"content-type": "application/json"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        return _opener.open(Request(self.url + path, data, headers), timeout=TIMEOUT)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Failures of the connection and of the other end as `SlipstreamError`."""
        try:
            yield
        except HTTPError as error:
            with error:
                raise SlipstreamError(f"{self.url}: status {error.code}: {_reason(error)}") from error
        except URLError as error:
            raise SlipstreamError(f"{self.url} cannot be reached: {error.reason}") from error
        except (OSError, HTTPException) as error:
            raise SlipstreamError(f"{self.url} broke off: {first_line(error)}") from error


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        named = bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError:  # of hosts and ports that cannot be
        return False
    more = "@" in parts.netloc or parts.query or parts.fragment
    plain = url.isascii() and url.isprintable() and " " not in url
    return parts.scheme in ("http", "https") and named and plain and not more


def _content(chunk: dict[str, Any]) -> Iterator[str]:
    """The text of a chunk; parts of another shape have none."""
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        delta = choice.get("delta") if isinstance(choice, dict) else None
        text = delta.get("content") if isinstance(delta, dict) else None
        if isinstance(text, str):
            yield text


def _reason(error: HTTPError) -> str:
    if 300 <= error.code < 400:
        return _harmless(f"it is elsewhere: {error.headers.get('location')}")
    try:
        return _message(_json(error.read()))
    except (OSError, HTTPException):  # the status was all that came
        return "no reason given"


def _json(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {}


def _message(answer: dict[str, Any]) -> str:
    """What the other end says went wrong."""
    error = answer.get("error")
    return _harmless(str((error.get("message") if isinstance(error, dict) else error) or "no reason given"))


def _harmless(text: str) -> str:
    """One line that does nothing to a terminal."""
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
