"""How a model writes calls of tools, found by its own templates: a call that the chat template has rendered, and that
the response template reads back as the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slipstream.text.tokenizer import CallForm

NAMES = ("probe_one", "probe_two")
ARGUMENTS: Mapping[str, Any] = {"probe": 7}
WRITTEN = tuple(json.dumps(ARGUMENTS, separators=signs) for signs in ((", ", ": "), (",", ":")))  # as templates do
HERMES = CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n")


def rendered_form(tokenizer: Any, opening: str, closing: str) -> CallForm | None:
    """What stands around the names and arguments of two calls; None if they are not alike, or not JSON.

    opening, closing: of a call, by the response template.
    """
    calls = [{"type": "function", "function": {"name": name, "arguments": dict(ARGUMENTS)}} for name in NAMES]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template may raise whatever it likes, and then it writes no calls
        return None
    parts = [_around(text, name, opening, closing) for name in NAMES]
    one, other = parts
    if one is None or other is None or one[:3] != other[:3] or other[3] < one[4]:
        return None
    return CallForm(*one[:3], between_calls=text[one[4] : other[3]])


def _around(text: str, name: str, opening: str, closing: str) -> tuple[str, str, str, int, int] | None:
    """What stands before a name, behind it and behind the arguments, and where the call begins and ends."""
    at = text.find(name)
    begin = text.rfind(opening, 0, at)
    found = [(text.find(written, at), written) for written in WRITTEN if text.find(written, at) >= 0]
    if at < 0 or begin < 0 or not found:
        return None
    place, written = min(found)
    end = text.find(closing, place + len(written))
    if end < 0:
        return None
    end += len(closing)
    return text[begin:at], text[at + len(name) : place], text[place + len(written) : end], begin, end


def spelled(form: CallForm) -> str:
    """Two calls in a form, to be read back."""
    calls = (form.before + name + form.between + WRITTEN[0] + form.behind for name in NAMES)
    return form.between_calls.join(calls)
