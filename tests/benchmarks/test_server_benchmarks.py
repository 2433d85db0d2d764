"""The benchmarks of the server: loads and storms on the toy, and the errors that they detect."""

from __future__ import annotations

import argparse
import asyncio
import json

import pytest
import server_soak
from load_client import Answer, Load, figures, run_load

from slipstream import SamplingParams, SlipstreamError
from tests.support.running_server import running_server, toy

pytestmark = pytest.mark.exhaustive

FIELDS = {"max_tokens": 12, "temperature": 0.0}


@pytest.mark.parametrize("load", [Load(2), Load(9, rate=200.0)])
def test_a_load_has_every_answer_with_its_times(load: Load) -> None:
    prompts = ["A heron", "The wren", "Then the wind"]
    with running_server() as server:
        answers = asyncio.run(run_load(server.url, "toy", prompts, load, FIELDS))
    expected = [answer.text for answer in toy().generate(prompts, SamplingParams(max_tokens=12), chat=False)]
    assert [answer.prompt for answer in answers] == prompts and [answer.text for answer in answers] == expected
    assert all(answer.times == sorted(answer.times) and answer.begun < answer.times[0] for answer in answers)


def test_a_whole_answer_has_a_single_time() -> None:
    with running_server() as server:
        load = run_load(server.url, "toy", ["A heron", "The wren"], Load(2), FIELDS | {"stream": False})
        answers = asyncio.run(load)
    expected = toy().generate(["A heron", "The wren"], SamplingParams(max_tokens=12), chat=False)
    assert [answer.text for answer in answers] == [answer.text for answer in expected]
    assert [answer.reason for answer in answers] == [answer.finish_reason for answer in expected]
    assert all(len(answer.times) == 1 and answer.begun < answer.times[0] for answer in answers)


async def _answers_with(response: bytes, *, stream: bool = True) -> Answer:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for start in range(0, len(response), 9):  # chunks in pieces, as a network delivers them
            writer.write(response[start : start + 9])
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        return (await run_load(f"http://{host}:{port}", "m", ["A heron"], Load(1), FIELDS | {"stream": stream}))[0]


def test_an_answer_in_pieces_is_joined_and_a_broken_one_is_an_error() -> None:
    events = [b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % word for word in (b"The ", b"wren")]
    chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = asyncio.run(_answers_with(head + b"".join(chunks) + b"0\r\n\r\n"))
    assert answer.text == "The wren" and len(answer.times) == 2 and answer.times[0] < answer.times[1]
    for broken in (head + chunks[0], head + chunks[0][:-9], b"HTTP/1.1 503 No\r\n\r\nbusy"):
        with pytest.raises(SlipstreamError, match=r"broke off|answered HTTP"):
            asyncio.run(_answers_with(broken))
    with pytest.raises(SlipstreamError, match="broke off after 12 bytes"):
        asyncio.run(_answers_with(b'HTTP/1.1 200 OK\r\n\r\n{"choices": ', stream=False))


def test_figures_are_computed_from_the_times_of_answers() -> None:
    answers = [Answer("a", 0.0, "x", [1.0, 1.5, 2.0], 5), Answer("b", 1.0, "x", [1.5, 4.0], 5)]
    summary = figures(answers)
    assert summary["tokens"] == 10 and summary["seconds"] == 4.0 and summary["tokens_per_second"] == 2.5
    assert summary["first_ms_p50"] == 750.0 and summary["between_ms_p50"] == 500.0
    assert summary["per_token_ms_p50"] == pytest.approx((250 + 625) / 2)


def test_a_storm_leaves_nothing_behind_and_a_wrong_text_is_caught() -> None:
    options = argparse.Namespace(requests=60, seed=3, at_once=8, longest=60)
    with running_server() as server:
        report = server_soak.measure(server.url, options)
        assert not report["wrong_texts"] and not report["health"]["not_ready"] and not report["internal_errors"]
        assert report["running_or_waiting"] == 0 and report["held"]["slipstream:tasks"][-1] <= 5
        body = json.dumps({"prompt": "A heron", "max_tokens": 5, "temperature": 0})
        right = {server.text("A heron", max_tokens=5, temperature=0)}
        assert server_soak.wrong_texts(server.http, {body: right}) == []
        assert server_soak.wrong_texts(server.http, {body: {"other"}}) == [f"200 {body}"]
        assert server_soak.wrong_texts(server.http, {body: {*right, "other"}}) == [f"200 {body}"]
