"""OpenAI's own client beyond single calls: helpers for schemas and streams, tool turns, asyncio, errors and retries."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from slipstream import SamplingParams, SpeculativeDecoder
from tests.support.processes import PATIENCE
from tests.support.running_server import ARGUMENTS, Gate, RunningServer, in_thread, running_server

ASKED: Any = [{"role": "user", "content": "the cat sat on the mat"}]
ENDLESS = {"1": -50}  # the end token
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": ARGUMENTS, "strict": True}}


class Measure(BaseModel):
    x: bool
    unit: Literal["m", "km"]


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.openai() as connected:
        yield connected


def test_completions_equal_the_decoders_texts_whole_and_streamed(
    client: openai.OpenAI, decoder: SpeculativeDecoder
) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 5, "logit_bias": ENDLESS}
    params = SamplingParams(**options | {"logit_bias": {1: -50}})
    expected = [result.text for result in decoder.generate(["A heron", "zz"], params, chat=False)]
    whole = client.completions.create(model="tiny", prompt=["A heron", "zz"], **options)
    assert [choice.text for choice in whole.choices] == expected
    chunks = list(
        client.completions.create(
            model="tiny", prompt=["A heron", "zz"], stream=True, stream_options={"include_usage": True}, **options
        )
    )
    for index, text in enumerate(expected):
        parts = [result for chunk in chunks for result in chunk.choices if result.index == index]
        assert "".join(result.text for result in parts) == text and parts[-1].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 80


def test_log_probabilities_with_an_echo_cover_prompt_and_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="A heron", max_tokens=5, temperature=0, logprobs=2, echo=True
    )
    reported = answer.choices[0].logprobs
    assert "".join(reported.tokens) == answer.choices[0].text and reported.token_logprobs[0] is None
    assert len(reported.token_logprobs) == 12 and all(len(top) in (2, 3) for top in reported.top_logprobs[1:])


def test_answers_are_parsed_into_classes(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=ASKED, response_format=Measure, temperature=1.0, seed=1, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Measure)


def test_the_streaming_helper_collects_the_answer(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    with client.chat.completions.stream(
        model="tiny",
        messages=ASKED,
        max_tokens=30,
        temperature=0,
        logprobs=True,
        stream_options={"include_usage": True},
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    expected = decoder.generate(ASKED, SamplingParams(max_tokens=30))
    assert final.choices[0].message.content == expected.text
    assert final.usage.completion_tokens == len(expected.token_ids) == len(final.choices[0].logprobs.content)


def test_the_streaming_helper_collects_calls(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "seed": 2}
    with client.chat.completions.stream(model="tiny", messages=ASKED, max_tokens=200, **options) as stream:
        (finished,) = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert finished.name == "add" and Measure.model_validate(finished.parsed_arguments)


def test_a_tool_call_can_be_answered(client: openai.OpenAI, server: RunningServer) -> None:
    options: dict[str, Any] = {"model": "tiny", "tools": [TOOL], "max_tokens": 200}
    first = client.chat.completions.create(
        messages=ASKED, tool_choice="required", parallel_tool_calls=False, seed=2, **options
    )
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls" and message.tool_calls
    tool_message = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "four"}
    answer = client.chat.completions.create(
        messages=[*ASKED, message, tool_message],
        tool_choice="none",
        seed=2,
        extra_body={"return_token_ids": True},
        **options,
    )
    prompt = server.http.post("/detokenize", json={"tokens": answer.choices[0].prompt_token_ids}).json()["prompt"]
    assert prompt == "u:the cat sat on the mat.a:.add.t:four.a:"


def test_a_prediction_is_counted(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": ASKED, "max_tokens": 60, "seed": 6, "logit_bias": ENDLESS}
    text = client.chat.completions.create(**options).choices[0].message.content
    again = client.chat.completions.create(**options, prediction={"type": "content", "content": text})
    assert again.choices[0].message.content == text
    assert again.usage.completion_tokens_details.accepted_prediction_tokens > 20


def test_concurrent_requests_get_their_own_answers(server: RunningServer, decoder: SpeculativeDecoder) -> None:
    prompts = [f"{name} sat" for name in ("cat", "dog", "heron", "wren", "owl")]

    async def ask() -> list[str]:
        transport = httpx.AsyncClient(trust_env=False)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=transport) as client:

            async def complete(prompt: str) -> str:
                text = ""
                async for chunk in await client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=30, temperature=0, stream=True
                ):
                    text += chunk.choices[0].text
                return text

            return list(await asyncio.gather(*map(complete, prompts)))

    expected = decoder.generate(prompts, SamplingParams(max_tokens=30), chat=False)
    assert asyncio.run(ask()) == [result.text for result in expected]


def test_closing_a_stream_ends_its_request(client: openai.OpenAI, server: RunningServer) -> None:
    stream = client.completions.create(model="tiny", prompt="A heron", max_tokens=900, stream=True, logit_bias=ENDLESS)
    next(stream)
    stream.close()
    server.wait_until(lambda: not server.service.live)


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"response_format": {"type": "json_schema"}}, openai.BadRequestError, "response_format.json_schema"),
        ({"messages": [{"role": "user", "content": "x" * (5 << 20)}]}, openai.APIStatusError, None),
    ],
)
def test_errors_raise_openais_classes_and_name_the_field(
    client: openai.OpenAI, fields: dict[str, Any], error: type[openai.APIStatusError], param: str | None
) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": ASKED} | fields)
    assert caught.value.param == param and caught.value.message and "x-request-id" not in caught.value.message


def test_a_wrong_key_is_an_authentication_error(tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("right-key\n")
    with running_server(api_key_file=str(tmp_path / "keys")) as server:
        with server.openai("wrong-key") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with server.openai("right-key") as client:
            assert [model.id for model in client.models.list()] == ["toy"]


def test_an_error_in_a_stream_is_raised() -> None:
    gate = Gate()
    with running_server(gate.load) as server, server.openai() as client:
        with in_thread(
            lambda: list(client.completions.create(model="toy", prompt="A heron", max_tokens=9, stream=True))
        ) as outcomes:
            assert gate.reached.wait(PATIENCE)
            (live,) = server.call(lambda: list(server.service.live))
            server.reach_deadline(live)
            gate.opened.set()
        assert isinstance(outcomes[0], openai.APIError) and "took over" in str(outcomes[0])
