"""OpenAI's Responses: items, events, continued conversations; through OpenAI's client and as raw events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from slipstream.apps.server import answers
from slipstream.apps.server.answers import AnswerMessage, PartReader
from slipstream.apps.server.responses_api import MAX_RESPONSES, ResponsesFields, ResponseStore, conversation
from tests.apps.server.test_messages_api import with_parts
from tests.support.chat_templates import decoder_without_tools
from tests.support.markers import subcases
from tests.support.processes import PATIENCE
from tests.support.running_server import ARGUMENTS, Gate, RunningServer, in_thread, running_server

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "m", "input": "the cat sat on the mat", "max_output_tokens": 20, "temperature": 0}
TOOL: Any = {"type": "function", "name": "measure", "parameters": ARGUMENTS, "strict": True}
NAMESPACE = {"type": "namespace", "name": "agents", "description": "what they do", "tools": [TOOL | {"name": "close"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(decoder_without_tools, served_model_name="tiny") as running:
        yield running


def events(server: RunningServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.http.stream("POST", PATH, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    pairs = list(zip(lines[::2], lines[1::2], strict=True))
    data = [json.loads(second.removeprefix("data: ")) for _, second in pairs]
    assert [first for first, _ in pairs] == [f"event: {item['type']}" for item in data]
    assert [item["sequence_number"] for item in data] == [*range(len(data))]
    return data


def test_a_stream_is_the_whole_answer(server: RunningServer) -> None:
    whole = server.http.post(PATH, json=BODY | {"max_output_tokens": 5}).json()
    assert whole["object"] == "response" and whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = whole["output"]
    text = item["content"][0]["text"]
    data = events(server, BODY | {"max_output_tokens": 5})
    assert [item["type"] for item in data[:4]] == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added")
    ]
    assert "".join(item["delta"] for item in data if item["type"] == "response.output_text.delta") == text
    assert [item["type"] for item in data[-4:]] == [
        *("response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete")
    ]
    done, last = data[-2]["item"], data[-1]["response"]
    assert done["content"] == item["content"] and last["output"] == [done]
    assert last["usage"]["output_tokens"] == 5 and last["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
    assert whole["usage"]["total_tokens"] == last["usage"]["total_tokens"]
    assert last["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


@pytest.mark.slow
def test_a_request_that_waits_sends_events_as_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "SILENCE_SECONDS", 0.02)
    gate, decoder = Gate(), decoder_without_tools(max_batch_size=1)
    with running_server(lambda: decoder) as server:
        gate.before(decoder)
        with in_thread(lambda: server.http.post(PATH, json=BODY)):
            assert gate.reached.wait(PATIENCE)
            with server.http.stream("POST", PATH, json=BODY | {"stream": True}) as answer:
                items = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
                types = [next(items)["type"] for _ in range(4)]
                gate.opened.set()
                types += [item["type"] for item in items]
    assert types[:4] == ["response.created", *3 * ["response.in_progress"]]
    assert types.count("response.created") == 1 and types[-1] == "response.incomplete"


@pytest.mark.slow
def test_openais_client_streams_continues_and_parses(server: RunningServer) -> None:
    with server.openai() as client:
        stream = client.responses.create(model="m", input="the cat", max_output_tokens=9, temperature=0, stream=True)
        received = list(stream)
        texts = [event.delta for event in received if event.type == "response.output_text.delta"]
        last = received[-1]
        assert last.type == "response.incomplete"
        first = last.response
        assert "".join(texts) == first.output_text and first.usage is not None
        later = client.responses.create(
            model="m", input="and the dog?", previous_response_id=first.id, max_output_tokens=4, temperature=0
        )
        assert later.usage is not None and later.usage.input_tokens > first.usage.input_tokens + 9
        messages: Any = [
            {"role": "user", "content": "the cat"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "and the dog?"},
        ]
        chat = client.chat.completions.create(model="m", messages=messages, max_tokens=4, temperature=0)
        assert chat.choices[0].message.content == later.output_text
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="m", input="x", previous_response_id="resp_none")
        assert caught.value.code == "previous_response_not_found" and caught.value.param == "previous_response_id"
        form: Any = {"format": {"type": "json_schema", "name": "a", "schema": ARGUMENTS, "strict": True}}
        answer = client.responses.create(model="m", input="x", text=form, max_output_tokens=200)
        assert set(json.loads(answer.output_text)) == {"x", "unit"}


def test_a_forced_call_names_its_namespace(server: RunningServer) -> None:
    body = BODY | {"tools": [NAMESPACE, {"type": "web_search"}], "tool_choice": "required", "max_output_tokens": 300}
    body["parallel_tool_calls"] = False
    (item,) = server.http.post(PATH, json=body).json()["output"]
    assert item["type"] == "function_call" and item["namespace"] == "agents" and item["name"] == "close"
    assert set(json.loads(item["arguments"])) == {"x", "unit"} and item["id"] != item["call_id"]
    data = events(server, body)
    names = [event["type"].removeprefix("response.") for event in data[2:-1]]
    assert names == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert data[2]["item"]["arguments"] == "" and data[5]["item"]["arguments"] == data[3]["delta"]


@pytest.mark.parametrize("summary", [None, "auto"])
def test_thoughts_text_and_calls_are_items(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, summary: str | None
) -> None:
    with_parts(monkeypatch)
    body = BODY | ({"reasoning": {"summary": summary}} if summary else {})
    whole = server.http.post(PATH, json=body).json()
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in whole["output"]] == kinds
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "Let me think."}]
    assert bool(whole["output"][0]["summary"]) == (summary is not None)
    assert whole["output"][3]["call_id"] == "functions.measure:1" != whole["output"][2]["call_id"]
    data = events(server, body)
    name = "reasoning_summary_text" if summary else "reasoning_text"
    assert "".join(e["delta"] for e in data if e["type"] == f"response.{name}.delta") == "Let me think."
    done = [event for event in data if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in done] == [0, 1, 2, 3]
    assert [event["item"]["type"] for event in done] == kinds
    assert data[-1]["response"]["output"] == [event["item"] for event in done]


def test_an_empty_answer_is_a_message_whole_and_streamed(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PartReader, "read", lambda reader, piece: [])
    monkeypatch.setattr(PartReader, "message", lambda reader: AnswerMessage("", "", ()))
    (item,) = server.http.post(PATH, json=BODY).json()["output"]
    *_, added, part, text, part_done, done, last = events(server, BODY)
    assert item["content"] == done["item"]["content"] and [done["item"]] == last["response"]["output"]
    names = [event["type"].removeprefix("response.") for event in (added, part, text, part_done, done)]
    assert names == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]


def test_items_of_one_answer_become_one_message() -> None:
    call: dict[str, Any] = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "seen"}]}
    items = [
        {"role": "developer", "content": "rules"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "ask"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        call,
        call | {"call_id": "b", "namespace": "agents"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        output,
        {"type": "message", "role": "assistant", "content": "And again."},
        output | {"call_id": "b", "output": "heard"},
        {"type": "web_search_call", "id": "x"},
    ]
    fields = ResponsesFields.model_validate({"input": items})
    chat = conversation(fields, [], 4096)
    roles = [message.role for message in chat.messages]
    assert roles == ["developer", "user", "assistant", "tool", "tool", "assistant"]
    made = chat.messages[2]
    assert made.content == "I look." and made.extra["reasoning_content"] == "hm"
    assert "reasoning_content" not in chat.messages[5].extra  # nor is it counted as a field without effect
    assert [made_call.function.name for made_call in made.tool_calls or ()] == ["look", "agents__look"]
    assert list(fields.ignored) == ["input.9.web_search_call"]


@pytest.mark.parametrize("entry", [{}, {"compact_threshold": None}, {"compact_threshold": 4096}])
def test_a_compaction_that_no_prompt_can_trigger_is_accepted(entry: dict[str, Any]) -> None:
    fields = ResponsesFields.model_validate({"input": "x", "context_management": [{"type": "compaction"} | entry]})
    assert conversation(fields, [], 4096).messages and list(fields.ignored) == ["context_management.0"]


def test_the_oldest_responses_are_forgotten_and_callers_see_their_own() -> None:
    store = ResponseStore()
    for number in range(MAX_RESPONSES + 1):
        store.add("ann", f"resp_{number}", [])
    assert store.get("ann", "resp_1") == []
    for owner, identity in (("ann", "resp_0"), ("bob", "resp_1")):
        with pytest.raises(Exception, match="is not known; allowed: one of the last"):
            store.get(owner, identity)


def test_a_conversation_that_is_too_long_fails_in_the_form_that_codex_reads(server: RunningServer) -> None:
    body = BODY | {"input": "x" * 5000}
    refused = server.http.post(PATH, json=body)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    last = events(server, body)[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "context_length_exceeded"


@subcases(
    "fields, param",
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "compaction", "encrypted_content": "x"}]}, "input.1"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "compaction_trigger"}]}, "input.1"),
        ({"context_management": [{"type": "compaction", "compact_threshold": 1000}]}, "context_management.0"),
        ({"context_management": [{"type": "compaction"}, {"type": "clear_2027"}]}, "context_management.1"),
        ({"context_management": [{"type": "compaction", "compact_threshold": "1e9"}]}, "context_management.0"),
        ({"context_management": {"type": "compaction"}}, "context_management"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "local_shell_call", "call_id": "x", "action": {}}]}, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input.0.role"),
        ({"input": [{"content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": {"text": "x"}}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input.0.content.0"),
        ({"input": [{"role": "assistant", "content": [{"type": "sound"}]}]}, "input.0.content.0"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": {"found": 2}}]}, "input.0.output"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 2}]}, "input.0.output"),
        ({"temperature": "hot"}, "temperature"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "xml"}}}}, "text.format"),
    ],
)
def test_what_would_change_the_answer_is_refused(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    answer = server.http.post(PATH, json=BODY | fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
