"""Repeated prompts are found in the cache; requests that arrive together begin together."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import SamplingParams
from slipstream.apps.server import engine_thread
from slipstream.apps.server.live_request import LiveRequest
from tests.support.running_server import PATIENCE, in_thread, running_server, toy

ASKED = [f"{'The wren sings. ' * n}{name}" for n, name in enumerate(("One", "Two", "Six"), 3)]


@pytest.mark.parametrize(("spare", "kept"), [(1, True), (-2, False)])
def test_conversations_that_take_turns_are_read_once_if_slots_suffice(
    spare: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "SPARE_SLOTS", spare)
    with running_server(lambda: toy(max_batch_size=3)) as server:
        answers: list[Any] = [server.complete(prompt, max_tokens=3, seed=1).json() for prompt in ASKED * 3]
    texts = [answer["choices"][0]["text"] for answer in answers]
    params = SamplingParams(max_tokens=3, temperature=1.0, seed=1)
    assert texts == [toy().generate(prompt, params, chat=False).text for prompt in ASKED] * 3
    lacking = [
        answer["usage"]["prompt_tokens"] - answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        for answer in answers[3:]
    ]
    assert (max(lacking) == 1) == kept


def test_the_first_request_waits_briefly_for_those_that_arrive_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "GATHER_SECONDS", PATIENCE)
    with running_server() as server:
        service, late = server.service, LiveRequest()
        server.call(lambda: service._preparing.add(late))
        with in_thread(lambda: server.text("A heron", max_tokens=4)) as texts:
            server.wait_until(lambda: service.num_waiting == 1 and service._preparing == {late})
            assert server.call(lambda: service.engine_status.num_running) == 0
            server.call(lambda: service._preparing.discard(late))
            server.text("Then", max_tokens=4)  # its arrival ends the wait
        assert isinstance(texts[0], str)
