"""Ollama's API: chats and texts as lines of JSON, whole and streamed, and what is told of the models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.apps.server.ollama_api import OllamaChatFields, conversation
from slipstream.apps.server.schemas import ChatFields
from tests.apps.server.test_messages_api import with_parts
from tests.support.chat_templates import decoder_without_tools
from tests.support.markers import subcases
from tests.support.processes import PATIENCE
from tests.support.running_server import ARGUMENTS, Gate, RunningServer, in_thread, running_server

OPTIONS = {"temperature": 0, "num_predict": 20, "num_ctx": 4096}
CHAT: dict[str, Any] = {
    "model": "tiny:latest",
    "messages": [{"role": "user", "content": "the cat sat on the mat"}],
    "options": OPTIONS,
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(decoder_without_tools, served_model_name=("tiny", "other")) as running:
        yield running


def lines(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer.iter_lines()]


def test_a_chat_streams_by_default_and_is_the_whole_answer(server: RunningServer) -> None:
    whole = server.http.post("/api/chat", json=CHAT | {"stream": False}).json()
    streamed = lines(server, "/api/chat", CHAT)
    assert whole["message"]["role"] == "assistant" and whole["done"] and whole["done_reason"] == "length"
    assert "".join(line["message"]["content"] for line in streamed) == whole["message"]["content"]
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    assert {line["model"] for line in streamed} == {"tiny:latest"} and streamed[0]["created_at"].endswith("Z")
    assert streamed[-1]["eval_count"] == whole["eval_count"] == 20 and whole["total_duration"] > 0
    assert whole["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_a_generated_text_is_that_of_a_chat(server: RunningServer) -> None:
    body = {"model": "tiny", "prompt": "the cat sat on the mat", "options": OPTIONS}
    chat = server.http.post("/api/chat", json=CHAT | {"stream": False}).json()["message"]["content"]
    assert server.http.post("/api/generate", json=body | {"stream": False}).json()["response"] == chat
    assert "".join(line["response"] for line in lines(server, "/api/generate", body)) == chat
    raw = server.http.post("/api/generate", json=body | {"stream": False, "raw": True}).json()["response"]
    assert raw == server.complete(body["prompt"], temperature=0, max_tokens=20).json()["choices"][0]["text"] != chat


def test_a_form_is_kept(server: RunningServer) -> None:
    body = CHAT | {"format": ARGUMENTS, "stream": False, "options": {"num_predict": -1, "seed": 1}}
    assert set(json.loads(server.http.post("/api/chat", json=body).json()["message"]["content"])) == {"x", "unit"}


def test_thoughts_and_calls_have_their_own_fields(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with_parts(monkeypatch)
    message = server.http.post("/api/chat", json=CHAT | {"stream": False}).json()["message"]
    assert message["thinking"] == "Let me think." and message["content"] == "I look."
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{"x": 1}, {}]
    assert [call.get("id") for call in message["tool_calls"]] == [None, "functions.measure:1"]
    streamed = [line["message"] for line in lines(server, "/api/chat", CHAT)]
    assert "".join(part.get("thinking", "") for part in streamed) == "Let me think."
    calls = [call["function"]["name"] for part in streamed for call in part.get("tool_calls", ())]
    assert calls == ["measure", "measure"]


def test_earlier_calls_and_results_are_shown(server: RunningServer) -> None:
    call = {"function": {"name": "look", "arguments": {"x": 1}}}
    later = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "a heron", "tool_name": "look"},
    ]
    body = CHAT | {"stream": False, "messages": [*CHAT["messages"], *later]}
    counts = [
        server.http.post("/api/chat", json=b).json()["prompt_eval_count"] for b in (CHAT | {"stream": False}, body)
    ]
    assert counts[1] > counts[0] + len("a heron")


def test_results_go_to_the_calls_that_their_names_tell() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("look", "hear", "look")]
    results = [{"role": "tool", "content": name, "tool_name": name} for name in ("hear", "look", "other", "look")]
    body = {"model": "tiny", "messages": [{"role": "assistant", "tool_calls": calls}, *results]}
    chat = conversation(OllamaChatFields.model_validate(body))
    assert isinstance(chat, ChatFields)
    ids = [message.tool_call_id for message in chat.messages[1:]]
    assert ids == ["call_0_1", "call_0_0", None, "call_0_2"]


def test_the_models_are_told(server: RunningServer) -> None:
    models = server.http.get("/api/tags").json()["models"]
    assert [model["name"] for model in models] == ["tiny", "other"]
    for model in models:
        assert set(model["details"]) > {"format", "family", "parameter_size", "quantization_level"}
        assert len(model["digest"]) == 64 and model["modified_at"].endswith("Z") and model["size"] == 0
    shown = server.http.post("/api/show", json={"model": "tiny:latest"}).json()
    kind = shown["model_info"]["general.architecture"]
    assert kind == "llama" and shown["model_info"][f"{kind}.context_length"] == 4096
    assert shown["model_info"]["general.basename"] == "tiny" and shown["capabilities"] == ["completion", "tools"]
    assert shown == server.http.post("/api/show", json={"name": "tiny"}).json() and shown["template"] == ""
    assert server.http.get("/api/ps").json()["models"][0]["context_length"] == 4096
    assert tuple(map(int, server.http.get("/api/version").json()["version"].split("."))) >= (0, 6, 4)


def test_a_request_without_a_prompt_finds_the_model_loaded(server: RunningServer) -> None:
    for path, name in (("/api/chat", "message"), ("/api/generate", "response")):
        answer = server.http.post(path, json={"model": "tiny"}).json()
        assert answer["done"] and answer["done_reason"] == "load" and name in answer


@pytest.mark.slow
def test_a_request_without_a_prompt_and_time_unloads_the_model() -> None:
    with running_server() as server:
        server.http.post("/api/chat", json=CHAT | {"stream": False, "keep_alive": 0})
        for path, keep_alive, reason, number in (
            *(("/api/chat", 0, "unload", 0), ("/api/generate", "0s", "unload", 0)),
            *(("/api/generate", "5m", "load", 1), ("/api/chat", -1, "load", 1)),
        ):
            answer = server.http.post(path, json={"model": "toy", "keep_alive": keep_alive}).json()
            assert answer["done_reason"] == reason
            assert len(server.http.get("/api/ps").json()["models"]) == number


def test_a_model_in_use_is_not_unloaded() -> None:
    gate = Gate()
    with (
        running_server(gate.load) as server,
        in_thread(lambda: server.http.post("/api/chat", json=CHAT | {"stream": False})) as answers,
    ):
        assert gate.reached.wait(PATIENCE)
        kept = server.http.post("/api/generate", json={"model": "toy", "keep_alive": 0}).json()
        gate.opened.set()
    assert kept["done_reason"] == "load" and answers[0].status_code == 200


@subcases(
    "path, body, status, why",
    [
        ("/api/chat", {"format": {"type": "xml"}}, 400, "format: "),
        ("/api/chat", {"format": "xml"}, 400, 'format="xml"; allowed: "json" or a JSON schema'),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
            400,
            "0.content has an image, but this",
        ),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "suffix: this model has no tokens for infilling"),
        ("/api/generate", {"prompt": "x", "think": 0}, 400, "think"),
        ("/api/generate", {"keep_alive": False}, 400, "keep_alive=false; allowed: a number"),
        ("/api/generate", {"prompt": "x", "context": [1]}, 400, "context: contexts are not supported"),
        ("/api/pull", {"model": "tiny"}, 404, "no such path"),
    ],
)
def test_errors_have_ollamas_form(
    server: RunningServer, path: str, body: dict[str, Any], status: int, why: str
) -> None:
    default = {name: value for name, value in CHAT.items() if path == "/api/chat" or name != "messages"}
    answer = server.http.post(path, json=default | body)
    assert answer.status_code == status and set(answer.json()) == {"error"} and why in answer.json()["error"], (
        answer.text
    )


def test_a_strict_server_knows_its_own_names_only() -> None:
    with running_server(strict=True) as server:
        for path, body in (("/api/chat", CHAT | {"model": "none"}), ("/api/show", {"model": "none"})):
            answer = server.http.post(path, json=body)
            assert answer.status_code == 404 and "model 'none' " in answer.json()["error"]
        assert server.http.post("/api/show", json={"model": "toy:latest"}).status_code == 200
        for number in (-1, 0):  # as many tokens as there is room for
            options = {"num_predict": number, "stop": ["a", "e", "o", "i"]}
            body = {"model": "toy:latest", "prompt": "x", "options": options}
            assert server.http.post("/api/generate", json=body).status_code == 200


def test_a_body_need_not_be_named_json_unless_another_site_sends_it(server: RunningServer) -> None:
    content = json.dumps(CHAT | {"stream": False})
    curl = {"content-type": "application/x-www-form-urlencoded"}
    assert server.http.post("/api/chat", content=content, headers=curl).json()["message"]["content"]
    refused = server.http.post("/api/chat", content=content, headers=curl | {"origin": "https://elsewhere.example"})
    assert refused.status_code == 403 and "origin" in refused.json()["error"]
