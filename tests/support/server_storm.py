"""A storm of requests on a server: good, bad, slow, abandoned; every text that arrives whole must be right."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from slipstream import Draft, SpeculativeDecoder
from slipstream.core.types import Row
from tests.support.processes import PATIENCE

WINDOW = 2048  # bytes that the kernel may keep for a slow reader
PROMPTS = ("A heron", "The sparrow was", "Then the wind", "zz", "a fish, a stone, a fish", "You are fast")
MALFORMED: tuple[tuple[str, bytes], ...] = (
    ("/v1/completions", b"{"),
    ("/v1/completions", b"[" * 5000),
    ("/v1/completions", b'{"prompt": "x", "n": 1e400}'),
    ("/v1/completions", b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}"),
    ("/v1/completions", b'{"prompt": "\\ud800"}'),
    ("/v1/completions", b'{"prompt": {"a": 1}}'),
    ("/v1/chat/completions", b'{"messages": "x"}'),
    ("/v1/chat/completions", b"\xff\xfe"),
    ("/v1/slipstream/replay", b'{"request": {}, "token_ids": [-1]}'),
    ("/tokenize", b"null"),
    ("/detokenize", b'{"tokens": [99999999]}'),
    ("/v1/completions", b'{"prompt": "x", "temperature": NaN}'),
)
NESTED: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"]}
NESTED |= {"additionalProperties": False}
BOMBS: tuple[dict[str, Any], ...] = (  # constraints that are unsatisfiable, too expensive or invalid
    {"structured_outputs": {"json": {"$defs": {"A": NESTED}, "$ref": "#/$defs/A"}}},
    {"structured_outputs": {"regex": "(" * 200 + "a" + ")" * 200}},
    {"structured_outputs": {"regex": "(x{1,5000}){1,5000}"}},
    {"structured_outputs": {"grammar": "start: start"}},
    {"structured_outputs": {"choice": ["a" * 5000]}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}}},
    {"logit_bias": {str(at): -100 for at in range(256)}, "max_tokens": 3},
)
BEGINNINGS: tuple[bytes, ...] = (  # beginnings of requests that never continue
    b"",
    b"POST /v1/comp",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{",
    b'POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"pro\r\n',
    b"\x16\x03\x01\x02\x00\x01\x00",
)
FAULT = "!!!"  # with `weak`, the server fails at prompts that begin so, once they have some output
KINDS = {"whole": 4, "stream": 4, "left": 2, "slow": 1, "gone": 1, "hasty": 1, "long": 1, "malformed": 1, "failing": 1}
# `fault` needs a decoder made by `weak`
HOSTILE = {"bomb": 2, "fault": 1, "silent": 2, "health": 1}
FOR_NOW = (429, 503)  # the client should ask again
UNSEEN = ("num_draft_tokens",)  # fields of a body that change no text


@dataclass
class RawClient:
    """HTTP by hand, for what well-behaved clients do not do: breaking off within a request, reading very slowly."""

    host: str
    socket: socket.socket

    @classmethod
    async def open(cls, url: str) -> RawClient:
        place = urlsplit(url)
        one = socket.socket()
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW)
        await asyncio.get_running_loop().sock_connect(one, (place.hostname or "", place.port or 80))
        return cls(place.netloc, one)

    async def send(self, path: str, body: dict[str, Any], part: float = 1.0) -> None:
        """Posts a body, or a part of the request."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {self.host}\r\ncontent-type: application/json\r\n"
        whole = f"{head}connection: close\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content
        await asyncio.get_running_loop().sock_sendall(self.socket, whole[: int(len(whole) * part)])

    async def read_slowly(self, bite: int, pause: float) -> tuple[int, list[str]]:
        """The status, and the lines of a chunked body, read in bites with pauses (seconds) between them."""
        loop, found = asyncio.get_running_loop(), b""
        while more := await loop.sock_recv(self.socket, bite):
            found += more
            await asyncio.sleep(pause)
        head, _, rest = found.partition(b"\r\n\r\n")
        body = b""
        while b"chunked" in head and rest:
            size, _, rest = rest.partition(b"\r\n")
            body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        return int(head.split()[1]), [line for line in body.decode().split("\n") if line]

    def reset(self) -> None:
        """Resets the connection."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


class Refused(Exception):
    """The server has no room at the moment."""


class Late(Exception):
    """The server's time limit for a request has passed."""


@dataclass
class Storm:
    """One run. texts: those that arrived whole, by their request; outcomes: how often each kind happened.

    longest: tokens of the long requests. The kinds: answers as a whole and as a stream; streams that are
    abandoned after some chunks, or read slowly; clients that disconnect within their request or before the answer, or
    give up after some milliseconds; long texts, which a server may cut off at its end; malformed bodies; rows that
    fail while others run.
    Hostile ones: constraints that are bombs, faults of a drafter, sockets that bring no request and
    stay open until the storm is over (`silent`), and questions after the server's health.
    """

    url: str
    requests: int
    seed: int = 0
    at_once: int = 12
    longest: int = 600
    kinds: dict[str, int] = field(default_factory=lambda: KINDS)
    silent: list[RawClient] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    texts: dict[str, set[str]] = field(default_factory=dict)

    def run(self) -> Storm:
        asyncio.run(self._run())
        return self

    async def _run(self) -> None:
        seeds = random.Random(self.seed)
        limit = asyncio.Semaphore(self.at_once)
        options: dict[str, Any] = {"base_url": self.url, "timeout": PATIENCE}
        async with httpx.AsyncClient(trust_env=False, **options) as client:

            async def one(seed: int) -> None:
                async with limit:
                    while (outcome := await self._one(client, random.Random(seed))) == "refused":
                        self.outcomes[outcome] += 1
                        await asyncio.sleep(0.05)  # ask again, as clients do, until the request is served
                    self.outcomes[outcome] += 1

            try:
                await asyncio.gather(*(one(seeds.getrandbits(32)) for _ in range(self.requests)))
            finally:
                for raw in self.silent:
                    raw.reset()

    async def _one(self, client: httpx.AsyncClient, choose: random.Random) -> str:
        (kind,) = choose.choices([*self.kinds], [*self.kinds.values()])
        try:
            await getattr(self, f"_{kind}")(client, choose)
        except Refused:
            return "refused"
        except Late:
            return "late"
        return kind

    async def _malformed(self, client: httpx.AsyncClient, choose: random.Random) -> None:
        path, body = choose.choice(MALFORMED)
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
        assert 400 <= answer.status_code < 500 and "error" in answer.json(), (path, body, answer.status_code)

    async def _bomb(self, client: httpx.AsyncClient, choose: random.Random) -> None:
        body = request(choose) | choose.choice(BOMBS)
        path = "/v1/completions"
        if "response_format" in body:
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": body.pop("prompt")}]
        answer = await client.post(path, json=body)
        if answer.status_code == 503:
            raise Refused
        assert answer.status_code == 200 or "error" in answer.json(), (body, answer.text)

    async def _fault(self, client: httpx.AsyncClient, choose: random.Random) -> None:
        body = request(choose) | {"prompt": FAULT, "max_tokens": 30, "num_draft_tokens": 4}
        answer = _checked(await client.post("/v1/completions", json=body), 500)
        assert answer.json()["error"]["type"] == "server_error"

    async def _silent(self, client: httpx.AsyncClient, choose: random.Random) -> None:
        raw = await RawClient.open(self.url)
        self.silent.append(raw)
        await asyncio.get_running_loop().sock_sendall(raw.socket, choose.choice(BEGINNINGS))

    async def _health(self, client: httpx.AsyncClient, choose: random.Random) -> None:
        answer = await client.get("/health")
        assert answer.status_code == 200 and answer.json() == {"status": "ready"}

    async def _failing(self, client: httpx.AsyncClient, choose: random.Random) -> None:
        """A row without an allowed token, beside others of the same batch."""
        ids = [choose.randrange(40, 60)]
        words = (await client.post("/detokenize", json={"tokens": ids})).json()["prompt"]
        body = request(choose) | {"allowed_token_ids": ids, "bad_words": [words]}
        answer = _checked(await client.post("/v1/completions", json=body), 400)
        assert "no token" in answer.json()["error"]["message"], answer.text

    async def _whole(self, client: httpx.AsyncClient, choose: random.Random) -> None:
        await self._answer(client, request(choose))

    async def _long(self, client: httpx.AsyncClient, choose: random.Random) -> None:
        await self._answer(client, request(choose) | {"max_tokens": self.longest, "ignore_eos": True})

    async def _answer(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        answer = _checked(await client.post("/v1/completions", json=body), 200)
        self._note(body, answer.json()["choices"][0]["text"])

    async def _stream(self, client: httpx.AsyncClient, choose: random.Random) -> None:
        await self._read(client, request(choose), None)

    async def _left(self, client: httpx.AsyncClient, choose: random.Random) -> None:
        await self._read(client, request(choose), choose.randrange(1, 9))

    async def _hasty(self, client: httpx.AsyncClient, choose: random.Random) -> None:
        """A client whose own deadline passes at any moment of the request."""
        try:
            async with asyncio.timeout(choose.uniform(0.001, 0.2)):
                await self._read(client, request(choose), None)
        except TimeoutError:
            self.outcomes["given up"] += 1

    async def _gone(self, client: httpx.AsyncClient, choose: random.Random) -> None:
        """A connection that is reset in the middle of the request, or before its answer."""
        raw = await RawClient.open(self.url)
        await raw.send("/v1/completions", request(choose), part=choose.choice((0.3, 0.9, 1.0)))
        await asyncio.sleep(choose.choice((0, 0.01)))
        raw.reset()

    async def _slow(self, client: httpx.AsyncClient, choose: random.Random) -> None:
        """A stream read in small bites with pauses, through a small window."""
        body = request(choose)
        raw = await RawClient.open(self.url)
        try:
            await raw.send("/v1/completions", body | {"stream": True, "slipstream": {"rounds": True}, "logprobs": 5})
            status, lines = await raw.read_slowly(256, 0.001)
        finally:
            raw.reset()
        if status in FOR_NOW:
            raise Refused
        self._note(body, "".join(map(_text_of, lines)))
        assert lines[-1] == "data: [DONE]"

    async def _read(self, client: httpx.AsyncClient, body: dict[str, Any], leave: int | None) -> None:
        """Reads a stream; leave: the number of chunks after which to disconnect."""
        text, last = "", ""
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            _checked(answer, 200)
            async for line in answer.aiter_lines():
                text, last = text + _text_of(line), line or last
                leave = leave if leave is None or not line.startswith("data: {") else leave - 1
                if leave == 0:
                    return
        assert last == "data: [DONE]"
        self._note(body, text)

    def _note(self, body: dict[str, Any], text: str) -> None:
        seen = {name: value for name, value in body.items() if name not in UNSEEN}
        self.texts.setdefault(json.dumps(seen, sort_keys=True), set()).add(text)


def _checked(answer: httpx.Response, status: int) -> httpx.Response:
    if answer.status_code in FOR_NOW:
        raise Refused
    if answer.status_code == 408:
        raise Late
    assert answer.status_code == status, answer.status_code
    return answer


def _text_of(line: str) -> str:
    """The text that an event adds."""
    if not line.startswith("data: {"):
        return ""
    chunk = json.loads(line[6:])
    if "error" in chunk:
        assert chunk["error"]["code"] == "timeout", chunk
        raise Late
    return str(chunk["choices"][0]["text"])


def request(choose: random.Random) -> dict[str, Any]:
    """One of a few dozen bodies, so that each comes more than once."""
    body: dict[str, Any] = {
        "prompt": choose.choice(PROMPTS),
        "max_tokens": choose.choice((5, 30, 60)),
        "temperature": choose.choice((0, 0.9)),
        "seed": choose.randrange(3),
    }
    if choose.random() < 0.3:
        body["num_draft_tokens"] = choose.choice((0, 7))
    return body


class FaultyDrafter:
    """A user's drafter that fails for some rows, whoever else is in the batch."""

    def __init__(self, drafter: Any, fails: Callable[[Row], bool]) -> None:
        self.drafter, self.fails = drafter, fails

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Any) -> Draft:
        if any(map(self.fails, rows)):
            raise RuntimeError("secret")
        draft: Draft = self.drafter.propose(rows, lengths, sampler)
        return draft


def with_faulty_drafter(decoder: SpeculativeDecoder, fails: Callable[[Row], bool]) -> SpeculativeDecoder:
    return decoder.using(drafter=FaultyDrafter(decoder.drafter, fails))


def weak(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """A decoder whose drafter fails at prompts that begin with `FAULT`, once they have some output."""
    mark = list(FAULT.encode())
    return with_faulty_drafter(decoder, lambda row: row.tokens[: len(mark)] == mark and row.num_output_tokens > 2)
