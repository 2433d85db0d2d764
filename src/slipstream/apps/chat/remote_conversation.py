"""A conversation with a model behind OpenAI's API, this project's server or any other. Needs no model here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from slipstream.apps.chat.face import Face
from slipstream.errors import SlipstreamError, UsageError, first_line
from slipstream.sampling.params import SamplingParams

KEYS = ("SLIPSTREAM_API_KEY", "OPENAI_API_KEY")  # environment variables, the first that is set counts
ALWAYS = ("temperature", "max_tokens")  # the defaults of servers differ
TIMEOUT = 600.0  # seconds without a sign of life
COMMANDS = {"/help": "list the commands", "/reset": "begin anew", "/quit": "leave"}


@dataclass
class RemoteChat:
    """url: of the server, with or without /v1. model: as the server calls it, "" for the first it lists."""

    url: str
    face: Face
    params: SamplingParams
    system: str = ""
    model: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UsageError(f"--url {self.url!r}; allowed: an address such as http://127.0.0.1:8000")
        self.url = self.url.rstrip("/").removesuffix("/v1")
        if not self.model:
            with self._open("/v1/models", None) as answer:
                listed = _json(answer.read()).get("data") or []
            if not listed:
                raise SlipstreamError(f"{self.url} lists no models; name one with --model")
            self.model = str(listed[0].get("id"))

    def handle(self, line: str) -> None:
        """One line of input: a command if it begins with a slash, else what the user says. A failure is one line."""
        text = line.strip()
        try:
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._ask(text)
        except SlipstreamError as error:
            self.face.error(" ".join(str(error).split()))

    def _command(self, name: str) -> None:
        if name == "/reset":
            self.turns.clear()
            self.face.say("begun anew")
        elif name in ("/quit", "/exit"):
            self.closed = True
        elif name == "/help":
            self.face.say("\n".join(f"{known:8} {text}" for known, text in COMMANDS.items()))
        else:
            raise UsageError(f"unknown command {name!r}; allowed with --url: {', '.join(COMMANDS)}")

    def _ask(self, text: str) -> None:
        """Answer `text`; an interrupted answer stays as far as it came, unless nothing came."""
        said = [{"role": "system", "content": self.system}] if self.system else []
        question = {"role": "user", "content": text}
        body = {"model": self.model, "messages": [*said, *self.turns, question], "stream": True}
        pieces: list[str] = []
        try:
            for piece in self._pieces(body | _given(self.params)):
                pieces.append(piece)
                self.face.piece(piece)
        except KeyboardInterrupt:
            self.face.note("interrupted")
        self.face.piece("\n")
        if pieces:
            self.turns += [question, {"role": "assistant", "content": "".join(pieces)}]

    def _pieces(self, body: dict[str, Any]) -> Iterator[str]:
        try:
            with self._open("/v1/chat/completions", body) as answer:
                for line in answer:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    chunk = _json(data)
                    if "error" in chunk:
                        raise SlipstreamError(f"{self.url}: {_message(chunk)}")
                    for choice in chunk.get("choices") or ():
                        yield (choice.get("delta") or {}).get("content") or ""
        except (OSError, HTTPException) as error:
            raise SlipstreamError(f"{self.url} broke off: {first_line(error)}") from error

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"content-type": "application/json"}
        key = next((os.environ[name] for name in KEYS if os.environ.get(name)), None)
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            return urlopen(Request(self.url + path, data, headers), timeout=TIMEOUT)
        except HTTPError as error:
            with error:
                said = _message(_json(error.read()))
            raise SlipstreamError(f"{self.url}: status {error.code}: {said}") from error
        except URLError as error:
            raise SlipstreamError(f"{self.url} cannot be reached: {error.reason}") from error


def _given(params: SamplingParams) -> dict[str, Any]:
    """The options that differ from their defaults, as OpenAI and vLLM name them."""
    plain, found = SamplingParams(), dict[str, Any]()
    for one in fields(params):
        value = getattr(params, one.name)
        if one.name not in ("n", "logprobs", "logits_processors") and (
            one.name in ALWAYS or value != getattr(plain, one.name)
        ):
            found[one.name] = value
    if "logit_bias" in found:
        found["logit_bias"] = {str(token): bias for token, bias in found["logit_bias"].items()}
    return found


def _json(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _message(answer: dict[str, Any]) -> str:
    error = answer.get("error")
    return str(error.get("message")) if isinstance(error, dict) else str(error or "no reason given")
