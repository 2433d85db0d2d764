"""Every refusal and failure as the error object of its endpoint's API: OpenAI's, Anthropic's or Ollama's."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from slipstream.apps.server.schemas import NOT_IN_RANGE, ChatFields, CompletionFields, Fields
from slipstream.apps.server.server_log import PRIVATE
from slipstream.errors import UsageError, did_you_mean, first_line

log = logging.getLogger("slipstream.server")
F = TypeVar("F", bound=Fields)
OVERLOADED = 529  # Anthropic's status for 503
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_exceeded",
    503: "overloaded_error",
}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    OVERLOADED: "overloaded_error",
}
NO_THREADS = "thread_unsupported_request"  # Anthropic's code, at which its clients send all messages instead
MESSAGES, OLLAMA = "/v1/messages", "/api/"  # the beginnings of the paths with error objects of their own
# patterns of fields of chat completions, and their names in the APIs whose requests are converted to these
FUNCTION = {r"((?:tools\.\d+|tool_choice)\.)function\.": r"\1"}
NAMES = {
    MESSAGES: {
        "response_format": "output_config.format",
        **FUNCTION,
        r"(tools\.\d+\.)parameters": r"\1input_schema",
    },
    "/v1/responses": {
        "response_format": "text.format",
        **FUNCTION,
        r"messages\b[\w.]*": "input",  # its items have other numbers
        "max_completion_tokens": "max_output_tokens",
    },
    f"{OLLAMA}generate": {
        "response_format": "format",
        r"messages\b[\w.]*": "prompt",
        "max_tokens": "options.num_predict",
    },
    OLLAMA: {"response_format": "format", "max_tokens": "options.num_predict"},
}
FIELDS = ChatFields.model_fields.keys() | CompletionFields.model_fields.keys()
# a field and where in it the fault is, at the beginning of a refusal: messages.0.content
ADDRESS = re.compile(r"([a-z][a-z_]*)(?:\.\w+)*(?=[=:]| (?:has|with|\d+)\b)")
INTERNAL = "internal error; the server's log has the details"
RETRY_AFTER_SECONDS = 1  # that clients should wait before they try again


class ApiError(Exception):
    """A request that cannot be answered.

    status: the HTTP status; param: the field at fault; code: for programs. prompt_tokens, window: of a prompt that is
    too long; remedy: ends its message.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        prompt_tokens: int = 0,
        window: int = 0,
        remedy: str = "",
    ) -> None:
        super().__init__(message + remedy)
        self.status, self.message, self.param, self.code = status, message + remedy, param, code
        self.prompt_tokens, self.window, self._remedy = prompt_tokens, window, remedy

    def body(self, path: str = "", request_id: str = "") -> dict[str, Any]:
        """The error object of an address. request_id: for those that name it."""
        message, param = self.message, self.param or ""
        names = next((names for beginning, names in NAMES.items() if path.startswith(beginning)), {})
        for pattern, name in names.items():
            message, param = (
                re.sub(rf"(?:^|(?<= of the prompt and )){pattern}", name, text) for text in (message, param)
            )
        if path.startswith(OLLAMA) and not path.startswith(f"{OLLAMA}v1/"):  # else a mistaken address of OpenAI's
            return {"error": message}
        if path.startswith(MESSAGES):
            kind = ANTHROPIC_TYPES.get(
                self.status_at(path), "invalid_request_error" if self.status < 500 else "api_error"
            )
            if self.prompt_tokens:  # in the words by which Claude Code knows that it must shorten the conversation
                message = f"prompt is too long: {self.prompt_tokens} tokens > {self.window} maximum{self._remedy}"
            error: dict[str, Any] = {"type": kind, "message": message}
            if self.code == NO_THREADS:
                error["details"] = {"error_code": self.code, "unsupported": [self.param]}
            return {"type": "error", "error": error, "request_id": request_id or None}
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": message, "type": kind, "param": param or None, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.status in (429, 503):
            return {"retry-after": str(RETRY_AFTER_SECONDS)}
        if self.status == 408:
            return {"x-should-retry": "false"}  # it would take as long again
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}

    def status_at(self, path: str) -> int:
        """The HTTP status at an address."""
        return OVERLOADED if self.status == 503 and path.startswith(MESSAGES) else self.status


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The error of a wrong request: status 400, which clients do not retry."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: BaseException) -> ApiError:
    """The error that a client sees for an exception; an internal error's message goes only to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError):
        line = first_line(error)
        address = ADDRESS.match(line)
        is_field = address is not None and (address[1] in FIELDS or line[address.end() :].startswith("="))
        return refused(line, address[0] if address is not None and is_field else None)
    log.error("internal error", exc_info=error, extra=PRIVATE)
    return ApiError(500, INTERNAL)


def error_answer(scope: Scope, error: BaseException) -> JSONResponse:
    """The answer to a request that was refused or has failed; `scope["state"]` gets the reason, for the log."""
    refusal, path, state = as_api_error(error), scope["path"], scope["state"]
    state["refusal"] = refusal.message
    live = state.get("live")
    request_id = f"req_{live.id}" if live is not None and path.startswith(MESSAGES) else ""
    headers = refusal.headers | ({"request-id": request_id} if request_id else {})
    return JSONResponse(refusal.body(path, request_id), refusal.status_at(path), headers)


def add_handlers(app: FastAPI) -> None:
    """Answer every exception with an error object."""

    @app.exception_handler(ApiError)
    @app.exception_handler(UsageError)
    async def _any(request: Request, error: Exception) -> JSONResponse:
        return error_answer(request.scope, error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return error_answer(request.scope, validation_error(error.errors()))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        status = 400 if error.status_code == 422 else error.status_code
        if request.method == "OPTIONS" and (status == 405 or request.scope["path"] == "*"):
            return Response(status_code=204, headers={"allow": ", ".join(_methods(request) or ("GET", "POST"))})
        message = _body_problem(error.__cause__, request) if status == 400 else _status_line(status, request)
        answer = error_answer(request.scope, ApiError(status, message))
        answer.headers.update(error.headers or {})
        if status == 405:
            answer.headers["allow"] = ", ".join(_methods(request))
        return answer


def _methods(request: Request) -> list[str]:
    """The methods of a path; the web framework lists only those of the first route that matches."""
    routes = (route for route in request.app.state.addresses if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in routes for method in getattr(route, "methods", None) or ()})


def _status_line(status: int, request: Request) -> str:
    """One line about a status of the web framework."""
    path = f"{request.method} {request.scope['path']!r:.80}"
    if status == 404:
        return f"{path}: no such path; allowed: those that GET /openapi.json lists{_nearest(request)}"
    if status == 405:
        return f"{path}: method not allowed; allowed: {', '.join(_methods(request))}"
    if status == 408:
        return "the request body did not arrive in time"
    if status == 413:
        return "the request body is too large"
    return f"{path}: {HTTPStatus(status).phrase.lower()}"


def _nearest(request: Request) -> str:
    """A suggestion of the path that was probably meant, as the end of a message; "" if there is none."""
    sent = request.scope["path"].rstrip("/")
    if sent.startswith(("/v1/files", "/v1/batches")):
        return "; the command `slipstream batch` answers files of requests"
    routes = [route for route in request.app.state.addresses if getattr(route, "include_in_schema", False)]
    paths = [route.path for route in routes if "{" not in route.path]
    same_end = [path for path in paths if sent.endswith(path.removeprefix("/v1"))]
    return f"; did you mean {max(same_end, key=len)!r}?" if same_end else did_you_mean(sent, *paths)


def _body_problem(cause: BaseException | None, request: Request) -> str:
    """The reason why a body could not be read."""
    if coding := request.headers.get("content-encoding"):
        return f"the request body has content-encoding {coding!r:.40}; allowed: none"
    if isinstance(cause, UnicodeDecodeError):
        return f"the request body is not valid UTF-8 at byte {cause.start}"
    if isinstance(cause, RecursionError):
        return "the request body is not valid JSON here: lists and objects are nested too deep"
    if isinstance(cause, ValueError):
        return f"the request body is not valid JSON here: {first_line(cause).partition(';')[0]}"
    return _status_line(400, request)


SOURCES = ("body", "query", "path", "header")  # where a field comes from, as the web framework names it
BRANCHES = ("str", "int", "bool", "float")  # kinds of values of one field, as pydantic names them
# how pydantic words what is allowed, and how we do
WORDING = (
    (r"(?:Input|String|List) should (?:be|have) ", ""),
    (r"greater than or equal to (\S+)", r"\1 or more"),
    (r"less than or equal to (\S+)", r"\1 or less"),
    (r"a valid integer.*", "a whole number"),
    (r"a valid string", "a string"),
    (r"a valid list", "a list"),
    (r"a valid boolean.*", "true or false"),
    (r" after validation, not \d+", ""),
)
MAX_SHOWN = 60  # characters of a value
KINDS: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}
QUOTED = re.compile(r"'([^']*)'")


def validated(kind: type[F], body: Mapping[str, Any]) -> F:
    """A request of this kind; ApiError names the field that is wrong."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise validation_error(error.errors()) from None


def validation_error(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's complaints, with the value that was sent unless it may be a user's text.

    For a field of several types, pydantic reports why each type does not fit. The client probably meant the type whose
    mistake lies deepest, or the type that fits except for its size.
    """
    field = _address(errors[0])[:1]
    field_errors = [error for error in errors if _address(error)[:1] == field]
    first = max(field_errors, key=lambda error: (len(_address(error)), not error["type"].endswith("_type")))
    place = _address(first)
    source = "query." if first["loc"][0:1] == ("query",) else ""
    name = source + ".".join(map(str, place)) or None
    is_wrong_kind, is_choice = first["type"].endswith("_type"), first["type"] == "literal_error"
    if first["type"] == "string_unicode":
        what = f"{name}:" if name else "a field's name"
        return refused(f"{what} has a lone surrogate; allowed: valid Unicode", _without_indexes(place))
    value, near = first["input"], ""
    if place[:1] == ["prompt"] and is_wrong_kind and len(field_errors) > 1:  # some addresses allow lists, too
        forms = "a string, a list of strings, token ids, or lists of token ids"
        return refused(f"{sent('prompt', value)}; allowed: {forms}", "prompt")
    if not place and first["type"] == "model_attributes_type":
        problem = "is not sent as application/json" if isinstance(value, bytes) else f"is {kind_of(value)}"
        return refused(f"the request body {problem}; allowed: a JSON object, sent as application/json")
    if first["type"] == "json_invalid":
        reason = first["ctx"]["error"].removesuffix(" at")
        return refused(f"the request body is not valid JSON at character {first['loc'][1]}: {reason}")
    if first["type"] == "missing":
        return refused(
            f"{name or 'request body'} is missing{misspelled(str(place[-1]), first['input']) if place else ''}", name
        )
    same_place = [error for error in field_errors if _address(error) == place] if is_wrong_kind else [first]
    allowed = [_allowed(error) for error in same_place]
    if is_choice:
        near = did_you_mean(str(value), *QUOTED.findall(first["ctx"]["expected"]))
    is_shown = is_choice or bool(source) or first["type"] in (NOT_IN_RANGE, "bool_type")
    what = sent(name or "request body", value, is_text_shown=is_shown)
    return refused(f"{what}; allowed: {' or '.join(dict.fromkeys(allowed))}{near}", _without_indexes(place))


def sent(name: str, value: Any, *, is_text_shown: bool = False) -> str:
    """The beginning of a refusal: a field and its value; only the type of a value that a user may have written."""
    if type(value) in KINDS and not (is_text_shown and type(value) is str):
        return f"{name}: {kind_of(value)}"
    return f"{name}={shortened(json.dumps(value))}"


def kind_of(value: Any) -> str:
    """The type of a string, list or object, in words; any other JSON value as it is written."""
    kind = KINDS.get(type(value), "") or shortened(json.dumps(value))
    return f"an empty {kind.split()[-1]}" if value in ("", [], {}) else kind


def shortened(text: str) -> str:
    """The beginning of a value, short enough for an error message."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def _without_indexes(place: Sequence[str | int]) -> str | None:
    """The path of the field itself, without indexes of list items at its end."""
    end = len(place)
    while end and isinstance(place[end - 1], int):
        end -= 1
    return ".".join(map(str, place[:end])) or None


def _address(error: Any) -> list[str | int]:
    """The fields and indexes that lead to a mistake, without pydantic's names for types of values."""
    place = [part for index, part in enumerate(error["loc"]) if index or part not in SOURCES]
    # names of types have other characters than those of fields, or begin like classes
    names = [part for part in place if isinstance(part, int) or part.isdecimal() or part.isidentifier()]
    return [part for part in names if isinstance(part, int) or not (part[0].isupper() or part in BRANCHES)]


def _allowed(error: Any) -> str:
    """The allowed values in our words; pydantic would call objects by the names of our classes."""
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "an object"
    text = str(error["msg"])
    for pattern, plain in WORDING:
        text = re.sub(pattern, plain, text)
    return text


def misspelled(name: str, fields: Any) -> str:
    """A hint at a field that was sent and is probably the missing field `name`, misspelled; "" if there is none."""
    near = get_close_matches(name, list(fields), 1, 0.7) if isinstance(fields, dict) else []
    return f"; did you misspell it as {near[0]!r}?" if near else ""
