"""What other servers ignore is ignored, counted and named once, unless it would have changed the answer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream import SpeculativeDecoder
from slipstream.apps.server.request_rows import window_of
from slipstream.apps.server.server_settings import ServerSettings
from slipstream.models.model_size import cached_bytes
from tests.support import tiny_models
from tests.support.chat_templates import TEMPLATES
from tests.support.markers import subcases
from tests.support.running_server import RunningServer, running_server, toy

HI: dict[str, Any] = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CHAT = "/v1/chat/completions"


def loaded(template: str) -> SpeculativeDecoder:
    inner = tiny_models.byte_tokenizer(TEMPLATES[template])
    model = tiny_models.fresh("llama", vocab_size=len(inner), max_position_embeddings=4096, eos_token_id=1)
    return SpeculativeDecoder(model, tokenizer=inner, drafter="none", reproducible=False)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(lambda: loaded("plain"), served_model_name=("tiny", "small")) as running:
        yield running


def asked(server: RunningServer, **fields: Any) -> Any:
    body = {"messages": [HI], "max_tokens": 1, "return_token_ids": True} | fields
    return server.http.post(CHAT, json=body)


def ignored(server: RunningServer) -> dict[str, float]:
    lines = [line for line in server.http.get("/metrics").text.splitlines() if "ignored_fields_total{" in line]
    return {line.partition('field="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.mark.slow
@subcases(
    "fields, names",
    [
        ({"reasoning_effort": "low"}, ["reasoning_effort"]),
        ({"reasoning": {"effort": "low"}}, ["reasoning"]),
        ({"chat_template_kwargs": {"enable_thinking": True}}, ["chat_template_kwargs.enable_thinking"]),
        ({"thinking_token_budget": 5}, ["thinking_token_budget"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, ["thinking", "thinking.budget_tokens"]),
        ({"model": "gpt-9"}, ["model"]),
        ({"web_search_options": {"x": 1}}, ["web_search_options"]),
        ({"tools": [TOOL, {"type": "custom", "function": {}}]}, ["tools.type"]),
        ({"messages": [HI, {"role": "assistant", "content": "x", "reasoning_content": "hm"}, HI]}, None),
    ],
)
def test_fields_without_effect_are_counted_and_named_once(
    server: RunningServer, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], names: list[str] | None
) -> None:
    names = ["messages.reasoning_content"] if names is None else names
    before = ignored(server)
    caplog.clear()
    caplog.set_level(logging.WARNING, "slipstream.server")
    for _ in range(2):
        assert asked(server, **fields).status_code == 200
    counts = {name: count - before.get(name, 0) for name, count in ignored(server).items()}
    assert {name: count for name, count in counts.items() if count} == dict.fromkeys(names, 2.0)
    assert len([record for record in caplog.records if "has" in record.getMessage()]) == len(names)
    assert "hm" not in caplog.text


@pytest.mark.slow
@subcases(
    "fields",
    [
        {"max_tokens": 100_000, "stop": ["a", "e"]},
        {"messages": [HI, {"role": "assistant", "content": []}, HI]},
        {"messages": [HI, {"role": "assistant", "content": None}, HI]},
        {
            "messages": [
                HI,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": None},
            ]
        },
        {"tools": [TOOL | {"function": {"name": f"look{n}", "parameters": {"type": "object"}}} for n in range(200)]},
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": None}}}
            ]
        },
    ],
)
def test_what_clients_send_is_accepted(server: RunningServer, fields: dict[str, Any]) -> None:
    answer = asked(server, **fields)
    assert answer.status_code == 200, answer.text


def test_arguments_that_are_no_json_do_not_end_a_conversation(server: RunningServer) -> None:
    call = CALL | {"function": {"name": "look", "arguments": "{oops"}}
    messages = [HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "no", "tool_call_id": "c"}]
    assert asked(server, messages=messages).status_code == 200


@pytest.mark.slow
def test_an_answer_is_cut_to_the_room_left_and_a_prompt_that_leaves_none_is_refused(server: RunningServer) -> None:
    room = asked(server, messages=[HI | {"content": "x" * 4060}], max_tokens=5000, ignore_eos=True).json()["usage"]
    assert room["total_tokens"] == 4096 and room["completion_tokens"] < 36
    answer = asked(server, messages=[HI | {"content": "x" * 4090}])
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("window", [512, 4096])
def test_the_refusal_of_a_long_prompt_names_the_option_that_takes_it(window: int) -> None:
    messages = [
        HI | {"content": "x" * 20 * window},
        HI | {"content": "x" * (window + 30)},
    ]  # the first is not tokenized
    with running_server(lambda: loaded("plain"), max_model_len=window) as server:
        for message in messages:
            for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"):
                body = {"model": "tiny", "messages": [message], "input": [message], "max_tokens": 9, "stream": False}
                answer = server.http.post(path, json=body)
                assert answer.status_code == 400
                assert ("; the server's option --max-model-len allows up to 4096" in answer.text) == (window == 512)


def test_only_allowed_tools_may_be_called(server: RunningServer) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "hear")]
    choice: dict[str, Any] = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools[1:]}}
    answer = asked(server, tools=tools, tool_choice=choice, parallel_tool_calls=False, max_tokens=200)
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "hear"
    choice["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "smell"}}]
    assert asked(server, tools=tools, tool_choice=choice).json()["error"]["param"] == "tool_choice"


def test_an_image_is_missing_from_a_tools_result_and_refused_in_a_question(server: RunningServer) -> None:
    image = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]
    called = {"role": "assistant", "tool_calls": [CALL]}
    before = asked(server, messages=[HI, called, {"role": "tool", "content": "see"}]).json()["usage"]["prompt_tokens"]
    after = asked(server, messages=[HI, called, {"role": "tool", "content": image}]).json()["usage"]["prompt_tokens"]
    assert after > before
    assert asked(server, messages=[HI | {"content": image}]).json()["error"]["param"] == "messages.0.content"


@pytest.mark.parametrize("name", ["grammar", "guided_json", "format", "output_config", "json_schema"])
def test_constraints_under_other_names_stay_refused(server: RunningServer, name: str) -> None:
    answer = asked(server, **{name: {"type": "object"}})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name


def test_a_switch_of_the_template_follows_the_effort() -> None:
    template = "{% if enable_thinking %}think{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    inner = tiny_models.byte_tokenizer(template)
    model = tiny_models.fresh("llama", vocab_size=len(inner))
    with running_server(
        lambda: SpeculativeDecoder(model, tokenizer=inner, drafter="none", reproducible=False)
    ) as server:

        def length(**fields: Any) -> int:
            return int(asked(server, **fields).json()["usage"]["prompt_tokens"])

        assert length() == length(reasoning_effort="none") == length(thinking={"type": "disabled"}) == 2
        assert length(reasoning_effort="high") == length(reasoning={"enabled": True}) == 2 + len("think")
        assert length(reasoning={"enabled": {}}) == 2
        switched_off = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}
        assert length(**switched_off) == 2 and not ignored(server)


def test_every_name_of_the_model_is_listed(server: RunningServer) -> None:
    assert [model["id"] for model in server.http.get("/v1/models").json()["data"]] == ["tiny", "small"]
    assert server.http.get("/v1/models/small").json()["id"] == "small"
    assert asked(server, model="small").json()["model"] == "tiny"
    assert server.http.get("/v1/models/none").status_code == 404


def test_a_model_of_a_folder_is_named_by_its_last_part(tmp_path: Any) -> None:
    folder = tmp_path / "heron"
    model, inner = tiny_models.fresh("llama"), tiny_models.tokenizer()
    model.save_pretrained(folder)
    inner.save_pretrained(folder)
    with running_server(lambda: SpeculativeDecoder(str(folder), drafter="none", reproducible=False)) as server:
        page = server.http.get("/v1/models").text + server.http.get("/metrics").text
        assert server.http.get("/v1/models").json()["data"][0]["id"] == "heron" and str(tmp_path) not in page


def test_limits_grow_with_the_window() -> None:
    usual, large = (ServerSettings().limits(window) for window in (4096, 32768))
    assert (usual.default_max_tokens, usual.max_queued_tokens) == (1024, 65536)
    assert (usual.queue_timeout, usual.request_timeout) == (60.0, 600.0)
    assert (large.default_max_tokens, large.max_queued_tokens) == (8192, 8 * 65536)
    assert (large.queue_timeout, large.request_timeout) == (480.0, 4800.0)
    assert ServerSettings(queue_timeout=5.0, default_max_tokens=7).limits(32768).queue_timeout == 5.0


def test_the_window_is_the_models_unless_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = loaded("plain")
    assert window_of(decoder, None) == window_of(decoder, 0) == 4096 and window_of(decoder, 100) == 100
    assert window_of(toy(), None) == 32768 and window_of(toy(), 0) == 1 << 20  # the size of its cache is unknown
    per_token = cached_bytes(decoder.target.model.config)
    assert per_token == 2 * 2 * 2 * 8 * 4  # keys and values of 2 layers with 2 heads of 8 floats
    decoder.target.backend.max_length = 1 << 17
    monkeypatch.setattr("slipstream.apps.server.request_rows.memory_bytes", lambda: 4 * 9 * per_token * 10_000)
    assert window_of(decoder, None) == 10_000 // 256 * 256
    monkeypatch.setattr("slipstream.apps.server.request_rows.memory_bytes", lambda: 1000)
    assert window_of(decoder, None) == 4096
