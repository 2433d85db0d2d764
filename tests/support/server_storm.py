"""A storm of requests on a server: good, bad, slow, given up half way; every text that comes whole must be right."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
from raw_client import RawClient

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
KINDS = {"whole": 4, "stream": 4, "left": 2, "slow": 1, "gone": 1, "hasty": 1, "long": 1, "malformed": 1, "failing": 1}
FOR_NOW = (429, 503)  # what a client is told that shall come again
UNSEEN = ("num_draft_tokens",)  # of a body: what no text depends on


class Refused(Exception):
    """The server has no room now."""


class Late(Exception):
    """The server's time for a request is over."""


@dataclass
class Storm:
    """One run. texts: those that came whole, by their request; outcomes: how often each thing happened.

    longest: tokens of the requests that take long. The kinds: answers as a whole and as a stream; streams that are
    left after some chunks, or read slowly; clients that are gone before the answer or in the middle of their request,
    or give up after some milliseconds; long texts, which a server may break off in the end; malformed bodies; rows
    that fail while others run beside them.
    """

    url: str
    requests: int
    seed: int = 0
    at_once: int = 12
    longest: int = 600
    outcomes: Counter[str] = field(default_factory=Counter)
    texts: dict[str, set[str]] = field(default_factory=dict)

    def run(self) -> Storm:
        asyncio.run(self._run())
        return self

    async def _run(self) -> None:
        seeds = random.Random(self.seed)
        limit = asyncio.Semaphore(self.at_once)
        async with httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=60) as client:

            async def one(seed: int) -> None:
                async with limit:
                    while (outcome := await self._one(client, random.Random(seed))) == "refused":
                        self.outcomes[outcome] += 1
                        await asyncio.sleep(0.05)  # asked again, as clients do, so that each request comes to its end
                    self.outcomes[outcome] += 1

            await asyncio.gather(*(one(seeds.getrandbits(32)) for _ in range(self.requests)))

    async def _one(self, client: httpx.AsyncClient, choose: random.Random) -> str:
        (kind,) = choose.choices([*KINDS], [*KINDS.values()])
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

    async def _failing(self, client: httpx.AsyncClient, choose: random.Random) -> None:
        """A row that has no token to choose from, beside others of the same batch."""
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
        """A client with a deadline of its own, which passes at any moment of the request."""
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
        """Read a stream; leave: after so many chunks go away."""
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
    """What an event adds to a text."""
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
