"""The requests of real clients are answered, and of their second turns only what is new is read.

The recordings of November 2026 are shortened: long texts are replaced, and tools have two properties at most.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream import SpeculativeDecoder
from slipstream.apps.server import messages_api, ollama_api, responses_api
from slipstream.apps.server.request_reading import rendered_messages
from slipstream.apps.server.schemas import ChatFields
from tests.support import tiny_models
from tests.support.chat_templates import TEMPLATES
from tests.support.markers import mostly_exhaustive
from tests.support.running_server import RunningServer, running_server

CLIENTS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data" / "recorded_requests.json").read_text(encoding="utf-8")
)
REQUESTS = [(client, request) for client, requests in CLIENTS.items() for request in requests]
# clients whose last request continues the one before it
TURNS = ["claude-code 2.1.197", "claude-code 2.1.332", "codex 0.171.0", "opencode 1.18.33", "cline 3.0.65"]
TURNS += ["continue cli 1.5.47"]


def chat_of(request: Any) -> ChatFields:
    path, body = request["path"].partition("?")[0], request["body"]
    if path == "/v1/messages":
        return messages_api.conversation(messages_api.MessagesFields.model_validate(body), 65536)
    if path == "/v1/messages/count_tokens":
        return messages_api.conversation(messages_api.CountedFields.model_validate(body), 65536)
    if path == "/v1/responses":
        return responses_api.conversation(responses_api.ResponsesFields.model_validate(body), [], 65536)
    if path.startswith("/api/"):
        kind = ollama_api.GenerateFields if path.endswith("generate") else ollama_api.OllamaChatFields
        chat = ollama_api.conversation(kind.model_validate(body))
        assert isinstance(chat, ChatFields)
        return chat
    return ChatFields.model_validate(body)


@pytest.fixture(scope="module", params=mostly_exhaustive(["system first", "no tools"], "no tools"))
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    inner = tiny_models.byte_tokenizer(TEMPLATES[request.param])
    model = tiny_models.fresh("llama", vocab_size=len(inner), max_position_embeddings=32768, eos_token_id=1)
    with running_server(
        lambda: SpeculativeDecoder(model, tokenizer=inner, drafter="none", reproducible=False),
        max_model_len=None,
        default_max_tokens=3,
    ) as running:
        yield running


def shortened(body: dict[str, Any]) -> dict[str, Any]:
    """The request with an answer of two tokens, if it says how long that may be."""
    return body | {name: 2 for name in ("max_tokens", "max_output_tokens") if name in body}


@pytest.mark.slow
def test_every_request_is_answered(server: RunningServer) -> None:
    for client, request in REQUESTS:
        answer = server.http.post(request["path"], json=shortened(request["body"]))
        if "previous_response_id" in request["body"]:
            assert answer.status_code == 400 and "resp_0001" in answer.json()["error"]["message"]
        else:
            assert answer.status_code == 200 and '"error":{' not in answer.text, (client, answer.text)


@pytest.mark.parametrize("client", TURNS)
def test_a_second_turn_reads_only_what_is_new(server: RunningServer, client: str) -> None:
    first, second = CLIENTS[client][-2:]
    counts = []
    for request in (first, second):
        server.http.post(request["path"], json=shortened(request["body"]))
        page = server.http.get("/metrics").text.splitlines()
        counts.append(
            {
                name: sum(float(line.rpartition(" ")[2]) for line in page if line.startswith(f"vllm:{name}_total"))
                for name in ("prefix_cache_hits", "prompt_tokens")
            }
        )
    read = {name: counts[1][name] - counts[0][name] for name in counts[0]}
    lengths = [len(prompt_of(server, request)) for request in (first, second)]
    assert read["prompt_tokens"] == lengths[1]
    assert read["prompt_tokens"] - read["prefix_cache_hits"] <= lengths[1] - lengths[0] + 64


def prompt_of(server: RunningServer, request: Any) -> list[int]:
    tokenizer = server.service.facts.tokenizer
    return rendered_messages(chat_of(request), tokenizer, server.service.loaded.rows.reading).ids
