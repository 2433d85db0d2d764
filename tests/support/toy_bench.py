"""A benchmark of the toy pair on three short prompts."""

from __future__ import annotations

from typing import Any

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.bench.plan import name_prompts
from slipstream.bench.records import Header
from slipstream.text.prompt_sets import NamedPrompt

HEADER = Header({}, {}, {}, "2026-01-01T00:00:00+00:00")
TEXTS = (("The heron was", "birds"), ("a fish, a", "fish"), ("It", "fish"))
PROMPTS = name_prompts([NamedPrompt(text, family) for text, family in TEXTS])
GREEDY = SamplingParams(max_tokens=24)


def toy(**options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder("toy", "toy:2", **options)
