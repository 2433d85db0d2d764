"""The part of Ollama's API that editors and its own client call. Streams are lines of JSON."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, StrictBool, ValidationError

from slipstream.apps.server.answer_state import ModelFacts, timings, without_folders
from slipstream.apps.server.answers import MessageWriter, encoded
from slipstream.apps.server.error_objects import OLLAMA, ApiError, refused, validation_error
from slipstream.apps.server.live_request import LiveRequest
from slipstream.apps.server.openai_routes import STARTED, answer, service_of
from slipstream.apps.server.schemas import (
    FAIL_FAST,
    MAX_TOKENS,
    ChatFields,
    CompletionFields,
    Fields,
    NumberRange,
    SlipstreamOptions,
    Text,
)
from slipstream.apps.server.service import Service
from slipstream.tokenization.answer_parser import AnswerPiece
from slipstream.tokenization.tokenizer import AnswerTokenizer, Tokenizer, ToolCall

router = APIRouter(prefix=OLLAMA.rstrip("/"))
VERSION = "0.12.0"  # of Ollama, whose API this is a part of; some clients ask for 0.6.4 or later
LATEST = ":latest"  # the end of a model's name that says nothing
NEVER = timedelta(days=36500)
# Ollama's names of options, and ours
OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "stop": "stop",
    "draft_num_predict": "num_draft_tokens",
}
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
NANOSECONDS = 1_000_000  # in a millisecond


class Options(Fields):
    """Sampling options by Ollama's names."""

    SILENT = frozenset(
        {"num_ctx", "num_keep", "num_batch", "num_gpu", "num_thread", "main_gpu", "use_mmap", "numa", "low_vram"}
    )

    num_predict: Annotated[int, NumberRange(-2, MAX_TOKENS)] | None = None
    temperature: Annotated[float, NumberRange(0, 100)] | None = None
    top_k: Annotated[int, NumberRange(-1, MAX_TOKENS)] | None = None
    top_p: Annotated[float, NumberRange(0, 1)] | None = None
    min_p: Annotated[float, NumberRange(0, 1)] | None = None
    repeat_penalty: Annotated[float, NumberRange(0, 100, excludes_low=True)] | None = None
    presence_penalty: Annotated[float, NumberRange(-100, 100)] | None = None
    frequency_penalty: Annotated[float, NumberRange(-100, 100)] | None = None
    seed: Annotated[int, NumberRange(-1, (1 << 63) - 1)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=32, fail_fast=True)] | None = None
    draft_num_predict: Annotated[int, NumberRange(0, 64)] | None = None


class Called(Fields):
    """The function that a call names."""

    SILENT = frozenset({"index"})

    name: str
    arguments: dict[str, Any] | None = None


class MadeCall(Fields):
    """A call that the assistant made."""

    SILENT = frozenset({"type"})

    id: str | None = None
    function: Called


class Message(Fields):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: Annotated[list[MadeCall], FAIL_FAST] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class AnswerFields(Fields):
    """The fields of both kinds of answers."""

    SILENT = frozenset({"keep_alive", "truncate", "shift"})

    model: Annotated[str, Field(max_length=1024)]
    stream: StrictBool | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    options: Options | None = None
    slipstream: SlipstreamOptions | None = None


class OllamaChatFields(AnswerFields):
    """Body of `POST /api/chat`; without messages, it only asks for the model to be loaded."""

    messages: Annotated[list[Message], FAIL_FAST] | None = None
    tools: Annotated[list[dict[str, Any]], FAIL_FAST] | None = None


class GenerateFields(AnswerFields):
    """Body of `POST /api/generate`."""

    REFUSED: ClassVar[dict[str, str]] = {
        "suffix": "filling in the middle is not supported",
        "template": "templates from requests are not run; the model's own is used",
        "context": "contexts are not supported; use /api/chat with all messages",
        "images": "this model reads texts only",
    }

    prompt: str | None = None
    system: str | None = None
    raw: StrictBool | None = None


class ModelFields(Fields):
    """Body of `POST /api/show`."""

    SILENT = frozenset({"verbose", "system", "template", "options"})

    model: str | None = None
    name: str | None = None


def conversation(fields: OllamaChatFields | GenerateFields) -> ChatFields | CompletionFields:
    """A request of this API as one of chat completions, or of completions if it is raw."""
    for name, why in fields.REFUSED.items():
        if fields.extra.get(name):
            raise refused(f"{name}: {why}", name)
    options = fields.options or Options()
    body: dict[str, Any] = {
        "model": fields.model.removesuffix(LATEST),
        "stream": fields.stream is not False,
        **DEFAULTS,
    }
    asked = {ours: getattr(options, name) for name, ours in OPTIONS.items()}
    body |= {name: value for name, value in asked.items() if value is not None}
    if body["top_p"] == 0:  # the likeliest token alone
        body |= {"top_p": 1, "top_k": 1}
    if options.num_predict is not None:
        body["max_tokens"] = options.num_predict if options.num_predict >= 0 else MAX_TOKENS  # all that fit
    if isinstance(fields.format, dict):
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": fields.format}}
    elif fields.format:
        if fields.format != "json":
            raise refused(f'format={json.dumps(fields.format)[:60]}; allowed: "json" or a JSON schema', "format")
        body["response_format"] = {"type": "json_object"}
    body["slipstream"] = None if fields.slipstream is None else fields.slipstream.model_dump()
    try:
        if isinstance(fields, GenerateFields) and fields.raw:
            return CompletionFields.model_validate(body | {"prompt": fields.prompt})
        if fields.think is not None:
            words: dict[bool | str, str] = {True: "on", False: "none"}
            body["reasoning_effort"] = words.get(fields.think, fields.think)
        return ChatFields.model_validate(body | _turns(fields))
    except ValidationError as error:
        raise validation_error(error.errors()) from None


def _turns(fields: OllamaChatFields | GenerateFields) -> dict[str, Any]:
    """The messages and tools of a request."""
    if isinstance(fields, GenerateFields):
        turns = [("system", fields.system), ("user", fields.prompt)]
        return {"messages": [{"role": role, "content": text} for role, text in turns if text]}
    messages = []
    for number, message in enumerate(fields.messages or ()):
        content: Any = message.content or ""
        if message.images:
            images = [{"type": "image_url"} for _ in message.images]
            content = [{"type": "text", "text": content}, *images]
        shown: dict[str, Any] = {"role": message.role, "content": content, "reasoning_content": message.thinking}
        calls = [call.model_dump(include={"id", "function"}) for call in message.tool_calls or ()]
        for index, call in enumerate(calls):  # some clients leave out the ids that other templates need
            call["id"] = call["id"] or f"call_{number}_{index}"
        shown |= {"tool_calls": calls} if calls else {}
        shown |= {"tool_call_id": message.tool_call_id} if message.tool_call_id else {}
        shown |= {"name": message.tool_name} if message.tool_name else {}
        messages.append(shown)
    return {"messages": messages, "tools": fields.tools}


class OllamaWriter(MessageWriter):
    """Writes answers of chats, or of texts; the last line of a stream has the counts."""

    media_type = "application/x-ndjson"

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


@router.post("/chat", response_model=None)
async def chat(http: Request, fields: OllamaChatFields) -> Response:
    """Answer a conversation in the form of Ollama's API; a stream unless `stream` is false."""
    return await _answer(http, fields, is_empty=not fields.messages)


@router.post("/generate", response_model=None)
async def generate(http: Request, fields: GenerateFields) -> Response:
    """Answer a prompt in the form of Ollama's API; a stream unless `stream` is false."""
    return await _answer(http, fields, is_empty=not fields.prompt)


async def _answer(http: Request, fields: OllamaChatFields | GenerateFields, *, is_empty: bool) -> Response:
    service, is_chat = service_of(http), isinstance(fields, OllamaChatFields)
    if is_empty:  # a request to load the model, which is loaded
        service.check_ready()
        text = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
        head = {"model": fields.model, "created_at": _time(datetime.now(UTC))}
        return JSONResponse({**head, **text, "done": True, "done_reason": "load"})
    make_writer = partial(OllamaWriter, model=fields.model, is_chat=is_chat)
    return await answer(service, http, conversation(fields), fields, make_writer)


@router.get("/version", response_model=None)
async def version() -> dict[str, str]:
    """The version of Ollama whose API this is a part of."""
    return {"version": VERSION}


@router.get("/tags", response_model=None)
async def tags(http: Request) -> dict[str, Any]:
    """The models that are served."""
    return {"models": _models(service_of(http))}


@router.get("/ps", response_model=None)
async def ps(http: Request) -> dict[str, Any]:
    """The models in memory: all that are served."""
    service = service_of(http)
    models = _models(service)
    loaded = {
        "expires_at": _time(datetime.now(UTC) + NEVER),
        "size_vram": 0,
        "context_length": service.rows.max_model_len,
    }
    return {"models": [model | loaded for model in models]}


@router.post("/show", response_model=None)
async def show(http: Request, fields: ModelFields) -> dict[str, Any]:
    """What is known about the model; its chat template is not revealed."""
    service = service_of(http)
    models = _models(service)
    asked = (fields.model or fields.name or "").removesuffix(LATEST)
    if service.settings.strict and asked not in service.names:
        raise ApiError(404, f"model {asked!r:.200} not found; allowed: {', '.join(service.names)}")
    details = models[0]["details"]
    kind = details["family"]
    return {
        "modelfile": "",
        "parameters": f"num_ctx {service.rows.max_model_len}",
        "template": "",
        "details": details,
        "model_info": {
            "general.architecture": kind,
            "general.basename": service.names[0],
            f"{kind}.context_length": service.rows.max_model_len,
        },
        "capabilities": _capabilities(service.facts.tokenizer),
        "modified_at": models[0]["modified_at"],
    }


def _models(service: Service) -> list[dict[str, Any]]:
    service.check_ready()
    target = service.decoder.target
    family = str(getattr(getattr(target.model, "config", None), "model_type", "") or "unknown")
    details = {
        "parent_model": "",
        "format": "gguf" if target.name.endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }
    card = {
        "modified_at": _time(datetime.fromtimestamp(STARTED, UTC)),
        "size": 0,
        "digest": hashlib.sha256(service.facts.fingerprint.encode()).hexdigest(),
        "details": details,
        "capabilities": _capabilities(service.facts.tokenizer),
    }
    return [{"name": name, "model": name, **card} for name in map(without_folders, service.names)]


def _capabilities(tokenizer: Tokenizer | None) -> list[str]:
    capabilities = ["completion"]
    if tokenizer is not None and tokenizer.has_chat_template and isinstance(tokenizer, AnswerTokenizer):
        capabilities += ["tools"] if tokenizer.call_text() is not None else []
        capabilities += ["thinking"] if tokenizer.answer_form().thought is not None else []
    return capabilities
