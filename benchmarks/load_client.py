"""A load of chat requests on a server, streamed unless whole answers are asked for: what was said, and when.

Two loads: so many streams at a time, each beginning when another ends, or arrivals at random (Poisson). Knows nothing
of the server but OpenAI's API.
"""

from __future__ import annotations

import asyncio
import json
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import quantiles
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from slipstream.errors import SlipstreamError


@dataclass
class Answer:
    """One request. times: of its beginning, and of every chunk with text, in seconds."""

    prompt: str
    begun: float
    text: str = ""
    times: list[float] = field(default_factory=list)
    tokens: int = 0  # filled in by whoever has the tokenizer
    reason: str | None = None


@dataclass(frozen=True)
class Load:
    """streams: at most so many requests at a time; rate: arrivals per second at random, if not None."""

    streams: int
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.streams} streams" if self.rate is None else f"Poisson {self.rate:g}/s"


async def run_load(url: str, model: str, prompts: Sequence[str], load: Load, fields: dict[str, Any]) -> list[Answer]:
    """Ask every prompt once. fields: of the request's body; with `"stream": False` an answer comes in one piece."""
    limit, waits = asyncio.Semaphore(load.streams), random.Random(0)

    async def one(prompt: str) -> tuple[Answer, list[bytes]]:
        async with limit:
            return await _ask(url, {"model": model, **fields}, prompt)

    tasks = []
    for prompt in prompts:
        tasks.append(asyncio.create_task(one(prompt)))
        if load.rate is not None:
            await asyncio.sleep(waits.expovariate(load.rate))
    read = _read if fields.get("stream", True) else _read_whole
    return [read(answer, pieces) for answer, pieces in await asyncio.gather(*tasks)]


async def _ask(url: str, fields: dict[str, Any], prompt: str) -> tuple[Answer, list[bytes]]:
    """An answer without its text, and what came at each of its times: it is read once the load is over.

    Written by hand, since on the machine of the server the client's work is the server's loss.
    """
    request = json.dumps({"stream": True} | fields | {"messages": [{"role": "user", "content": prompt}]}).encode()
    host, loop = urlsplit(url), asyncio.get_running_loop()
    found = Answer(prompt, perf_counter())
    transport, came = await loop.create_connection(lambda: _Came(loop.create_future()), host.hostname, host.port)
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host.netloc}\r\ncontent-type: application/json\r\n"
        transport.write(f"{head}content-length: {len(request)}\r\nconnection: close\r\n\r\n".encode() + request)
        await came.over
    finally:
        transport.close()
    told, _, body = b"".join(came.data).partition(b"\r\n\r\n")
    streamed, good = fields.get("stream", True), b" 200 " in told.partition(b"\r\n")[0]
    if good and not streamed:
        found.times = came.times[-1:]
        return found, [body]
    if not good or b"transfer-encoding: chunked" not in told.lower():
        raise SlipstreamError(f"the server answered {told.decode().splitlines()[0]}: {body.decode():.300}")
    pieces, ends = _unchunked(body, len(told) + 4)
    reached = list(accumulate(map(len, came.data)))
    found.times = [came.times[bisect_left(reached, end)] for end in ends]
    return found, pieces


class _Came(asyncio.Protocol):
    """Notes what comes and when."""

    def __init__(self, over: asyncio.Future[None]) -> None:
        self.over, self.data, self.times = over, list[bytes](), list[float]()

    def data_received(self, data: bytes) -> None:
        self.times.append(perf_counter())
        self.data.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)


def _unchunked(body: bytes, begin: int) -> tuple[list[bytes], list[int]]:
    """The pieces of a chunked body, and where in the answer each ends; the body begins at byte `begin`."""
    pieces, ends, at = list[bytes](), list[int](), 0
    while (line := body.find(b"\r\n", at)) > 0:
        size = int(body[at:line], 16)
        if not size:
            return pieces, ends
        at = line + 2 + size + 2
        pieces.append(body[line + 2 : at - 2])
        ends.append(begin + at)
    raise SlipstreamError(f"the server broke off after {len(body)} bytes")


def _read(found: Answer, pieces: Sequence[bytes]) -> Answer:
    """The answer with its text, and the times of those pieces alone that had text."""
    times, found.times = found.times, []
    for at, piece in zip(times, _whole_lines(pieces), strict=True):
        told = "".join(_text(line, found) for line in piece.split(b"\n") if line.startswith(b"data: {"))
        found.text += told
        found.times += [at] * bool(told)
    return found


def _read_whole(found: Answer, pieces: Sequence[bytes]) -> Answer:
    """The same of an answer that came in one piece."""
    body = b"".join(pieces)
    try:
        choice = json.loads(body)["choices"][0]
    except json.JSONDecodeError as error:
        raise SlipstreamError(f"the server broke off after {len(body)} bytes") from error
    found.text, found.reason = choice["message"]["content"], choice["finish_reason"]
    return found


def _whole_lines(pieces: Sequence[bytes]) -> Iterator[bytes]:
    """The same with what ends within a line moved to the next."""
    rest = b""
    for piece in pieces:
        lines, end, rest = (rest + piece).rpartition(b"\n")
        yield lines + end


def _text(line: bytes, found: Answer) -> str:
    """What an event adds to the answer; notes the finish reason."""
    chunk = json.loads(line[6:])
    if "error" in chunk:
        raise SlipstreamError(f"the server broke off: {chunk['error']}")
    for choice in chunk.get("choices", []):
        found.reason = choice.get("finish_reason") or found.reason
    return "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", []))


def figures(answers: Sequence[Answer]) -> dict[str, float]:
    """Tokens per second of all together; p50 and p99 in ms of the first token, between chunks, and per token."""
    begun, ended = min(one.begun for one in answers), max(one.times[-1] for one in answers if one.times)
    first = [one.times[0] - one.begun for one in answers if one.times]
    between = [b - a for one in answers for a, b in zip(one.times, one.times[1:], strict=False)]
    each = [(one.times[-1] - one.times[0]) / (one.tokens - 1) for one in answers if one.tokens > 1]
    found = {"tokens": float(sum(one.tokens for one in answers)), "seconds": ended - begun}
    found["tokens_per_second"] = found["tokens"] / found["seconds"]
    for name, values in (("first_ms", first), ("between_ms", between), ("per_token_ms", each)):
        cuts = quantiles([*values, *values], n=100, method="inclusive")  # twice: of a single value as well
        found |= {f"{name}_p50": 1000 * cuts[49], f"{name}_p99": 1000 * cuts[98]}
    return found
