"""OpenAI's Responses, which Codex speaks: their requests as conversations, and answers as their items and events."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request, Response
from pydantic import Field, StrictBool

from slipstream.apps.server.answer_state import ModelFacts, usage
from slipstream.apps.server.answers import HEADERS, MessageWriter, encoded
from slipstream.apps.server.error_objects import ApiError, refused, sent, validated
from slipstream.apps.server.live_request import LiveRequest
from slipstream.apps.server.openai_routes import answer, models_of, served_window
from slipstream.apps.server.request_reading import check_extra, check_json
from slipstream.apps.server.schemas import (
    FAIL_FAST,
    MAX_TOKENS,
    WITHOUT_EFFECT,
    ChatFields,
    Fields,
    NumberRange,
    SlipstreamOptions,
)
from slipstream.checks import is_whole
from slipstream.tokenization.answer_parser import AnswerPiece
from slipstream.tokenization.tokenizer import ToolCall

router = APIRouter()
MAX_RESPONSES = 64  # of a server that requests can continue
MEMBER = "__"  # between a namespace and the name of a tool in it
TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")  # types of text parts
ROLES = ("user", "assistant", "system", "developer")
CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
NO_SUMMARIES = "the server neither makes nor reads summaries; allowed: all items of the conversation"
REFUSED_ITEMS = {  # of which each stands for a part of the conversation, or would shorten it
    "item_reference": "items are not stored; allowed: the item itself, or previous_response_id",
    "compaction": NO_SUMMARIES,
    "compaction_trigger": NO_SUMMARIES,
}
FAILURES = {429: "rate_limit_exceeded"}
Items = Annotated[list[dict[str, Any]], FAIL_FAST]
Messages = list[dict[str, Any]]


class TextOptions(Fields):
    """The form of the answer."""

    SILENT = frozenset({"verbosity"})

    format: dict[str, Any] | None = None


class ReasoningOptions(Fields):
    """The effort of thinking; with `summary`, thoughts are reported as summaries."""

    effort: Annotated[str, Field(max_length=32)] | None = None
    summary: str | None = None


class ResponsesFields(Fields):
    """Body of `POST /v1/responses`."""

    REFUSED: ClassVar[dict[str, str]] = {
        "conversation": "conversations are not stored; use previous_response_id, or send all items",
        "background": "responses are not made in the background; use stream",
        "prompt": "stored prompts are not supported; use instructions and input",
    }
    SILENT = WITHOUT_EFFECT | {"client_metadata", "include", "max_tool_calls", "stream_options", "truncation"}

    model: Annotated[str, Field(max_length=1024)] | None = None
    input: str | Items
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    context_management: Items | None = None
    store: StrictBool | None = None
    stream: StrictBool | None = None
    tools: Items | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    max_output_tokens: Annotated[int, NumberRange(1, MAX_TOKENS)] | None = None
    temperature: Annotated[float, NumberRange(0, 100)] | None = None
    top_p: Annotated[float, NumberRange(0, 1, excludes_low=True)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    seed: Annotated[int, NumberRange(-1, (1 << 63) - 1)] | None = None
    slipstream: SlipstreamOptions | None = None


class ResponseStore:
    """The conversations of the latest responses, so that requests can continue them; each caller sees its own."""

    def __init__(self) -> None:
        self._conversations: OrderedDict[tuple[str, str], Messages] = OrderedDict()

    def add(self, owner: str, identity: str, messages: Messages) -> None:
        """Keep a conversation, and forget the oldest if there are too many."""
        self._conversations[owner, identity] = messages
        if len(self._conversations) > MAX_RESPONSES:
            self._conversations.popitem(last=False)

    def get(self, owner: str, identity: str) -> Messages:
        """The conversation that ended with a response; ApiError if it is not known."""
        if (messages := self._conversations.get((owner, identity))) is None:
            raise refused(
                f"previous_response_id: {identity!r:.80} is not known; allowed: one of the last {MAX_RESPONSES} "
                "responses since the server started that had store=true, or all items in input",
                "previous_response_id",
                "previous_response_not_found",
            )
        return messages


def conversation(fields: ResponsesFields, earlier: Messages, window: int) -> ChatFields:
    """A request of this API as one of chat completions.

    earlier: what the request continues. window: the most tokens of a prompt and its answer.
    """
    check_extra(fields, strict=True)
    for name, value in fields.model_dump(exclude={"input"}).items():  # the answer repeats them
        check_json(name, value)
    for number, entry in enumerate(fields.context_management or []):
        name, kind, threshold = f"context_management.{number}", entry.get("type"), entry.get("compact_threshold")
        if kind != "compaction" or not (threshold is None or is_whole(threshold, window, 1 << 62)):
            raise refused(
                f"{name} of type {kind!r:.40}: the server does not shorten conversations; allowed: 'compaction' with a "
                f"compact_threshold of at least {window} tokens, which no prompt can reach, or without one",
                name,
            )
        fields.ignore(name, "; no prompt reaches its threshold")
    head = [{"role": "system", "content": fields.instructions}] if fields.instructions else []
    if not (messages := head + earlier + input_messages(fields)):
        raise refused("input has no message, call or result; allowed: at least one", "input")
    chat: dict[str, Any] = {
        "model": fields.model,
        "messages": messages,
        "tools": [tool for tool, _ in _tools(fields.tools or [])],
        "tool_choice": _tool_choice(fields.tool_choice),
        "max_completion_tokens": fields.max_output_tokens,
        "reasoning_effort": (fields.reasoning or ReasoningOptions()).effort,
    }
    same = ("stream", "parallel_tool_calls", "temperature", "top_p", "seed", "slipstream")
    chat |= {name: getattr(fields, name) for name in same}
    form = (fields.text or TextOptions()).format
    if form is not None and form.get("type") == "json_schema":
        if not isinstance(form.get("schema"), dict):
            allowed = '{"type": "json_schema", "name": ..., "schema": {...}}'
            raise refused(f"text.format has no schema; allowed: {allowed}", "text.format")
        chat["response_format"] = {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
    elif form is not None:
        chat["response_format"] = form
    return validated(ChatFields, chat)


def input_messages(fields: ResponsesFields) -> Messages:
    """The input as messages; items of the assistant that follow each other become one."""
    if isinstance(fields.input, str):
        return [{"role": "user", "content": fields.input}]
    messages: Messages = []
    for number, item in enumerate(fields.input):
        place, kind = f"input.{number}", item.get("type") or "message"
        if not isinstance(kind, str):
            raise refused(f"{sent(f'{place}.type', kind)}; allowed: a string", f"{place}.type")
        if kind == "message" and item.get("role") != "assistant":
            if (role := item.get("role")) not in ROLES:
                allowed = ", ".join(map(repr, ROLES))
                raise refused(f"{sent(f'{place}.role', role, is_text_shown=True)}; allowed: {allowed}", f"{place}.role")
            messages.append({"role": role, "content": _parts(f"{place}.content", item.get("content"))})
        elif kind in OUTPUTS:
            content = _parts(f"{place}.output", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": content})
        elif kind == "message" or kind in CALLS or kind == "reasoning":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": "", "tool_calls": []})
            _add(messages[-1], place, kind, item)
        elif kind in REFUSED_ITEMS:
            raise refused(f"{place} of type {kind!r}: {REFUSED_ITEMS[kind]}", place)
        else:
            fields.ignore(f"{place}.{kind}"[:80], "; the model is not shown it")
    return _in_order(messages)


def _add(message: dict[str, Any], place: str, kind: str, item: dict[str, Any]) -> None:
    """Add an item to a message of the assistant."""
    if kind == "message":
        text = _text(f"{place}.content", item.get("content"))
        message["content"] = "\n\n".join(filter(None, [message["content"], text]))
    elif kind == "reasoning":
        text = _text(f"{place}.content", item.get("content")) or _text(f"{place}.summary", item.get("summary"))
        if text:
            message["reasoning_content"] = "\n\n".join(filter(None, [message.get("reasoning_content"), text]))
    else:
        name = str(item.get("name"))
        name = f"{item['namespace']}{MEMBER}{name}" if item.get("namespace") else name
        arguments = item.get("arguments") if kind == "function_call" else {"input": str(item.get("input") or "")}
        function = {"name": name, "arguments": arguments or "{}"}
        message["tool_calls"].append({"id": str(item.get("call_id")), "type": "function", "function": function})


def _in_order(messages: Messages) -> Messages:
    """The messages, with all results of calls before what the assistant said between them."""
    result: Messages = []
    for message in messages:
        last = result[-1] if result else None
        if message["role"] == "tool" and last is not None and last["role"] == "assistant" and not last["tool_calls"]:
            before = result[-2] if len(result) > 1 else None
            if before is not None and before["role"] == "tool":
                result.insert(-1, message)  # a text came between the results of several calls
                continue
        result.append(message)
    return result


def _parts(place: str, content: Any) -> str | list[dict[str, Any]]:
    """A content as chat completions have it."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise refused(f"{sent(place, content)}; allowed: a string or a list of parts", place)
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "input_image":
            parts.append({"type": kind, "image_url": part.get("image_url")})
        elif kind in TEXTS:
            parts.append({"type": "text", "text": str(part.get("text") or part.get("refusal") or "")})
        else:
            name = f"{place}.{number}"
            what = f"{name} of type {kind!r:.40}" if isinstance(part, dict) else sent(name, part)
            raise refused(f"{what}; allowed: parts of type input_text, input_image", name)
    return parts


def _text(place: str, content: Any) -> str:
    parts = _parts(place, content)
    return parts if isinstance(parts, str) else "\n".join(part.get("text", "") for part in parts)


def _tools(tools: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """The tools as functions, each with what its calls' items say of it: its name, and its namespace if it has one.

    Tools that are no functions keep their type, and are left out when the request is read.
    """
    result: list[tuple[dict[str, Any], dict[str, str]]] = []
    for tool in tools:
        if tool.get("type") == "namespace" and isinstance(members := tool.get("tools"), list):
            for member, _ in _tools([member for member in members if isinstance(member, dict)]):
                if member.get("type") == "function":
                    name, space = str(member["function"].get("name")), str(tool.get("name"))
                    function = member["function"] | {"name": f"{space}{MEMBER}{name}"}
                    result.append(({"type": "function", "function": function}, {"name": name, "namespace": space}))
        elif tool.get("type", "function") == "function":
            function = {
                name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None
            }
            result.append(({"type": "function", "function": function}, {"name": str(tool.get("name"))}))
        else:
            result.append(({"type": str(tool.get("type"))}, {}))
    return result


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    """A choice as chat completions have it."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = [{"type": "function", "function": {"name": tool.get("name")}} for tool in choice.get("tools") or []]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


class ResponsesWriter(MessageWriter):
    """Writes responses, whole or as events; the last carries the whole response."""

    def __init__(
        self,
        live: LiveRequest,
        fields: ChatFields,
        facts: ModelFacts,
        *,
        request: ResponsesFields,
        store: ResponseStore,
    ) -> None:
        super().__init__(live, fields, facts)
        self._request, self._chat, self._store = request, fields, store
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []  # those that are complete
        self._open: dict[str, Any] | None = None  # the item that text is added to
        self._shows_summary = (request.reasoning or ReasoningOptions()).summary is not None
        self._sequence = 0
        self._members = {tool["function"]["name"]: member for tool, member in _tools(request.tools or []) if member}

    def sent(self, item: dict[str, Any]) -> bytes:
        numbered = {"type": item["type"], "sequence_number": self._sequence} | item
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (item["type"].encode(), encoded(numbered))

    def keep_alive(self) -> bytes:
        """An event, since Codex ends a stream of comments alone after five minutes."""
        if self.has_begun:
            return self.sent({"type": "response.in_progress", "response": self._response("in_progress")})
        self.has_begun = True
        return b"".join(map(self.sent, self.begin()))

    def failure(self, error: ApiError) -> bytes:
        code = error.code or FAILURES.get(error.status, "server_error" if error.status >= 500 else "invalid_prompt")
        response = self._response("failed") | {"error": {"code": code, "message": error.message}}
        return self.sent({"type": "response.failed", "response": response})

    def _response(self, status: str) -> dict[str, Any]:
        request = self._request
        is_over = status in ("completed", "incomplete")
        return {
            "id": f"resp_{self.live.id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self.facts.name,
            "output": list(self._items),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "metadata": request.extra.get("metadata") or {},
            "tools": request.tools or [],
            "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_output_tokens": request.max_output_tokens,
            "previous_response_id": request.previous_response_id,
            "reasoning": (request.reasoning or ReasoningOptions()).model_dump(),
            "text": {"format": (request.text or TextOptions()).format or {"type": "text"}},
            "store": request.store is not False,
            "usage": self._usage() if is_over else None,
        } | (self.report() if is_over else {})

    def _usage(self) -> dict[str, Any]:
        counts = usage(self.choices, 1)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.choice.thought_tokens or 0},
            "total_tokens": counts["total_tokens"],
        }

    def begin(self) -> list[dict[str, Any]]:
        response = self._response("in_progress")
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def part(self, part: AnswerPiece) -> list[dict[str, Any]]:
        if part.call is not None:
            return [*self._close(), *self._call(part.call)]
        kind = "message" if part.kind == "text" else "reasoning"
        begun: list[dict[str, Any]] = []
        if self._open is None or self._open["type"] != kind:
            begun = self._close()
            self._open = self._new_item(kind)
            begun += self._begin_item(self._open)
        self._open["text"] += part.text
        return [*begun, self._delta(self._open, part.text)]

    def _new_item(self, kind: str, text: str = "") -> dict[str, Any]:
        prefix = "msg" if kind == "message" else "rs"
        return {"id": f"{prefix}_{self.live.id}_{len(self._items)}", "type": kind, "text": text}

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self._items)}

    def _begin_item(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        shown = self._item(item | {"text": None}, "in_progress")
        added = {"type": "response.output_item.added", "output_index": len(self._items), "item": shown}
        if item["type"] == "reasoning" and self._shows_summary:
            part = {"summary_index": 0, "part": {"type": "summary_text", "text": ""}}
            return [added, {"type": "response.reasoning_summary_part.added", **self._place(item), **part}]
        part = {"content_index": 0, "part": _content_part(item["type"], "")}
        return [added, {"type": "response.content_part.added", **self._place(item), **part}]

    def _delta(self, item: dict[str, Any], text: str) -> dict[str, Any]:
        place = self._place(item)
        if item["type"] == "message":
            shown = {"content_index": 0, "delta": text, "logprobs": []}
            return {"type": "response.output_text.delta", **place, **shown}
        if self._shows_summary:
            return {"type": "response.reasoning_summary_text.delta", **place, "summary_index": 0, "delta": text}
        return {"type": "response.reasoning_text.delta", **place, "content_index": 0, "delta": text}

    def _close(self) -> list[dict[str, Any]]:
        """The events that complete the open item."""
        if self._open is None:
            return []
        item, self._open = self._open, None
        text, kind = item["text"], item["type"]
        if kind == "reasoning" and self._shows_summary:
            index = {"summary_index": 0}
            names = ("reasoning_summary_text.done", "reasoning_summary_part.done")
            part: dict[str, Any] = {"type": "summary_text", "text": text}
        else:
            index = {"content_index": 0}
            names = ("output_text.done" if kind == "message" else "reasoning_text.done", "content_part.done")
            part = _content_part(kind, text)
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        place = self._place(item)
        return [
            {"type": f"response.{names[0]}", **place, **index, "text": text, **logprobs},
            {"type": f"response.{names[1]}", **place, **index, "part": part},
            self._complete(self._item(item, "completed")),
        ]

    def _item(self, item: dict[str, Any], status: str) -> dict[str, Any]:
        """A message or a reasoning item; its text is None before it has any."""
        text, kind = item["text"], item["type"]
        content = [] if text is None else [_content_part(kind, text)]
        shown = {"id": item["id"], "type": kind, "status": status}
        if kind == "message":
            return shown | {"role": "assistant", "content": content}
        has_summary = self._shows_summary and text is not None
        summary = [{"type": "summary_text", "text": text}] if has_summary else []
        return shown | {"summary": summary, "content": content, "encrypted_content": None}

    def _complete(self, item: dict[str, Any]) -> dict[str, Any]:
        self._items.append(item)
        return {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": item}

    def _call_item(self, call: ToolCall) -> dict[str, Any]:
        number = f"{self.live.id[:16]}_{len(self._items)}"
        name = self._members.get(call.name, {"name": call.name})
        identity = {"id": f"fc_{number}", "type": "function_call", "call_id": call.id or f"call_{number}"}
        return {**identity, **name, "arguments": call.arguments, "status": "completed"}

    def _call(self, call: ToolCall) -> list[dict[str, Any]]:
        item, index = self._call_item(call), len(self._items)
        place = {"item_id": item["id"], "output_index": index}
        begun = item | {"arguments": "", "status": "in_progress"}
        return [
            {"type": "response.output_item.added", "output_index": index, "item": begun},
            {"type": "response.function_call_arguments.delta", **place, "delta": call.arguments},
            {
                "type": "response.function_call_arguments.done",
                **place,
                "name": call.name,
                "arguments": call.arguments,
            },
            self._complete(item),
        ]

    def _finished(self) -> dict[str, Any]:
        """The whole response, which later requests can continue."""
        status = "incomplete" if self.choice.finish_reason == "length" else "completed"
        response = self._response(status)
        if response["store"]:
            earlier = [message.model_dump(exclude_none=True) for message in self._chat.messages]
            earlier = earlier[bool(self._request.instructions) :]
            output = input_messages(ResponsesFields(input=self._items))
            self._store.add(self.live.owner, response["id"], earlier + output)
        return response

    def end(self) -> list[dict[str, Any]]:
        closed = self._close()
        if all(item["type"] == "reasoning" for item in self._items):  # an empty answer is a message, too
            self._open = self._new_item("message")
            closed += self._begin_item(self._open) + self._close()
        response = self._finished()
        return [*closed, {"type": f"response.{response['status']}", "response": response}]

    def whole(self) -> dict[str, Any]:
        message = self.reader.message()
        for kind, text in (("reasoning", message.thought), ("message", message.text)):
            if text or (kind == "message" and not message.calls):
                self._items.append(self._item(self._new_item(kind, text), "completed"))
        for call in message.calls:
            self._items.append(self._call_item(call))
        return self._finished()


def _content_part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


@router.post("/v1/responses", response_model=None, responses={200: {"content": {"text/event-stream": {}}}})
async def responses(http: Request, fields: ResponsesFields) -> Response:
    """Answer a conversation in the form of OpenAI's Responses, whole or as a stream."""
    store: ResponseStore = http.app.state.responses
    earlier: Messages = []
    if fields.previous_response_id is not None:
        earlier = store.get(http.state.owner, fields.previous_response_id)
    make_writer = partial(ResponsesWriter, request=fields, store=store)
    chat = conversation(fields, earlier, served_window(http, fields.model))
    try:
        return await answer(http, chat, fields, make_writer)
    except ApiError as error:
        if not fields.stream or error.code != "context_length_exceeded":
            raise
        # an event of a stream is how Codex understands that a conversation is too long
        http.state.refusal = error.message
        live: LiveRequest = http.state.live
        writer = make_writer(live, chat, models_of(http).named(live.model).facts)
        events = [*map(writer.sent, writer.begin()), writer.failure(error)]
        return Response(b"".join(events), media_type=writer.media_type, headers=HEADERS)
