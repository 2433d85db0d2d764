"""With --strict, a field has its effect or is refused by name; an invalid body costs no more than parsing it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from slipstream.apps.server.engine_routes import ReplayFields
from slipstream.apps.server.error_objects import validation_error
from slipstream.apps.server.request_reading import SAME_NAMES
from slipstream.apps.server.schemas import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from slipstream.sampling.params import SamplingParams
from tests.support.markers import subcases
from tests.support.running_server import RunningServer, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(strict=True) as running:
        yield running


WRONG = [None] * 20_000
LONE = "a\ud800"  # half of a surrogate pair
TEXT_PART = {"type": "text", "text": LONE}
HI = [{"role": "user", "content": "hi"}]
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}
SQUARE = {"name": "f", "parameters": {"type": "square"}}
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA = "/v1/messages", "/api/generate"
JSON = {"content-type": "application/json"}


def ask(server: RunningServer, path: str, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    body = {CHAT: {"messages": HI, "max_tokens": 3}, TEXT: {"prompt": "A heron", "max_tokens": 3}}.get(path, {})
    sent = json.dumps({name: value for name, value in (body | fields).items() if value is not None})
    answer = server.http.post(path, content=sent, headers=JSON)
    return answer.status_code, answer.json()


def test_every_sampling_option_is_a_field_of_requests() -> None:
    elsewhere = {"n", "logprobs", "suffix", "thinking_token_budget", "constraint", "logits_processors"}
    assert vars(SamplingParams()).keys() - SAME_NAMES == elsewhere


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionFields, {"prompt": WRONG}, "prompt"),
        (CompletionFields, {"prompt": [WRONG]}, "prompt"),
        (CompletionFields, {"prompt": [1, *WRONG]}, "prompt"),
        (CompletionFields, {"prompt": "x", "stop": WRONG}, "stop"),
        (CompletionFields, {"prompt": "x", "stop_token_ids": WRONG}, "stop_token_ids"),
        (CompletionFields, {"prompt": "x", "bad_words": WRONG}, "bad_words"),
        (CompletionFields, {"prompt": "x", "allowed_token_ids": WRONG}, "allowed_token_ids"),
        (CompletionFields, {"prompt": "x", "prediction": {"type": "content", "content": WRONG}}, "prediction"),
        (CompletionFields, {"prompt": "x", "structured_outputs": {"choice": WRONG}}, "structured_outputs"),
        (CompletionFields, {"prompt": "x", "logit_bias": {str(n): None for n in range(20_000)}}, "logit_bias"),
        (ChatFields, {"messages": WRONG}, "messages"),
        (ChatFields, {"messages": [{"role": "user", "content": WRONG}]}, "messages"),
        (ChatFields, {"messages": [{"role": "assistant", "tool_calls": WRONG}]}, "messages"),
        (ChatFields, {"messages": HI, "tools": WRONG}, "tools"),
        (TokenizeFields, {"messages": WRONG}, "messages"),
        (DetokenizeFields, {"tokens": WRONG}, "tokens"),
        (ReplayFields, {"request": {}, "token_ids": WRONG}, "token_ids"),
    ],
)
def test_a_list_is_read_only_up_to_its_first_mistake(kind: type[BaseModel], body: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    errors = caught.value.errors()
    assert len(errors) < 20
    refusal = validation_error(errors)
    assert (refusal.param or "").startswith(param) and "\n" not in refusal.message


def said(**content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"} | content]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"} | fields}]}


NO_TEXT = "a string, or text parts"


@pytest.mark.slow
@subcases(
    "path, fields, param, why",
    [
        (CHAT, {"stop": ["", "x"]}, "stop", "stop.0: an empty string; allowed: at least 1 character"),
        (CHAT, {"stop": ["x"] * 33}, "stop", "stop: a list; allowed: at most 32 items"),
        (CHAT, {"stop": 5}, "stop", "stop=5; allowed: a string or a list"),
        (CHAT, {"stop": ["x" * 300]}, "stop", "stop.0: a string; allowed: at most 256"),
        (CHAT, said(content=["hi"]), "messages.0.content", "messages.0.content.0: a string; allowed: an object"),
        (CHAT, said(content=5), "messages.0.content", "messages.0.content=5; allowed: a string or a list"),
        (CHAT, said(content={}), "messages.0.content", ".content: an empty object; allowed: a string or a list"),
        (CHAT, said(content=[{"text": "x"}]), "messages.0.content.0.type", "messages.0.content.0.type is missing"),
        (CHAT, said(content=[{"type": "text"}]), "messages.0.content.0", "messages.0.content.0 has no text"),
        (CHAT, said(content=None), "messages.0.content", f"messages.0.content is null; allowed: {NO_TEXT}"),
        (CHAT, said(content=[]), "messages.0.content", "messages.0.content is []; allowed: "),
        (CHAT, said(role="assistant", content=None), "messages.0.content", "messages.0.content is null"),
        (CHAT, said(role="tool", content=None), "messages.0.content", "messages.0.content is null"),
        (CHAT, {"tool_choice": "any"}, "tool_choice", "tool_choice=\"any\"; allowed: 'none', 'auto' or 'required'"),
        (CHAT, {"tool_choice": {"type": "any"}}, "tool_choice.type", "tool_choice.type=\"any\"; allowed: 'function'"),
        (CHAT, {"response_format": {"type": ""}}, "response_format.type", 'response_format.type=""; allowed: '),
        (CHAT, {"prediction": "x"}, "prediction", "prediction: a string; allowed: an object"),
        (CHAT, {"seed": 1 << 63}, "seed", f"={1 << 63}; allowed: a whole number from -1 to {(1 << 63) - 1}"),
        (CHAT, {"temperature": "hot"}, "temperature", 'temperature="hot"; allowed: a number from 0 to 100'),
        (CHAT, {"temperature": True}, "temperature", "temperature=true; allowed: a number from 0 to 100"),
        (CHAT, {"max_tokens": "4"}, "max_tokens", 'max_tokens="4"; allowed: a whole number from 0 to 16777216'),
        (CHAT, {"max_tokens": 4.5}, "max_tokens", "max_tokens=4.5; allowed: a whole number from 0 to 16777216"),
        (CHAT, {"top_p": 2}, "top_p", "top_p=2; allowed: a number above 0, up to 1"),
        (CHAT, {"top_p": 0}, "top_p", "top_p=0; allowed: a number above 0, up to 1"),
        (CHAT, {"n": 99}, "n", "n=99; allowed: a whole number from 1 to 16"),
        (CHAT, {"best_of": "2"}, "best_of", 'best_of="2"; allowed: a whole number'),
        (CHAT, {"logit_bias": {"5": "x"}}, "logit_bias.5", '.5="x"; allowed: a number from -10000 to 10000'),
        (CHAT, {"stream": "yes"}, "stream", 'stream="yes"; allowed: true or false'),
        (CHAT, {"messages": None, "mesages": HI}, "messages", "messages is missing; did you misspell it as 'mesages'?"),
        (TEXT, {"prompt": [5, -3]}, "prompt", "prompt.1=-3; allowed: 0 or more"),
        (TEXT, {"prompt": {}}, "prompt", "prompt: an empty object; allowed: a string, a list of strings"),
        (TEXT, {"prompt": [[5], [999]]}, "prompt", "prompt 1: token id 999; allowed: 0 to 256"),
        (TEXT, {"logit_bias": {"999": 1}}, "logit_bias", "logit_bias: token id 999"),
        (TEXT, {"stop_token_ids": [999]}, "stop_token_ids", "stop_token_ids: token id 999"),
        (
            TEXT,
            {"prediction": {"type": "content", "content": "x"}, "num_draft_tokens": 0},
            "prediction",
            "prediction w",
        ),
        (TEXT, {"allowed_token_ids": [97], "bad_words": ["a"]}, "allowed_token_ids", "the sampling options leave no t"),
        (TEXT, {"structured_outputs": {"choice": ["ab"]}, "bad_words": ["a"]}, "bad_words", "the constraint and the o"),
        # fields of the other endpoint, of other programs and of older APIs, which would change the answer
        (TEXT, {"max_completion_tokens": 5}, "max_completion_tokens", "on /v1/chat/completions, here it is max_tokens"),
        (TEXT, {"tools": [{}]}, "tools", "tools is not a field of this endpoint; allowed: on /v1/chat/completions"),
        (TEXT, {"reasoning_effort": "low"}, "reasoning_effort", "allowed: on /v1/chat/completions"),
        (CHAT, {"echo": True}, "echo", "echo is not a field of this endpoint; allowed: on /v1/completions"),
        (CHAT, {"prompt": "x"}, "prompt", "prompt is not a field of this endpoint; allowed: on /v1/completions"),
        (CHAT, {"grammar": "start: x"}, "grammar", "asked for with response_format or structured_outputs"),
        (CHAT, {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "JSON is written without whitespace"),
        (CHAT, {"thinking": {"type": "enabled"}}, "thinking", "this model has no chat template"),
        (TEXT, {"suffix": "end"}, "suffix", "this model has no tokens for infilling"),
        (CHAT, {"documents": [{"text": "x"}]}, "documents", "put them into a message"),
        (CHAT, said(function_call={"name": "f"}), "messages.0.function_call", "use tool_calls"),
        (CHAT, said(prefix=True), "messages.0.prefix", "continue_final_message"),
        (CHAT, said(refusal="No."), "messages.0.refusal", "shown to the model as content"),
        (CHAT, said(reasoning_content="x"), "messages.0.reasoning_content", "this model has no chat template"),
        (CHAT, said(thinking="x"), "messages.0.thinking", "this model has no chat template"),
        (
            *(CHAT, {"response_format": {"type": "json_object", "schema": {"required": ["a"]}}}),
            *("response_format.schema", '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'),
        ),
        (
            *(CHAT, {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}),
            *("response_format.json_schema", "response_format.json_schema with type 'json_object'; allowed: with type"),
        ),
        (
            *(CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
            'response_format.json_schema.schema is missing; allowed: {"json_schema": {"name": ..., "schema": {...}}}',
        ),
        (
            *(CHAT, {"response_format": {"type": "json_schema", "json_schema": {"shema": {}}}}),
            *("response_format.json_schema", "; did you misspell it as 'shema'?"),
        ),
        (CHAT, {"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "regex=5; allowed: a string"),
        (CHAT, {"structured_outputs": {"json": 5}}, "structured_outputs.json", "=5; allowed: an object or a string"),
        (CHAT, {"structured_outputs": {"json_schema": {}}}, "structured_outputs", "json_schema; allowed: one of"),
        (CHAT, {"structured_outputs": {"json": None}}, "structured_outputs", "nothing; allowed: one of"),
        (CHAT, {"tools": [{}]}, "tools.0.function", "tools.0.function is missing; allowed: an object with a name"),
        (CHAT, {"tools": [{"function": "f"}]}, "tools.0.function", "function: a string; allowed: an object with"),
        (CHAT, tool(description=5), "tools.0.function.description", "description=5; allowed: a string"),
        (CHAT, tool(parameters=[]), "tools.0.function.parameters", ": an empty list; allowed: a JSON schema"),
        (CHAT, tool(parameters={"properties": 5}), "tools.0.function.parameters", ".properties=5; allowed: an object"),
        (CHAT, tool(parameters={"properties": {"a": "x"}}), "tools.0.function.parameters", ".properties.a: a string;"),
        (CHAT, tool(description=LONE), "tools.0", "tools.0 has a lone surrogate; allowed: valid Unicode"),
        (CHAT, tool(parameters={"properties": {LONE: 1}}), "tools.0", "tools.0 has a lone surrogate; allowed: valid"),
        ("/tokenize", {}, "prompt", "prompt and messages are missing; allowed: one of them"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt", "prompt with messages; allowed: one of them"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model", "model 'other' is not served here"),
        ("/tokenize", {"prompt": "x", "tools": [{}]}, "tools", "tools with prompt; allowed: with messages"),
        ("/tokenize", {"messages": HI, "chat_template": "x"}, "chat_template", "templates from requests are not run"),
        ("/tokenize", {"messages": HI} | tool(), "tools", "no chat template"),
        ("/detokenize", {"tokens": [97], "model": "other"}, "model", "model 'other' is not served here"),
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt", "prompt: a list; allowed: a string"),
        (TEXT, {"logit_bias": {"1": 1, "01": 2}}, "logit_bias", ": '1' and '01' are one token; allowed: each"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "max_tokens=0; allowed: at least 1"),
        (CHAT, {"max_completion_tokens": 10**6}, "max_completion_tokens", "max_completion_tokens=1000000 exceed it"),
        (TEXT, {"max_tokens": 5000}, "max_tokens", "max_tokens=5000 exceed it"),
        (CHAT, {"thinking_token_budget": 5}, "thinking_token_budget", "this model writes no thoughts"),
        # texts that UTF-8 cannot write
        (TEXT, {"prompt": LONE}, "prompt", "prompt has '\\ud800' at character 1; allowed: valid Unicode"),
        (TEXT, {"prompt": ["x", LONE]}, "prompt", "prompt has '\\ud800' at character 1; allowed: valid Unicode"),
        ("/tokenize", {"prompt": LONE}, "prompt", "prompt has '\\ud800' at character 1; allowed: valid Unicode"),
        (CHAT, said(content=LONE), "messages.0.content", "messages.0.content has '\\ud800' at character 1"),
        (CHAT, said(content=[TEXT_PART]), "messages.0.content", "messages.0.content has '\\ud800' at character 1"),
        (CHAT, said(name=LONE), "messages.0.name", "messages.0.name: has a lone surrogate; allowed: valid Unicode"),
        (CHAT, {"stop": [LONE]}, "stop", "stop.0: has a lone surrogate; allowed: valid Unicode"),
        (CHAT, {LONE: 1}, None, "a field's name has a lone surrogate; allowed: valid Unicode"),
        (CHAT, {"prediction": {"type": "content", "content": LONE}}, "prediction.content", "prediction.content has '"),
        # which an answer would repeat
        (RESPONSES, {"input": "x", "metadata": {"a": LONE}}, "metadata", "metadata has a lone surrogate; allowed: val"),
        (RESPONSES, {"input": "x", "tools": [{"type": LONE}]}, "tools", "tools has a lone surrogate; allowed: valid"),
        (RESPONSES, {"input": "x", "reasoning": {"a": LONE}}, "reasoning", "reasoning has a lone surrogate; allowed:"),
        (RESPONSES, {"input": [HI[0], {"type": [None]}]}, "input.1.type", "input.1.type: a list; allowed: a string"),
        (TEXT, {"prompt": "x" * 4231}, "prompt", "is 4096 tokens; the prompt alone has 4231"),
        # refused by their characters, before they are tokenized
        (TEXT, {"prompt": "x" * 40_000}, "prompt", "prompt has 40000 characters; allowed: at most 4096 tokens, of at"),
        (TEXT, {"prompt": ["y", "x" * 40_000]}, "prompt", "prompt has 40000 characters"),
        (CHAT, said(content="x" * 40_000), "messages", "messages has 40000 characters"),
        (CHAT, said(content=[{"type": "text", "text": "x" * 20_000}] * 2), "messages", "messages has 40000 characters"),
        (CHAT, {"prediction": {"type": "content", "content": "x" * 40_000}}, "prediction", "has 40000 characters"),
        (TEXT, {"prompt": "x" * 4096}, "prompt", "the prompt alone has 4096, and its answer at least one"),
        (TEXT, {"prompt": "x" * 90, "max_tokens": 4007}, "max_tokens", "90 of the prompt and max_tokens=4007 exceed"),
        # constraints and options under the names of other systems
        *(
            (path, {name: {"type": "object"}}, name, "response_format or structured_outputs")
            for path in (CHAT, TEXT)
            for name in ("format", "response_schema", "guided_decoding", "output_config", "json", "schema", "regex")
        ),
        (CHAT, {"format": "json"}, "format", "response_format or structured_outputs"),
        (CHAT, {"json_mode": True}, "json_mode", "response_format or structured_outputs"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities", "modalities.1=\"audio\"; allowed: 'text'"),
        *(
            (CHAT, {name: {"guided_json": {}}}, name, "its fields belong at the top level")
            for name in ("extra_body", "options", "sampling_params", "generationConfig")
        ),
        # suggestions for misspelt names
        (CHAT, said(role="usr"), "messages.0.role", "'tool' or 'function'; did you mean 'user'?"),
        (CHAT, said(content=None, contents="hi"), "messages.0.content", "is null; did you misspell it as 'contents'?"),
        (CHAT, {"tool_choice": "requird"}, "tool_choice", "did you mean 'required'?"),
        (CHAT, {"response_format": {"type": "json_shema"}}, "response_format.type", "did you mean 'json_schema'?"),
        (CHAT, {"tools": [{"type": "functon"}]}, "tools.0.type", "allowed: 'function'; did you mean 'function'?"),
        (TEXT, {"model": "toyy"}, "model", "allowed: 'toy'; did you mean 'toy'?"),
    ],
)
def test_a_refusal_names_the_field_and_the_reason(
    server: RunningServer, path: str, fields: dict[str, Any], param: str | None, why: str
) -> None:
    status, answer = ask(server, path, fields)
    assert status == (404 if param == "model" else 400), answer
    assert answer["error"]["param"] == param and why in answer["error"]["message"], answer


@pytest.mark.parametrize(
    ("path", "fields", "param", "why"),
    [
        (RESPONSES, {"input": "x" * 4231}, "input", "the prompt alone has 4231"),
        (RESPONSES, {"input": "x" * 40_000}, "input", "input has 40000 characters"),
        (
            RESPONSES,
            {"input": "x", "max_output_tokens": 10**6},
            "max_output_tokens",
            "max_output_tokens=1000000 exceed",
        ),
        (RESPONSES, {"input": LONE}, "input", "input has '\\ud800' at character 1"),
        (RESPONSES, {"input": [IMAGE]}, "input", "input has an image, but this model sees none; allowed: text"),
        (RESPONSES, {"input": "x", "tools": [{"name": ""}]}, "tools.0.name", "tools.0.name: ''; allowed: a string"),
        (RESPONSES, {"input": "x", "tools": [SQUARE]}, "tools.0.parameters", "tools.0.parameters.type: 'square'"),
        (MESSAGES, {"messages": HI, "max_tokens": 10**6}, None, "max_tokens=1000000 exceed it"),
        (MESSAGES, {"system": LONE}, None, "system has a lone surrogate; allowed: valid Unicode"),
        (MESSAGES, {"messages": [HI[0] | {"content": LONE}], "system": "x"}, None, "messages.0 has a lone surrogate"),
        (MESSAGES, {"tools": [{"name": ""}]}, None, "tools.0.name: ''; allowed: a string"),
        (
            MESSAGES,
            {"tools": [{"name": "f", "input_schema": {"type": "square"}}]},
            None,
            "tools.0.input_schema.type: '",
        ),
        (OLLAMA, {"options": {"num_predict": 10**6}}, None, "options.num_predict=1000000 exceed it"),
        (OLLAMA, {"prompt": LONE}, None, "prompt has '\\ud800' at character 1"),
        (OLLAMA, {"system": LONE}, None, "system has a lone surrogate; allowed: valid Unicode"),
        (OLLAMA, {"prompt": "x" * 40_000}, None, "prompt has 40000 characters"),
        (OLLAMA, {"images": ["AAAA"]}, None, "prompt has an image, but this model sees none; allowed: text"),
    ],
)
def test_a_refusal_names_the_field_of_its_own_api(
    server: RunningServer, path: str, fields: dict[str, Any], param: str | None, why: str
) -> None:
    needed = {MESSAGES: {"messages": HI, "max_tokens": 5}, OLLAMA: {"model": "toy", "prompt": "x"}}
    answer = server.http.post(path, content=json.dumps(needed.get(path, {}) | fields), headers=JSON)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    message = error if isinstance(error, str) else error["message"]
    assert why in message and "messages." not in message.replace("messages.0 has", ""), message
    assert param is None or error["param"] == param


@subcases("nothing", [None, False, "", []])
def test_unsupported_fields_are_allowed_if_empty(server: RunningServer, nothing: Any) -> None:
    body = {"tools": nothing, "functions": nothing, "grammar": nothing} | ({"suffix": ""} if nothing == "" else {})
    sent = {"messages": [{"role": "user", "content": "hi", "function_call": nothing, "refusal": nothing}]}
    for path, fields in ((TEXT, body), (CHAT, sent | {"suffix": nothing, "guided_json": nothing})):
        start = {"max_tokens": 1} | ({"prompt": "x"} if path == TEXT else {})
        answer = server.http.post(path, json=start | fields)
        assert answer.status_code == 200, answer.text


def test_text_may_be_named_as_the_only_modality(server: RunningServer) -> None:
    status, answer = ask(server, CHAT, {"modalities": ["text"], "max_tokens": 1})
    assert status == 200, answer


def count(server: RunningServer) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    counts = [line.rpartition(" ")[2] for line in lines if line.startswith("slipstream:ignored_fields_total{")]
    return sum(map(float, counts))


def test_unknown_fields_at_every_depth_are_counted_and_named_once(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "slipstream.server")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}, "color": 1}]},
        {"role": "assistant", "content": "ho", "mood": "glad", "annotations": [], "refusal": None},
        {"role": "user", "content": "hm", "mood": "sad"},
    ]
    fields = {"messages": messages, "temprature": 0.5, "slipstream": {"round": True}, "store": True}
    before = count(server)
    for _ in range(2):
        assert ask(server, CHAT, fields)[0] == 200
    assert count(server) == before + 2 * 8
    named = [record.getMessage().removeprefix("requests have the field ") for record in caplog.records]
    assert set(named) == {
        "'temprature', which has no effect; did you mean 'temperature'?",
        "'messages.0.content.0.color', which has no effect; it is unknown",
        "'messages.1.mood', which has no effect; it is unknown",
        "'slipstream.round', which has no effect; did you mean 'rounds'?",
    }
    assert len(named) == 4


def test_unknown_fields_of_a_refused_request_are_neither_counted_nor_logged(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "slipstream.server")
    before = count(server)
    for path, fields in (
        (CHAT, {"guided_json": {"type": "object"}, "nobody": 1}),
        (TEXT, {"tools": [{}], "nobody": 1}),
    ):
        assert ask(server, path, fields)[0] == 400
    assert count(server) == before and not caplog.records
