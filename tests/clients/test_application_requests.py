"""Requests like those of Continue (by its source) and Open WebUI; the applications themselves are not run here."""

from __future__ import annotations

import json
from typing import Any

from slipstream import SamplingParams, SpeculativeDecoder
from tests.support.running_server import RunningServer

STOPS = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<endoftext>", "</fim_middle>", "</code>"]
STOPS += ["\n\n", "/src/", "#- coding: utf-8", "```", "\nfunction", "\nclass", "\nmodule", "\nexport", "\nimport"]
STOPS += ["\ndef", "\nfrom", "\nwhile", "\nfor", "\ntry"]
KEYS = {"Authorization": "Bearer none", "api-key": "none"}  # Continue sends both


def streamed(server: RunningServer, path: str, body: dict[str, Any]) -> list[Any]:
    with server.http.stream("POST", path, json=body | {"stream": True}, headers=KEYS) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_continue_completes_with_its_own_prompt_and_many_stop_strings(
    server: RunningServer, decoder: SpeculativeDecoder
) -> None:
    assert [model["id"] for model in server.http.get("/v1/models", headers=KEYS).json()["data"]] == ["tiny"]
    body = {"model": "tiny", "prompt": "<fim_prefix>cat<fim_suffix>mat<fim_middle>", "max_tokens": 40, "stop": STOPS}
    chunks = streamed(server, "/v1/completions", body | {"temperature": 0.01, "seed": 3})
    params = SamplingParams(max_tokens=40, stop=STOPS, temperature=0.01, seed=3)
    expected = decoder.generate(body["prompt"], params, chat=False).text
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected


def test_continue_edits_with_the_old_file_as_prediction(server: RunningServer) -> None:
    messages = [{"role": "system", "content": " "}, {"role": "user", "content": "mend the cat"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 30, "temperature": 0.0, "top_p": 1.0, "seed": 1}
    plain = streamed(server, "/v1/chat/completions", body)
    prediction = {"type": "content", "content": "the cat sat on the mat"}
    edited = streamed(server, "/v1/chat/completions", body | {"prediction": prediction})
    texts = ["".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) for chunks in (plain, edited)]
    assert texts[0] == texts[1]


def test_open_webui_streams_chats_with_usage_and_requests_titles(server: RunningServer) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "the cat sat"}]}]
    chat = {"model": "tiny", "messages": messages, "stream_options": {"include_usage": True}, "max_tokens": 20}
    chunks = streamed(server, "/v1/chat/completions", chat)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant" and chunks[-1]["usage"]["completion_tokens"] <= 20
    title = {"model": "tiny", "messages": [{"role": "user", "content": "title"}], "stream": False}
    answer = server.http.post("/v1/chat/completions", json=title | {"max_completion_tokens": 9}, headers=KEYS)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["role"] == "assistant"
