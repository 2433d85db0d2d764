"""Folders of runs made with the toy models: a small benchmark, a small sweep, and runs with given times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from slipstream import SamplingParams, SpeculativeDecoder, Stats
from slipstream.bench.arms import parse_arms
from slipstream.bench.length_series import references, summarize_over
from slipstream.bench.lineup import Lineup, Runner
from slipstream.bench.plan import name_prompts, plan
from slipstream.bench.records import Run, append, make_header, start
from slipstream.bench.summary import ArmSummary
from slipstream.bench.tuning.search import Budget
from slipstream.config import DecoderConfig
from slipstream.text.prompt_sets import NamedPrompt

NASTY = '<script>alert("x")</script> & $x^2$'  # a family name that must be escaped wherever it is shown
PROMPTS = (
    NamedPrompt("The heron looked at", "chat"),
    NamedPrompt("A sparrow called out", "chat"),
    NamedPrompt("The wind was", "chat"),
    NamedPrompt("A fish, a", "chat"),
    NamedPrompt("The river does not", NASTY),
    NamedPrompt("So the heron ate <b>fish</b>", NASTY),
    NamedPrompt("It was", NASTY),
    NamedPrompt("Then", NASTY),
)
ARMS = "none,ngram@2,model@1,model@2,model@3,model@3/topk:2"


def make(folder: Path, arms: str = ARMS, batches: Sequence[int] = (1, 2), repeats: int = 2) -> Path:
    """Runs a benchmark of the toy pair into a folder."""
    decoder, params = SpeculativeDecoder("toy", "toy:2"), SamplingParams(max_tokens=24, seed=0)
    parsed_arms, prompts = parse_arms(arms), name_prompts(PROMPTS)
    reference = parsed_arms[0].name
    settings: dict[str, Any] = {"reference": reference, "batch_sizes": list(batches), "repeats": repeats, "chat": True}
    models = {"target": "toy", "draft": "toy:2"}
    start(folder, make_header(models, parsed_arms, prompts, DecoderConfig(), params, **settings))
    runner = Runner(Lineup(decoder, parsed_arms, params), plan(parsed_arms, prompts, batches, repeats), folder)
    assert all(run.error is None for run in runner.run([]))
    return folder


def fail(folder: Path, arm: str, error: str) -> None:
    """Adds a failed run of an arm to a folder."""
    append(folder, Run(arm, ["chat/1"], "chat", 1, 99, error=error))


def timed(arm: str, seconds: Sequence[float], *, drafted: int = 10, accepted: int = 0) -> list[Run]:
    """Runs of an arm with given times, one prompt each, of 10 tokens in 10 rounds."""
    stats = replace(
        Stats(
            num_rounds=10, num_steps=10, num_output_tokens=10, num_draft_tokens=drafted, num_accepted_tokens=accepted
        ),
        drafted_per_position=[drafted] if drafted else [],
        accepted_per_position=[accepted] if drafted else [],
    )
    return [
        Run(
            arm,
            [f"chat/{i}"],
            "chat",
            1,
            0,
            time,
            10,
            [[1] * 10],
            ["identical"],
            stats.to_dict() | {"total_seconds": time},
            [],
        )
        for i, time in enumerate(seconds)
    ]


def ticking(seconds: float, tick: float = 0.004) -> Budget:
    """A budget whose clock advances by `tick` seconds whenever it is read."""
    ticks = count()
    return Budget(seconds, lambda: tick * next(ticks))


def summarized(runs: Sequence[Run], default: str) -> list[ArmSummary]:
    """The summary of each arm relative to its own reference."""
    return summarize_over(runs, references(list(dict.fromkeys(run.arm for run in runs)), default))
