"""A conversation with a model behind OpenAI's API, this project's server or any other. Whatever goes wrong there is one
line.
"""

from __future__ import annotations

import json
import os
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from http.client import HTTPException, HTTPMessage
from typing import IO, TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from slipstream.constraints.constraint import Constraint
from slipstream.errors import SlipstreamError, UsageError, did_you_mean, first_line
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.apps.chat.conversation import ChatDisplay

LINE_END = re.compile(r"\r\n|\n|\r")
KEYS = ("SLIPSTREAM_API_KEY", "OPENAI_API_KEY")  # environment variables, the first that is set counts
NO_REASON = "no reason given"
WORDS = ("message", "detail", "errors", "msg", "reason", "error_message")  # what went wrong, as servers name it
MAX_WHOLE_BYTES = 4 << 20  # of an answer that comes whole
MAX_PAGE_LENGTH = 1 << 14  # characters of a page that are read
MAX_EXCERPT_LENGTH = 300  # characters of what came instead of one
TAGS = re.compile(r"(?is)<(script|style)\b.*?</\1>|<[^<>]{0,1000}>")
TIMEOUT_SECONDS = 600.0  # without a sign of life
ALWAYS = ("temperature", "max_tokens")  # the defaults of servers differ
LEFT_OUT = ("n", "logprobs", "logits_processors")  # a chat has one text, shows no probabilities and sends no code
COMMANDS = {"/help": "list the commands", "/reset": "begin anew", "/quit": "leave"}


@dataclass(frozen=True)
class ServerEvent:
    """One event. kind: "message" where none is named."""

    kind: str
    data: str


def events_of(pieces: Iterable[bytes]) -> Iterator[ServerEvent]:
    """The events of a stream as they come; one that the stream ends in counts, as servers leave out the empty line."""
    kind, data = "", list[str]()
    for line in _lines(pieces):
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "event":
            kind = value
        elif not line:
            if data:
                yield ServerEvent(kind or "message", "\n".join(data))
            kind, data = "", []
    if data:
        yield ServerEvent(kind or "message", "\n".join(data))


def _lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """The lines of UTF-8 text, without the mark that it may begin with."""
    decoder, rest, after_return = getincrementaldecoder("utf-8-sig")("replace"), "", False
    for piece in pieces:
        text = decoder.decode(piece)
        if not text:
            continue
        # a carriage return ends its line at once, for what follows may take long; a line feed behind it is a part of it
        rest += text[1:] if after_return and text[0] == "\n" else text
        after_return = text[-1] == "\r"
        *lines, rest = LINE_END.split(rest)
        yield from lines
    if rest:
        yield rest


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
            answer_fields = _json(answer.read())
        if _is_error(answer_fields):
            raise SlipstreamError(f"{self.url}: {_reason_in(json.dumps(answer_fields))}")
        listed = answer_fields.get("data")
        ids = [item.get("id") for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        return [name for name in ids if isinstance(name, str)]

    def pieces(self, body: dict[str, Any], note: Callable[[str], None] = lambda line: None) -> Iterator[str]:
        """The text of a streamed chat completion as it comes. SlipstreamError says what came where that is no text.

        note: called with a line about what came besides a text.
        """
        parts, head = AnswerParts(), bytearray()
        with self._failing(), self._open("/v1/chat/completions", body) as answer:
            for event in events_of(_bytes_of(answer, head)):
                if event.data.strip() == "[DONE]":
                    parts.is_over = True
                    break
                chunk = _json(event.data)
                if event.kind == "error" or _is_error(chunk):
                    raise SlipstreamError(f"{self.url}: {_reason_in(event.data)}")
                if parts.has_choices and not chunk and event.data.strip():  # text would be missing without a word
                    raise SlipstreamError(f"{self.url} sent an event that cannot be read: {_excerpt(event.data)}")
                if text := parts.take(chunk):
                    yield text
            kind = answer.headers.get_content_type()
        if not parts.has_choices:
            answer_fields = _json(bytes(head))
            if _is_error(answer_fields):
                raise SlipstreamError(f"{self.url}: {_reason_in(json.dumps(answer_fields))}")
            if text := parts.take(answer_fields):
                yield text
            if not parts.has_choices:
                raise SlipstreamError(f"{self.url} sent {_described(bytes(head), kind)} instead of a streamed answer")
            parts.is_over = True
            note(f"{self.url} sent its answer whole, not as a stream")
        if not parts.is_over:
            raise SlipstreamError(f"{self.url} broke off: the stream ended before the answer did")
        if (besides := parts.besides) and parts.has_text:
            note(f"the answer also has {besides}")
        elif besides:
            raise SlipstreamError(f"{self.url}: the answer has no text, but {besides}")
        elif not parts.has_text:
            note("the answer is empty")

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"content-type": "application/json"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        return _opener.open(Request(self.url + path, data, headers), timeout=TIMEOUT_SECONDS)

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


@dataclass
class AnswerParts:
    """What has come of an answer. has_choices: a chunk with choices has come; is_over: the answer has ended."""

    has_choices: bool = False
    is_over: bool = False
    has_text: bool = False
    refusal: str = ""
    tools: list[str] = field(default_factory=list)
    thinks: bool = False
    filtered: bool = False

    def take(self, chunk: dict[str, Any]) -> str:
        """The text of a chunk, or of a whole answer; parts of another shape have none."""
        texts = []
        for choice in _dictionaries(chunk.get("choices")):
            self.has_choices = True
            self.is_over |= choice.get("finish_reason") is not None
            self.filtered |= choice.get("finish_reason") == "content_filter"
            part = choice.get("delta") or choice.get("message")
            if isinstance(part, dict):
                texts.append(_text(part.get("content")))
                self.refusal += _text(part.get("refusal"))
                self.thinks |= bool(part.get("reasoning_content") or part.get("reasoning"))
                functions = [call.get("function") for call in _dictionaries(part.get("tool_calls"))]
                functions.append(part.get("function_call"))
                self.tools += [
                    str(function["name"])
                    for function in functions
                    if isinstance(function, dict) and function.get("name")
                ]
        self.has_text |= any(texts)
        return "".join(texts)

    @property
    def besides(self) -> str:
        """What came and is no text, in words; empty for nothing."""
        named = ", ".join(repr(name) for name in self.tools)
        parts = [
            f"a refusal: {_harmless(self.refusal)}" if self.refusal else "",
            f"calls of tools, which this chat cannot answer: {_harmless(named)}" if self.tools else "",
            "reasoning, which is not shown" if self.thinks and not self.has_text else "",
            "an end by the server's content filter" if self.filtered else "",
        ]
        return " and ".join(filter(None, parts))


def _dictionaries(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _text(value: Any) -> str:
    """A text, or the texts of its parts."""
    return value if isinstance(value, str) else "".join(_text(part.get("text")) for part in _dictionaries(value))


def _bytes_of(answer: Any, head: bytearray) -> Iterator[bytes]:
    """What comes, as it comes; its beginning stays in `head`."""
    while piece := answer.read1(1 << 16):
        head += piece[: max(0, MAX_WHOLE_BYTES - len(head))]
        yield piece


def _described(data: bytes, kind: str) -> str:
    """What came instead of an answer."""
    text = _excerpt(data.decode(errors="replace"))
    return f"{kind} ({text})" if text else "nothing"


def _reason(error: HTTPError) -> str:
    if 300 <= error.code < 400:
        return _harmless(f"it is elsewhere: {error.headers.get('location')}")
    try:
        return _reason_in(error.read().decode(errors="replace"))
    except (OSError, HTTPException):  # the status was all that came
        return NO_REASON


def _json(data: bytes | str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, list) and len(value) == 1:  # as some servers wrap what went wrong
        value = value[0]
    return value if isinstance(value, dict) else {}


def _is_error(fields: dict[str, Any]) -> bool:
    """Whether this says what went wrong: OpenAI's form, vLLM's, FastAPI's, and those of others."""
    if not isinstance(fields.get("choices"), list):
        return bool(fields.get("error")) or any(map(fields.get, WORDS))
    failed = any(
        choice.get("error") or choice.get("finish_reason") == "error" for choice in _dictionaries(fields["choices"])
    )
    return failed or bool(fields.get("error"))


def _reason_in(text: str) -> str:
    """What the other end says went wrong."""
    fields = _json(text)
    if not fields and not text.lstrip().startswith(("{", "[")):
        return _excerpt(text) or NO_REASON
    reasons = [_said(fields.get(name)) for name in ("error", *WORDS)]
    reasons += [_said(choice.get("error")) for choice in _dictionaries(fields.get("choices"))]
    return _excerpt(next(filter(None, reasons), "")) or NO_REASON


def _said(value: Any) -> str:
    """The words of an error, whatever they stand in."""
    if isinstance(value, list):
        return "; ".join(filter(None, map(_said, value)))
    if isinstance(value, dict):
        words = next(filter(None, (_said(value.get(name)) for name in ("message", "msg", "detail", "error"))), "")
        place = value.get("loc")
        return f"{'.'.join(map(str, place))}: {words}" if isinstance(place, list) and words else words
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _excerpt(text: str) -> str:
    """The beginning of a text, or of what a page says, in one line that does nothing to a terminal."""
    return _harmless(TAGS.sub(" ", text[:MAX_PAGE_LENGTH]))[:MAX_EXCERPT_LENGTH]


def _harmless(text: str) -> str:
    """One line that does nothing to a terminal."""
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())


def request_fields(params: SamplingParams) -> dict[str, Any]:
    """The options that differ from their defaults; UsageError names what no request can say."""
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
    """url: of the server, with or without /v1. model: as the server calls it, "" for the first it lists."""

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
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._ask(text)
        except SlipstreamError as error:
            self.display.error(" ".join(str(error).split()))

    def _command(self, name: str) -> None:
        if name == "/reset":
            self.turns.clear()
            self.display.show("begun anew")
        elif name in ("/quit", "/exit"):
            self.closed = True
        elif name == "/help":
            self.display.show_pairs(list(COMMANDS.items()))
        else:
            near = did_you_mean(name, *COMMANDS)
            raise UsageError(f"unknown command {name!r}; allowed with --url: {', '.join(COMMANDS)}{near}")

    def _ask(self, text: str) -> None:
        """Answer `text`; an interrupted answer stays as far as it came, unless nothing came."""
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
