"""Predictions, constraints and forced calls through OpenAI's client keep the text of plain decoding."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from slipstream import SpeculativeDecoder
from tests.support import tiny_models
from tests.support.markers import subcases
from tests.support.running_server import ARGUMENTS, RunningServer, running_server

TEMPLATE = (
    "{% for t in tools or [] %}tool:{{ t['function']['name'] }} <tool_call>.{% endfor %}"
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}.{% endfor %}a:"
)
EXTRA = ["\n", *'<>_{}"/[]-0123456789']
ASKED = [{"role": "user", "content": "the cat sat on the mat"}]
VISIBLE = {"0": -100, "1": -100, "2": -100}  # a logit bias against tokens that the text does not show
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": ARGUMENTS}},
    {"type": "function", "function": {"name": "stop_now"}},
]
FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ARGUMENTS, "strict": True}}},
    {"extra_body": {"structured_outputs": {"json": json.dumps(ARGUMENTS)}}},
    {"extra_body": {"structured_outputs": {"regex": "[a-c]{4,9}"}}},
    {"extra_body": {"structured_outputs": {"choice": ["yes", "no way"]}}},
    {"extra_body": {"structured_outputs": {"grammar": 'start: "a" ("b" | "c"){3}'}}},
    {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}, "parallel_tool_calls": False},
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    inner = tiny_models.tokenizer(EXTRA, TEMPLATE)
    model = tiny_models.fresh("llama", vocab_size=len(inner), eos_token_id=1)
    settings: dict[str, Any] = {"drafter": "suffix", "num_draft_tokens": 4, "acceptance": "match"}
    with running_server(
        lambda: SpeculativeDecoder(model, tokenizer=inner, **settings), served_model_name="tiny"
    ) as running:
        yield running


@pytest.fixture
def ask(server: RunningServer) -> Iterator[Any]:
    with server.openai() as client:
        yield partial(client.chat.completions.create, model="tiny", messages=ASKED, max_tokens=200)


def with_more(fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    return fields | {"extra_body": fields.get("extra_body", {}) | more}


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("temperature", [0, 1.2])
def test_a_constrained_answer_equals_plain_decoding(ask: Any, form: dict[str, Any], temperature: float) -> None:
    options = {"temperature": temperature, "seed": 4}
    fast = ask(**options, **form).choices[0]
    plain = ask(**options, **with_more(form, num_draft_tokens=0)).choices[0]
    calls = [[call.function for call in choice.message.tool_calls or []] for choice in (fast, plain)]
    assert fast.message.content == plain.message.content and calls[0] == calls[1]
    assert fast.finish_reason == plain.finish_reason == ("tool_calls" if "tools" in form else "stop")
    unconstrained = ask(**options).choices[0].message.content
    assert fast.message.content != unconstrained  # the constraint had an effect


def test_an_answer_follows_its_json_schema(ask: Any) -> None:
    answer = json.loads(ask(temperature=1.0, seed=1, **FORMS[0]).choices[0].message.content)
    assert set(answer) == {"x", "unit"} and isinstance(answer["x"], bool) and answer["unit"] in ("m", "km")


@pytest.mark.slow
def test_a_required_call_is_one_of_the_tools_whole_and_streamed(ask: Any) -> None:
    for seed in range(4):
        options = {"temperature": 1.0, "seed": seed} | FORMS[5]
        (call,) = ask(**options).choices[0].message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert call.function.name in ("add", "stop_now")
        assert set(arguments) == ({"x", "unit"} if call.function.name == "add" else set())
        chunks = [chunk.choices[0] for chunk in ask(stream=True, **options) if chunk.choices]
        assert chunks[-1].finish_reason == "tool_calls" and not any(chunk.delta.content for chunk in chunks)
        assert chunks[-2].delta.tool_calls[0].function.arguments == call.function.arguments


def test_a_named_tool_is_the_one_that_is_called(ask: Any) -> None:
    choice = {"type": "function", "function": {"name": "stop_now"}}
    (call,) = ask(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, seed=1).choices[0].message.tool_calls
    assert call.function.name == "stop_now" and json.loads(call.function.arguments) == {}


def test_forced_tokens_are_reported_and_credited_to_no_drafter(server: RunningServer) -> None:
    body = {"messages": ASKED, "max_tokens": 200, "temperature": 0, "slipstream": {"rounds": True}} | FORMS[6]
    receipts = [chunk["slipstream"] for chunk in server.chunks("/v1/chat/completions", body) if "slipstream" in chunk]
    tokens = [token for part in receipts for token in part["tokens"]]
    forced = [token for token in tokens if token["origin"] == "forced"]
    assert len(forced) == sum(part["round"]["forced"] for part in receipts) > 20
    assert {token["source"] for token in forced} == {None}
    receipt = receipts[-1]["receipt"]
    assert receipt["stats"]["num_forced_tokens"] == len(forced) and "grammar" in receipt["params"]["constraint"]
    again = {"request": body, "token_ids": receipt["token_ids"], "seed": receipt["seed"]}
    assert server.http.post("/v1/slipstream/replay", json=again).json()["identical"]


def test_a_prediction_is_counted_and_does_not_change_the_text(ask: Any, server: RunningServer) -> None:
    options = {"temperature": 0.8, "seed": 6, "max_tokens": 60, "logit_bias": VISIBLE}
    unpredicted = ask(**options)
    text = unpredicted.choices[0].message.content
    assert unpredicted.usage.completion_tokens_details is None
    right = ask(**options, prediction={"type": "content", "content": text})
    halves = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
    parts = ask(**options, prediction={"type": "content", "content": halves})
    wrong = ask(**options, prediction={"type": "content", "content": text[:9] + "Q" * 40})
    assert {answer.choices[0].message.content for answer in (right, parts, wrong)} == {text}
    details = [answer.usage.completion_tokens_details for answer in (right, parts, wrong)]
    assert details[0].accepted_prediction_tokens > 40 and details[0].rejected_prediction_tokens == 0
    assert details[1].accepted_prediction_tokens == details[0].accepted_prediction_tokens
    assert details[2].accepted_prediction_tokens < 20 and details[2].rejected_prediction_tokens > 0
    page = server.http.get("/metrics").text
    assert 'slipstream:accepted_by_source_total{engine="0",model_name="tiny",source="prediction"}' in page


def test_a_prediction_works_with_completions_several_choices_and_constraints(ask: Any, server: RunningServer) -> None:
    options = {"temperature": 0, "max_tokens": 40, "logit_bias": VISIBLE}
    text = server.text("the cat", **options)
    answer = server.complete("the cat", **options, prediction={"type": "content", "content": text})
    assert answer.json()["choices"][0]["text"] == text
    assert answer.json()["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 20
    formed = ask(temperature=0, **FORMS[0])
    predicted = {"type": "content", "content": formed.choices[0].message.content}
    again = ask(temperature=0, prediction=predicted, **FORMS[0])
    assert again.choices[0].message == formed.choices[0].message
    several = {"n": 3, "seed": 2, "temperature": 1.0, "max_tokens": 20}
    texts = [[c.message.content for c in ask(**several, **more).choices] for more in ({}, {"prediction": predicted})]
    assert texts[0] == texts[1]


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}}


def tool(parameters: Any, choice: Any = "required") -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}], "tool_choice": choice}


CHAIN = {f"d{at}": {"properties": {"a": {"$ref": f"#/$defs/d{at + 1}"}}} for at in range(900)}
RULES = "start: r0\n" + "".join(f'r{at}: "b" r{at + 1}\n' for at in range(3000)) + 'r3000: "a"'


@subcases(
    "fields, named",
    [
        (schema({"type": 5}), "response_format"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "response_format"),
        (schema({"$ref": "#"}), "response_format"),
        (schema({"$ref": "file:///etc/passwd"}), "response_format"),
        (schema({"enum": ["x" * 70000]}), "response_format"),
        (schema({"$defs": CHAIN, "$ref": "#/$defs/d0"}), "response_format"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"choice": []}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"json": '{"items":' * 6000}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"grammar": "start: x"}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"grammar": RULES}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"structural_tag": "x"}}}, "structured_outputs"),
        (schema({}) | {"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
        ({"tool_choice": "required"}, "tool_choice"),
        (tool({}, {"type": "function", "function": {"name": "g"}}), "tool_choice"),
        (tool({}, {"type": "function"}), "tool_choice"),
        (tool({"type": "string"}), "tools.0.function.parameters"),
        (tool({"properties": {"a": {"pattern": "(?<=a)"}}}), "tools.0.function.parameters"),
        (tool("x", "auto"), "tools.0.function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools.0.function.name"),
        ({"tools": TOOLS[:1] * 2}, "tools"),
        ({"prediction": {"type": "content", "content": ""}}, "prediction"),
        ({"prediction": {"type": "content", "content": "x" * 5000}}, "prediction"),
        ({"prediction": {"type": "text", "content": "x"}}, "prediction"),
    ],
)
def test_an_invalid_constraint_tool_or_prediction_is_refused_by_name(
    ask: Any, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(**fields)
    assert str(caught.value.param).startswith(named) and named in caught.value.body["message"]  # type: ignore[index]


def test_lone_surrogates_in_constraints_and_tools_are_refused(server: RunningServer) -> None:
    for fields in (
        {"structured_outputs": {"regex": "\ud800"}},
        {"structured_outputs": {"choice": ["\ud800"]}},
        {"structured_outputs": {"json": {"const": "\ud800"}}},
        {"tools": [{"type": "function", "function": {"name": "f", "description": "\ud800"}}]},
    ):
        content = json.dumps({"messages": ASKED} | fields)
        answer = server.http.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, fields


def test_a_tool_may_be_called_instead_of_an_answer_in_the_response_format(ask: Any) -> None:
    answers = [ask(temperature=1.5, seed=seed, tools=TOOLS, **FORMS[0]).choices[0] for seed in range(6)]
    for choice in answers:
        assert choice.message.tool_calls or set(json.loads(choice.message.content)) == {"x", "unit"}


def test_the_calls_in_the_documentation_are_answered_in_their_form(server: RunningServer) -> None:
    page = (Path(__file__).parents[3] / "docs" / "structured_output.md").read_text(encoding="utf-8")
    bodies = [json.loads(call) for call in re.findall(r"(?m)^curl .* -d '(.*)'$", page)]
    answers = [server.http.post("/v1/chat/completions", json=body | {"seed": 1}).json() for body in bodies]
    place, year = (answer["choices"][0]["message"]["content"] for answer in answers)
    assert json.loads(place).keys() == {"city"} and re.fullmatch("[0-9]{4}", year)
