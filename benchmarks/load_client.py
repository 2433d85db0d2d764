"""A load of chat requests on a server, streamed: when each chunk came, and what was said.

Two loads: so many streams at a time, each beginning when another ends, or arrivals at random (Poisson). Knows nothing
of the server but OpenAI's API.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from time import perf_counter
from typing import Any

import httpx


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
    """Ask every prompt once."""
    limit, waits = asyncio.Semaphore(load.streams), random.Random(0)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.streams)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=600, limits=limits) as client:

        async def one(prompt: str) -> Answer:
            async with limit:
                return await _ask(client, {"model": model, **fields}, prompt)

        tasks = []
        for prompt in prompts:
            tasks.append(asyncio.create_task(one(prompt)))
            if load.rate is not None:
                await asyncio.sleep(waits.expovariate(load.rate))
        return list(await asyncio.gather(*tasks))


async def _ask(client: httpx.AsyncClient, fields: dict[str, Any], prompt: str) -> Answer:
    body = fields | {"messages": [{"role": "user", "content": prompt}], "stream": True}
    found = Answer(prompt, perf_counter())
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"the server broke off: {chunk['error']}")
            for choice in chunk.get("choices", []):
                if text := choice["delta"].get("content"):
                    found.text += text
                    found.times.append(perf_counter())
                found.reason = choice.get("finish_reason") or found.reason
    return found


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
