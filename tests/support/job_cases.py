"""Requests of jobs on the toy model, and the contents of their outputs."""

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
    lines = []
    for i in range(count):
        line = {"id": f"r{i}", "prompt": WORDS[i % 5] * (1 + i % 3), "max_tokens": 4 + i * 7 % most}
        line |= {"temperature": 0.8} if i % 2 else {}
        line |= {"seed": i} if i % 5 == 0 else {}
        lines.append(line | ({"n": 2} if i % 7 == 3 and i % 2 else {}))
    return lines


def chat(id: str, text: str, **body: Any) -> dict[str, Any]:
    """A line of OpenAI's format."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 12} | body
    return {"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path: Path, lines: Iterable[Any]) -> Path:
    """Writes a file of JSON lines; strings are written as they are."""
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_id(path: Path) -> dict[str, str]:
    """The unparsed lines of an output by their ids, each of which occurs once."""
    lines = path.read_text().splitlines()
    line_of_id = {str(json.loads(line).get("custom_id", json.loads(line)["id"])): line for line in lines}
    assert len(line_of_id) == len(lines)
    return line_of_id


def counts(report: JobReport) -> tuple[int, int, int, int]:
    return report.total, report.answered_before, report.answered, report.failed
