"""Forced calls of models whose templates have their own form of calls."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from slipstream import SpeculativeDecoder
from slipstream.tokenization.answer_parser import AnswerParser
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from tests.support import tiny_models
from tests.support.running_server import ARGUMENTS, running_server

EXTRA = ["\n", *'<>_{}"/[]-0123456789']
READS_TOOLS = "{% if tools %}{% endif %}"
CHAT = "{%% for m in messages %%}{{ m['role'][0] }}:{{ m['content'] }}.%s{%% endfor %%}a:"
CALLS = "{%% for c in m.tool_calls or [] %%}%s{%% endfor %%}"
ASKED: Any = [{"role": "user", "content": "the cat sat on the mat"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "parameters": ARGUMENTS}},
    {"type": "function", "function": {"name": "stop_now"}},
]
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
WHOLE = {"type": "function", "function": "{content}"}


def reads(**calls: Any) -> dict[str, Any]:
    """A response template with these rules for calls."""
    fields = {"tool_calls": {"repeats": True, "content": "json"} | calls, "content": {"content": "text"}}
    return {"defaults": {"role": "assistant"}, "start_anchor_pattern": r"\Z", "fields": fields}


def tokenizer(rendered: str, template: dict[str, Any]) -> Any:
    made = tiny_models.tokenizer(EXTRA, READS_TOOLS + CHAT % (CALLS % rendered))
    made.response_template = template
    return made


FORMS = {
    "the name in the opening": (
        "[call:{{ c.function.name }}]{{ c.function.arguments | tojson }}[end]",
        reads(open_pattern=r"\s*\[call:(?P<name>\w+)\]", close="[end]", transform=NAMED),
    ),
    "an object between marks": ("<<{{ c.function | tojson }}>>\n", reads(open="<<", close=">>", transform=WHOLE)),
    "special tokens as marks": (
        "<pad>{{ c.function | tojson }}<eos>",
        reads(open="<pad>", close="<eos>", transform=WHOLE),
    ),
}
OTHERS = {
    "arguments that are not JSON": (
        "[call:{{ c.function.name }}]"
        "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}[end]",
        reads(
            open_pattern=r"\[call:(?P<name>\w+)\]",
            close="[end]",
            content="xml-inline",
            content_args={"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>"},
            transform=NAMED,
        ),
    ),
    "a chat template that writes another form": (
        "[[{{ c.function | tojson }}]]",
        reads(open="<<", close=">>", transform=WHOLE),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_a_required_call_is_written_in_the_models_own_form_and_read_back(name: str) -> None:
    inner = tokenizer(*FORMS[name])
    model = tiny_models.fresh("llama", vocab_size=len(inner), eos_token_id=1)
    decoder = SpeculativeDecoder(model, tokenizer=inner, drafter="suffix", num_draft_tokens=4, acceptance="match")
    with running_server(lambda: decoder, served_model_name="tiny") as server, server.openai() as client:
        for seed in range(3):
            options: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": TOOLS, "max_tokens": 200}
            options |= {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0, "seed": seed}
            answer = client.chat.completions.create(**options).choices[0]
            assert answer.finish_reason == "tool_calls" and not answer.message.content
            (call,) = answer.message.tool_calls
            arguments = json.loads(call.function.arguments)
            jsonschema.validate(arguments, ARGUMENTS if call.function.name == "add" else {"maxProperties": 0})
            chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **options)]
            assert not any(chunk.delta.content for chunk in chunks)
            assert [c.function.arguments for streamed in chunks for c in streamed.delta.tool_calls or []] == [
                call.function.arguments
            ]


@pytest.mark.parametrize("name", FORMS)
def test_a_closing_mark_inside_arguments_does_not_end_the_call(name: str) -> None:
    rendered, template = FORMS[name]
    ours = HFTokenizer(tokenizer(rendered, template))
    mark = template["fields"]["tool_calls"]["close"]
    written = {"x": f"a{mark}b{mark}"}
    opening = template["fields"]["tool_calls"].get("open")
    call = (
        opening + json.dumps({"name": "add", "arguments": written}) if opening else f"[call:add]{json.dumps(written)}"
    )
    assert read(ours, f"{call}{mark}{call}{mark}") == [written, written]
    assert read(ours, f"{call}{mark}{call[:-2]}") == [written]


def read(ours: HFTokenizer, text: str) -> list[Any]:
    """The arguments of the calls in an answer."""
    parser = AnswerParser(ours.answer_form(), TOOLS)
    return [json.loads(piece.call.arguments) for piece in parser.feed(text) + parser.end() if piece.call]


def test_calls_that_are_not_json_are_read_only_if_complete() -> None:
    ours = HFTokenizer(tokenizer(*OTHERS["arguments that are not JSON"]))
    assert read(ours, "[call:add]<x>a</x>[end][call:add]<x>b</x>") == [{"x": "a"}]
    assert read(ours, "[call:add]<x>a</x>") == []


@pytest.mark.slow
def test_a_forced_call_with_a_mark_in_its_arguments_is_read_as_a_call() -> None:
    rendered = "<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    inner = tiny_models.tokenizer(EXTRA, CHAT % (CALLS % rendered))
    model = tiny_models.fresh("llama", vocab_size=len(inner), eos_token_id=1)
    value = {"type": "object", "properties": {"a": {"enum": ["</tool_call>"]}}, "required": ["a"]}
    tools: Any = [
        {"type": "function", "function": {"name": "x", "parameters": value | {"additionalProperties": False}}}
    ]
    with (
        running_server(
            lambda: SpeculativeDecoder(model, tokenizer=inner, drafter="none", reproducible=False),
            served_model_name="tiny",
        ) as server,
        server.openai() as client,
    ):
        options: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": tools, "tool_choice": "required"}
        for several, limit in ((False, 200), (True, 400)):
            answer = client.chat.completions.create(**options, parallel_tool_calls=several, max_tokens=limit, seed=1)
            (choice,) = answer.choices
            assert choice.message.tool_calls and not choice.message.content
            assert {call.function.arguments for call in choice.message.tool_calls} == {'{"a": "</tool_call>"}'}
            assert choice.finish_reason == ("length" if answer.usage.completion_tokens == limit else "tool_calls")


def test_several_calls_are_separated_as_the_template_writes_them() -> None:
    form = HFTokenizer(tokenizer(*FORMS["an object between marks"])).call_text()
    assert form is not None and form.before == '<<{"name": "' and form.between_calls == "\n" and form.quotes_names


@pytest.mark.parametrize("name", OTHERS)
def test_unsupported_call_forms_are_not_forced(name: str) -> None:
    assert HFTokenizer(tokenizer(*OTHERS[name])).call_text() is None


@pytest.mark.slow
def test_a_call_of_a_template_without_tools_has_the_form_that_the_prompt_describes() -> None:
    inner = tiny_models.byte_tokenizer(CHAT % (CALLS % FORMS["an object between marks"][0]))
    model = tiny_models.fresh("llama", vocab_size=len(inner), max_position_embeddings=4096, eos_token_id=1)
    with running_server(
        lambda: SpeculativeDecoder(model, tokenizer=inner, drafter="none", reproducible=False), served_model_name="tiny"
    ) as server:
        body = {"messages": ASKED, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
        (choice,) = server.http.post("/v1/chat/completions", json=body | {"return_token_ids": True}).json()["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] in ("add", "stop_now") and choice["finish_reason"] == "tool_calls"
        assert inner.decode(choice["token_ids"]).startswith('<tool_call>\n{"name": "')


def test_a_required_call_in_an_unsupported_form_is_refused_by_name() -> None:
    inner = tokenizer(*OTHERS["arguments that are not JSON"])
    model = tiny_models.fresh("llama", vocab_size=len(inner), eos_token_id=1)
    with (
        running_server(
            lambda: SpeculativeDecoder(model, tokenizer=inner, drafter="none", reproducible=False),
            served_model_name="tiny",
        ) as server,
        server.openai() as client,
        pytest.raises(openai.BadRequestError, match="form of calls is not known") as caught,
    ):
        client.chat.completions.create(model="tiny", messages=ASKED, tools=TOOLS, tool_choice="required")
    assert caught.value.param == "tool_choice"
