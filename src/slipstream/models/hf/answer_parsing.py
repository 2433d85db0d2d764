"""Calls of tools in an answer, read with transformers' response parsing.

A tokenizer may bring a `response_template`; else the chat template tells by its tags whether calls are JSON objects
between <tool_call> and </tool_call>, as Hermes and Qwen models write them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.text.tool_calls import ParsedAnswer, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAGGED: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"\Z",  # nothing of the prompt belongs to the answer
    "fields": {
        "tool_calls": {
            "open_pattern": rf"\s*{OPEN}",
            "close": CLOSE,
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


def response_template(tokenizer: Any) -> dict[str, Any] | None:
    """How this tokenizer's model answers; None if that is not known."""
    own = getattr(tokenizer, "response_template", None)
    if own is not None:
        return dict(own)
    return TAGGED if OPEN in str(tokenizer.chat_template or "") else None


def call_opening(template: Mapping[str, Any] | None) -> str | None:
    """The text that a call begins with."""
    if template is None:
        return None
    calls = template.get("fields", {}).get("tool_calls", {})
    said = calls.get("open") or str(calls.get("open_pattern", "")).removeprefix(r"\s*")
    return said if isinstance(said, str) and said and not set(said) & set("\\()[]*+?|") else None


def call_tags(template: Mapping[str, Any] | None) -> tuple[str, str] | None:
    """The tags around calls that are JSON objects with a name and arguments; None for other forms."""
    return (OPEN, CLOSE) if template is TAGGED else None


def parse(
    tokenizer: Any, prompt: Sequence[int], answer: Sequence[int], tools: Sequence[Mapping[str, Any]]
) -> ParsedAnswer | None:
    """The calls of an answer; None if there are none, or they cannot be read, as those that were cut off."""
    template = response_template(tokenizer)
    if template is None:
        return None
    ends = {tokenizer.eos_token_id, *tokenizer.all_special_ids}
    ids = list(answer[:-1]) if answer and answer[-1] in ends else list(answer)
    try:
        found = tokenizer.parse_response(
            tokenizer.decode(ids), template, prefix=tokenizer.decode(list(prompt)), tools=list(tools)
        )
        calls = tuple(_call(one) for one in found.get("tool_calls") or ())
    except (ValueError, LookupError, TypeError, AttributeError):  # a model may write anything
        return None
    return ParsedAnswer(str(found.get("content") or "").strip(), calls) if calls else None


def _call(found: Mapping[str, Any]) -> ToolCall:
    function = found["function"]
    arguments = function.get("arguments", {})
    return ToolCall(str(function["name"]), arguments if isinstance(arguments, str) else json.dumps(arguments))
