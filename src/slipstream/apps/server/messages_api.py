"""Anthropic's Messages, which Claude Code speaks: their requests as conversations, and answers as their messages."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, StrictBool, ValidationError

from slipstream.apps.server.answer_state import usage
from slipstream.apps.server.answers import MessageWriter, encoded
from slipstream.apps.server.error_objects import MESSAGES, ApiError, refused, validation_error
from slipstream.apps.server.openai_routes import answer, service_of, until_gone
from slipstream.apps.server.request_reading import rendered_chat
from slipstream.apps.server.schemas import (
    FAIL_FAST,
    MAX_TOKENS,
    ChatFields,
    Fields,
    NumberRange,
    SlipstreamOptions,
    Text,
)
from slipstream.tokenization.answer_parser import AnswerPiece
from slipstream.tokenization.tokenizer import ToolCall

router = APIRouter(prefix=MESSAGES)
BILLING = "x-anthropic-billing-header"  # begins a text of Claude Code's that is not for the model
ROLES = {"developer": "system", "ctx": "user", "msg": "user"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
TEXTUAL = ("text", "image")  # blocks of a user's message
SKIPPED = ("redacted_thinking", "server_tool_use", "web_search_tool_result")  # of the assistant's
STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
Blocks = Annotated[list[dict[str, Any]], FAIL_FAST]


class Message(Fields):
    """A message, whose content is a text or blocks."""

    role: Literal["user", "assistant", "system", "developer", "ctx", "msg"]
    content: str | Blocks


class Tool(Fields):
    """A tool that the model may call."""

    SILENT = frozenset({"cache_control", "defer_loading", "eager_input_streaming", "strict", "input_examples"})

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class Choice(Fields):
    """Whether and which tools must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool | None = None


class OutputConfig(Fields):
    """How much to think, and the form of the answer."""

    effort: Annotated[str, Field(max_length=32)] | None = None
    format: dict[str, Any] | None = None


class Thinking(Fields):
    """Whether to think, and at most how much."""

    SILENT = frozenset({"display"})

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, NumberRange(0, MAX_TOKENS)] | None = None


class CountedFields(Fields):
    """Body of `POST /v1/messages/count_tokens`."""

    SILENT = frozenset(
        {"metadata", "service_tier", "container", "context_management", "cache_control", "betas", "mcp_servers"}
    )

    model: Annotated[str, Field(max_length=1024)] | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    system: str | Blocks | None = None
    tools: Annotated[list[Tool], FAIL_FAST] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesFields(CountedFields):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[int, NumberRange(1, MAX_TOKENS)]
    stream: StrictBool | None = None
    stop_sequences: Annotated[list[Text], Field(max_length=32, fail_fast=True)] | None = None
    temperature: Annotated[float, NumberRange(0, 100)] | None = None
    top_p: Annotated[float, NumberRange(0, 1, excludes_low=True)] | None = None
    top_k: Annotated[int, NumberRange(-1, MAX_TOKENS)] | None = None
    seed: Annotated[int, NumberRange(-1, (1 << 63) - 1)] | None = None
    slipstream: SlipstreamOptions | None = None


def conversation(fields: CountedFields) -> ChatFields:
    """A request of this API as one of chat completions; ApiError names what cannot be read."""
    messages: list[dict[str, Any]] = []
    if system := _system_text(fields.system):
        messages.append({"role": "system", "content": system})
    for number, message in enumerate(fields.messages):
        messages += _messages(f"messages.{number}", message, fields)
    chat: dict[str, Any] = {"model": fields.model, "messages": messages, "tools": _tools(fields.tools or [])}
    if (choice := fields.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name or ""}}
        chat["tool_choice"] = named if choice.type == "tool" else CHOICES[choice.type]
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    config = fields.output_config or OutputConfig()
    if fields.thinking is not None:
        chat["thinking"] = fields.thinking.model_dump(include={"type", "budget_tokens"}, exclude_none=True)
    if config.effort is not None and (fields.thinking is None or fields.thinking.type != "disabled"):
        chat["reasoning_effort"] = config.effort
    if (form := config.format) is not None:
        if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
            name = "output_config.format"
            raise refused(f'{name}; allowed: {{"type": "json_schema", "schema": {{...}}}}', name)
        named_schema = {"name": "answer", "schema": form["schema"]}
        chat["response_format"] = {"type": "json_schema", "json_schema": named_schema}
    if isinstance(fields, MessagesFields):
        chat |= {name: getattr(fields, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        chat |= {"stop": fields.stop_sequences, "seed": fields.seed}
        chat["slipstream"] = None if fields.slipstream is None else fields.slipstream.model_dump()
    last = messages[-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):
        chat["continue_final_message"] = True  # the answer begins with this text
    try:
        return ChatFields.model_validate(chat)
    except ValidationError as error:
        raise validation_error(error.errors()) from None


def _system_text(system: str | list[dict[str, Any]] | None) -> str:
    blocks = [{"text": system}] if isinstance(system, str) else system or []
    texts = [str(block.get("text") or "") for block in blocks]
    return "\n".join(text for text in texts if text and not text.startswith(BILLING))


def _tools(tools: list[Tool]) -> list[dict[str, Any]]:
    """The tools as functions; Anthropic's own have another type, and are left out like all that are no functions."""
    functions: list[dict[str, Any]] = []
    for tool in tools:
        if tool.type not in (None, "custom"):
            functions.append({"type": tool.type})
            continue
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        empty = {"type": "object", "properties": {}}
        function["parameters"] = empty | (tool.input_schema or {})
        functions.append({"type": "function", "function": function})
    return functions


def _messages(place: str, message: Message, fields: CountedFields) -> list[dict[str, Any]]:
    """A message as messages of a conversation: results of tools come before the text next to them."""
    role = ROLES.get(message.role, message.role)
    blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for number, block in enumerate(blocks):
        kind, name = block.get("type"), f"{place}.content.{number}"
        if kind in TEXTUAL:
            parts.append(_part(block))
        elif kind == "tool_result":
            results.append(_result(block))
        elif kind == "tool_use":
            function = {"name": str(block.get("name")), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "document" and isinstance(source := block.get("source"), dict) and source.get("type") == "text":
            parts.append({"type": "text", "text": str(source.get("data") or "")})
        elif kind in SKIPPED:
            fields.ignore(f"{name}.{kind}", "; the model is not shown it")
        else:
            raise refused(f"{name} has the type {kind!r:.40}; allowed: text, tool_use, tool_result, thinking", name)
    if role == "assistant":
        content: Any = parts if parts else ""
        return [{"role": role, "content": content, "tool_calls": calls, "reasoning_content": "\n\n".join(thoughts)}]
    return results + ([{"role": role, "content": parts}] if parts else [])


def _part(block: dict[str, Any]) -> dict[str, Any]:
    if block.get("type") == "image":
        return {"type": "image_url"}
    return {"type": "text", "text": str(block.get("text") or "")}


def _result(block: dict[str, Any]) -> dict[str, Any]:
    content = block.get("content") or ""
    if isinstance(content, list):
        content = [_part(part) for part in content if isinstance(part, dict) and part.get("type") in TEXTUAL]
    return {"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": content}


class MessagesWriter(MessageWriter):
    """Writes messages, whole or as events with one open block at a time."""

    DELTAS: ClassVar[dict[str, tuple[str, str]]] = {
        "text": ("text_delta", "text"),
        "thought": ("thinking_delta", "thinking"),
    }
    index = -1  # of the latest block
    open_kind: str | None = None  # of the block that is open
    num_calls = 0

    @property
    def headers(self) -> dict[str, str]:
        return {"request-id": f"req_{self.live.id}"}

    def keep_alive(self) -> bytes:
        return PING if self.has_begun else super().keep_alive()

    def sent(self, item: dict[str, Any]) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (item["type"].encode(), encoded(item))

    def failure(self, error: ApiError) -> bytes:
        return self.sent(error.body(MESSAGES, f"req_{self.live.id}"))

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self.live.id}",
            "type": "message",
            "role": "assistant",
            "model": self.facts.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        counts = usage(self.choices, 1)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts["completion_tokens"],
        }

    def begin(self) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": self._head()}]

    def part(self, part: AnswerPiece) -> list[dict[str, Any]]:
        if part.call is not None:
            block = self._call(part.call, {})
            delta = {"type": "input_json_delta", "partial_json": part.call.arguments}
            return [*self._open("call", block), self._delta(delta)]
        blocks = {
            "text": {"type": "text", "text": ""},
            "thought": {"type": "thinking", "thinking": "", "signature": ""},
        }
        kind, name = self.DELTAS[part.kind]
        begun = [] if part.kind == self.open_kind else self._open(part.kind, blocks[part.kind])
        return [*begun, self._delta({"type": kind, name: part.text})]

    def _call(self, call: ToolCall, arguments: Any) -> dict[str, Any]:
        self.num_calls += 1
        identity = call.id or f"toolu_{self.live.id[:16]}_{self.num_calls}"
        return {"type": "tool_use", "id": identity, "name": call.name, "input": arguments}

    def _open(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        closed = self._close()
        self.index, self.open_kind = self.index + 1, kind
        return [*closed, {"type": "content_block_start", "index": self.index, "content_block": block}]

    def _close(self) -> list[dict[str, Any]]:
        closed = [] if self.open_kind is None else [{"type": "content_block_stop", "index": self.index}]
        self.open_kind = None
        return closed

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self.index, "delta": delta}

    def _stop(self) -> dict[str, Any]:
        stop, reason = self.stop_string, self.choice.finish_reason or "stop"
        kind = "tool_use" if self.num_calls and reason == "stop" else STOP_REASONS.get(reason, "end_turn")
        return {"stop_reason": kind if stop is None or self.num_calls else "stop_sequence", "stop_sequence": stop}

    def end(self) -> list[dict[str, Any]]:
        closed = self._close()
        final = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return [*closed, final | self.report(), {"type": "message_stop"}]

    def whole(self) -> dict[str, Any]:
        message = self.reader.message()
        content: list[dict[str, Any]] = []
        if message.thought:
            content.append({"type": "thinking", "thinking": message.thought, "signature": ""})
        if message.text:
            content.append({"type": "text", "text": message.text})
        content += [self._call(call, json.loads(call.arguments)) for call in message.calls]
        return self._head() | {"content": content} | self._stop() | self.report()


@router.post("", response_model=None)
async def messages(http: Request, fields: MessagesFields) -> Response:
    """Answer a conversation in the form of Anthropic's Messages, whole or as a stream."""
    return await answer(service_of(http), http, conversation(fields), fields, MessagesWriter)


@router.post("/count_tokens", response_model=None)
async def count_tokens(http: Request, fields: CountedFields) -> JSONResponse:
    """The tokens of a conversation's prompt, with its system text, tools and the chat template."""
    service = service_of(http)
    service.check_ready()
    chat = conversation(fields)
    service.check_model(chat)
    reading = service.rows.reading
    work = service.text_pool.run(lambda tokenizer: rendered_chat(chat, tokenizer, reading), http.state.caller)
    rendered = await until_gone(http, work)
    service.count_ignored(fields, chat)
    return JSONResponse({"input_tokens": len(rendered.ids)})
