"""Calls of tools in an answer, read with transformers' response parsing.

A tokenizer may bring a `response_template`; else the chat template tells by its tags whether calls are JSON objects
between <tool_call> and </tool_call>, as Hermes and Qwen models write them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.models.hf.call_forms import ARGUMENTS, HERMES, NAMES, rendered_form, spelled
from slipstream.text.tool_calls import CallForm, ParsedAnswer, ToolCall

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
    """The text that a call begins with: of a pattern the part that is the same for all calls."""
    calls = _calls_of(template)
    said = calls.get("open") or _literal_beginning(str(calls.get("open_pattern", "")).removeprefix(r"\s*"))
    return said if isinstance(said, str) and said else None


def call_form(tokenizer: Any) -> CallForm | None:
    """How calls are written, if the template reads them so; None if it is not known, or arguments are not JSON.

    Calls with special tokens are not among them: those are no text, so that no grammar of a text can force them.
    """
    template = response_template(tokenizer)
    opening, closing = call_opening(template), _calls_of(template).get("close")
    if opening is None or not isinstance(closing, str) or not closing:
        return None
    form = rendered_form(tokenizer, opening, closing) or (HERMES if template is TAGGED else None)
    if form is None or any(token in spelled(form) for token in tokenizer.all_special_tokens):
        return None
    ids = tokenizer(spelled(form), add_special_tokens=False)["input_ids"]
    read = parse(tokenizer, [], ids, [{"type": "function", "function": {"name": name}} for name in NAMES])
    same = read is not None and [(c.name, json.loads(c.arguments)) for c in read.calls] == [
        (n, ARGUMENTS) for n in NAMES
    ]
    return form if same or template is TAGGED else None


def _calls_of(template: Mapping[str, Any] | None) -> Mapping[str, Any]:
    found = {} if template is None else template.get("fields", {}).get("tool_calls", {})
    return found if isinstance(found, Mapping) else {}


def _literal_beginning(pattern: str) -> str:
    """The text before the first part of a regular expression that is not always the same."""
    text, at = "", 0
    while at < len(pattern):
        sign = pattern[at]
        if sign == "\\" and at + 1 < len(pattern) and not pattern[at + 1].isalnum():
            sign, at = pattern[at + 1], at + 1
        elif sign in "\\()[].^$*+?{}|":
            return text[:-1] if sign in "*?{|" else text
        text, at = text + sign, at + 1
    return text


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
