"""Requests of jobs on the toy, and what their outputs hold."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slipstream import SpeculativeDecoder
from slipstream.jobs.batch_job import JobReport

WORDS = ("The heron", "A sparrow called out", "The river does not", "So the heron ate", "It was home before")


def toy(**settings: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder("toy", **{"acceptance": "match", "max_batch_size": 4} | settings)


def requests(count: int, most: int = 30) -> list[dict[str, Any]]:
    """Plain lines of all kinds: greedy and sampled, long and short, some with a seed, some with two texts."""
    made = []
    for at in range(count):
        line = {"id": f"r{at}", "prompt": WORDS[at % 5] * (1 + at % 3), "max_tokens": 4 + at * 7 % most}
        line |= {"temperature": 0.8} if at % 2 else {}
        line |= {"seed": at} if at % 5 == 0 else {}
        made.append(line | ({"n": 2} if at % 7 == 3 and at % 2 else {}))
    return made


def chat(id: str, text: str, **body: Any) -> dict[str, Any]:
    """A line of OpenAI's format."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 12} | body
    return {"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path: Path, lines: Iterable[Any]) -> Path:
    """A file of JSON lines; texts stand as they are."""
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_id(path: Path) -> dict[str, str]:
    """The whole lines of an output, as bytes have them, by their id; each id once."""
    lines = path.read_text().splitlines()
    found = {str(json.loads(line).get("custom_id", json.loads(line)["id"])): line for line in lines}
    assert len(found) == len(lines)
    return found


def counts(report: JobReport) -> tuple[int, int, int, int]:
    return report.total, report.answered_before, report.answered, report.failed
