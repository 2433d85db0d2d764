"""The same request with the same seed has the same text, whatever starts, ends or breaks off beside it."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.apps.server import error_objects
from slipstream.apps.server.live_request import LiveRequest
from slipstream.core.rng import Race
from tests.support import tiny_models
from tests.support.running_server import RunningServer, running_server, toy
from tests.support.server_storm import HOSTILE, KINDS, Storm, weak

pytestmark = pytest.mark.slow


def alone(decoder: SpeculativeDecoder, body: dict[str, Any]) -> str:
    options = {name: body[name] for name in ("max_tokens", "temperature", "seed", "ignore_eos") if name in body}
    return decoder.generate(body["prompt"], SamplingParams(**options), chat=False).text


def wrong_texts(storm: Storm, decoder: SpeculativeDecoder) -> int:
    plain = decoder.using("none", num_draft_tokens="auto")
    return sum(texts != {alone(plain, json.loads(body))} for body, texts in storm.texts.items())


def stormed(load: Callable[[], SpeculativeDecoder], requests: int = 150) -> tuple[Storm, RunningServer]:
    with running_server(load, max_queued_requests=9) as server:
        storm = Storm(server.url, requests, seed=1, longest=60).run()
        server.wait_until(lambda: not server.service.live)
        assert server.complete(max_tokens=2).status_code == 200
        assert server.call(lambda: server.service.engine_status.num_running) == 0 == server.service.num_waiting
        return storm, server


def test_texts_of_a_transformer_do_not_depend_on_what_runs_beside_them() -> None:
    def load() -> SpeculativeDecoder:
        return SpeculativeDecoder(
            tiny_models.fresh("llama"),
            tiny_models.perturbed("llama"),
            tokenizer=tiny_models.tokenizer(),
            acceptance="match",
            max_batch_size=3,
        )

    storm, _ = stormed(load, 30)
    assert len(storm.texts) > 7 and wrong_texts(storm, load()) == 0


@pytest.mark.exhaustive
def test_a_sampler_that_depends_on_the_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, honest = count(), Race.bits
    monkeypatch.setattr(Race, "bits", lambda self, keys: honest(self, keys + np.uint64(next(calls))))
    storm, _ = stormed(lambda: toy(max_batch_size=3), 60)
    monkeypatch.undo()
    assert wrong_texts(storm, toy()) > 3


def num_requests() -> int:
    """Those that anything in this process still holds."""
    gc.collect()
    return sum(type(item) is LiveRequest for item in gc.get_objects())


def test_a_hostile_storm_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest's capture of the log keeps each exception, and its frames keep the requests
    monkeypatch.setattr(error_objects.log, "error", lambda *_, **__: None)
    before = num_requests()  # of earlier tests
    with running_server(lambda: weak(toy(max_batch_size=3)), max_queued_requests=9) as server:
        threads = threading.active_count()
        storm = Storm(server.url, 110, seed=2, longest=120, kinds=KINDS | HOSTILE).run()
        service = server.service
        server.wait_until(
            lambda: not service.live and not service.engine_status.num_running and not service.num_waiting
        )
        # the connection of this test's client
        server.wait_until(lambda: len(server.server.server_state.connections) <= 1)
        assert server.http.get("/health").json() == {"status": "ready"}
        # frames still hold the latest requests
        server.wait_until(lambda: threading.active_count() <= threads + 1 and num_requests() <= before + 8)
        assert server.server.failure is None
    assert min(storm.outcomes[kind] for kind in KINDS | HOSTILE) > 0
    assert len(storm.texts) > 20 and wrong_texts(storm, toy()) == 0
