"""Thoughts are separated from answers, counted, limited, and followed by structured output and calls."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from slipstream import SpeculativeDecoder
from tests.support import tiny_models
from tests.support.running_server import ARGUMENTS, RunningServer, running_server

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}."
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}{% endfor %}{% if tools %}{% endif %}"
    "{% if add_generation_prompt %}a:<think>\n{% if enable_thinking is defined and not enable_thinking %}"
    "\n</think>\n\n{% endif %}{% endif %}"
)
ASKED: Any = [{"role": "user", "content": "the cat sat on the mat"}]
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": ARGUMENTS}}]
ADDRESS = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    inner = tiny_models.tokenizer(["\n", *'<>_{}"/[]-=0123456789'], TEMPLATE)
    inner.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    model = tiny_models.fresh("llama", vocab_size=len(inner), eos_token_id=1)
    decoder = SpeculativeDecoder(model, tokenizer=inner, drafter="suffix", num_draft_tokens=4, acceptance="match")
    with running_server(lambda: decoder, served_model_name="tiny") as running:
        yield running


def answer(server: RunningServer, **fields: Any) -> dict[str, Any]:
    body = {"messages": ASKED, "max_tokens": 300, "temperature": 1.0, "thinking_token_budget": 12} | fields
    response = server.http.post(ADDRESS, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def streamed(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """The message that the chunks of a stream add up to."""
    body = {"messages": ASKED, "max_tokens": 300, "temperature": 1.0, "thinking_token_budget": 12, "stream": True}
    body |= {"stream_options": {"include_usage": True}} | fields
    message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []}
    with server.http.stream("POST", ADDRESS, json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            message["usage"] = chunk.get("usage") or message.get("usage")
            for choice in chunk["choices"]:
                message["finish_reason"] = choice["finish_reason"]
                for name in ("content", "reasoning", "reasoning_content"):
                    message[name] += choice["delta"].get(name) or ""
                message["tool_calls"] += choice["delta"].get("tool_calls") or []
    return message


def test_a_stream_and_a_whole_answer_have_the_same_parts(server: RunningServer) -> None:
    kinds = set()
    for seed in range(6):
        whole, chunks = answer(server, seed=seed, max_tokens=60), streamed(server, seed=seed, max_tokens=60)
        message = whole["choices"][0]["message"]
        for name in ("content", "reasoning", "reasoning_content"):
            assert (message.get(name) or "") == chunks[name]
        assert message.get("reasoning") == message.get("reasoning_content")
        assert whole["choices"][0]["finish_reason"] == chunks["finish_reason"]
        details = whole["usage"]["completion_tokens_details"]
        assert details == chunks["usage"]["completion_tokens_details"]
        assert 0 < details["reasoning_tokens"] <= min(14, whole["usage"]["completion_tokens"])
        kinds |= {name for name in ("content", "reasoning") if message.get(name)}
    assert kinds == {"content", "reasoning"}


def test_budgets_and_counts_of_other_apis_are_the_same(server: RunningServer) -> None:
    def thought(seed: int, **fields: Any) -> str:
        return str(
            answer(server, seed=seed, thinking_token_budget=None, **fields)["choices"][0]["message"]["reasoning"]
        )

    assert "thinking" in server.http.post("/api/show", json={"model": "tiny"}).json()["capabilities"]
    enabled, limited = {"type": "enabled", "budget_tokens": 12}, list[bool]()
    for seed in range(3):
        expected = answer(server, seed=seed)["choices"][0]["message"]["reasoning"]
        limited.append(thought(seed) != expected)
        assert thought(seed, thinking=enabled) == thought(seed, reasoning={"max_tokens": 12}) == expected
        body = {"messages": ASKED, "max_tokens": 300, "temperature": 1.0, "seed": seed, "thinking": enabled}
        assert server.http.post("/v1/messages", json=body).json()["content"][0]["thinking"] == expected
        body = {"input": ASKED, "max_output_tokens": 60, "temperature": 1.0, "seed": seed}
        details = server.http.post("/v1/responses", json=body).json()["usage"]["output_tokens_details"]
        counted = answer(server, seed=seed, max_tokens=60, thinking_token_budget=None)["usage"]
        assert details["reasoning_tokens"] == counted["completion_tokens_details"]["reasoning_tokens"] > 0
    assert any(limited)
    for path in ("/v1/messages", ADDRESS):
        wrong = {"messages": ASKED, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": -1}}
        assert "thinking.budget_tokens=-1; allowed: a whole number from 0 to" in server.http.post(path, json=wrong).text


def test_a_template_that_closes_the_thought_leaves_none(server: RunningServer) -> None:
    whole = answer(server, seed=1, max_tokens=40, chat_template_kwargs={"enable_thinking": False})
    assert "reasoning" not in whole["choices"][0]["message"]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("thinks", [True, False])
def test_structured_output_begins_after_the_thought(server: RunningServer, thinks: bool) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": ARGUMENTS}}
    for fields in ({"response_format": named}, {"structured_outputs": {"regex": "[0-9]{3}"}}):
        for seed in range(3):
            whole = answer(server, seed=seed, chat_template_kwargs={"enable_thinking": thinks}, **fields)
            (choice,) = whole["choices"]
            assert choice["finish_reason"] == "stop"
            content = choice["message"]["content"]
            if "response_format" in fields:
                jsonschema.validate(json.loads(content), ARGUMENTS)
            else:
                assert len(content) == 3 and content.isdigit()
            assert thinks or "reasoning" not in choice["message"]


def test_forced_calls_have_the_form_that_the_template_writes_and_follow_the_thought(server: RunningServer) -> None:
    for seed in range(3):
        fields: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
        (choice,) = answer(server, **fields)["choices"]
        (call,) = choice["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), ARGUMENTS)
        assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
        chunks = streamed(server, **fields)
        assert [streamed_call["function"] for streamed_call in chunks["tool_calls"]] == [call["function"]]
        assert chunks["finish_reason"] == "tool_calls"
        assert chunks["reasoning"] == (choice["message"].get("reasoning") or "")


def test_added_tokens_may_be_named_in_grammars(server: RunningServer) -> None:
    grammar = 'start: <tool_call> "a" </tool_call>'
    whole = answer(server, structured_outputs={"grammar": grammar}, chat_template_kwargs={"enable_thinking": False})
    assert whole["choices"][0]["message"]["content"] == "<tool_call>a</tool_call>"
    assert whole["usage"]["completion_tokens"] == 4  # each mark is a token, and so is the end


def test_no_thought_no_text_no_key_and_no_path_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    keys, folder = tmp_path / "keyring", tmp_path / "heron"
    keys.write_text("anna:sesame-open\n")
    inner = tiny_models.byte_tokenizer(TEMPLATE)
    tiny_models.fresh("llama", vocab_size=len(inner), eos_token_id=1).save_pretrained(folder)
    inner.save_pretrained(folder)
    past = [
        {"role": "user", "content": "my secret plan"},
        {"role": "assistant", "content": "a hidden answer", "reasoning_content": "a private thought"},
        {"role": "user", "content": "go on"},
    ]
    limits = {"max_tokens": 20, "thinking_token_budget": 6, "unknown_field": "my secret plan"}
    bodies: dict[str, Any] = {
        ADDRESS: {"messages": past, **limits},
        "/v1/messages": {"model": "m", "messages": [past[0]], "max_tokens": 20, "thinking": {"budget_tokens": 1}},
        "/v1/responses": {"input": past, "max_output_tokens": 20},
        "/api/chat": {"model": "m", "messages": [past[0]], "options": {"num_predict": 20}, "stream": False},
        "/v1/completions": {"prompt": "my secret plan", "max_tokens": 3, "echo": "both"},
    }
    load = partial(SpeculativeDecoder, str(folder), drafter="none", reproducible=False)
    thoughts = []
    with running_server(load, api_key_file=str(keys)) as server:
        caplog.clear()
        for address, body in bodies.items():
            for key in ("sesame-open", "sesame-shut"):
                reply = server.http.post(address, json=body, headers={"authorization": f"Bearer {key}"})
                if address == ADDRESS and reply.status_code == 200:
                    thoughts.append(reply.json()["choices"][0]["message"]["reasoning_content"])
    assert len(thoughts) == 1 and len(thoughts[0]) > 3 and "anna" in caplog.text
    secrets = ["secret plan", "hidden answer", "private thought", "sesame", str(tmp_path), *thoughts]
    assert [secret for secret in secrets if secret in caplog.text] == []
