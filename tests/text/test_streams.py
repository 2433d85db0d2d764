"""Streams: their chunks, their results, and `async for`."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from tests.support.processes import PATIENCE

PROMPT = "The heron and the sparrow. The heron"
OPTIONS: Any = {"max_tokens": 24, "temperature": 0.8, "seed": 5}
PARAMS = SamplingParams(**OPTIONS)


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder("toy", acceptance="match")


def same(result: Any, expected: Any) -> bool:
    names = ("text", "token_ids", "finish_reason", "seed", "prompt_token_ids", "error")
    return all(getattr(result, name) == getattr(expected, name) for name in names)


def test_a_stream_ends_with_the_result_of_generate(decoder: SpeculativeDecoder) -> None:
    expected = decoder.generate(PROMPT, PARAMS)
    stream = decoder.stream(PROMPT, **OPTIONS)
    text = "".join(map(str, stream))
    assert text == expected.text and same(stream.result, expected)
    assert stream.result.stats.num_output_tokens == 24 and next(stream, None) is None
    assert same(stream.result, expected), "the result stays available"


@pytest.mark.parametrize("num_read", [0, 1])
def test_there_is_no_result_before_the_end(decoder: SpeculativeDecoder, num_read: int) -> None:
    stream = decoder.stream(PROMPT, PARAMS)
    for _ in range(num_read):
        next(stream)
    with pytest.raises(UsageError, match=r"^stream\.result before all chunks were read; allowed: after the "):
        assert stream.result
    stream.close()
    assert list(stream) == []
    assert decoder.generate(PROMPT, PARAMS).finish_reason == "length", "a closed stream releases the models"


def test_coroutines_read_the_same_chunks_without_blocking_the_event_loop(decoder: SpeculativeDecoder) -> None:
    expected = list(decoder.stream(PROMPT, PARAMS))
    threads = set()

    async def read() -> tuple[list[Any], Any, int]:
        stream, turns, chunks = decoder.astream(PROMPT, **OPTIONS), 0, []

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        async for chunk in stream:
            chunks.append(chunk)
            threads.add(threading.current_thread())
        counting.cancel()
        return chunks, stream.result, turns

    chunks, result, turns = asyncio.run(read())
    assert "".join(map(str, chunks)) == "".join(map(str, expected)) == result.text
    assert same(result, decoder.generate(PROMPT, PARAMS))
    assert turns > len(chunks) and threads == {threading.main_thread()}


def test_several_coroutines_take_turns_and_each_gets_its_own_text(decoder: SpeculativeDecoder) -> None:
    prompts = [PROMPT, "The sparrow", "Then the wind"]
    expected = decoder.generate(prompts, PARAMS)

    async def read(prompt: str) -> str:
        return "".join([chunk.text async for chunk in decoder.astream(prompt, PARAMS)])

    async def read_all() -> list[str]:
        return await asyncio.gather(*map(read, prompts))

    assert asyncio.run(read_all()) == [result.text for result in expected]


def test_a_coroutine_may_stop_early_and_errors_reach_it(decoder: SpeculativeDecoder) -> None:
    async def stop_early() -> None:
        stream = decoder.astream(PROMPT, PARAMS)
        async for _ in stream:
            break
        await stream.aclose()
        assert [chunk async for chunk in stream] == []
        with pytest.raises(UsageError, match=r"^stream\.result"):
            assert stream.result

    async def ask_wrongly() -> None:
        async for _ in decoder.astream(["a", "b"], PARAMS):  # type: ignore[arg-type]
            pass

    asyncio.run(stop_early())
    with pytest.raises(UsageError, match=r"^prompt is a list of prompts; allowed: stream takes one prompt"):
        asyncio.run(ask_wrongly())
    assert decoder.generate(PROMPT, PARAMS).finish_reason == "length"


def test_a_chunk_whose_reader_gave_up_goes_to_the_next_reader(decoder: SpeculativeDecoder) -> None:
    expected = decoder.generate(PROMPT, PARAMS)

    async def read_impatiently() -> tuple[str, int]:
        stream, chunks, num_timeouts = decoder.astream(PROMPT, PARAMS), [], 0
        while True:
            waits = [asyncio.ensure_future(anext(stream)) for _ in range(1 + num_timeouts % 3)]
            await asyncio.sleep(0 if num_timeouts < 20 else 0.05)
            for wait in waits:
                if wait.done() and isinstance(wait.exception(), StopAsyncIteration):
                    assert same(stream.result, expected)
                    return "".join(map(str, chunks)), num_timeouts
                if wait.done():
                    chunks.append(wait.result())
                else:
                    wait.cancel()
                    num_timeouts += 1
            await asyncio.wait(waits)

    text, num_timeouts = asyncio.run(read_impatiently())
    assert text == expected.text and num_timeouts >= 20


def test_a_thread_may_close_a_stream_that_another_one_reads(decoder: SpeculativeDecoder) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def wait(input_ids: Any, scores: Any) -> Any:
        begun.set()
        assert goes_on.wait(PATIENCE)
        return scores

    stream = decoder.stream(PROMPT, max_tokens=24, num_draft_tokens=0, logits_processors=[wait])
    read: list[Any] = []
    reader = threading.Thread(target=lambda: read.extend(stream))
    closer = threading.Thread(target=stream.close)
    reader.start()
    assert begun.wait(PATIENCE)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive(), "closing waits for the round in progress"
    goes_on.set()
    closer.join(PATIENCE)
    reader.join(PATIENCE)
    assert not closer.is_alive() and not reader.is_alive() and read
    assert list(stream) == []


def test_a_cancelled_coroutine_leaves_the_models_free(decoder: SpeculativeDecoder) -> None:
    async def read(has_begun: asyncio.Event) -> None:
        async for _ in decoder.astream(PROMPT, max_tokens=150, num_draft_tokens=0):
            has_begun.set()

    async def cancel() -> None:
        has_begun = asyncio.Event()
        reading = asyncio.ensure_future(read(has_begun))
        await has_begun.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(cancel())
    assert decoder.generate(PROMPT, PARAMS).finish_reason == "length"
