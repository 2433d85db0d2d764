"""Tools are shown to the model by its template, and calls are read back from its answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.apps.server.answer_state import ModelFacts
from slipstream.apps.server.answers import ChatWriter
from slipstream.apps.server.error_objects import ApiError
from slipstream.apps.server.live_request import Committed, Job, LiveRequest
from slipstream.apps.server.request_reading import Reading, rendered_chat
from slipstream.apps.server.schemas import ChatFields, MessageFields
from slipstream.core.rounds import Round
from slipstream.core.types import Row
from slipstream.models.toy import ToyTokenizer
from slipstream.text.detokenizer import new_text, read_as_committed
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from tests.support import tiny_models
from tests.support.markers import subcases
from tests.support.running_server import RunningServer, running_server

TEMPLATE = (
    "{% if tools %}{% for t in tools %}tool:{{ t['function']['name'] }} <tool_call>.{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}."
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}a:"
)
EXTRA = '<>_{}"/1[]'
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'

STRICT = Reading(strict=True)


def tokenizer() -> Any:
    return tiny_models.tokenizer(list(EXTRA), TEMPLATE)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    inner = tokenizer()
    model = tiny_models.fresh("llama", vocab_size=len(inner))
    with running_server(
        lambda: SpeculativeDecoder(model, tokenizer=inner, drafter="none", reproducible=False, acceptance="match"),
        strict=True,
    ) as running:
        yield running


MARKED = '<tool_call>{"name": "add", "arguments": {"x": "a</tool_call>b<tool_call>{"}}</tool_call>'


@pytest.mark.slow
@subcases("cut", range(1, len(CALL)))
def test_calls_before_a_truncated_call_are_reported(cut: int) -> None:
    chunks, whole = written(f"so {CALL}{MARKED}{CALL[:-cut]}", 7, "length")
    for calls in (whole["message"]["tool_calls"], streamed_calls(chunks)):
        # a call is complete as soon as its JSON is, without the closing mark
        assert [json.loads(call["function"]["arguments"])["x"] for call in calls][:2] == [
            1,
            "a</tool_call>b<tool_call>{",
        ]
        assert len(calls) == 2 + (cut <= len("</tool_call>"))
    assert (
        whole["message"]["content"].removeprefix("so").strip() in CALL
        and whole["finish_reason"] == chunks[-1]["finish_reason"] == "length"
    )


@subcases("arguments", ["5", "[1]", '"x"', [1], 5, True, "[" * 100_000])
def test_arguments_of_earlier_calls_must_be_json_objects(server: RunningServer, arguments: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "messages.1.tool_calls.0.function.arguments"
    assert error["message"].endswith("; allowed: a JSON object")


def test_tools_reach_the_template_unless_tool_choice_is_none(server: RunningServer) -> None:
    def prompt(**fields: Any) -> list[int]:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "return_token_ids": True} | fields
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["prompt_token_ids"])

    bare = prompt()
    assert len(prompt(tools=TOOLS)) == len(prompt(tools=TOOLS, tool_choice="auto")) > len(bare)
    assert prompt(tools=TOOLS, tool_choice="none") == bare


def test_calls_of_earlier_turns_are_shown_to_the_template_as_objects(server: RunningServer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "content": "2", "tool_call_id": "c"})
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    ids = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["prompt_token_ids"]
    assert tokenizer().convert_tokens_to_ids("1") in ids


def streamed_calls(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]


def written(text: str, cuts: int, reason: str = "stop", **options: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The chunks and the whole answer of a text that comes in rounds of `cuts` tokens."""
    ours = HFTokenizer(tokenizer())
    ids = [*ours.bare(text), *([1] if reason == "stop" else [])]
    fields = ChatFields(messages=[MessageFields(role="user", content="hi")], tools=TOOLS, **options)
    row = Row(0, ours.bare("u:hi.a:"), SamplingParams(max_tokens=len(ids)), 0, frozenset({1}))
    read_as_committed(row, ours)
    facts = ModelFacts("m", "f", True, lambda round: "none", True, ours)

    async def work() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        live = LiveRequest()
        live.jobs = [Job(live, 0, row)]
        writer, whole, chunks = ChatWriter(live, fields, facts), ChatWriter(live, fields, facts), []
        for at in range(0, len(ids), cuts):
            round = Round(0, 0, 1, at, (), row.commit(ids[at : at + cuts]), 0, False, row.finish_reason)
            event = Committed(0, round, 0.0, new_text(row, ours))
            chunks += [chunk["choices"][0] for chunk in writer.take(event)]
            whole.note(event)
        return chunks, whole.whole()["choices"][0]

    return asyncio.run(work())


@pytest.mark.parametrize("cuts", [1, 4, 1000])
def test_a_stream_gives_the_text_as_it_comes_and_the_calls_at_the_end(cuts: int) -> None:
    chunks, whole = written(f"let me see {CALL}", cuts)
    text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
    assert text.strip() == "let me see" == whole["message"]["content"]
    (call,) = chunks[-2]["delta"]["tool_calls"]
    assert call["index"] == 0 and call["function"]["name"] == "add"
    assert whole["message"]["tool_calls"] == [{name: value for name, value in call.items() if name != "index"}]
    assert chunks[-1]["finish_reason"] == whole["finish_reason"] == "tool_calls"
    assert chunks[-2]["finish_reason"] is None and chunks[-1]["delta"] == {}
    assert all("tool_calls" not in chunk["delta"] for chunk in chunks[:-2])


@pytest.mark.parametrize("cuts", [1, 5])
@pytest.mark.parametrize("text", ["nothing to call <tool", "broken <tool_call>{oops"])
def test_text_that_only_starts_like_a_call_is_not_lost(text: str, cuts: int) -> None:
    chunks, whole = written(text, cuts, "length")
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == text == whole["message"]["content"]
    assert chunks[-1]["finish_reason"] == whole["finish_reason"] == "length"


@pytest.mark.parametrize(("parallel", "count"), [(None, 2), (True, 2), (False, 1)])
def test_only_one_call_is_reported_without_parallel_tool_calls(parallel: bool | None, count: int) -> None:
    chunks, whole = written(CALL + CALL.replace("1", "[1]"), 1, parallel_tool_calls=parallel)
    assert len(streamed_calls(chunks)) == len(whole["message"]["tool_calls"]) == count
    assert [call["index"] for call in streamed_calls(chunks)] == [*range(count)]
    assert json.loads(whole["message"]["tool_calls"][0]["function"]["arguments"]) == {"x": 1}


CALLED = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@subcases(
    "fields, param",
    [
        ({"tools": TOOLS}, "tools"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALLED]}]}, "messages.0.tool_calls"),
    ],
)
def test_fields_that_need_a_chat_template_are_refused_without_one(fields: dict[str, Any], param: str) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}]} | fields
    with pytest.raises(ApiError, match="no chat template") as refusal:
        rendered_chat(ChatFields.model_validate(asked), ToyTokenizer(), STRICT)
    assert refusal.value.status == 400 and refusal.value.param == param
    if param != "reasoning_effort":  # this template does not read it
        rendered_chat(ChatFields.model_validate(asked | {"chat_template_kwargs": {}}), HFTokenizer(tokenizer()), STRICT)


class Opening(ToyTokenizer):
    """Puts the token 256 before every text."""

    def encode(self, text: str) -> list[int]:
        return [256, *text.encode()]

    def bare(self, text: str) -> list[int]:
        return [*text.encode()]


def test_special_tokens_are_added_to_texts_but_not_to_templated_chats() -> None:
    asked = [MessageFields(role="user", content="hi")]
    with pytest.raises(ApiError, match="add_special_tokens=true; allowed: false"):
        rendered_chat(ChatFields(messages=asked, add_special_tokens=True), HFTokenizer(tokenizer()), STRICT)
    encoded = [
        rendered_chat(ChatFields(messages=asked, add_special_tokens=add_special), Opening(), STRICT).ids
        for add_special in (None, False)
    ]
    assert encoded == [[256, *b"hi"], [*b"hi"]]


HALF = "\ud800"  # half of a surrogate pair
DEEP: Any = 1
for _ in range(100_000):  # deep enough for Python 3.13, which allows more nesting than 3.12
    DEEP = [DEEP]


@subcases(
    "fields, place",
    [
        ({"messages": [{"role": "assistant", "tool_calls": [CALLED | {"id": HALF}]}]}, "messages.0"),
        ({"chat_template_kwargs": {"x": HALF}}, "chat_template_kwargs"),
        *(
            ({"messages": [{"role": "assistant", "tool_calls": [CALLED | {"function": called}]}]}, "messages.0")
            for called in (
                {"name": "add", "arguments": {"x": HALF}},
                {"name": "add", "arguments": '{"x": "\\ud800"}'},
                {"name": HALF, "arguments": {}},
                {"name": "add", "arguments": {"x": DEEP}},
            )
        ),
    ],
)
def test_lone_surrogates_and_excessive_nesting_are_refused_by_name(fields: dict[str, Any], place: str) -> None:
    asked = ChatFields.model_validate({"messages": [{"role": "user", "content": "hi"}]} | fields)
    with pytest.raises(ApiError, match=f"^{place} (has a lone surrogate|is nested too deep); allowed: ") as refusal:
        rendered_chat(asked, HFTokenizer(tokenizer()), STRICT)
    assert refusal.value.status == 400 and refusal.value.param == place


@pytest.mark.parametrize(("behind", "more"), [("", ""), ("\n", ""), (f" and {CALL}", "\nand"), (" or so", "\nor so")])
def test_the_content_of_an_answer_is_the_text_around_its_calls(behind: str, more: str) -> None:
    chunks, whole = written(f"let me see {CALL}{behind}", 4)
    streamed = "".join(chunk["delta"].get("content", "") for chunk in chunks)
    assert whole["message"]["content"] == f"let me see{more}" == streamed
    assert written(CALL, 4)[1]["message"]["content"] is None


HI: Any = {"role": "user", "content": "hi"}
ANSWERED: Any = {"role": "assistant", "content": "ho"}


@subcases(
    "fields, param",
    [
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tools"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"messages": [HI, {"role": "assistant", "tool_calls": [CALLED]}]}, "messages.1.tool_calls"),
        ({"messages": [HI, ANSWERED | {"reasoning_content": "hm"}, HI]}, "messages.1.reasoning_content"),
        ({"messages": [HI, ANSWERED | {"reasoning": "hm"}, HI]}, "messages.1.reasoning"),
    ],
)
def test_fields_that_the_template_does_not_read_are_refused(fields: dict[str, Any], param: str) -> None:
    asked = ChatFields.model_validate({"messages": [HI]} | fields)
    with pytest.raises(ApiError, match="this chat template does not read") as refusal:
        rendered_chat(asked, HFTokenizer(tiny_models.tokenizer()), STRICT)
    assert refusal.value.status == 400 and refusal.value.param == param
    for shown in ({"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS, "tool_choice": "required"}, {}):
        rendered_chat(
            ChatFields.model_validate({"messages": [HI]} | shown), HFTokenizer(tiny_models.tokenizer()), STRICT
        )


@subcases(
    "fields, param",
    [
        (
            {"messages": [HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages.1.tool_calls.0.function.arguments",
        ),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
)
def test_a_strict_server_refuses_what_others_mend(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    answer = server.http.post("/v1/chat/completions", json={"messages": [HI], "max_tokens": 1} | fields)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(param), answer.text


READING = (
    "{% for m in messages %}{{ m.get('reasoning_content', '') }}{{ m['mood'] }}{{ m['role'][0] }}:{{ m['content'] }}."
    "{% endfor %}{{ tools | length if tools else '' }}{{ reasoning_effort }}{% if enable_thinking %}think{% endif %}a:"
)


def test_fields_that_the_template_reads_reach_it(caplog: pytest.LogCaptureFixture) -> None:
    inner = tiny_models.tokenizer(list("0123456789"), READING)
    model = tiny_models.fresh("llama", vocab_size=len(inner))
    with running_server(
        lambda: SpeculativeDecoder(model, tokenizer=inner, drafter="none", reproducible=False),
        served_model_name="tiny",
        strict=True,
    ) as server:

        def prompt(**fields: Any) -> list[int]:
            body = {"messages": [HI, ANSWERED, HI], "max_tokens": 1, "return_token_ids": True} | fields
            answer = server.http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            ids = list(answer.json()["choices"][0]["prompt_token_ids"])
            asked = {name: value for name, value in body.items() if name not in ("max_tokens", "return_token_ids")}
            assert server.http.post("/tokenize", json=asked).json()["tokens"] == ids  # the same fields, the same tokens
            return ids

        plain = prompt()
        for fields in (
            {"messages": [HI, ANSWERED | {"reasoning_content": "hm"}, HI]},
            {"messages": [HI, ANSWERED | {"mood": "glad"}, HI]},
            {"tools": TOOLS},
            {"reasoning_effort": "low"},
            {"chat_template_kwargs": {"enable_thinking": True}},
        ):
            assert len(prompt(**fields)) > len(plain), fields
        assert not any("no effect" in record.getMessage() for record in caplog.records)
        body = {"messages": [HI], "enable_thinking": True}
        for path in ("/v1/chat/completions", "/tokenize"):
            refused = server.http.post(path, json=body).json()["error"]
            assert refused["param"] == "enable_thinking" and "allowed: in chat_template_kwargs" in refused["message"]
        wrong = server.http.post(
            "/v1/chat/completions", json={"messages": [HI], "chat_template_kwargs": {"enable_thinkin": 1}}
        )
        assert "did you mean 'enable_thinking'?" in wrong.json()["error"]["message"]
