"""Requests that take seconds to read keep no other request waiting."""

from __future__ import annotations

import asyncio
from threading import Event

from slipstream.apps.server.answer_forms import compiles_slowly
from slipstream.apps.server.request_fields import ChatFields
from slipstream.apps.server.text_pool import THREADS, TextPool


def test_quick_calls_run_beside_any_number_of_slow_ones() -> None:
    pool, release = TextPool(None), Event()

    async def both() -> str:
        slow = [asyncio.ensure_future(pool.run(lambda _: release.wait(60), is_slow=True)) for _ in range(3 * THREADS)]
        try:
            return await asyncio.wait_for(pool.run(lambda _: "read"), 60)
        finally:
            release.set()
            assert all(await asyncio.gather(*slow))

    assert asyncio.run(both()) == "read"
    pool.close()


def fields(**given: object) -> ChatFields:
    return ChatFields.model_validate({"messages": [{"role": "user", "content": "a"}]} | given)


def test_which_requests_are_slow() -> None:
    def schema(value: object) -> dict[str, object]:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}}

    for given in (
        {},
        {"response_format": {"type": "json_object"}},
        schema({"type": "object", "properties": {"a": {"type": "integer"}}}),
        {"structured_outputs": {"regex": "[0-9]+"}},
    ):
        assert not compiles_slowly(fields(**given))
    for given in (
        schema({"type": "integer", "multipleOf": 99999989}),
        schema({"enum": [f"v{at}" for at in range(2000)]}),
        {"structured_outputs": {"regex": "[0-9]{1,90}"}},
        {"structured_outputs": {"grammar": "start: /a{2}/"}},
    ):
        assert compiles_slowly(fields(**given))
