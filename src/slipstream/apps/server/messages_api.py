"""Anthropic's Messages, which Claude Code speaks: their requests as conversations, and answers as their messages."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, StrictBool

from slipstream.apps.server.answer_state import usage
from slipstream.apps.server.answers import MessageWriter, encoded
from slipstream.apps.server.error_objects import MESSAGES, NO_THREADS, ApiError, refused, sent, validated
from slipstream.apps.server.openai_routes import answer, models_of, served_window, until_gone
from slipstream.apps.server.request_reading import check_json, rendered_chat
from slipstream.apps.server.schemas import (
    FAIL_FAST,
    MAX_TOKENS,
    AnthropicErrorBody,
    ChatFields,
    Fields,
    NumberRange,
    SlipstreamOptions,
    Text,
    refusals,
)
from slipstream.checks import is_whole
from slipstream.tokenization.answer_parser import AnswerPiece
from slipstream.tokenization.tokenizer import ToolCall

router = APIRouter(prefix=MESSAGES, responses=refusals(AnthropicErrorBody))
# edits that shorten a conversation, and the tokens of a prompt from which on they do so by default
SHORTENING = {"clear_tool_uses_20250919": 100_000, "compact_20260112": 150_000}
BILLING = "x-anthropic-billing-header"  # begins a text of Claude Code's that is not for the model
ROLES = {"developer": "system", "ctx": "user", "msg": "user"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
TEXTUAL = ("text", "image")  # blocks of a user's message
SKIPPED = ("redacted_thinking", "server_tool_use", "web_search_tool_result")  # of the assistant's
SENDERS = {"tool_result": "user", "tool_use": "assistant"}  # of blocks
STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
Blocks = Annotated[list[dict[str, Any]], FAIL_FAST]


class Message(Fields):
    """A message, whose content is a text or blocks."""

    role: Literal["user", "assistant", "system", "developer", "ctx", "msg"]
    content: str | Blocks


class Tool(Fields):
    """A tool that the model may call."""

    SILENT = frozenset({"cache_control", "eager_input_streaming", "strict", "input_examples"})

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: StrictBool | None = None


class Choice(Fields):
    """The choice of tools: any, none, one that is named, or the model's own."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool | None = None


class OutputConfig(Fields):
    """The effort of thinking, and the form of the answer."""

    effort: Annotated[str, Field(max_length=32)] | None = None
    format: dict[str, Any] | None = None


class Thinking(Fields):
    """Thinking: on, off or adaptive, and its largest number of tokens."""

    SILENT = frozenset({"display"})

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, NumberRange(0, MAX_TOKENS)] | None = None


class CountedFields(Fields):
    """Body of `POST /v1/messages/count_tokens`."""

    SILENT = frozenset({"metadata", "service_tier", "cache_control", "betas"})

    model: Annotated[str, Field(max_length=1024)] | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    system: str | Blocks | None = None
    tools: Annotated[list[Tool], FAIL_FAST] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: dict[str, Any] | None = None


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


def conversation(fields: CountedFields, window: int) -> ChatFields:
    """A request of this API as one of chat completions; ApiError names what cannot be read.

    window: the most tokens of a prompt and its answer.
    """
    if fields.extra.get("thread"):
        why = "thread: conversations are not stored; allowed: all messages of the conversation, without thread"
        raise refused(why, "thread", NO_THREADS)
    if fields.extra.get("compaction"):
        raise refused("compaction: the server makes no summaries; allowed: a message that asks for one", "compaction")
    check_json("system", fields.system)  # the conversation's messages have other numbers
    for number, message in enumerate(fields.messages):
        check_json(f"messages.{number}", message.content)
    first_thought = _first_thought(fields, window)
    messages: list[dict[str, Any]] = []
    blocks = [{"text": fields.system}] if isinstance(fields.system, str) else fields.system or []
    texts = [str(block.get("text") or "") for block in blocks]
    if system := "\n".join(text for text in texts if text and not text.startswith(BILLING)):
        messages.append({"role": "system", "content": system})
    for number, message in enumerate(fields.messages):
        messages += _messages(f"messages.{number}", message, fields, has_thoughts=number >= first_thought)
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
        chat |= {"stop": fields.stop_sequences, "seed": fields.seed, "slipstream": fields.slipstream}
    last = messages[-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):
        chat["continue_final_message"] = True  # the answer begins with this text
    return validated(ChatFields, chat)


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
        deferred = {"defer_loading": True} if tool.defer_loading else {}
        functions.append({"type": "function", "function": function, **deferred})
    return functions


def _first_thought(fields: CountedFields, window: int) -> int:
    """The index of the first message that keeps its thoughts, by the edits of the conversation that a request asks for.

    ApiError for edits that would shorten it.
    """
    first, edits = 0, (fields.context_management or {}).get("edits") or []
    if not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
        raise refused("context_management.edits is no list of edits; allowed: a list of objects", "context_management")
    for number, edit in enumerate(edits):
        kind, name = edit.get("type"), f"context_management.edits.{number}"
        if kind == "clear_thinking_20251015":
            keep = edit.get("keep") or {"type": "thinking_turns", "value": 1}
            turns = keep.get("value") if isinstance(keep, dict) and keep.get("type") == "thinking_turns" else None
            if is_whole(turns, 1, MAX_TOKENS):
                first = max(first, _first_of_turns(fields.messages, turns))
            elif keep not in ("all", {"type": "all"}):
                turns_allowed = '{"type": "thinking_turns", "value": 1 or more}'
                raise refused(f'{sent(f"{name}.keep", keep)}; allowed: "all" or {turns_allowed}', f"{name}.keep")
            continue
        default = {"type": "input_tokens", "value": SHORTENING.get(str(kind))}
        trigger = edit.get("trigger") or default
        tokens = trigger.get("value") if isinstance(trigger, dict) and trigger.get("type") == "input_tokens" else None
        if kind not in SHORTENING or not is_whole(tokens, window, 1 << 62):
            raise refused(
                f"{name} of type {kind!r:.40}: the server does not shorten conversations; allowed: "
                f"'clear_thinking_20251015', or a trigger of at least {window} input_tokens, which no prompt can reach",
                name,
            )
        fields.ignore(name, "; no prompt reaches its trigger")
    return first


def _first_of_turns(messages: list[Message], count: int) -> int:
    """The index of the first message of the last `count` turns with thoughts.

    A turn of the assistant ends where the user says more than what tools have returned.
    """
    is_new = True
    for index, message in reversed(list(enumerate(messages))):
        kinds = {"text"} if isinstance(message.content, str) else {block.get("type") for block in message.content}
        if message.role != "assistant":
            is_new = is_new or kinds != {"tool_result"}
        elif "thinking" in kinds:
            count, is_new = count - is_new, False
            if count < 0:
                return index + 1
    return 0


def _messages(place: str, message: Message, fields: CountedFields, *, has_thoughts: bool) -> list[dict[str, Any]]:
    """A message as messages of a conversation: results of tools come before the text next to them."""
    role = ROLES.get(message.role, message.role)
    blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for number, block in enumerate(blocks):
        kind, name = block.get("type"), f"{place}.content.{number}"
        if (sender := SENDERS.get(str(kind), role)) != role:
            raise refused(f"{name} of type {kind!r} in a message of role {role!r}; allowed: of role {sender!r}", name)
        if kind in TEXTUAL:
            parts.append(_part(block))
        elif kind == "tool_result":
            content = block.get("content") or ""
            if isinstance(content, list):
                content = _result(name, content, fields)
            elif not isinstance(content, str):
                raise refused(f"{sent(f'{name}.content', content)}; allowed: a string or a list", f"{name}.content")
            call_id = str(block.get("tool_use_id") or "")
            results.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind == "tool_use":
            arguments = block.get("input") or {}
            if not isinstance(arguments, dict | str):
                raise refused(f"{sent(f'{name}.input', arguments)}; allowed: an object", f"{name}.input")
            function = {"name": str(block.get("name")), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts += [str(block.get("thinking") or "")] * has_thoughts
        elif kind == "document" and isinstance(source := block.get("source"), dict) and source.get("type") == "text":
            parts.append({"type": "text", "text": str(source.get("data") or "")})
        elif kind in SKIPPED:
            fields.ignore(f"{name}.{kind}", "; the model is not shown it")
        else:
            raise refused(f"{name} has the type {kind!r:.40}; allowed: text, tool_use, tool_result, thinking", name)
    if role == "assistant":
        thought = {"reasoning_content": "\n\n".join(thoughts)} if any(thoughts) else {}
        return [{"role": role, "content": parts or "", "tool_calls": calls, **thought}]
    return results + ([{"role": role, "content": parts or ""}] if parts or not results else [])


def _result(place: str, blocks: list[Any], fields: CountedFields) -> list[dict[str, Any]]:
    """The parts of a tool's result. It describes the tools that it refers to, as the client's prompt has promised."""
    parts: list[dict[str, Any]] = []
    names: list[Any] = []
    for number, block in enumerate(blocks):
        name = f"{place}.content.{number}"
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise refused(f"{sent(name, block)}; allowed: an object with a type", name)
        if kind in TEXTUAL:
            parts.append(_part(block))
        elif kind == "tool_reference":
            names.append(block.get("tool_name"))
        else:
            fields.ignore(f"{name}.{kind}"[:80], "; the model is told that it is missing")
            parts.append({"type": "text", "text": f"[{kind}, which this model cannot read]"})
    if names:
        offered = [tool for tool in fields.tools or [] if tool.name in names]
        functions = [tool["function"] for tool in _tools(offered) if "function" in tool]
        check_json("tools", functions)
        lines = [f"<function>{json.dumps(function, ensure_ascii=False)}</function>" for function in functions]
        parts.append({"type": "text", "text": "\n".join(["<functions>", *lines, "</functions>"])})
    return parts


def _part(block: dict[str, Any]) -> dict[str, Any]:
    if block.get("type") == "image":
        source = block.get("source")
        source = source if isinstance(source, dict) else {}
        data = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": source.get("url") if source.get("type") == "url" else data}
    return {"type": "text", "text": str(block.get("text") or "")}


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


@router.post("", response_model=None, responses={200: {"content": {"text/event-stream": {}}}})
async def messages(http: Request, fields: MessagesFields) -> Response:
    """Answer a conversation in the form of Anthropic's Messages, whole or as a stream."""
    return await answer(http, conversation(fields, served_window(http, fields.model)), fields, MessagesWriter)


@router.post("/count_tokens", response_model=None)
async def count_tokens(http: Request, fields: CountedFields) -> JSONResponse:
    """The tokens of a conversation's prompt, with its system text, tools and the chat template."""
    served = models_of(http)
    chat = conversation(fields, served_window(http, fields.model))
    async with served.using(served.choose(chat)) as service:
        loaded = service.loaded
        work = loaded.text_pool.run(
            lambda tokenizer: rendered_chat(chat, tokenizer, loaded.rows.reading), http.state.caller
        )
        rendered = await until_gone(http, work)
        service.count_ignored(fields, chat)
    return JSONResponse({"input_tokens": len(rendered.ids)})
