"""Sends a load of chat requests to a server and records the answers and the time of each piece.

A load is either a fixed number of concurrent requests, of which the next starts when one ends, or requests that arrive
at random times (Poisson). Answers are streamed unless the request's body says otherwise. The client knows nothing of
the server but OpenAI's API.
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
    """A request and its answer."""

    prompt: str
    begun: float  # when it was sent, in seconds
    text: str = ""
    times: list[float] = field(default_factory=list)  # when each chunk with text came
    tokens: int = 0  # set by the caller, who has the tokenizer
    reason: str | None = None


@dataclass(frozen=True)
class Load:
    """The number and the timing of requests."""

    streams: int  # most requests at a time
    rate: float | None = None  # random arrivals per second; None: the next when a stream is free

    def __str__(self) -> str:
        return f"{self.streams} streams" if self.rate is None else f"Poisson {self.rate:g}/s"


async def run_load(url: str, model: str, prompts: Sequence[str], load: Load, fields: dict[str, Any]) -> list[Answer]:
    """Send every prompt once. fields: added to each request's body; `"stream": False` asks for whole answers."""
    limit, waits = asyncio.Semaphore(load.streams), random.Random(0)

    async def ask(prompt: str) -> tuple[Answer, list[bytes]]:
        async with limit:
            return await _ask(url, {"model": model, **fields}, prompt)

    tasks = []
    for prompt in prompts:
        tasks.append(asyncio.create_task(ask(prompt)))
        if load.rate is not None:
            await asyncio.sleep(waits.expovariate(load.rate))
    read = _read if fields.get("stream", True) else _read_whole
    return [read(answer, pieces) for answer, pieces in await asyncio.gather(*tasks)]


async def _ask(url: str, fields: dict[str, Any], prompt: str) -> tuple[Answer, list[bytes]]:
    """Returns an answer without its text, and the piece that came at each of its times.

    The pieces are parsed when the load is over, and HTTP is written by hand: the client shares the server's cores, so
    its work would slow the server.
    """
    request = json.dumps({"stream": True} | fields | {"messages": [{"role": "user", "content": prompt}]}).encode()
    host, loop = urlsplit(url), asyncio.get_running_loop()
    answer = Answer(prompt, perf_counter())
    transport, received = await loop.create_connection(
        lambda: _Received(loop.create_future()), host.hostname, host.port
    )
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host.netloc}\r\ncontent-type: application/json\r\n"
        transport.write(f"{head}content-length: {len(request)}\r\nconnection: close\r\n\r\n".encode() + request)
        await received.closed
    finally:
        transport.close()
    headers, _, body = b"".join(received.data).partition(b"\r\n\r\n")
    is_streamed, is_ok = fields.get("stream", True), b" 200 " in headers.partition(b"\r\n")[0]
    if is_ok and not is_streamed:
        answer.times = received.times[-1:]
        return answer, [body]
    if not is_ok or b"transfer-encoding: chunked" not in headers.lower():
        raise SlipstreamError(f"the server answered {headers.decode().splitlines()[0]}: {body.decode():.300}")
    pieces, ends = _unchunked(body, len(headers) + 4)
    totals = list(accumulate(map(len, received.data)))  # bytes received after each part
    answer.times = [received.times[bisect_left(totals, end)] for end in ends]
    return answer, pieces


class _Received(asyncio.Protocol):
    """Records the data of a connection and when each part came."""

    def __init__(self, closed: asyncio.Future[None]) -> None:
        self.closed, self.data, self.times = closed, list[bytes](), list[float]()

    def data_received(self, data: bytes) -> None:
        self.times.append(perf_counter())
        self.data.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.closed.done():
            return
        if error is None:
            self.closed.set_result(None)
        else:
            self.closed.set_exception(error)


def _unchunked(body: bytes, offset: int) -> tuple[list[bytes], list[int]]:
    """The pieces of a chunked body, and the byte of the answer at which each ends. offset: where the body begins."""
    pieces, ends, position = list[bytes](), list[int](), 0
    while (line := body.find(b"\r\n", position)) > 0:
        size = int(body[position:line], 16)
        if not size:
            return pieces, ends
        position = line + 2 + size + 2
        pieces.append(body[line + 2 : position - 2])
        ends.append(offset + position)
    raise SlipstreamError(f"the server broke off after {len(body)} bytes")


def _read(answer: Answer, pieces: Sequence[bytes]) -> Answer:
    """Fill in the answer's text, and keep only the times of pieces that have text."""
    times, answer.times = answer.times, []
    for time, piece in zip(times, _whole_lines(pieces), strict=True):
        text = "".join(_text(line, answer) for line in piece.split(b"\n") if line.startswith(b"data: {"))
        answer.text += text
        answer.times += [time] * bool(text)
    return answer


def _read_whole(answer: Answer, pieces: Sequence[bytes]) -> Answer:
    """Fill in the text of an answer that was not streamed."""
    body = b"".join(pieces)
    try:
        choice = json.loads(body)["choices"][0]
    except json.JSONDecodeError as error:
        raise SlipstreamError(f"the server broke off after {len(body)} bytes") from error
    answer.text, answer.reason = choice["message"]["content"], choice["finish_reason"]
    return answer


def _whole_lines(pieces: Sequence[bytes]) -> Iterator[bytes]:
    """As many pieces, each of whole lines: the begun line at a piece's end moves to the next piece."""
    begun = b""
    for piece in pieces:
        lines, newline, begun = (begun + piece).rpartition(b"\n")
        yield lines + newline


def _text(line: bytes, answer: Answer) -> str:
    """The text of an event. Sets the answer's finish reason."""
    chunk = json.loads(line[6:])
    if "error" in chunk:
        raise SlipstreamError(f"the server broke off: {chunk['error']}")
    for choice in chunk.get("choices", []):
        answer.reason = choice.get("finish_reason") or answer.reason
    return "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", []))


def figures(answers: Sequence[Answer]) -> dict[str, float]:
    """Tokens per second of the load; p50 and p99 of milliseconds to the first token, between chunks and per token."""
    begun, ended = min(answer.begun for answer in answers), max(a.times[-1] for a in answers if a.times)
    first = [answer.times[0] - answer.begun for answer in answers if answer.times]
    between = [later - time for a in answers for time, later in zip(a.times, a.times[1:], strict=False)]
    per_token = [(a.times[-1] - a.times[0]) / (a.tokens - 1) for a in answers if a.tokens > 1]
    totals = {"tokens": float(sum(answer.tokens for answer in answers)), "seconds": ended - begun}
    totals["tokens_per_second"] = totals["tokens"] / totals["seconds"]
    for name, values in (("first_ms", first), ("between_ms", between), ("per_token_ms", per_token)):
        cuts = quantiles([*values, *values], n=100, method="inclusive")  # doubled, since it needs two values
        totals |= {f"{name}_p50": 1000 * cuts[49], f"{name}_p99": 1000 * cuts[98]}
    return totals
