"""A real model behind the server gives the texts of the decoder, alone and concurrently."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from tests.support.embedded_model import loaded
from tests.support.running_server import RunningServer, running_server

pytestmark = pytest.mark.smollm2
QUESTIONS = ("Repeat after me: the ferry leaves from pier five at nine.", "What is a heron?")


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return loaded().using(acceptance="match")


@pytest.fixture(scope="module")
def server(decoder: SpeculativeDecoder) -> Iterator[RunningServer]:
    with running_server(lambda: decoder.using()) as running:
        yield running


def test_answers_to_concurrent_requests_equal_plain_decoding(
    server: RunningServer, decoder: SpeculativeDecoder
) -> None:
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": text}], "max_tokens": 16, "temperature": t, "seed": 3}
        for text in QUESTIONS
        for t in (0, 0.8)
    ]
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(lambda body: server.http.post("/v1/chat/completions", json=body).json(), bodies))
    plain = decoder.using("none")
    for body, answer in zip(bodies, answers, strict=True):
        params = SamplingParams(max_tokens=16, temperature=body["temperature"], seed=3)
        assert answer["choices"][0]["message"]["content"] == plain.generate(body["messages"], params).text


def test_an_echo_has_the_log_probabilities_of_the_generation_to_the_bit(
    server: RunningServer, decoder: SpeculativeDecoder
) -> None:
    if not decoder.reproducible:
        pytest.skip("forward shapes do not agree on this machine")
    fields = {"temperature": 0, "max_tokens": 20, "logprobs": 2, "return_token_ids": True}
    choice = server.complete("A heron is", **fields).json()["choices"][0]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    again = server.complete(ids, echo=True, logprobs=2, max_tokens=0).json()["choices"][0]["logprobs"]
    assert again["token_logprobs"][len(choice["prompt_token_ids"]) :] == choice["logprobs"]["token_logprobs"]
