"""Anthropic's Messages: whole, streamed and counted, with their own errors and headers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.apps.server.answers import PartReader
from slipstream.apps.server.messages_api import CountedFields, conversation
from slipstream.apps.server.request_reading import rendered_chat
from slipstream.tokenization.answer_parser import AnswerPiece
from slipstream.tokenization.tokenizer import ToolCall
from tests.support.chat_templates import decoder_without_tools
from tests.support.markers import subcases
from tests.support.running_server import ARGUMENTS, RunningServer, running_server

PATH = "/v1/messages"
BODY: dict[str, Any] = {
    "model": "claude-opus-4-8",
    "max_tokens": 30,
    "temperature": 0,
    "messages": [{"role": "user", "content": "the cat sat on the mat"}],
}
TOOLS = [{"name": "measure", "description": "what it does", "input_schema": ARGUMENTS}]
FORMAT = {"type": "json_schema", "schema": ARGUMENTS}
PARTS = [
    AnswerPiece("thought", "Let me ", ""),
    AnswerPiece("thought", "think.", ""),
    AnswerPiece("text", "I look.", ""),
    AnswerPiece("call", "", "", ToolCall("measure", '{"x": 1}')),
    AnswerPiece("call", "", "", ToolCall("measure", "{}", "functions.measure:1")),
]


def with_parts(patch: pytest.MonkeyPatch) -> None:
    """Make every answer one of thoughts, text and calls."""
    patch.setattr(PartReader, "read", lambda _, piece: PARTS if piece.finish_reason else [])


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(decoder_without_tools, served_model_name="tiny") as running:
        yield running


def events(server: RunningServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.http.stream("POST", f"{PATH}?beta=true", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["request-id"].startswith("req_")
        lines = [line for line in answer.iter_lines() if line]
    pairs = list(zip(lines[::2], lines[1::2], strict=True))
    data = [json.loads(second.removeprefix("data: ")) for _, second in pairs]
    assert [first for first, _ in pairs] == [f"event: {item['type']}" for item in data]
    return data


@pytest.mark.parametrize("content", [[], [{"type": "thinking", "thinking": "hm"}], ""])
def test_a_question_without_text_is_answered(server: RunningServer, content: Any) -> None:
    assert server.http.post(PATH, json=BODY | {"messages": [{"role": "user", "content": content}]}).status_code == 200


def test_a_stream_is_the_whole_answer(server: RunningServer) -> None:
    whole = server.http.post(PATH, json=BODY)
    assert whole.headers["request-id"].startswith("req_")
    message = whole.json()
    text = message["content"][0]["text"]
    assert message["type"] == "message" and message["role"] == "assistant" and message["model"] == "tiny"
    assert message["stop_reason"] == "max_tokens" and message["stop_sequence"] is None
    data = events(server, BODY)
    names = [item["type"] for item in data]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert data[1]["content_block"] == {"type": "text", "text": ""}
    assert "".join(item["delta"]["text"] for item in data[2:-3]) == text
    start, final = data[0]["message"], data[-2]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["output_tokens"] == 0
    assert final["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert final["usage"]["output_tokens"] == message["usage"]["output_tokens"] == 30
    assert final["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert "per_step_accepted" not in message["metrics"]["speculative_decoding"]
    detailed = server.http.post(PATH, json=BODY | {"slipstream": {"rounds": True}}).json()["metrics"]
    assert sum(detailed["speculative_decoding"]["per_step_drafted"]) > 0


def test_cached_prompt_tokens_are_counted_apart(server: RunningServer) -> None:
    question = [{"role": "user", "content": "a heron stands by the river"}]
    usages = [server.http.post(PATH, json=BODY | {"messages": question}).json()["usage"] for _ in range(2)]
    count = server.http.post(f"{PATH}/count_tokens", json={"messages": question}).json()["input_tokens"]
    totals = [usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in usages]
    assert totals == [count, count] and usages[1]["cache_read_input_tokens"] > usages[0]["cache_read_input_tokens"]
    assert usages[1]["cache_creation_input_tokens"] == 0


def test_tools_and_system_texts_are_counted(server: RunningServer) -> None:
    def count(**fields: Any) -> int:
        body = {"model": "m", "messages": BODY["messages"]} | fields
        return int(server.http.post(f"{PATH}/count_tokens?beta=true", json=body).json()["input_tokens"])

    assert count() < count(system="Be brief.") < count(system="Be brief.", tools=TOOLS)
    billed = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"},
        {"type": "text", "text": "Be brief."},
    ]
    assert count(system=billed) == count(system="Be brief.")


def test_a_stop_sequence_is_named(server: RunningServer) -> None:
    text = server.http.post(PATH, json=BODY).json()["content"][0]["text"]
    stop = text[4:6]
    message = server.http.post(PATH, json=BODY | {"stop_sequences": ["zz" * 9, stop]}).json()
    assert message["stop_reason"] == "stop_sequence" and message["stop_sequence"] == stop
    assert stop not in message["content"][0]["text"]


def test_a_forced_call_is_a_tool_use_block(server: RunningServer) -> None:
    body = BODY | {"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 300}
    message = server.http.post(PATH, json=body).json()
    (block,) = message["content"]
    assert block["type"] == "tool_use" and block["name"] == "measure" and set(block["input"]) == {"x", "unit"}
    assert block["id"].startswith("toolu_") and message["stop_reason"] == "tool_use"
    data = events(server, body)
    (begun,) = [item["content_block"] for item in data if item["type"] == "content_block_start"]
    assert begun["input"] == {} and begun["name"] == "measure"
    (delta,) = [item["delta"] for item in data if item["type"] == "content_block_delta"]
    assert json.loads(delta["partial_json"]) == block["input"]


def test_thoughts_text_and_calls_are_blocks_one_after_the_other(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_parts(monkeypatch)
    content = server.http.post(PATH, json=BODY).json()["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use", "tool_use"]
    assert content[0] == {"type": "thinking", "thinking": "Let me think.", "signature": ""}
    assert [block["input"] for block in content[2:]] == [{"x": 1}, {}]
    assert content[2]["id"].startswith("toolu_") and content[3]["id"] == "functions.measure:1"
    data = [item for item in events(server, BODY) if item["type"].startswith("content_block")]
    assert [item["index"] for item in data] == [0] * 4 + [1] * 3 + [2] * 3 + [3] * 3
    deltas = [item["delta"] for item in data if item["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == [
        *("thinking_delta", "thinking_delta", "text_delta", "input_json_delta", "input_json_delta")
    ]


def test_results_come_before_the_text_next_to_them() -> None:
    blocks = [
        {"type": "text", "text": "and now?"},
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "seen"}, {"type": "image"}]},
        {"type": "tool_result", "tool_use_id": "b", "content": "heard", "is_error": True, "cache_control": {}},
    ]
    made = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "tool_use", "id": "a", "name": "look", "input": {"x": 1}},
    ]
    body = {"messages": [{"role": "assistant", "content": made}, {"role": "user", "content": blocks}]}
    fields = CountedFields.model_validate(body)
    chat = conversation(fields, 4096)
    assert [message.role for message in chat.messages] == ["assistant", "tool", "tool", "user"]
    assert chat.messages[0].extra["reasoning_content"] == "hm"
    only_results = CountedFields.model_validate({"messages": [{"role": "user", "content": blocks[1:]}]})
    assert [message.role for message in conversation(only_results, 4096).messages] == ["tool", "tool"]
    assert list(fields.ignored) == ["messages.0.content.1.redacted_thinking"]


def test_the_model_is_told_of_what_it_cannot_read_in_a_result(server: RunningServer) -> None:
    content = [{"type": "document", "source": {"type": "base64", "data": "x"}}, {"type": "text", "text": "two pages"}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": content}
    prompt = shown(server, {"messages": [{"role": "user", "content": [result]}]})
    assert "[document, which this model cannot read]\ntwo pages" in prompt


def test_deferred_tools_are_described_where_a_result_refers_to_them(server: RunningServer) -> None:
    """The beginning of the prompt stays the same, and the model's calls of such a tool are read."""
    later = TOOLS[0] | {"name": "weigh", "defer_loading": True}
    hidden = later | {"name": "placeholder"}
    asked = {"role": "user", "content": "how heavy is the cat?"}
    search = {"type": "tool_use", "id": "a", "name": "search", "input": {"query": "weigh"}}
    reference = {"type": "tool_reference", "tool_name": "weigh"}
    found = {"type": "tool_result", "tool_use_id": "a", "content": [reference]}
    turns = [asked, {"role": "assistant", "content": [search]}, {"role": "user", "content": [found]}]
    first = shown(server, {"messages": [asked], "tools": [*TOOLS, hidden]})
    second = shown(server, {"messages": turns, "tools": [*TOOLS, hidden, later]})
    assert "weigh" not in first and "placeholder" not in second
    assert second.startswith(first)
    described = json.dumps({"name": "weigh", "description": "what it does", "parameters": ARGUMENTS})
    assert f"<functions>\n<function>{described}</function>\n</functions>" in second
    own_search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}  # which finds nothing
    assert "weigh" in shown(server, {"messages": [asked], "tools": [own_search, *TOOLS, later]})


def shown(server: RunningServer, body: dict[str, Any]) -> str:
    """The prompt of a request."""
    chat = conversation(CountedFields.model_validate(body), 4096)
    tokenizer = server.service.facts.tokenizer
    return str(tokenizer.decode(rendered_chat(chat, tokenizer, server.service.loaded.rows.reading).ids))


def sent(role: str, block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


def thought(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "thinking", "thinking": text}, {"type": "text", "text": text}]}


@subcases(
    "edit, kept",
    [
        (None, "abcd"),
        ({"keep": "all"}, "abcd"),
        ({"keep": {"type": "all"}}, "abcd"),
        ({}, "d"),
        ({"keep": {"type": "thinking_turns", "value": 1}}, "d"),
        ({"keep": {"type": "thinking_turns", "value": 2}}, "bcd"),
        ({"keep": {"type": "thinking_turns", "value": 9}}, "abcd"),
        ({"type": "compact_20260112"}, "abcd"),
        ({"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 4096}}, "abcd"),
    ],
)
def test_edits_of_the_conversation_clear_old_thoughts(edit: dict[str, Any] | None, kept: str) -> None:
    """A result of a tool does not end the assistant's turn."""
    results = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "seen"}]}
    said = {"role": "user", "content": "go on"}
    messages = [said, thought("a"), said, thought("b"), results, thought("c"), said, thought("d")]
    edits = [] if edit is None else [{"type": "clear_thinking_20251015"} | edit]
    fields = CountedFields.model_validate({"messages": messages, "context_management": {"edits": edits}})
    chat = conversation(fields, 4096)
    assert "".join(message.extra.get("reasoning_content", "") for message in chat.messages) == kept
    assert "".join(message.content[0].text for message in chat.messages if message.role == "assistant") == "abcd"  # type: ignore[index, misc, union-attr]
    assert bool(fields.ignored) == (edit is not None and "type" in edit)


@subcases(
    "fields, name",
    [
        ({"compaction": {"type": "summarize"}}, "compaction: the server makes no summaries"),
        (
            {
                "context_management": {
                    "edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 9}}]
                }
            },
            "context_management.edits.0 of type 'compact_20260112'",
        ),
        (
            {
                "context_management": {
                    "edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 9}}]
                }
            },
            "context_management.edits.0 of type 'clear_tool_uses",
        ),
        (
            {"context_management": {"edits": [{"type": "clear_all_20270101"}]}},
            "context_management.edits.0 of type 'clear_all_20270101'",
        ),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "some"}]}},
            'context_management.edits.0.keep: a string; allowed: "all"',
        ),
        ({"context_management": {"edits": {}}}, None),
        ({"context_management": {"edits": "all"}}, "context_management.edits is no list"),
        ({"context_management": {"edits": [1]}}, "context_management.edits is no list"),
    ],
)
def test_edits_that_would_shorten_the_conversation_are_refused(
    server: RunningServer, fields: dict[str, Any], name: str | None
) -> None:
    for path in (PATH, f"{PATH}/count_tokens"):
        answer = server.http.post(path, json=BODY | fields)
        if name is None:
            assert answer.status_code == 200
        else:
            assert answer.status_code == 400 and name in answer.json()["error"]["message"], answer.text


@subcases(
    "fields, status, kind, why",
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens is missing"),
        ({"messages": []}, 400, "invalid_request_error", "messages: an empty list"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "invalid_request_error", None),
        ({"messages": [{"role": "user", "content": "x" * 90_000}]}, 400, "invalid_request_error", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "invalid_request_error",
            "0.content has an image",
        ),
        (sent("user", {"type": "tool_use"}), 400, "invalid_request_error", "messages.0.content.0 of type 'tool_use'"),
        (sent("assistant", {"type": "tool_result"}), 400, "invalid_request_error", "of role 'user'"),
        (
            sent("assistant", {"type": "tool_use", "input": [1]}),
            400,
            "invalid_request_error",
            "content.0.input: a list",
        ),
        (sent("user", {"type": "tool_result", "content": 5}), 400, "invalid_request_error", "content.0.content=5"),
        (
            sent("user", {"type": "tool_result", "content": ["x"]}),
            400,
            "invalid_request_error",
            "content.0.content.0: a string",
        ),
        (
            sent("user", {"type": "tool_result", "content": [{"text": "x"}]}),
            400,
            "invalid_request_error",
            "content.0.content.0: an object; allowed: an object with a type",
        ),
        ({"output_config": {"format": {"type": "xml"}}}, 400, "invalid_request_error", "output_config.format"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, 400, "invalid_request_error", "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "any"}, "output_config": {"format": FORMAT}},
            400,
            "invalid_request_error",
            "output_config.format with tool_choice",
        ),
    ],
)
def test_errors_have_anthropics_form(
    server: RunningServer, fields: dict[str, Any], status: int, kind: str, why: str | None
) -> None:
    body = {name: value for name, value in (BODY | fields).items() if value is not None}
    answer = server.http.post(PATH, json=body)
    error = answer.json()
    assert answer.status_code == status and error["type"] == "error" and error["error"]["type"] == kind, error
    if why is None:  # the words by which Claude Code knows that it must shorten the conversation
        words = error["error"]["message"].split()
        assert words[:4] == ["prompt", "is", "too", "long:"] and int(words[4]) > int(words[7]) == 4096
    else:
        assert why in error["error"]["message"]


@pytest.mark.slow
def test_unknown_addresses_and_keys_have_anthropics_form(tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("ann:secret-key\n")
    with running_server(api_key_file=str(tmp_path / "keys"), strict=True) as server:
        error = server.http.post(PATH, json=BODY).json()
        assert error["type"] == "error" and error["error"]["type"] == "authentication_error"
        headers = {"x-api-key": "secret-key", "authorization": "Bearer wrong"}
        answer = server.http.post(PATH, json=BODY, headers=headers)
        assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"
        assert server.http.get("/v1/messages/none", headers=headers).json()["type"] == "error"


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_conversations_are_not_stored_and_clients_learn_to_send_all_messages(
    server: RunningServer, thread: dict[str, str]
) -> None:
    answer = server.http.post("/v1/messages", json=BODY | {"thread": thread})
    details = answer.json()["error"]["details"]
    assert answer.status_code == 400 and details == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }
    assert server.http.post("/v1/messages", json=BODY | {"thread": None}).status_code == 200
