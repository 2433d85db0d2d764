"""The part of Ollama's API that editors and its own client call. Streams are lines of JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import Field, StrictBool

from slipstream.apps.server.answer_state import ModelFacts, public_name, timings
from slipstream.apps.server.answers import MessageWriter, encoded
from slipstream.apps.server.error_objects import OLLAMA, ApiError, refused, validated
from slipstream.apps.server.live_request import LiveRequest
from slipstream.apps.server.openai_routes import STARTED, answer, models_of
from slipstream.apps.server.request_reading import check_extra, check_json
from slipstream.apps.server.schemas import (
    FAIL_FAST,
    MAX_TOKENS,
    CallFields,
    ChatFields,
    CompletionFields,
    Fields,
    NumberRange,
    OllamaErrorBody,
    SlipstreamOptions,
    Text,
    refusals,
    says_something,
)
from slipstream.apps.server.service import Service
from slipstream.tokenization.answer_parser import AnswerPiece
from slipstream.tokenization.infill import InfillTokenizer
from slipstream.tokenization.tokenizer import AnswerTokenizer, ToolCall


class JSONRoute(APIRoute):
    """Reads bodies of every type as JSON: Ollama's examples use curl, which names another type.

    Pages of other sites, which could send such bodies unasked, are refused by their origin.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            others = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
            headers = [*others, (b"content-type", b"application/json")]
            return await handler(Request({**request.scope, "headers": headers}, request.receive))

        return handle


router = APIRouter(prefix=OLLAMA.rstrip("/"), route_class=JSONRoute, responses=refusals(OllamaErrorBody))
VERSION = "0.12.0"  # of Ollama, whose API this is a part of; some clients ask for 0.6.4 or later
LATEST = ":latest"  # the end of a model's name that says nothing
NEVER = timedelta(days=36500)
JSON_LINES = "application/x-ndjson"
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {JSON_LINES: {}}}}
NANOSECONDS = 1_000_000  # in a millisecond


class Options(Fields):
    """Sampling options, of which some have other names in Ollama's API."""

    SILENT = frozenset(
        {"num_ctx", "num_keep", "num_batch", "num_gpu", "num_thread", "main_gpu", "use_mmap", "numa", "low_vram"}
    )

    num_predict: Annotated[int, NumberRange(-2, MAX_TOKENS)] | None = None
    temperature: Annotated[float, NumberRange(0, 100)] | None = None
    top_k: Annotated[int, NumberRange(-1, MAX_TOKENS)] | None = None
    top_p: Annotated[float, NumberRange(0, 1)] | None = None
    min_p: Annotated[float, NumberRange(0, 1)] | None = None
    repetition_penalty: Annotated[
        Annotated[float, NumberRange(0, 100, excludes_low=True)] | None, Field(alias="repeat_penalty")
    ] = None
    presence_penalty: Annotated[float, NumberRange(-100, 100)] | None = None
    frequency_penalty: Annotated[float, NumberRange(-100, 100)] | None = None
    seed: Annotated[int, NumberRange(-1, (1 << 63) - 1)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=32, fail_fast=True)] | None = None
    num_draft_tokens: Annotated[Annotated[int, NumberRange(0, 64)] | None, Field(alias="draft_num_predict")] = None


class Message(Fields):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: Annotated[list[CallFields], FAIL_FAST] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class AnswerFields(Fields):
    """The fields of both kinds of answers."""

    SILENT = frozenset({"truncate", "shift"})

    model: Annotated[str, Field(max_length=1024)]
    stream: StrictBool | None = None
    format: str | dict[str, Any] | None = None
    think: StrictBool | str | None = None
    options: Options | None = None
    # zero in a request without a prompt unloads the model; else it has no effect
    keep_alive: Annotated[float, NumberRange()] | str | None = None
    slipstream: SlipstreamOptions | None = None


class OllamaChatFields(AnswerFields):
    """Body of `POST /api/chat`; without messages, it only asks for the model to be loaded."""

    messages: Annotated[list[Message], FAIL_FAST] | None = None
    tools: Annotated[list[dict[str, Any]], FAIL_FAST] | None = None


class GenerateFields(AnswerFields):
    """Body of `POST /api/generate`."""

    REFUSED: ClassVar[dict[str, str]] = {
        "template": "templates from requests are not run; the model's own is used",
        "context": "contexts are not supported; use /api/chat with all messages",
    }

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: StrictBool | None = None


class ModelFields(Fields):
    """Body of `POST /api/show`."""

    SILENT = frozenset({"verbose", "system", "template", "options"})

    model: str | None = None
    name: str | None = None


def conversation(fields: OllamaChatFields | GenerateFields) -> ChatFields | CompletionFields:
    """A request of this API as one of chat completions, or of completions if it is raw."""
    check_extra(fields, strict=True)
    options = fields.options or Options()
    body: dict[str, Any] = {
        "model": fields.model.removesuffix(LATEST),
        "stream": fields.stream is not False,
        "slipstream": fields.slipstream,
    }
    names = Options.model_fields.keys() - {"num_predict"}
    body |= {name: value for name in names if (value := getattr(options, name)) is not None}
    if body.get("top_p") == 0:  # the likeliest token alone
        body |= {"top_p": 1, "top_k": 1}
    if options.num_predict is not None:
        body["max_tokens"] = options.num_predict if options.num_predict > 0 else MAX_TOKENS  # all that fit
    if isinstance(fields.format, dict):
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": fields.format}}
    elif fields.format:
        if fields.format != "json":
            raise refused(f'format={json.dumps(fields.format)[:60]}; allowed: "json" or a JSON schema', "format")
        body["response_format"] = {"type": "json_object"}
    if isinstance(fields, GenerateFields) and (fields.raw or fields.suffix):
        for name in ("system", "think", "images"):
            if says_something(getattr(fields, name)):
                raise refused(f"{name} with raw or suffix, which use no chat template; allowed: without it", name)
        return validated(CompletionFields, body | {"prompt": fields.prompt or "", "suffix": fields.suffix})
    if fields.think is not None:
        words: dict[bool | str, str] = {True: "on", False: "none"}
        body["reasoning_effort"] = words.get(fields.think, fields.think)
    return validated(ChatFields, body | _turns(fields))


def _turns(fields: OllamaChatFields | GenerateFields) -> dict[str, Any]:
    """The messages and tools of a request."""
    if isinstance(fields, GenerateFields):
        check_json("system", fields.system)
        turns = [("system", fields.system), ("user", _with_images(fields.prompt, fields.images))]
        return {"messages": [{"role": role, "content": content} for role, content in turns if content]}
    messages = []
    waiting: list[CallFields] = []  # calls whose results have not come
    for number, message in enumerate(fields.messages or ()):
        content = _with_images(message.content, message.images)
        shown: dict[str, Any] = {"role": message.role, "content": content, "reasoning_content": message.thinking}
        for index, call in enumerate(message.tool_calls or ()):
            call.id = call.id or f"call_{number}_{index}"  # some clients leave out the ids that other templates need
        waiting = list(message.tool_calls or waiting)
        if message.role == "tool" and not message.tool_call_id:  # the name tells whose result it is
            named = [call for call in waiting if call.function.name == message.tool_name]
            if named:
                waiting.remove(named[0])
                message.tool_call_id = str(named[0].id)
        shown |= {"tool_calls": message.tool_calls} if message.tool_calls else {}
        shown |= {"tool_call_id": message.tool_call_id} if message.tool_call_id else {}
        shown |= {"name": message.tool_name} if message.tool_name else {}
        messages.append(shown)
    return {"messages": messages, "tools": fields.tools}


def _with_images(text: str | None, images: list[str] | None) -> Any:
    """A content as chat completions have it; images come before the text, as Ollama places them."""
    if not images:
        return text or ""
    shown = [{"type": "image_url", "image_url": f"data:;base64,{image}"} for image in images]
    return [*shown, *([{"type": "text", "text": text}] if text else [])]


class OllamaWriter(MessageWriter):
    """Writes answers of chats, or of texts; the last line of a stream has the counts."""

    media_type = JSON_LINES

    def __init__(
        self, live: LiveRequest, fields: ChatFields | CompletionFields, facts: ModelFacts, *, model: str, is_chat: bool
    ) -> None:
        super().__init__(live, fields, facts)
        self._model, self._is_chat, self._num_calls = model, is_chat, 0

    def sent(self, item: dict[str, Any]) -> bytes:
        return encoded(item) + b"\n"

    def failure(self, error: ApiError) -> bytes:
        return self.sent(error.body(OLLAMA))

    def keep_alive(self) -> bytes:
        return self.sent(self._line("", "", []))  # JSON lines have no comments

    def _line(self, text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"model": self._model, "created_at": _time(datetime.now(UTC))}
        thinking = {"thinking": thought} if thought else {}
        if not self._is_chat:
            return {**head, "response": text, **thinking, "done": False}
        called = {"tool_calls": calls} if calls else {}
        return {**head, "message": {"role": "assistant", "content": text, **thinking, **called}, "done": False}

    def begin(self) -> list[dict[str, Any]]:
        return []

    def part(self, part: AnswerPiece) -> list[dict[str, Any]]:
        if part.call is not None:
            self._num_calls += 1
            return [self._line("", "", [_call(part.call, self._num_calls - 1)])]
        return [self._line(*((part.text, "") if part.kind == "text" else ("", part.text)), [])]

    def end(self) -> list[dict[str, Any]]:
        return [self._line("", "", []) | self._counts()]

    def _counts(self) -> dict[str, Any]:
        times = timings(self.choice)
        reading, writing = (int(NANOSECONDS * times[f"{part}_ms"]) for part in ("prompt", "predicted"))
        return {
            "done": True,
            "done_reason": "length" if self.choice.finish_reason == "length" else "stop",
            "total_duration": reading + writing,
            "load_duration": 0,
            "prompt_eval_count": len(self.choice.prompt),
            "prompt_eval_duration": reading,
            "eval_count": times["predicted_n"],
            "eval_duration": writing,
            **self.report(),
        }

    def whole(self) -> dict[str, Any]:
        message = self.reader.message()
        calls = [_call(call, index) for index, call in enumerate(message.calls)]
        return self._line(message.text, message.thought, calls) | self._counts()


def _call(call: ToolCall, index: int) -> dict[str, Any]:
    function = {"index": index, "name": call.name, "arguments": json.loads(call.arguments)}
    return {"function": function} | ({"id": call.id} if call.id else {})


def _time(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")


@router.post("/chat", response_model=None, responses=STREAMED)
async def chat(http: Request, fields: OllamaChatFields) -> Response:
    """Answer a conversation in the form of Ollama's API; a stream unless `stream` is false."""
    return await _answer(http, fields, is_empty=not fields.messages)


@router.post("/generate", response_model=None, responses=STREAMED)
async def generate(http: Request, fields: GenerateFields) -> Response:
    """Answer a prompt in the form of Ollama's API; a stream unless `stream` is false."""
    return await _answer(http, fields, is_empty=not (fields.prompt or fields.suffix))


async def _answer(http: Request, fields: OllamaChatFields | GenerateFields, *, is_empty: bool) -> Response:
    is_chat = isinstance(fields, OllamaChatFields)
    if is_empty:  # a request to load the model, or to unload it unless it is in use
        served = models_of(http)
        service = served.answering(fields.model.removesuffix(LATEST))
        if fields.keep_alive in (0, "0", "0s", "0m", "0h"):
            service.unload()
        else:
            async with served.using(service):
                pass
        reason = "unload" if service.state == "unloaded" else "load"
        text = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
        head = {"model": fields.model, "created_at": _time(datetime.now(UTC))}
        return JSONResponse({**head, **text, "done": True, "done_reason": reason})
    make_writer = partial(OllamaWriter, model=fields.model, is_chat=is_chat)
    return await answer(http, conversation(fields), fields, make_writer)


@router.get("/version", response_model=None)
async def version() -> dict[str, str]:
    """The version of Ollama whose API this is a part of."""
    return {"version": VERSION}


@router.get("/tags", response_model=None)
async def tags(http: Request) -> dict[str, Any]:
    """The models that are served."""
    served = models_of(http)
    served.check_ready()
    return {"models": [card for service in served.services for card in _cards(service)]}


@router.get("/ps", response_model=None)
async def ps(http: Request) -> dict[str, Any]:
    """The models in memory."""
    served = models_of(http)
    served.check_ready()
    services = [service for service in served.services if service.state == "loaded"]
    cards: list[dict[str, Any]] = []
    for service in services:
        idle_seconds = service.idle_seconds_left
        until = datetime.now(UTC) + (NEVER if idle_seconds is None else timedelta(seconds=idle_seconds))
        memory = {"expires_at": _time(until), "size_vram": 0, "context_length": service.limits.window}
        cards += [card | memory for card in _cards(service)]
    return {"models": cards}


@router.post("/show", response_model=None)
async def show(http: Request, fields: ModelFields) -> dict[str, Any]:
    """A model's details: its template for infilling alone, and its context once it has been loaded."""
    service = models_of(http).answering((fields.model or fields.name or "").removesuffix(LATEST))
    card, facts = _cards(service)[0], service.known_facts
    kind = card["details"]["family"]
    window = {} if facts is None else {f"{kind}.context_length": service.limits.window}
    tokenizer = None if facts is None else facts.tokenizer
    infill_tokens = tokenizer.infill_tokens() if isinstance(tokenizer, InfillTokenizer) else None
    return {
        "modelfile": "",
        "parameters": f"num_ctx {service.limits.window}" if window else "",
        "template": "" if infill_tokens is None else infill_tokens.template,  # tells Continue that the model can infill
        "details": card["details"],
        "model_info": {"general.architecture": kind, "general.basename": service.names[0], **window},
        "capabilities": card["capabilities"],
        "modified_at": card["modified_at"],
    }


def _cards(service: Service) -> list[dict[str, Any]]:
    """A model under each of its names."""
    facts = service.known_facts
    family = "unknown" if facts is None else facts.family
    details = {
        "parent_model": "",
        "format": "" if facts is None else facts.format,
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }
    card = {
        "modified_at": _time(datetime.fromtimestamp(STARTED, UTC)),
        "size": 0,
        "digest": hashlib.sha256((service.names[0] if facts is None else facts.fingerprint).encode()).hexdigest(),
        "details": details,
        # before a model has been loaded: what most can do, as clients ask once
        "capabilities": ["completion", "tools"] if facts is None else _capabilities(facts),
    }
    return [{"name": name, "model": name, **card} for name in map(public_name, service.names)]


def _capabilities(facts: ModelFacts) -> list[str]:
    tokenizer, capabilities = facts.tokenizer, ["completion"]
    if facts.sees_images:
        capabilities.append("vision")
    if isinstance(tokenizer, InfillTokenizer) and tokenizer.infill_tokens() is not None:
        capabilities.append("insert")
    if tokenizer is not None and tokenizer.has_chat_template and isinstance(tokenizer, AnswerTokenizer):
        capabilities += ["tools"] if tokenizer.call_text() is not None else []
        capabilities += ["thinking"] if tokenizer.answer_form().thought is not None else []
    return capabilities
