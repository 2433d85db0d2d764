"""A fault inside a request ends that request only: others keep their texts, and the server continues."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.types import Row
from tests.support.job_cases import by_id, chat
from tests.support.running_server import RunningServer, running_server, toy
from tests.support.server_storm import with_faulty_drafter

MARK = "!!!"  # a prompt with it fails
GOOD = ["A heron", "The sparrow was", "Then the wind"]


class Panic(BaseException):
    """Like errors from Rust, not a subclass of `Exception`."""


def is_bad(row: Row) -> bool:
    return bytes(row.tokens[: row.prompt_length]).find(MARK.encode()) >= 0


def faulty(**settings: Any) -> SpeculativeDecoder:
    """The toy with a user's drafter that fails on marked prompts once they have some output."""
    return with_faulty_drafter(toy(**settings), lambda row: is_bad(row) and row.num_output_tokens > 2)


def alone(prompt: str) -> str:
    return toy().generate(prompt, SamplingParams(max_tokens=40), chat=False).text


def ask(server: RunningServer, prompts: Sequence[str]) -> list[Any]:
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(lambda prompt: server.complete(prompt, max_tokens=40, temperature=0), prompts))


@pytest.mark.slow
@pytest.mark.parametrize("places", [1, 4])
def test_a_request_that_fails_leaves_others_their_texts(places: int) -> None:
    with running_server(lambda: faulty(max_batch_size=places)) as server:
        for _ in range(3):  # the same request again does no more harm
            answers = ask(server, [*GOOD, f"bad {MARK}"])
            assert [answer.json()["choices"][0]["text"] for answer in answers[:3]] == [alone(prompt) for prompt in GOOD]
            assert answers[3].status_code == 500 and "secret" not in answers[3].text
        assert server.http.get("/health").status_code == 200
        assert server.server.failure is None and not server.call(lambda: server.service.live)


def test_a_stream_that_fails_ends_with_an_error_event_and_leaves_its_neighbor_alone() -> None:
    with running_server(lambda: faulty(max_batch_size=4)) as server, ThreadPoolExecutor(1) as thread:
        beside = thread.submit(server.text, GOOD[0], max_tokens=40, temperature=0)
        body = {"prompt": f"bad {MARK}", "max_tokens": 40, "temperature": 0}
        chunks = server.chunks("/v1/completions", body)
        assert chunks[-1]["error"]["type"] == "server_error" and len(chunks) > 1
        assert beside.result() == alone(GOOD[0])


@pytest.mark.parametrize("error", [RuntimeError("secret"), Panic("secret")])
def test_a_step_that_fails_ends_its_requests_and_not_the_server(error: BaseException) -> None:
    errors = [error]

    def load() -> SpeculativeDecoder:
        decoder: Any = toy(max_batch_size=2)
        verify = decoder._target_session.verify_greedy

        def failing(rows: Sequence[Row], *arguments: Any) -> Any:
            verdict = verify(rows, *arguments)
            if errors and any(row.num_output_tokens > 9 for row in rows):
                raise errors.pop()
            return verdict

        decoder._target_session.verify_greedy = failing
        return decoder

    with running_server(load) as server:
        answer = server.complete(GOOD[0], max_tokens=40, temperature=0)
        assert answer.status_code == 500 and "secret" not in answer.text
        assert [answer.json()["choices"][0]["text"] for answer in ask(server, GOOD)] == [alone(text) for text in GOOD]
        assert server.server.failure is None and not server.call(lambda: server.service.live)


def test_a_prompt_that_cannot_be_scored_fails_alone() -> None:
    def load() -> SpeculativeDecoder:
        decoder: Any = toy(max_batch_size=2)
        score = decoder.score_prompt

        def failing(scores: Any, row: Row, *arguments: Any) -> Any:
            if is_bad(row):
                raise MemoryError("no room")
            return score(scores, row, *arguments)

        decoder.score_prompt = failing
        return decoder

    with running_server(load) as server:
        assert server.complete(MARK, echo=True, logprobs=1, max_tokens=0).status_code == 500
        assert server.complete("A heron", echo=True, logprobs=1, max_tokens=0).status_code == 200


def test_a_request_that_runs_out_of_memory_fails_alone() -> None:
    def load() -> SpeculativeDecoder:
        decoder: Any = toy(max_batch_size=2)
        session = decoder._target_session
        reserve = session.reserve

        def failing(rows: int, length: int) -> None:
            if length > 1000:
                raise MemoryError("no room")
            reserve(rows, length)

        session.reserve = failing
        return decoder

    with running_server(load) as server, ThreadPoolExecutor(1) as thread:
        beside = thread.submit(server.text, GOOD[0], max_tokens=900, temperature=0)
        assert server.complete("x", max_tokens=1500).status_code == 500
        assert len(beside.result()) > 0
        assert server.text(GOOD[0], max_tokens=40, temperature=0) == alone(GOOD[0])


LINES = [chat(f"c{at}", "The heron" if at != 5 else MARK, temperature=0, max_tokens=20 + at) for at in range(12)]


def test_a_job_answers_all_lines_but_the_one_that_fails(tmp_path: Path) -> None:
    for name, order in (("job", LINES), ("last", [*LINES[:5], *LINES[6:], LINES[5]])):
        output, errors = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.errors.jsonl"
        report = faulty(max_batch_size=3).batch(order, output, errors=errors)
        assert report.answered == 11 and report.failed == 1
        assert [json.loads(line)["custom_id"] for line in errors.read_text().splitlines()] == ["c5"]
        toy(max_batch_size=3).batch([line for line in LINES if line["custom_id"] != "c5"], tmp_path / f"{name}.good")
        assert by_id(output) == by_id(tmp_path / f"{name}.good")


def test_a_job_whose_engine_fails_raises_its_error_and_keeps_its_answers(tmp_path: Path) -> None:
    decoder = toy(max_batch_size=2)
    session: Any = decoder._target_session
    verify, calls = session.verify_greedy, iter(range(10**6))

    def failing(*arguments: Any) -> Any:
        if next(calls) > 30:
            raise RuntimeError("the device is gone")
        return verify(*arguments)

    session.verify_greedy = failing
    with pytest.raises(RuntimeError, match="the device is gone"):
        decoder.batch(LINES, tmp_path / "output.jsonl")
    report = toy(max_batch_size=2).batch(LINES, tmp_path / "output.jsonl")
    assert report.answered_before > 0 and report.answered + report.answered_before == len(LINES)
