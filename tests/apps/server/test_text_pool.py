"""Threads that tokenize texts: callers take turns, and a call that fails ends alone."""

from __future__ import annotations

import asyncio
import threading
import weakref

import pytest

from slipstream.apps.server import service
from slipstream.apps.server.request_rows import compiles_slowly
from slipstream.apps.server.schemas import ChatFields
from slipstream.apps.server.text_pool import THREADS, TextPool
from tests.support.running_server import PATIENCE, Gate, running_server


def test_callers_take_turns() -> None:
    async def order() -> list[str]:
        pool, opened, begun, finished = TextPool(None), threading.Event(), threading.Semaphore(0), list[str]()

        def wait(_: object) -> None:
            begun.release()
            assert opened.wait(PATIENCE)

        blocking = [asyncio.ensure_future(pool.run(wait, "a")) for _ in range(THREADS)]
        await asyncio.sleep(0)
        for _ in range(THREADS):
            assert await asyncio.to_thread(begun.acquire, timeout=PATIENCE)
        calls = [asyncio.ensure_future(pool.run(lambda _, who=who: finished.append(who), who)) for who in "aaaabc"]
        await asyncio.sleep(0)
        calls[1].cancel()  # its caller disconnected
        await asyncio.sleep(0)
        assert pool.waiting_seconds > 0
        opened.set()
        await asyncio.gather(*blocking, *calls, return_exceptions=True)
        assert pool.waiting_seconds == 0
        pool.close()
        return finished

    finished = asyncio.run(order())
    assert sorted(finished) == ["a", "a", "a", "b", "c"] and {"b", "c"} <= set(finished[:4])


def test_a_call_that_fails_raises_its_error_and_leaves_the_thread_for_others() -> None:
    async def work() -> None:
        pool = TextPool(None)
        for _ in range(THREADS + 1):
            with pytest.raises(ZeroDivisionError):
                await pool.run(lambda _: 1 / 0)
        assert await pool.run(lambda _: "done") == "done"
        pool.close()

    asyncio.run(work())


def test_what_a_call_held_is_freed_while_the_thread_waits_for_the_next() -> None:
    async def work() -> bool:
        pool, freed = TextPool(None), threading.Event()

        def function(_: object) -> None:
            pass

        weakref.finalize(function, freed.set)
        await pool.run(function)
        del function
        is_freed = await asyncio.to_thread(freed.wait, PATIENCE)
        pool.close()
        return is_freed

    assert asyncio.run(work())


def test_a_stalled_server_says_so_in_its_health(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    with running_server(gate.load) as server:
        assert server.http.get("/health").json() == {"status": "ready"}
        with server.http.stream(
            "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 3, "stream": True}
        ) as answer:
            assert gate.reached.wait(PATIENCE)
            assert server.http.get("/health").status_code == 200  # a step may take a while
            monkeypatch.setattr(service, "STALLED_SECONDS", 0.0)
            health = server.http.get("/health")
            assert health.status_code == 503 and health.json() == {"status": "stalled"}
            monkeypatch.undo()
            gate.opened.set()
            answer.read()
        assert server.http.get("/health").status_code == 200


def fields(**options: object) -> ChatFields:
    return ChatFields.model_validate({"messages": [{"role": "user", "content": "a"}]} | options)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"multipleOf": 99999989}}}}}


def test_only_requests_with_large_grammars_compile_slowly() -> None:
    def schema(value: object) -> dict[str, object]:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}}

    for options in (
        {},
        {"response_format": {"type": "json_object"}},
        schema({"type": "object", "properties": {"a": {"type": "integer"}}}),
        {"structured_outputs": {"regex": "[0-9]+"}},
    ):
        assert not compiles_slowly(fields(**options))
    for options in (
        schema({"type": "integer", "multipleOf": 99999989}),
        schema({"enum": [f"v{at}" for at in range(2000)]}),
        {"structured_outputs": {"regex": "[0-9]{1,90}"}},
        {"structured_outputs": {"grammar": "start: /a{2}/"}},
        {"response_format": {"type": "json_object"}, "tools": [TOOL]},  # one grammar covers the answer and all tools
        {"tool_choice": "required", "tools": [TOOL]},
    ):
        assert compiles_slowly(fields(**options))
