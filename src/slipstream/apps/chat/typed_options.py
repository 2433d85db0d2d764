"""Sampling options as they are typed: methods with their numbers, and single values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from slipstream.errors import UsageError
from slipstream.sampling.params import SamplingParams

KEEP_ALL: dict[str, float] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
# per method what its numbers mean, in order, and what they are if left out
METHODS: dict[str, dict[str, float]] = {
    "greedy": {},
    "multinomial": {"temperature": 1.0, "min_p": 0.0},
    "topk": {"temperature": 1.0, "top_k": 50, "min_p": 0.0},
    "nucleus": {"temperature": 1.0, "top_p": 0.9, "min_p": 0.0},
    "topknucleus": {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.0},
}
NOT_TYPED = ("logits_processors", "constraint", "n", "logprobs")
OPTIONS = tuple(f.name for f in fields(SamplingParams) if f.name not in NOT_TYPED)


def numbers(method: str, given: Sequence[str]) -> dict[str, Any]:
    """The options that a method and its numbers stand for; numbers come in order or as NAME=VALUE."""
    meaning = METHODS[method]
    chosen, order = dict(meaning), iter(meaning)
    allowed = f"allowed: /sampling {method} [{'] ['.join(meaning)}], each a number or NAME=NUMBER"
    for word in given:
        name, equals, value = word.partition("=")
        name, value = (name, value) if equals else (next(order, ""), word)
        if name not in meaning:
            raise UsageError(f"/sampling {method} {' '.join(given)}; {allowed if meaning else 'allowed: greedy alone'}")
        try:
            chosen[name] = int(value) if name == "top_k" else float(value)
        except ValueError:
            raise UsageError(f"/sampling {method}: {name} {value!r}; {allowed}") from None
    if meaning and chosen["temperature"] == 0:
        raise UsageError(f"/sampling {method}: temperature 0 is greedy; allowed: above 0, or /sampling greedy")
    return KEEP_ALL | chosen


def value_of(name: str, text: str) -> Any:
    """A typed value: JSON where it is JSON, else the text itself."""
    if text == "none":
        return getattr(SamplingParams(), name)
    try:
        value = json.loads({"on": "true", "off": "false"}.get(text, text))
    except json.JSONDecodeError:
        return text
    if name == "stop" and not isinstance(value, str | list):
        return text
    if name == "logit_bias" and isinstance(value, dict):  # JSON's keys are text
        return {int(key) if key.isdecimal() else key: bias for key, bias in value.items()}
    return value
