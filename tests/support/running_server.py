"""A server on a free port in this process, and backends that wait for a signal, so that no test depends on time."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
from torch import Tensor

from slipstream import SpeculativeDecoder
from slipstream.apps.server.launch import Server
from slipstream.apps.server.live_request import LiveRequest
from slipstream.apps.server.server_settings import ServerSettings
from slipstream.apps.server.service import ModelSource
from tests.support.processes import PATIENCE

NO_MODELS: dict[str, dict[str, Any]] = {}
LOCAL: dict[str, Any] = {"trust_env": False, "verify": False}  # reading certificates takes 25 ms, and none are needed
# the schema of a tool's arguments, or of an answer
ARGUMENTS = {
    "type": "object",
    "properties": {"x": {"type": "boolean"}, "unit": {"enum": ["m", "km"]}},
    "required": ["x", "unit"],
    "additionalProperties": False,
}


def toy(**settings: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder("toy", **{"acceptance": "match", "drafter": "suffix", "num_draft_tokens": 4} | settings)


def toy_with(tokenizer: Any, **settings: Any) -> SpeculativeDecoder:
    """A toy decoder whose target has this tokenizer."""
    decoder = toy(**settings)
    models = replace(decoder._models, target=replace(decoder.target, tokenizer=tokenizer))
    decoder._parts_if_open = replace(decoder._parts, models=models)
    return decoder


@dataclass
class RunningServer:
    """A running server and clients of it."""

    server: Server
    url: str
    http: httpx.Client

    @property
    def models(self) -> Any:
        return self.server.models

    @property
    def service(self) -> Any:
        """The first model's."""
        return self.models.services[0]

    def openai(self, key: str = "none", **options: Any) -> openai.OpenAI:
        client = httpx.Client(**LOCAL)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, http_client=client, **{"max_retries": 0} | options)

    def connected(self) -> socket.socket:
        place = urlsplit(self.url)
        return socket.create_connection((place.hostname or "", place.port or 0), PATIENCE)

    def complete(self, prompt: Any = "A heron", **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": prompt} | fields)

    def text(self, prompt: Any = "A heron", **fields: Any) -> str:
        answer = self.complete(prompt, **fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def chunks(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream; comments are left out and the last is "[DONE]"."""
        with self.http.stream("POST", path, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs a function on the event loop and returns its result."""
        is_finished, results = threading.Event(), []

        def work() -> None:
            results.append(function())
            is_finished.set()

        assert self.server._loop is not None
        self.server._loop.call_soon_threadsafe(work)
        assert is_finished.wait(PATIENCE)
        return results[0]

    def reach_deadline(self, live: LiveRequest) -> None:
        """Ends the time of a request now, since real time may end it early on a busy machine."""
        *_, deadline = self.service._timers[live]
        self.call(deadline._run)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Waits until a condition, checked on the event loop, holds."""
        pause = threading.Event()
        for _ in range(int(PATIENCE / 0.005)):
            if self.call(holds):
                return
            pause.wait(0.005)
        raise AssertionError("the condition never held")


class PromptServer(Server):
    """Checks every 5 ms instead of every 100 ms whether it should end."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not await self.on_tick(1):
            await asyncio.sleep(0.005)


@contextmanager
def running_server(
    load: Callable[[], SpeculativeDecoder] = toy,
    *,
    several: Mapping[str, Mapping[str, Any]] = NO_MODELS,
    **settings: Any,
) -> Iterator[RunningServer]:
    """A server of the toy, or of the decoder that `load` returns; it is shut down at the end.

    several: the models of a server of several by their names: fields of their `ModelSource` and of their settings.
    """
    ready = threading.Event()
    shared = ServerSettings(**{"port": 0, "max_model_len": 4096} | settings)
    sources = [_source(shared, name, **fields) for name, fields in several.items()] or [ModelSource(load, shared)]
    server = PromptServer(shared, sources, lambda server: ready.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        for _ in range(int(PATIENCE / 0.005)):  # a small model may be loaded before the server listens
            if server.started:
                break
            time.sleep(0.005)
        with httpx.Client(base_url=server.url, timeout=PATIENCE, **LOCAL) as client:
            yield RunningServer(server, server.url, client)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()
        if server.models is not None:  # as the command does after a second signal
            server.models.close(0.0)


def _source(
    shared: ServerSettings,
    name: str,
    load: Callable[[], SpeculativeDecoder] = toy,
    fetch: Callable[[], int | None] = lambda: 0,
    **settings: Any,
) -> ModelSource:
    return ModelSource(load, replace(shared, served_model_name=(name,), **settings), fetch)


class Gate:
    """A model behind a gate: forwards wait until it is open. reached: set once a forward waits."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()

    def load(self, **settings: Any) -> SpeculativeDecoder:
        return self.before(toy(**settings))

    def before(self, decoder: SpeculativeDecoder) -> SpeculativeDecoder:
        backend: Any = decoder.target.backend
        forward = backend.forward

        def waiting(tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
            self.reached.set()
            assert self.opened.wait(PATIENCE)
            return forward(tokens, starts, first_slot=first_slot, logits=logits)

        backend.forward = waiting
        return decoder


@contextmanager
def in_thread(function: Callable[[], Any]) -> Iterator[list[Any]]:
    """Runs a function beside the test; its result or error is in the list after the block."""
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    yield results
    thread.join(PATIENCE)
    assert not thread.is_alive()
