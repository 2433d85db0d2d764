"""OpenAI's Responses, which Codex speaks: their requests as conversations, and answers as their items and events."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request, Response
from pydantic import Field, StrictBool, ValidationError

from slipstream.apps.server.answer_state import ModelFacts, usage
from slipstream.apps.server.answers import HEADERS, AnswerMessage, MessageWriter, encoded
from slipstream.apps.server.error_objects import ApiError, refused, validation_error
from slipstream.apps.server.live_request import LiveRequest
from slipstream.apps.server.openai_routes import answer, service_of
from slipstream.apps.server.schemas import (
    FAIL_FAST,
    MAX_TOKENS,
    WITHOUT_EFFECT,
    ChatFields,
    Fields,
    NumberRange,
    SlipstreamOptions,
)
from slipstream.tokenization.answer_parser import AnswerPiece
from slipstream.tokenization.tokenizer import ToolCall

router = APIRouter()
MAX_RESPONSES = 64  # of a server that requests can continue
MEMBER = "__"  # between a namespace and the name of a tool in it
TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")  # types of text parts
CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
FAILURES = {429: "rate_limit_exceeded"}
Items = Annotated[list[dict[str, Any]], FAIL_FAST]
Messages = list[dict[str, Any]]


class TextOptions(Fields):
    """The form of the answer."""

    SILENT = frozenset({"verbosity"})

    format: dict[str, Any] | None = None


class ReasoningOptions(Fields):
    """How much to think, and whether thoughts are reported as summaries."""

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


def conversation(fields: ResponsesFields, earlier: Messages) -> ChatFields:
    """A request of this API as one of chat completions. earlier: what the request continues."""
    for name, why in fields.REFUSED.items():
        if fields.extra.get(name):
            raise refused(f"{name}: {why}", name)
    head = [{"role": "system", "content": fields.instructions}] if fields.instructions else []
    chat: dict[str, Any] = {
        "model": fields.model,
        "messages": head + earlier + input_messages(fields),
        "tools": [tool for tool, _ in _tools(fields.tools or [])],
        "tool_choice": _tool_choice(fields.tool_choice),
        "max_completion_tokens": fields.max_output_tokens,
        "reasoning_effort": None if fields.reasoning is None else fields.reasoning.effort,
        "slipstream": None if fields.slipstream is None else fields.slipstream.model_dump(),
    }
    chat |= {name: getattr(fields, name) for name in ("stream", "parallel_tool_calls", "temperature", "top_p", "seed")}
    form = None if fields.text is None else fields.text.format
    if form is not None and form.get("type") == "json_schema":
        chat["response_format"] = {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
    elif form is not None:
        chat["response_format"] = form
    try:
        return ChatFields.model_validate(chat)
    except ValidationError as error:
        raise validation_error(error.errors()) from None


def input_messages(fields: ResponsesFields) -> Messages:
    """The input as messages; items of the assistant that follow each other become one."""
    if isinstance(fields.input, str):
        return [{"role": "user", "content": fields.input}]
    messages: Messages = []
    for number, item in enumerate(fields.input):
        place, kind = f"input.{number}", item.get("type") or "message"
        if kind == "message" and item.get("role") != "assistant":
            messages.append({"role": str(item.get("role")), "content": _parts(item.get("content"))})
        elif kind in OUTPUTS:
            output = {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": _parts(item.get("output"))}
            messages.append(output)
        elif kind == "message" or kind in CALLS or kind == "reasoning":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []})
            _add(messages[-1], kind, item)
        elif kind == "item_reference":
            raise refused(f"{place}: items are not stored; allowed: the item itself, or previous_response_id", place)
        else:
            fields.ignore(f"{place}.{kind}"[:80], "; the model is not shown it")
    return _in_order(messages)


def _add(message: dict[str, Any], kind: str, item: dict[str, Any]) -> None:
    """Add an item to a message of the assistant."""
    if kind == "message":
        message["content"] = "\n\n".join(filter(None, [message["content"], _text(item.get("content"))]))
    elif kind == "reasoning":
        text = _text(item.get("content")) or _text(item.get("summary"))
        message["reasoning_content"] = "\n\n".join(filter(None, [message["reasoning_content"], text]))
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


def _parts(content: Any) -> Any:
    """A content as chat completions have it."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        parts.append(
            {"type": "text", "text": str(part.get("text") or part.get("refusal") or "")}
            if kind in TEXTS
            else {"type": kind or "none"}
        )
    return parts


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part.get("text") or part.get("refusal") or "") for part in parts if isinstance(part, dict))


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
        self, live: LiveRequest, fields: ChatFields, facts: ModelFacts, *, asked: ResponsesFields, store: ResponseStore
    ) -> None:
        super().__init__(live, fields, facts)
        self._asked, self._chat, self._store = asked, fields, store
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []  # those that are complete
        self._open: dict[str, Any] | None = None  # the item that text is added to
        self._shows_summary = asked.reasoning is not None and asked.reasoning.summary is not None
        self._sequence = 0
        self._members = {tool["function"]["name"]: member for tool, member in _tools(asked.tools or []) if member}

    def sent(self, item: dict[str, Any]) -> bytes:
        numbered = {"type": item["type"], "sequence_number": self._sequence} | item
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (item["type"].encode(), encoded(numbered))

    def keep_alive(self) -> bytes:
        if not self.has_begun:
            return super().keep_alive()
        return self.sent({"type": "response.in_progress", "response": self._response("in_progress")})

    def failure(self, error: ApiError) -> bytes:
        code = error.code or FAILURES.get(error.status, "server_error" if error.status >= 500 else "invalid_prompt")
        response = self._response("failed") | {"error": {"code": code, "message": error.message}}
        return self.sent({"type": "response.failed", "response": response})

    def _response(self, status: str) -> dict[str, Any]:
        asked = self._asked
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
            "instructions": asked.instructions,
            "metadata": asked.extra.get("metadata") or {},
            "tools": asked.tools or [],
            "tool_choice": asked.tool_choice or "auto",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "max_output_tokens": asked.max_output_tokens,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": None, "summary": None} if asked.reasoning is None else asked.reasoning.model_dump(),
            "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
            "store": asked.store is not False,
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
        begun = (
            [] if self._open is not None and self._open["type"] == kind else [*self._close(), *self._begin_item(kind)]
        )
        assert self._open is not None
        self._open["text"] += part.text
        return [*begun, self._delta(part.text)]

    @property
    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._items)}

    def _begin_item(self, kind: str) -> list[dict[str, Any]]:
        prefix = "msg" if kind == "message" else "rs"
        self._open = {"id": f"{prefix}_{self.live.id}_{len(self._items)}", "type": kind, "text": ""}
        item = {"type": "response.output_item.added", "output_index": len(self._items)}
        added = item | {"item": self._item(self._open | {"text": None}, "in_progress")}
        if kind == "reasoning" and self._shows_summary:
            part = {"summary_index": 0, "part": {"type": "summary_text", "text": ""}}
            return [added, {"type": "response.reasoning_summary_part.added", **self._place, **part}]
        return [
            added,
            {"type": "response.content_part.added", **self._place, "content_index": 0, "part": self._part("")},
        ]

    def _part(self, text: str) -> dict[str, Any]:
        assert self._open is not None
        return _content_part(self._open["type"], text)

    def _delta(self, text: str) -> dict[str, Any]:
        assert self._open is not None
        if self._open["type"] == "message":
            shown: dict[str, Any] = {"content_index": 0, "delta": text, "logprobs": []}
            return {"type": "response.output_text.delta", **self._place, **shown}
        if self._shows_summary:
            return {"type": "response.reasoning_summary_text.delta", **self._place, "summary_index": 0, "delta": text}
        return {"type": "response.reasoning_text.delta", **self._place, "content_index": 0, "delta": text}

    def _close(self) -> list[dict[str, Any]]:
        """The events that complete the open item."""
        if self._open is None:
            return []
        text, kind = self._open["text"], self._open["type"]
        if kind == "reasoning" and self._shows_summary:
            index: dict[str, Any] = {"summary_index": 0}
            names = ("reasoning_summary_text.done", "reasoning_summary_part.done")
            part: dict[str, Any] = {"type": "summary_text", "text": text}
        else:
            index = {"content_index": 0}
            names = ("output_text.done" if kind == "message" else "reasoning_text.done", "content_part.done")
            part = self._part(text)
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        done = [
            {"type": f"response.{names[0]}", **self._place, **index, "text": text, **logprobs},
            {"type": f"response.{names[1]}", **self._place, **index, "part": part},
        ]
        item, self._open = self._item(self._open, "completed"), None
        return [*done, self._done(item)]

    def _item(self, item: dict[str, Any], status: str) -> dict[str, Any]:
        """A message or a reasoning item; its text is None before it has any."""
        text, kind = item["text"], item["type"]
        content = [] if text is None else [_content_part(kind, text)]
        shown = {"id": item["id"], "type": kind, "status": status}
        if kind == "message":
            return shown | {"role": "assistant", "content": content}
        if self._shows_summary:
            summary = [] if text is None else [{"type": "summary_text", "text": text}]
            return shown | {"summary": summary, "content": content, "encrypted_content": None}
        return shown | {"summary": [], "content": content, "encrypted_content": None}

    def _done(self, item: dict[str, Any]) -> dict[str, Any]:
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
            self._done(item),
        ]

    def _finished(self) -> dict[str, Any]:
        """The whole response, which later requests can continue."""
        status = "incomplete" if self.choice.finish_reason == "length" else "completed"
        response = self._response(status)
        if response["store"]:
            earlier = [message.model_dump(exclude_none=True) for message in self._chat.messages]
            earlier = earlier[bool(self._asked.instructions) :]
            again = ResponsesFields(input=self._items)
            self._store.add(self.live.owner, response["id"], earlier + input_messages(again))
        return response

    def end(self) -> list[dict[str, Any]]:
        closed = self._close()
        response = self._finished()
        return [*closed, {"type": f"response.{response['status']}", "response": response}]

    def whole(self) -> dict[str, Any]:
        message: AnswerMessage = self.reader.message()
        for kind, text in (("reasoning", message.thought), ("message", message.text)):
            if text or (kind == "message" and not message.calls):
                prefix = "msg" if kind == "message" else "rs"
                item = {"id": f"{prefix}_{self.live.id}_{len(self._items)}", "type": kind, "text": text}
                self._items.append(self._item(item, "completed"))
        for call in message.calls:
            self._items.append(self._call_item(call))
        return self._finished()


def _content_part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


@router.post("/v1/responses", response_model=None)
async def responses(http: Request, fields: ResponsesFields) -> Response:
    """Answer a conversation in the form of OpenAI's Responses, whole or as a stream."""
    store: ResponseStore = http.app.state.responses
    earlier: Messages = []
    if fields.previous_response_id is not None:
        earlier = store.get(http.state.owner, fields.previous_response_id)
    make_writer = partial(ResponsesWriter, asked=fields, store=store)

    def refuse(live: LiveRequest, error: ApiError) -> Response | None:
        """Tell a client of a stream that its conversation is too long in the form in which Codex understands it."""
        if not fields.stream or error.code != "context_length_exceeded":
            return None
        chat = conversation(fields, earlier)
        writer = make_writer(live, chat, service_of(http).facts)
        events = [*map(writer.sent, writer.begin()), writer.failure(error)]
        return Response(b"".join(events), media_type=writer.media_type, headers=HEADERS)

    return await answer(service_of(http), http, conversation(fields, earlier), fields, make_writer, refuse)
