"""A storm of requests on a server: good, bad, given up half way; every text that comes whole must be the right one."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

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


@dataclass
class Storm:
    """One run. outcomes: how often each thing happened; wrong: texts that are not those of the request alone."""

    url: str
    requests: int
    seed: int = 0
    at_once: int = 12
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
        kind = choose.choices(("whole", "stream", "left", "malformed"), (4, 4, 3, 1))[0]
        if kind == "malformed":
            path, body = choose.choice(MALFORMED)
            answer = await client.post(path, content=body, headers={"content-type": "application/json"})
            assert 400 <= answer.status_code < 500 and "error" in answer.json(), (path, body, answer.status_code)
            return "malformed"
        body = request(choose)
        if kind == "whole":
            answer = await client.post("/v1/completions", json=body)
            if answer.status_code == 429:
                return "refused"
            assert answer.status_code == 200, answer.text
            self._note(body, answer.json()["choices"][0]["text"])
            return "whole"
        return await self._stream(client, body, choose.randrange(1, 9) if kind == "left" else None)

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any], leave: int | None) -> str:
        text, ended = "", False
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            if answer.status_code == 429:
                return "refused"
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    text += chunk["choices"][0]["text"]
                    leave = None if leave is None else leave - 1
                if leave == 0:
                    return "left"
                ended |= line == "data: [DONE]"
        assert ended
        self._note(body, text)
        return "stream"

    def _note(self, body: dict[str, Any], text: str) -> None:
        self.texts.setdefault(json.dumps(body, sort_keys=True), set()).add(text)


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
