"""A conversation with a model behind OpenAI's API, on this project's server or any other. Every failure there becomes
one line.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from http.client import HTTPException, HTTPMessage
from typing import IO, TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from slipstream.constraints.constraint import Constraint
from slipstream.errors import SlipstreamError, UsageError, did_you_mean, first_line, one_line
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.apps.chat.conversation import ChatDisplay

KEYS = ("SLIPSTREAM_API_KEY", "OPENAI_API_KEY")  # environment variables, the first that is set counts
NO_REASON = "no reason given"
REASONS = ("error", "message", "detail", "msg", "errors", "reason")  # fields in which servers report what went wrong
ENDS = ("stop", "length")  # finish reasons that need no remark
MAX_WHOLE_BYTES = 4 << 20  # of an answer that is not streamed
MAX_PAGE_LENGTH = 1 << 14  # characters of a page that are read
MAX_EXCERPT_LENGTH = 300  # characters of what came instead of an answer
TAGS = re.compile(r"(?is)<(script|style)\b.*?</\1>|<[^<>]{0,1000}>")
TIMEOUT_SECONDS = 600.0  # during which the server sends nothing
ALWAYS = ("temperature", "max_tokens")  # sent even at their default, as the defaults of servers differ
LEFT_OUT = ("n", "logprobs", "logits_processors")  # a chat has one text, shows no probabilities and sends no code
COMMANDS = {"/help": "list the commands", "/reset": "forget the conversation", "/quit": "leave"}


class _NoRedirects(HTTPRedirectHandler):
    """Follows no redirect: the key is meant for the given address only."""

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
            shown = "with a user or password" if "@" in url else repr(url)  # which must not be shown
            raise UsageError(f"--url {shown}; allowed: an address such as http://127.0.0.1:8000")
        name = next((name for name in KEYS if os.environ.get(name)), None)
        key = None if name is None else os.environ[name]
        if key is not None and not (key.isascii() and key.isprintable()):
            raise UsageError(f"{name} is no key that can be sent; allowed: printable ASCII characters")
        return RemoteApi(url.rstrip("/").removesuffix("/v1"), key)

    def models(self) -> list[str]:
        with self._failing(), self._open("/v1/models", None) as answer:
            answer_fields = _object(answer.read())
        self._raise_error_in(answer_fields)
        listed = _dictionaries(answer_fields.get("data"))
        return [item["id"] for item in listed if isinstance(item.get("id"), str)]

    def pieces(self, body: dict[str, Any], note: Callable[[str], None] = lambda line: None) -> Iterator[str]:
        """The text of a streamed chat completion as it comes; SlipstreamError names what came instead of one.

        note: called with a line about what came besides the text.
        """
        parts = AnswerParts()
        with self._failing(), self._open("/v1/chat/completions", body) as answer:
            kind = answer.headers.get_content_type()
            if kind == "text/event-stream":
                for chunk in self._chunks(answer, parts):
                    if text := parts.take(chunk):
                        yield text
            else:
                data = answer.read(MAX_WHOLE_BYTES).decode(errors="replace")
                self._raise_error_in(_object(data))
                if text := parts.take(_object(data)):
                    yield text
                if not parts.has_choices:
                    what = f"{kind} ({_excerpt(data)})" if data.strip() else "nothing"
                    raise SlipstreamError(f"{self.url} sent {what} instead of a streamed answer")
                parts.is_over = True
                note(f"{self.url} sent its answer whole, not as a stream")
        if not parts.has_choices:
            raise SlipstreamError(f"{self.url} sent events without an answer")
        if not parts.is_over:
            raise SlipstreamError(f"{self.url} broke off: the stream ended before the answer did")
        if parts.end not in ENDS:
            note(f"the answer ended by {_harmless(parts.end)!r}")
        if not parts.has_text:
            note("the answer has no text, but reasoning, which is not shown" if parts.thinks else "the answer is empty")

    def _chunks(self, answer: Any, parts: AnswerParts) -> Iterator[dict[str, Any]]:
        """The objects that a stream's events hold, one a line, up to [DONE]."""
        for line in answer:
            name, _, data = line.decode(errors="replace").strip().partition(":")
            if name != "data" or not data:
                continue
            if data.strip() == "[DONE]":
                parts.is_over = True
                return
            chunk = _object(data)
            self._raise_error_in(chunk)
            if not chunk:  # skipping it could lose text unnoticed
                raise SlipstreamError(f"{self.url} sent an event that cannot be read: {_excerpt(data)}")
            yield chunk

    def _raise_error_in(self, answer: dict[str, Any]) -> None:
        """Raise SlipstreamError if an answer reports an error, in the form of OpenAI, vLLM, FastAPI or others."""
        failed = [choice for choice in _dictionaries(answer.get("choices")) if choice.get("finish_reason") == "error"]
        if answer.get("error") or failed or ("choices" not in answer and any(map(answer.get, REASONS))):
            holder = answer if answer.get("error") or not failed else failed[0]
            raise SlipstreamError(f"{self.url}: {_reason_in(holder)}")

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"content-type": "application/json"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        return _opener.open(Request(self.url + path, data, headers), timeout=TIMEOUT_SECONDS)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Raise failures of the connection and of the server as `SlipstreamError`."""
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
        has_host = bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError:  # an impossible host or port
        return False
    has_more = "@" in parts.netloc or parts.query or parts.fragment
    is_plain = url.isascii() and url.isprintable() and " " not in url
    return parts.scheme in ("http", "https") and has_host and is_plain and not has_more


@dataclass
class AnswerParts:
    """What has come of an answer. has_choices: a chunk with choices has come; is_over: the answer has ended.

    end: the finish reason; thinks: reasoning has come.
    """

    has_choices: bool = False
    is_over: bool = False
    has_text: bool = False
    thinks: bool = False
    end: str = "stop"

    def take(self, chunk: dict[str, Any]) -> str:
        """The text of a chunk, or of a whole answer, a refusal included; parts of another shape have none."""
        text = ""
        for choice in _dictionaries(chunk.get("choices")):
            self.has_choices = True
            if choice.get("finish_reason") is not None:
                self.is_over, self.end = True, str(choice["finish_reason"])
            part = choice.get("delta") or choice.get("message")
            if isinstance(part, dict):
                text += _text(part.get("content")) + _text(part.get("refusal"))
                self.thinks |= bool(part.get("reasoning_content") or part.get("reasoning"))
        self.has_text |= bool(text)
        return text


def _dictionaries(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _text(value: Any) -> str:
    """A text, or the texts of its parts."""
    return value if isinstance(value, str) else "".join(_text(part.get("text")) for part in _dictionaries(value))


def _reason(error: HTTPError) -> str:
    if 300 <= error.code < 400:
        return _harmless(f"it redirects to {error.headers.get('location')}")
    try:
        data = error.read().decode(errors="replace")
    except (OSError, HTTPException):  # the status was all that came
        return NO_REASON
    fields = _object(data)
    return _reason_in(fields) if fields else _excerpt(data) or NO_REASON


def _object(data: bytes | str) -> dict[str, Any]:
    """A JSON object; an empty one for anything else."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, list) and len(value) == 1:  # some servers wrap an error in a list
        value = value[0]
    return value if isinstance(value, dict) else {}


def _reason_in(fields: dict[str, Any]) -> str:
    """The reason that a server's error object gives, as JSON if it is not a text."""
    value = next((value for value in map(fields.get, REASONS) if value and value is not True), None)
    if isinstance(value, dict):
        return _reason_in(value)
    return NO_REASON if value is None else _excerpt(value if isinstance(value, str) else json.dumps(value))


def _excerpt(text: str) -> str:
    """The beginning of a text or of a page's text, as one line without control characters."""
    return _harmless(TAGS.sub(" ", text[:MAX_PAGE_LENGTH]))[:MAX_EXCERPT_LENGTH]


def _harmless(text: str) -> str:
    """A text as one line without control characters."""
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())


def request_fields(params: SamplingParams) -> dict[str, Any]:
    """The options that differ from their defaults; UsageError names one that cannot be sent."""
    plain, request = SamplingParams(), dict[str, Any]()
    for option in fields(params):
        value = getattr(params, option.name)
        if option.name not in LEFT_OUT and (option.name in ALWAYS or value != getattr(plain, option.name)):
            request[option.name] = value
    if "logit_bias" in request:
        request["logit_bias"] = {str(token): bias for token, bias in request["logit_bias"].items()}
    if "prediction" in request:
        request["prediction"] = _prediction(request["prediction"])
    if "constraint" in request:
        request |= _form(request.pop("constraint"))
    return request


def _prediction(prediction: object) -> dict[str, str]:
    if not isinstance(prediction, str):
        raise UsageError("--prediction of token ids with --url; allowed: a text")
    return {"type": "content", "content": prediction}


def _form(constraint: Constraint) -> dict[str, Any]:
    """`response_format` where OpenAI has a form for it, else vLLM's `structured_outputs`."""
    if constraint.whitespace != Constraint.whitespace:
        raise UsageError(
            f"--whitespace {constraint.whitespace!r} with --url, to which it cannot be sent; "
            f"allowed: {Constraint.whitespace!r}"
        )
    if constraint.schemas:
        raise UsageError("--grammar that names schemas with --url; allowed: a grammar that stands alone")
    if constraint.json_object:
        return {"response_format": {"type": "json_object"}}
    if (schema := constraint.json_schema) is not None:
        read = json.loads(schema) if isinstance(schema, str) else dict(schema)
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": read}}}
    return {"structured_outputs": constraint.to_dict()}


@dataclass
class RemoteChat:
    """A conversation with a server's model. url: with or without /v1; model: "" for the first that the server lists."""

    url: str
    display: ChatDisplay
    params: SamplingParams
    system: str = ""
    model: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self._options = request_fields(self.params)
        self._api = RemoteApi.at(self.url)
        self.url = self._api.url
        if not self.model:
            listed = self._api.models()
            if not listed:
                raise SlipstreamError(f"{self.url} lists no models; name one with --model")
            self.model = listed[0]

    def handle(self, line: str) -> None:
        """One line of input: a command if it begins with a slash, else what the user says. A failure is one line."""
        text = line.strip()
        try:
            if line.startswith("/"):
                self._command(text)
            elif text:
                self._ask(text)
        except SlipstreamError as error:
            self.display.error(one_line(error))

    def _command(self, name: str) -> None:
        if name == "/reset":
            self.turns.clear()
            self.display.show("the conversation is empty")
        elif name in ("/quit", "/exit"):
            self.closed = True
        elif name == "/help":
            self.display.show_pairs(list(COMMANDS.items()))
        else:
            near = did_you_mean(name, *COMMANDS)
            raise UsageError(f"unknown command {name!r}; allowed with --url: {', '.join(COMMANDS)}{near}")

    def _ask(self, text: str) -> None:
        """Answer `text`; what came of an interrupted answer is kept, unless nothing came."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        question = {"role": "user", "content": text}
        body = {"model": self.model, "messages": [*system, *self.turns, question], "stream": True}
        pieces, notes = list[str](), list[str]()
        try:
            for piece in self._api.pieces(body | self._options, notes.append):
                pieces.append(piece)
                self.display.token(piece)
        except KeyboardInterrupt:
            notes.append("interrupted")
        except SlipstreamError:
            if pieces:
                self.display.token("\n")
            raise
        self.display.token("\n")
        for line in notes:
            self.display.remark(line)
        if pieces:
            self.turns += [question, {"role": "assistant", "content": "".join(pieces)}]
