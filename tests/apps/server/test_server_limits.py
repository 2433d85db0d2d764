"""Limits, deadlines, disconnecting clients, shutdown: a request never costs others more than its share."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from torch import Tensor

from slipstream import SpeculativeDecoder
from slipstream.apps.server import answers, connections, launch
from slipstream.apps.server.engine_thread import FairQueue
from slipstream.apps.server.error_objects import ApiError
from slipstream.apps.server.live_request import MAX_UNREAD_EVENTS, Ended, Event, Job, LiveRequest, Started
from slipstream.apps.server.request_reading import rendered_prompts
from slipstream.apps.server.request_rows import writer_of
from slipstream.apps.server.schemas import CompletionFields
from slipstream.core.types import Row
from slipstream.models.toy import ToyTokenizer
from slipstream.sampling.params import SamplingParams
from tests.support.markers import mostly_exhaustive
from tests.support.running_server import PATIENCE, Gate, RunningServer, in_thread, running_server, toy_with

LONG_PROMPT: dict[str, Any] = {"prompt": [7] * 4000, "max_tokens": 1}
LONG = {"prompt": "A heron", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def one_at_a_time(gate: Gate, **settings: Any) -> Any:
    return running_server(lambda: gate.load(max_batch_size=1), **settings)


def opened(client: httpx.Client, body: dict[str, Any]) -> Any:
    """A stream that is started but not read."""
    return client.stream("POST", "/v1/completions", json=body | {"stream": True})


def test_requests_beyond_the_queue_limit_are_told_to_retry_later(gate: Gate) -> None:
    with one_at_a_time(gate, max_queued_requests=2) as server:
        streams = [opened(server.http, LONG | {"max_tokens": 5}) for _ in range(3)]
        first = streams[0].__enter__()
        assert gate.reached.wait(PATIENCE)
        for stream in streams[1:]:
            stream.__enter__()
        refused = server.complete()
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_exceeded"
        with server.openai() as client, pytest.raises(openai.RateLimitError):
            client.completions.create(model="toy", prompt="x")
        gate.opened.set()
        assert "data: [DONE]" in first.read().decode()
        for stream in streams:
            stream.__exit__(None, None, None)
        assert (
            'slipstream:rejected_total{engine="0",model_name="toy",reason="requests"} 2.0'
            in server.http.get("/metrics").text
        )


def test_prompt_tokens_beyond_the_queue_limit_are_refused(gate: Gate) -> None:
    with one_at_a_time(gate, max_queued_tokens=1000) as server, opened(server.http, LONG):
        assert gate.reached.wait(PATIENCE)
        with opened(server.http, LONG | {"prompt": "x" * 980}):
            server.wait_until(lambda: sum(server.service.admission._prompt_tokens.values()) >= 980)
            assert server.complete("x" * 21, max_tokens=1).status_code == 429
            gate.opened.set()


def test_openais_client_retries_a_temporary_refusal_by_itself(gate: Gate) -> None:
    with one_at_a_time(gate, max_queued_requests=1) as server, opened(server.http, LONG | {"max_tokens": 3}):
        assert gate.reached.wait(PATIENCE)  # the first request has left the queue
        with opened(server.http, LONG | {"max_tokens": 3}):
            server.wait_until(lambda: server.service.num_waiting == 1)
            with server.openai(max_retries=8) as client:
                refused = threading.Event()
                add = server.service.metrics.add

                def count(name: str, *values: Any, **more: Any) -> None:
                    add(name, *values, **more)
                    if name == "slipstream:rejected":
                        refused.set()

                server.service.metrics.add = count
                with in_thread(
                    lambda: client.completions.create(model="toy", prompt="A heron", max_tokens=3)
                ) as answers:
                    assert refused.wait(PATIENCE)
                    gate.opened.set()
        assert answers[0].usage.completion_tokens == 3


def test_a_request_that_waits_too_long_is_refused(gate: Gate) -> None:
    with one_at_a_time(gate) as server, opened(server.http, LONG):
        assert gate.reached.wait(PATIENCE)
        # the first request no longer waits
        server.service.limits = replace(server.service.limits, queue_timeout=0.05)
        answer = server.complete()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "queue_timeout"
        assert answer.headers["retry-after"]
        assert server.call(lambda: server.service.num_waiting) == 0


CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "A heron"}]}
SIGNS_OF_LIFE = {  # and the ends of streams
    "/v1/messages": (CHAT | {"max_tokens": 3}, "event: ping", "message_stop"),
    "/v1/chat/completions": (CHAT | {"max_tokens": 3}, ": still here", "[DONE]"),
    "/v1/completions": ({"prompt": "A heron", "max_tokens": 3}, ": still here", "[DONE]"),
    "/v1/responses": ({"input": "A heron", "max_output_tokens": 3}, 'data: {"type":"response.in_', "incomplete"),
    "/api/chat": (CHAT | {"options": {"num_predict": 3}}, '{"model":"toy"', '"done":true'),
}


def test_streams_outlive_the_limits_of_idle_connections_while_they_wait_and_their_prompts_are_read(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "SILENCE_SECONDS", 0.02)
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(launch, "REQUEST_SECONDS", 0.2)
    with one_at_a_time(gate, keep_alive_timeout=1) as server, ExitStack() as stack:
        streams = []
        for path, (body, sign, end) in SIGNS_OF_LIFE.items():
            answer = stack.enter_context(server.http.stream("POST", path, json=body | {"stream": True}))
            assert gate.reached.wait(PATIENCE)  # the first prompt is being read, the other requests wait
            streams.append((answer.iter_lines(), sign, end))
        for lines, sign, _ in streams:
            signs = (line for line in lines if line.startswith(sign))
            assert all(next(signs) for _ in range(75))  # in 1.5 seconds
        gate.opened.set()
        for lines, _, end in streams:
            assert end in [line for line in lines if line][-1]


def test_a_request_that_takes_too_long_fails_and_says_not_to_retry(gate: Gate) -> None:
    with one_at_a_time(gate, request_timeout=0.05) as server:
        answer = server.complete()
        assert answer.status_code == 408 and answer.headers["x-should-retry"] == "false"
        gate.opened.set()
        server.wait_until(lambda: not server.service.live)


def queued(service: Any, **fields: Any) -> LiveRequest:
    """A request whose events nobody reads; must be called on the event loop."""
    live: LiveRequest = service.enter("", None)
    loaded = service.loaded
    writer_of(loaded.rows, service.facts, live, CompletionFields(**LONG | fields), loaded.decoder.tokenizer)
    service.submit(live)
    return live


def test_a_deadline_ends_the_rows_of_a_stream_that_nobody_reads(gate: Gate) -> None:
    with one_at_a_time(gate) as server:
        live = server.call(lambda: queued(server.service))
        assert gate.reached.wait(PATIENCE)
        server.reach_deadline(live)
        assert live.error is not None
        gate.opened.set()
        server.wait_until(lambda: live.jobs[0].over)
        assert live.jobs[0].row.num_output_tokens < LONG["max_tokens"]
        server.call(lambda: server.service.release(live))
        assert 'when="running"' in server.http.get("/metrics").text


class SlowTokenizer(ToyTokenizer):
    """Counts the texts it encodes, and blocks until `opened` is set."""

    def __init__(self) -> None:
        self.texts, self.opened = 0, threading.Event()

    def encode(self, text: str) -> list[int]:
        self.texts += 1
        assert self.opened.wait(PATIENCE)
        return super().encode(text)

    def __deepcopy__(self, copied: Any) -> SlowTokenizer:
        return self


def test_too_many_prompts_are_refused_before_any_is_tokenized() -> None:
    tokenizer = SlowTokenizer()
    fields = CompletionFields(prompt=["a"] * 65, n=2)
    with pytest.raises(ApiError, match="65 prompts with n=2; allowed: at most 128 outputs"):
        rendered_prompts(fields, tokenizer)
    assert tokenizer.texts == 0


def test_prompts_are_tokenized_under_the_deadline_of_their_request() -> None:
    tokenizer = SlowTokenizer()
    decoder = toy_with(tokenizer)
    with running_server(lambda: decoder) as server:
        with in_thread(server.complete) as answers:
            server.wait_until(lambda: tokenizer.texts == 1)
            (live,) = server.call(lambda: list(server.service.live))
            server.reach_deadline(live)
        assert answers[0].status_code == 408
        assert tokenizer.texts == 1 and not server.call(lambda: server.service.live)
        tokenizer.opened.set()


def two_rows(ends: int) -> LiveRequest:
    """A request with two started rows, of which `ends` have ended."""
    live = new_job("a").request
    live.jobs = [new_job("a"), new_job("a")]
    for event in (Started(0, 0, 0.0), Started(1, 0, 0.0), *(Ended(choice, "length", 0.0) for choice in range(ends))):
        live.add_event(event)
    return live


@pytest.mark.parametrize("ends", [0, 1, 2])
def test_a_slow_reader_gets_the_timeout_before_its_unread_events(ends: int) -> None:
    live = two_rows(ends)
    assert live.read() == Started(0, 0, 0.0)
    live.fail(ApiError(408, "late"))
    if ends < 2:
        with pytest.raises(ApiError, match="late"):
            live.read()
    else:  # a complete answer is still delivered
        assert [live.read() for _ in range(4)] == [Started(1, 0, 0.0), *(Ended(n, "length", 0.0) for n in (0, 1)), None]


@pytest.mark.parametrize("ends", [0, 1, 2])
def test_a_reader_of_a_whole_answer_gets_all_of_it_or_the_timeout(ends: int) -> None:
    async def read() -> tuple[list[Event], Exception | None]:
        live, events = two_rows(ends), list[Event]()
        reading = asyncio.ensure_future(live.read_all(events.append))
        await asyncio.sleep(0)
        assert len(events) == (4 if ends == 2 else 0)
        live.fail(ApiError(408, "late"))
        try:
            await reading
        except ApiError as error:
            return events, error
        return events, None

    events, error = asyncio.run(read())
    assert (len(events), error is None) == ((4, True) if ends == 2 else (0, False))


def test_a_long_answer_is_handed_over_in_parts_without_waking_the_reader() -> None:
    async def read() -> None:
        live, events = two_rows(0), list[Event]()
        reading = asyncio.ensure_future(live.read_all(events.append))
        await asyncio.sleep(0)
        for count in range(3, 3 * MAX_UNREAD_EVENTS):
            live.add_event(Started(0, 0, 0.0))
            live.notify()
            assert len(events) == count // MAX_UNREAD_EVENTS * MAX_UNREAD_EVENTS  # handed over within `notify`
        live.add_event(Ended(0, "length", 0.0))
        live.add_event(Ended(1, "length", 0.0))
        live.notify()
        assert len(events) == 3 * MAX_UNREAD_EVENTS + 1
        await reading

    asyncio.run(read())


def test_an_error_in_the_callback_ends_the_wait_for_an_answer() -> None:
    async def read() -> None:
        await two_rows(2).read_all(lambda event: 1 / 0)  # type: ignore[arg-type, return-value]

    with pytest.raises(ZeroDivisionError):
        asyncio.run(read())


def test_a_client_that_disconnects_while_queued_is_forgotten(gate: Gate) -> None:
    with one_at_a_time(gate) as server, opened(server.http, LONG):
        assert gate.reached.wait(PATIENCE)
        for stream in (True, False):
            impatient = httpx.Client(base_url=server.url, trust_env=False, timeout=0.2)
            with impatient as client, pytest.raises(httpx.TimeoutException):
                client.post("/v1/completions", json=LONG | {"stream": stream})
        server.wait_until(lambda: len(server.service.live) == 1 and server.service.num_waiting == 0)


def test_a_client_that_disconnects_while_served_frees_its_place(gate: Gate) -> None:
    with one_at_a_time(gate) as server:
        with opened(server.http, LONG):
            assert gate.reached.wait(PATIENCE)
            (live,) = server.call(lambda: list(server.service.live))
        server.wait_until(lambda: not server.service.live)
        gate.opened.set()
        assert live.jobs[0].row.num_output_tokens < LONG["max_tokens"]
        assert server.complete(temperature=0, max_tokens=3).status_code == 200
        assert live.jobs[0].row.finish_reason == "cancelled"


def forwards_of(decoder: SpeculativeDecoder) -> list[list[int]]:
    """A list that gets the tokens of each forward of the target."""
    backend: Any = decoder.target.backend
    forward, forwards = backend.forward, list[list[int]]()

    def recorded(tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        forwards.append(tokens.flatten().tolist())
        return forward(tokens, starts, first_slot=first_slot, logits=logits)

    backend.forward = recorded
    return forwards


def test_a_prompt_whose_client_has_left_is_read_no_further(gate: Gate) -> None:
    decoder = gate.load()
    forwards = forwards_of(decoder)
    with running_server(lambda: decoder) as server:
        with opened(server.http, LONG_PROMPT):
            assert gate.reached.wait(PATIENCE)
        server.wait_until(lambda: not server.service.live)
        gate.opened.set()
        assert server.complete(max_tokens=1).status_code == 200
    assert 0 < sum(tokens.count(7) for tokens in forwards) < len(LONG_PROMPT["prompt"]) // 2


def test_a_short_request_passes_a_long_prompt_that_is_read_alone(gate: Gate) -> None:
    decoder = gate.load()
    forwards = forwards_of(decoder)
    with running_server(lambda: decoder) as server, in_thread(lambda: server.complete(**LONG_PROMPT)) as long:
        assert gate.reached.wait(PATIENCE)
        with in_thread(lambda: server.complete([8, 9], max_tokens=1)) as short:
            server.wait_until(lambda: len(server.service.live) == 2 and not server.service._preparing)
            gate.opened.set()
    assert long[0].status_code == short[0].status_code == 200
    first = next(index for index, tokens in enumerate(forwards) if 8 in tokens)
    assert sum(tokens.count(7) for tokens in forwards[:first]) < len(LONG_PROMPT["prompt"]) // 2


def test_a_shutdown_finishes_running_requests_and_refuses_new_ones(gate: Gate) -> None:
    with one_at_a_time(gate) as server:
        with in_thread(lambda: server.complete(max_tokens=4)) as answers:
            assert gate.reached.wait(PATIENCE)
            server.call(server.server.begin_shutdown)
            server.wait_until(lambda: server.models.state == "draining")
            late = server.complete()
            assert late.status_code == 503 and late.json()["error"]["type"] == "overloaded_error"
            assert server.http.get("/health").status_code == 503 and server.http.get("/live").status_code == 200
            gate.opened.set()
        assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 4


def test_requests_still_running_at_the_drain_timeout_end_with_an_error(gate: Gate) -> None:
    with one_at_a_time(gate, drain_timeout=0.05) as server, opened(server.http, LONG) as stream:
        assert gate.reached.wait(PATIENCE)
        server.call(server.server.begin_shutdown)
        text = stream.read().decode()
        assert '"error"' in text and "shutting down" in text
        gate.opened.set()


def test_a_second_signal_ends_the_server_at_once(gate: Gate) -> None:
    with one_at_a_time(gate) as server, opened(server.http, LONG):
        assert gate.reached.wait(PATIENCE)
        server.call(server.server.begin_shutdown)
        server.server.handle_exit(15, None)
        assert server.server.should_exit and server.server.force_exit
        gate.opened.set()


@pytest.mark.slow
def test_a_dead_engine_fails_every_request_and_ends_the_server(gate: Gate) -> None:
    def load() -> Any:
        decoder = gate.load(max_batch_size=1)
        backend: Any = decoder.target.backend
        waiting = backend.forward

        def breaking(*arguments: Any, **more: Any) -> Any:
            waiting(*arguments, **more)
            raise RuntimeError("secret: the device is gone")

        backend.forward = breaking
        return decoder

    with running_server(load) as server:
        with in_thread(lambda: server.complete()) as first, in_thread(lambda: server.complete()) as second:
            assert gate.reached.wait(PATIENCE)
            server.wait_until(lambda: len(server.service.live) == 2)
            gate.opened.set()
        for answers in (first, second):
            assert answers[0].status_code == 500 and answers[0].json()["error"]["type"] == "server_error"
            assert "secret" not in answers[0].text and "Traceback" not in answers[0].text
        assert "secret" in str(server.server.failure) and server.server.should_exit


def test_requests_get_503_while_the_models_load() -> None:
    begun, go_on, statuses = threading.Event(), threading.Event(), list[int]()

    def load() -> Any:
        begun.set()
        assert go_on.wait(PATIENCE)
        return Gate().load()

    def early() -> None:
        assert begun.wait(PATIENCE)
        while box[0].models is None or not box[0].started:
            time.sleep(0.001)
        for path in ("/health", "/v1/models", "/metrics"):
            statuses.append(httpx.get(box[0].url + path, trust_env=False, timeout=PATIENCE).status_code)
        go_on.set()

    box: list[Any] = []
    from slipstream.apps.server.launch import Server
    from slipstream.apps.server.server_settings import ServerSettings
    from slipstream.apps.server.service import ModelSource

    ready, settings = threading.Event(), ServerSettings(port=0)
    box.append(Server(settings, [ModelSource(load, settings)], lambda server: ready.set()))
    thread = threading.Thread(target=box[0].run)
    thread.start()
    early()
    assert ready.wait(PATIENCE)
    box[0].should_exit = True
    thread.join(PATIENCE)
    assert statuses == [503, 503, 503]


def new_job(owner: str) -> Job:
    return Job(LiveRequest(owner, caller=owner), 0, Row(0, [1], SamplingParams(), 0))


def test_callers_take_turns_and_each_callers_requests_keep_their_order() -> None:
    async def orders() -> list[str]:
        line = FairQueue()
        jobs = [new_job("a") for _ in range(5)] + [new_job("b"), new_job("c"), new_job("c")]
        names = {id(job): f"{job.request.owner}{at}" for at, job in enumerate(jobs)}
        for job in jobs:
            line.add(job)
        assert len(line) == 8
        line.remove(jobs[1])
        taken = []
        while (job := line.take()) is not None:
            taken.append(names[id(job)])
        return taken

    assert asyncio.run(orders()) == ["a0", "b5", "c6", "a2", "c7", "a3", "a4"]


@pytest.mark.slow
@pytest.mark.parametrize(("share_learning", "salted"), [(False, False), (False, True), (True, False)])
def test_a_short_request_does_not_wait_for_many_requests_of_another_key(
    gate: Gate, tmp_path: Any, share_learning: bool, salted: bool
) -> None:
    (tmp_path / "keys").write_text("many:key-of-the-many\none:key-of-the-one\n")
    with one_at_a_time(gate, api_key_file=str(tmp_path / "keys"), share_learning=share_learning) as server:
        ended, shown = list[str](), server.service.engine_status.event

        def note(live: LiveRequest, event: Event) -> None:
            ended.extend([live.owner] * isinstance(event, Ended))
            shown(live, event)

        server.service.engine_status.event = note

        def ask(key: str, salt: str | None = None) -> None:
            with server.openai(key) as client:
                more = {"cache_salt": salt}
                client.completions.create(model="toy", prompt="A heron", max_tokens=5, extra_body=more)

        salts = [f"salt {at}" if salted else None for at in range(8)]
        threads = [threading.Thread(target=ask, args=["key-of-the-many", salt]) for salt in salts]
        for thread in threads:
            thread.start()
        server.wait_until(lambda: len(server.service.live) == 8 and not server.service._preparing)
        threads.append(threading.Thread(target=ask, args=["key-of-the-one"]))
        threads[-1].start()
        server.wait_until(lambda: len(server.service.live) == 9 and not server.service._preparing)
        gate.opened.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert len(ended) == 9 and ended.index("one") <= 2


@pytest.mark.slow
def test_keys_share_cached_prompts_only_with_share_learning(tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("ann:key-of-ann\nbob:key-of-bob\n")

    def cached(server: RunningServer, key: str, **more: Any) -> int:
        with server.openai(key) as client:
            answer = client.completions.create(model="toy", prompt="A heron " * 9, max_tokens=3, extra_body=more)
        return int(answer.usage.prompt_tokens_details.cached_tokens)  # type: ignore[union-attr]

    with running_server(api_key_file=str(tmp_path / "keys")) as server:
        assert [cached(server, key) > 0 for key in ("key-of-ann", "key-of-ann", "key-of-bob")] == [False, True, False]
        assert cached(server, "key-of-bob") and not cached(server, "key-of-bob", cache_salt="x")
    with running_server(api_key_file=str(tmp_path / "keys"), share_learning=True) as server:
        assert [cached(server, key) > 0 for key in ("key-of-ann", "key-of-bob")] == [False, True]


def test_requests_of_one_caller_take_turns_however_many_rows_they_have() -> None:
    line, many, few = FairQueue(), LiveRequest(caller="a"), LiveRequest(caller="a")
    jobs = [Job(many, at, Row(at, [1], SamplingParams(), 0)) for at in range(5)]
    jobs += [Job(few, at, Row(at, [1], SamplingParams(), 0)) for at in range(2)]
    for job in jobs:
        line.add(job)
    assert line.take(lambda job: job.request is few) is jobs[5] and len(line) == 6
    taken = [line.take() for _ in range(7)]
    assert taken == [jobs[0], jobs[6], *jobs[1:5], None]


@pytest.mark.slow
def test_long_rows_of_one_request_leave_a_place_to_others(gate: Gate) -> None:
    many = LONG | {"prompt": ["A heron"] * 4, "n": 4, "stream": False}
    with running_server(lambda: gate.load(max_batch_size=3)) as server:

        def running() -> int:
            return int(server.service.engine_status.num_running)

        with in_thread(lambda: server.http.post("/v1/completions", json=many | {"max_tokens": 1000})) as answers:
            assert gate.reached.wait(PATIENCE)
            gate.opened.set()
            server.wait_until(lambda: running() == 2)
            assert server.complete("The sparrow", max_tokens=5).status_code == 200
            # the short request started and ended in between
            assert server.call(running) == 2 and len(server.service.live) == 1
        assert answers[0].status_code == 200 and len(answers[0].json()["choices"]) == 16


def test_short_rows_of_one_request_may_take_all_places(gate: Gate) -> None:
    with (
        running_server(lambda: gate.load(max_batch_size=3)) as server,
        in_thread(lambda: server.complete(["A heron"] * 3, max_tokens=9)) as answers,
    ):
        assert gate.reached.wait(PATIENCE)
        server.wait_until(lambda: server.service.engine_status.num_running == 3)
        gate.opened.set()
    assert answers[0].status_code == 200


def test_each_caller_has_a_share_of_the_queue(gate: Gate, tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("ann:key-of-ann\nbob:key-of-bob\n")
    keys = {"api_key_file": str(tmp_path / "keys")}
    with one_at_a_time(gate, max_queued_requests=4, max_queued_tokens=1000, **keys) as server:
        short = LONG | {"max_tokens": 3}

        def entered(owner: str, prompt: str = "x") -> bool:
            """Whether a new request of an owner is admitted to the queue."""

            def enter() -> bool:
                try:
                    live = server.service.enter(owner, None)
                except ApiError as error:
                    assert error.status == 429
                    return False
                fields = CompletionFields(**short | {"prompt": prompt})
                loaded = server.service.loaded
                writer_of(loaded.rows, server.service.facts, live, fields, loaded.decoder.tokenizer)
                try:
                    server.service.submit(live)
                except ApiError as error:
                    assert error.status == 429
                    server.service.release(live)
                    return False
                return True

            return bool(server.call(enter))

        assert entered("ann") and gate.reached.wait(PATIENCE)
        assert [entered("ann", "x" * 200) for _ in range(5)] == [True] * 4 + [False]
        assert [entered("bob", "x" * 200) for _ in range(3)] == [True, True, False]  # half of the queue each
        assert [entered("cat", "x" * 300) for _ in range(2)] == [True, False]  # a third of the queue each
        assert not entered("ann")
        gate.opened.set()
        server.wait_until(lambda: all(job.over for live in server.service.live for job in live.jobs))


async def opened_sockets(url: str, count: int, data: bytes) -> list[socket.socket]:
    place, loop = urlsplit(url), asyncio.get_running_loop()
    sockets = []
    for _ in range(count):
        connection = socket.socket()
        connection.setblocking(False)
        await loop.sock_connect(connection, (place.hostname or "", place.port or 0))
        await loop.sock_sendall(connection, data)
        sockets.append(connection)
    return sockets


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    mostly_exhaustive(
        [b"", b"GET /hea", HEAD, HEAD + b"content-length: 100\r\n\r\n{", HEAD + b"transfer-encoding: chunked\r\n\r\n"],
        *(b"", HEAD),
    ),
)
def test_sockets_without_a_complete_request_do_not_block_others(data: bytes) -> None:
    with running_server(request_timeout=50.0) as server:

        async def crowd() -> list[socket.socket]:
            return await opened_sockets(server.url, launch.MAX_CONNECTIONS + 30, data)

        sockets = asyncio.run(crowd())
        for _ in range(3):
            assert httpx.get(f"{server.url}/health", trust_env=False, timeout=PATIENCE).status_code == 200
            assert (
                httpx.post(
                    f"{server.url}/v1/completions", json={"prompt": "x"}, trust_env=False, timeout=PATIENCE
                ).status_code
                == 200
            )
        server.wait_until(lambda: len(server.server.server_state.connections) <= launch.MAX_CONNECTIONS)
        for connection in sockets:
            connection.close()


@pytest.mark.parametrize("data", [b"", b"GET /health HTTP/1.1\r\nx: ", HEAD])
def test_a_socket_whose_request_never_arrives_is_closed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3 - 75)
    with running_server() as server, server.connected() as connection:
        connection.sendall(data)
        assert closed(connection, dribbled=b"x: y\r\n" if data == HEAD else b"")


def closed(connection: socket.socket, dribbled: bytes) -> bool:
    """Whether the server closes the connection in time, although `dribbled` is sent now and then."""
    connection.settimeout(0.05)
    for _ in range(int(PATIENCE / 0.05)):
        try:
            if not connection.recv(100):
                return True
        except TimeoutError:
            if dribbled:
                connection.sendall(dribbled)
        except OSError:
            return True
    return False


@pytest.mark.parametrize("framing", [b"content-length: 1000000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"])
def test_a_body_that_never_ends_times_out(framing: bytes) -> None:
    with running_server(request_timeout=0.3) as server:
        with server.connected() as connection:
            connection.sendall(HEAD + framing)
            answer = b""
            while b"did not arrive in time" not in answer:  # not until the connection closes, which takes seconds
                answer += (part := connection.recv(4096))
                assert part, answer
            assert answer.startswith(b"HTTP/1.1 408")
        server.wait_until(lambda: not server.service.live)


@pytest.mark.slow
def test_a_client_that_never_reads_is_disconnected() -> None:
    with running_server(request_timeout=1.0) as server:
        place = urlsplit(server.url)
        body = json.dumps(LONG | {"stream": True, "logprobs": 5, "max_tokens": 4000}).encode()
        for listener in server.server.servers[0].sockets:  # or the system would keep a whole answer
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect((place.hostname or "", place.port or 0))
            connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            connections = server.server.server_state.connections
            server.wait_until(lambda: any(connection.flow.write_paused for connection in connections))
            server.wait_until(lambda: not server.service.live and not connections)
