"""Several models in a server: each text is that of its model alone, models take turns, and make room for others."""

from __future__ import annotations

import gc
import logging
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder
from slipstream.apps.server import served_models
from tests.support.markers import mostly_exhaustive
from tests.support.running_server import PATIENCE, Gate, RunningServer, in_thread, running_server, toy

pytestmark = pytest.mark.slow

TOYS = {"low": "toy:2", "high": "toy:5", "other": "toy:3"}
GIGABYTE = 10**9


def decoder_of(name: str) -> SpeculativeDecoder:
    return SpeculativeDecoder(TOYS[name], acceptance="match", drafter="suffix", num_draft_tokens=4)


def loads(name: str) -> Callable[[], SpeculativeDecoder]:
    return lambda: decoder_of(name)


def sized(gigabytes: float, load: Callable[[], SpeculativeDecoder] = toy, **settings: Any) -> dict[str, Any]:
    return {"load": load, "fetch": lambda: round(gigabytes * GIGABYTE), **settings}


def states(server: RunningServer) -> dict[str, str]:
    return {card["id"]: card["status"]["value"] for card in server.http.get("/v1/models").json()["data"]}


def service_of(server: RunningServer, name: str) -> Any:
    return server.call(lambda: server.models.named(name))


def ask(server: RunningServer, name: str, **fields: Any) -> Any:
    return server.complete("The heron", model=name, **{"max_tokens": 8, "temperature": 0} | fields)


@pytest.fixture
def gates() -> Iterator[dict[str, Gate]]:
    gates = {"a": Gate(), "b": Gate()}
    yield gates
    for gate in gates.values():
        gate.opened.set()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_models, "memory_of", lambda device: 10 * GIGABYTE)


@pytest.mark.parametrize("gigabytes", mostly_exhaustive([1.0, 4.0, 6.0], 4.0))  # all fit; two at a time; one at a time
def test_each_text_is_that_of_its_model_alone(gigabytes: float, memory: None) -> None:
    kinds = [{"temperature": 0}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.6, "top_k": 9, "seed": 8}]
    requests = [(name, prompt, kind) for prompt in ("The heron", "A crow sat") for kind in kinds for name in TOYS]
    expected = [
        decoder_of(name).generate(prompt, SamplingParams(max_tokens=30, **kind), chat=False).text
        for name, prompt, kind in requests
    ]
    with running_server(several={name: sized(gigabytes, loads(name)) for name in TOYS}) as server:
        with ThreadPoolExecutor(6) as threads:
            texts = threads.map(
                lambda request: server.text(request[1], model=request[0], max_tokens=30, **request[2]), requests
            )
            assert list(texts) == expected
        assert len(set(expected)) > len(kinds)
        assert list(states(server).values()).count("loaded") == {1.0: 3, 4.0: 2, 6.0: 1}[gigabytes]


def test_models_with_work_take_turns_step_by_step() -> None:
    forwards, gate = list[str](), Gate()

    def counted(name: str) -> SpeculativeDecoder:
        decoder = gate.load(drafter="none", num_draft_tokens=0)
        backend: Any = decoder.target.backend
        forward = backend.forward

        def noted(*arguments: Any, **more: Any) -> Any:
            forwards.append(name)
            return forward(*arguments, **more)

        backend.forward = noted
        return decoder

    names = ("a", "b", "c")
    models = {name: {"load": lambda name=name: counted(name)} for name in names}
    with running_server(several=models) as server, ThreadPoolExecutor(3) as threads:
        gate.opened.set()
        for name in names:
            ask(server, name, max_tokens=1)
        gate.opened.clear()
        gate.reached.clear()
        answers = [threads.submit(ask, server, name, max_tokens=40, ignore_eos=True) for name in names]
        assert gate.reached.wait(PATIENCE)
        services = [service_of(server, name) for name in names]
        server.wait_until(lambda: all(service._submitted for service in services))
        forwards.clear()
        gate.opened.set()
        assert [answer.result().json()["usage"]["completion_tokens"] for answer in answers] == [40, 40, 40]
    turns = [name for name, _ in groupby(forwards)]
    assert turns == forwards and len(turns) >= 3 * 39  # one forward of each
    assert all(set(turns[i : i + 3]) == set(names) for i in range(3 * 38))


def test_the_idle_model_that_was_used_longest_ago_makes_room(memory: None) -> None:
    models = {"a": sized(5), "b": sized(4), "c": sized(4), "d": sized(9.5)}
    with running_server(several=models) as server:
        assert set(states(server).values()) == {"unloaded"}
        seen = []
        for name in ("a", "b", "a", "c", "d"):
            assert ask(server, name).status_code == 200
            seen.append("".join(name for name, state in states(server).items() if state == "loaded"))
        assert seen == ["a", "ab", "ab", "ac", "d"]


def test_a_model_with_requests_is_unloaded_only_after_them_and_newer_ones_wait(
    memory: None, gates: dict[str, Gate]
) -> None:
    models = {"a": sized(6, gates["a"].load), "b": sized(6, gates["b"].load)}
    with running_server(several=models) as server, ThreadPoolExecutor(3) as threads:
        a, b = service_of(server, "a"), service_of(server, "b")
        first = threads.submit(ask, server, "a")
        assert gates["a"].reached.wait(PATIENCE)
        second = threads.submit(ask, server, "b")
        server.wait_until(lambda: a.is_leaving)
        assert states(server) == {"a": "loaded", "b": "unloaded"}
        newer = threads.submit(ask, server, "a", max_tokens=5)
        server.wait_until(lambda: len(a.waiting) == 1)
        gates["a"].opened.set()
        assert first.result().status_code == 200
        assert gates["b"].reached.wait(PATIENCE)
        assert states(server) == {"a": "unloaded", "b": "loaded"} and not newer.done()
        gates["b"].opened.set()
        assert second.result().status_code == newer.result().status_code == 200
        assert states(server) == {"a": "loaded", "b": "unloaded"} and not a.waiting and not b.live


def test_a_request_that_gives_up_waiting_for_room_leaves_the_other_model_loaded(
    memory: None, gates: dict[str, Gate]
) -> None:
    with (
        running_server(several={"a": sized(6, gates["a"].load), "b": sized(6)}) as server,
        ThreadPoolExecutor(3) as threads,
    ):
        a, b = service_of(server, "a"), service_of(server, "b")
        first = threads.submit(ask, server, "a")
        assert gates["a"].reached.wait(PATIENCE)
        second = threads.submit(ask, server, "b")
        server.wait_until(lambda: a.is_leaving)
        newer = threads.submit(ask, server, "a", max_tokens=5)
        server.wait_until(lambda: len(a.waiting) == 1)
        queue_timer = server.call(lambda: b._timers[next(iter(b.live))][0])
        server.call(queue_timer._run)
        late = second.result()
        assert (
            late.status_code == 503 and late.json()["error"]["code"] == "queue_timeout" and late.headers["retry-after"]
        )
        assert late.json()["error"]["message"] == "the model was not loaded in time; try again later"
        server.wait_until(lambda: not a.is_leaving and not a.waiting)
        gates["a"].opened.set()
        assert first.result().status_code == newer.result().status_code == 200
        assert states(server) == {"a": "loaded", "b": "unloaded"}


def test_requests_that_wait_for_a_load_are_bounded_like_others() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> SpeculativeDecoder:
        begun.set()
        assert go_on.wait(PATIENCE)
        return toy()

    models: dict[str, dict[str, Any]] = {"a": {"load": slow}, "b": {}}
    with running_server(several=models, max_queued_requests=2) as server, ThreadPoolExecutor(2) as threads:
        service = service_of(server, "a")
        answers = [threads.submit(ask, server, "a") for _ in range(2)]
        assert begun.wait(PATIENCE)
        server.wait_until(lambda: service.num_waiting == 2)
        assert ask(server, "a").status_code == 429
        assert server.http.get("/health").status_code == 200 and states(server)["a"] == "loading"
        go_on.set()
        assert [answer.result().status_code for answer in answers] == [200, 200]


def test_a_failed_load_is_one_line_and_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[Exception] = [SlipstreamError("model '/srv/models/x.gguf' is damaged"), MemoryError("secret")]

    def failing() -> SpeculativeDecoder:
        if errors:
            raise errors.pop(0)
        return toy()

    with running_server(several={"a": {"load": failing}, "b": {}}) as server:
        text = server.text(model="b", temperature=0, max_tokens=9)
        for line in (
            "a could not be loaded: model 'x.gguf' is damaged",
            "a could not be loaded: the log has the details",
        ):
            answer = ask(server, "a")
            assert answer.status_code == 503 and answer.json()["error"]["message"] == line
            assert line in caplog.text
            assert server.text(model="b", temperature=0, max_tokens=9) == text
        assert ask(server, "a").status_code == 200 and server.server.failure is None


def test_an_engine_that_fails_is_loaded_again_and_leaves_others_alone() -> None:
    decoders = list[Any]()

    def load() -> SpeculativeDecoder:
        decoders.append(toy())
        if len(decoders) == 1:
            decoders[0].target.backend.forward = None
        return decoders[-1]

    with running_server(several={"a": {"load": load}, "b": {}}) as server:
        assert ask(server, "a").status_code == 500
        assert states(server) == {"a": "unloaded", "b": "unloaded"}
        assert ask(server, "b").status_code == ask(server, "a").status_code == 200
        assert server.server.failure is None and len(decoders) == 2


def test_a_model_that_cannot_fit_is_refused_and_unloads_none(memory: None) -> None:
    with running_server(several={"a": sized(8), "b": sized(12)}) as server:
        assert ask(server, "a").status_code == 200
        error = ask(server, "b").json()["error"]["message"]
        assert error.startswith(
            "b could not be loaded: it needs about 12.0 GB of memory, and this machine has 10.0 GB;"
        )
        assert states(server) == {"a": "loaded", "b": "unloaded"}


def test_a_model_of_unknown_size_is_loaded_alone(memory: None) -> None:
    with running_server(several={"a": sized(1), "b": {"fetch": lambda: None}}) as server:
        for name, state in (("a", "loaded"), ("b", "unloaded"), ("a", "loaded")):
            assert ask(server, name).status_code == 200
            assert states(server) == {"a": state, "b": "unloaded" if state == "loaded" else "loaded"}


def test_an_idle_model_is_unloaded_and_its_memory_freed() -> None:
    backends = list[Any]()

    def load() -> SpeculativeDecoder:
        decoder = toy()
        backends.append(weakref.ref(decoder.target.backend))
        return decoder

    with running_server(load, idle_minutes=5.0) as server:  # of one model, too
        text = server.text(temperature=0, max_tokens=9)
        (loaded,) = server.http.get("/api/ps").json()["models"]
        fingerprint = server.http.get("/v1/models").json()["data"][0]["system_fingerprint"]
        tags = server.http.get("/api/tags").json()
        server.call(server.service._idle_timer._run)
        assert states(server) == {"toy": "unloaded"} and server.http.get("/api/ps").json() == {"models": []}
        assert server.http.get("/api/tags").json() == tags
        server.wait_until(lambda: gc.collect() >= 0 and backends[0]() is None)
        assert 'slipstream:model_loaded{engine="0",model_name="toy"} 0.0' in server.http.get("/metrics").text
        card = server.http.get("/v1/models/toy").json()
        assert card["system_fingerprint"] == fingerprint and card["max_model_len"] == 4096
        assert server.text(temperature=0, max_tokens=9) == text and loaded["expires_at"] < "2100"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_system_gets_the_memory_of_a_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []

    def load() -> SpeculativeDecoder:
        decoder: Any = toy()
        tensors = [torch.ones(10_000) for _ in range(8_000)]  # 320 MB, of which every hundredth outlives the model
        decoder.target.backend.weights = tensors
        kept.extend(tensors[::100])
        return decoder

    def megabytes() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / 1e6

    with running_server(several={"a": {}, "b": {"load": load}}) as server:
        assert ask(server, "a").status_code == 200
        before = megabytes()
        assert ask(server, "b").status_code == 200
        loaded = megabytes()
        service, held = service_of(server, "b"), []
        post = service._thread.post  # when it is called, the engine's thread may return memory at once
        monkeypatch.setattr(service._thread, "post", lambda function: (held.append(service._loaded), post(function)))
        server.call(service.unload)
        monkeypatch.undo()
        assert held == [None] and ask(server, "a").status_code == 200
        server.wait_until(lambda: megabytes() - before < (loaded - before) / 3)


def test_a_request_stops_the_idle_time_until_its_end(gates: dict[str, Gate]) -> None:
    with running_server(gates["a"].load, idle_minutes=5.0) as server, in_thread(lambda: ask(server, "")) as answers:
        assert gates["a"].reached.wait(PATIENCE)
        assert server.call(lambda: server.service._idle_timer.cancelled())
        server.call(server.service.unload)  # a model with a running text is never unloaded
        assert states(server) == {"toy": "loaded"}
        gates["a"].opened.set()
        server.wait_until(lambda: not server.service.live)
        assert not server.call(lambda: server.service._idle_timer.cancelled())
    assert answers[0].status_code == 200


def test_every_list_has_all_models_and_says_which_are_loaded() -> None:
    with running_server(several={"a": {}, "b": {"max_model_len": 512}}) as server:
        before = {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}
        assert [before[name]["max_model_len"] for name in "ab"] == [None, None]
        load = server.http.post("/api/generate", json={"model": "b", "stream": False}).json()
        assert load["done_reason"] == "load" and states(server) == {"a": "unloaded", "b": "loaded"}
        assert server.http.get("/v1/models/b").json()["max_model_len"] == 512
        assert [card["name"] for card in server.http.get("/api/tags").json()["models"]] == ["a", "b"]
        assert [card["name"] for card in server.http.get("/api/ps").json()["models"]] == ["b"]
        show = [server.http.post("/api/show", json={"model": name}).json() for name in ("a", "b:latest")]
        assert [info["parameters"] for info in show] == ["", "num_ctx 512"]
        state = server.http.get("/v1/slipstream/state", params={"model": "b"}).json()
        assert state["model"] == "b" and state["models"] == {"a": "unloaded", "b": "loaded"} and state["drafter"]
        assert server.http.get("/v1/slipstream/state").json()["drafter"] is None
        assert server.http.get("/health").json() == {"status": "ready"}
        ask(server, "b")
        page = server.http.get("/metrics").text
        for line in (
            'slipstream:model_loaded{engine="0",model_name="a"} 0.0',
            'slipstream:model_loaded{engine="0",model_name="b"} 1.0',
            'vllm:generation_tokens_total{engine="0",model_name="a"} 0.0',
            'vllm:generation_tokens_total{engine="0",model_name="b"} 8.0',
        ):
            assert line in page, line


def test_the_first_model_answers_to_no_name_and_to_unknown_ones_unless_the_server_is_strict() -> None:
    for is_strict in (False, True):
        with running_server(several={"a": {}, "b": {}}, strict=is_strict) as server:
            assert ask(server, "b").json()["model"] == "b"
            assert server.complete(max_tokens=1).json()["model"] == "a"
            unknown = ask(server, "gpt-4")
            if is_strict:
                refusal = unknown.json()["error"]
                assert unknown.status_code == 404 and refusal["code"] == "model_not_found"
                assert "allowed: 'a', 'b'" in refusal["message"]
            else:
                assert unknown.json()["model"] == "a"
            assert server.http.get("/v1/models/c").status_code == 404


def test_endpoints_that_only_tokenize_load_the_model_they_name() -> None:
    with running_server(several={name: {"load": loads(name)} for name in ("low", "high")}) as server:
        assert server.http.post("/tokenize", json={"model": "high", "prompt": "a"}).json()["tokens"] == [97]
        assert states(server) == {"low": "unloaded", "high": "loaded"}
        body = {"model": "low", "messages": [{"role": "user", "content": "abc"}]}
        assert server.http.post("/v1/messages/count_tokens", json=body).json() == {"input_tokens": 3}
        assert states(server)["low"] == "loaded"
        assert not server.call(lambda: any(service._users for service in server.models.services))


def test_a_shutdown_lets_requests_finish_that_wait_for_a_load() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> SpeculativeDecoder:
        begun.set()
        assert go_on.wait(PATIENCE)
        return toy()

    with (
        running_server(several={"a": {"load": slow}, "b": {}}) as server,
        in_thread(lambda: ask(server, "a")) as answers,
    ):
        assert begun.wait(PATIENCE)
        server.call(server.server.begin_shutdown)
        server.wait_until(lambda: server.models.state == "draining")
        assert ask(server, "b").status_code == 503
        go_on.set()
    assert answers[0].status_code == 200


def test_the_log_names_the_model_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "slipstream.server"), running_server(several={"a": {}, "b": {}}) as server:
        ask(server, "b")
    assert any(line.startswith("loaded b in ") for line in caplog.messages)
    assert any('model="b"' in line and "status=200" in line for line in caplog.messages)
