"""Reads tool calls from an answer, by transformers' response parsing.

The form of calls is given by the tokenizer's `response_template`. A tokenizer without one may have a chat template with
the tags <tool_call> and </tool_call>: then calls are JSON objects between them, as Hermes and Qwen models write them.
To learn how calls are written, a made-up call is rendered by the chat template and must be read back unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.tokenization.tokenizer import CallForm, ParsedAnswer, ToolCall

NAMES = ("probe_one", "probe_two")
ARGUMENTS: Mapping[str, Any] = {"probe": 7}
WRITTEN = tuple(json.dumps(ARGUMENTS, separators=signs) for signs in ((", ", ": "), (",", ":")))  # as templates do
HERMES = CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n")
OPEN, CLOSE = "<tool_call>", "</tool_call>"
OUTSIDE_TEXTS = frozenset(' \t\r\n{}[]:,"\\+-.0123456789truefalsnE')  # characters of JSON outside its strings
JSON_BEGINS = re.compile(r"[{\[]")
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


def rendered_form(tokenizer: Any, opening: str, closing: str) -> CallForm | None:
    """The form in which a chat template writes calls, read off two rendered calls.

    None if the two calls differ in form, or their arguments are not JSON. opening, closing: of a call, by the response
    template.
    """
    calls = [{"type": "function", "function": {"name": name, "arguments": dict(ARGUMENTS)}} for name in NAMES]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template may raise anything, and then it writes no calls
        return None
    parts = [_around(text, name, opening, closing) for name in NAMES]
    first, second = parts
    if first is None or second is None or first[:3] != second[:3] or second[3] < first[4]:
        return None
    return CallForm(*first[:3], between_calls=text[first[4] : second[3]])


def _around(text: str, name: str, opening: str, closing: str) -> tuple[str, str, str, int, int] | None:
    """The text before a name, after it and after the arguments, and where the call begins and ends."""
    name_start = text.find(name)
    begin = text.rfind(opening, 0, name_start)
    places = [(text.find(written, name_start), written) for written in WRITTEN if text.find(written, name_start) >= 0]
    if name_start < 0 or begin < 0 or not places:
        return None
    start, written = min(places)
    end = text.find(closing, start + len(written))
    if end < 0:
        return None
    end += len(closing)
    return text[begin:name_start], text[name_start + len(name) : start], text[start + len(written) : end], begin, end


def spelled(form: CallForm) -> str:
    """Two calls in a form, to be read back."""
    calls = (form.before + name + form.between + WRITTEN[0] + form.behind for name in NAMES)
    return form.between_calls.join(calls)


def response_template(tokenizer: Any) -> dict[str, Any] | None:
    """The template of this tokenizer's answers; None if it is unknown."""
    template = getattr(tokenizer, "response_template", None)
    if template is not None:
        return dict(template)
    written = str(tokenizer.chat_template or "")
    return TAGGED if OPEN in written or "tools" not in written else None  # a template without tools gets Hermes' form


def call_opening(template: Mapping[str, Any] | None) -> str | None:
    """The text that every call begins with; if a pattern is given, its constant beginning."""
    calls = _calls_of(template)
    opening = calls.get("open") or _literal_beginning(str(calls.get("open_pattern", "")).removeprefix(r"\s*"))
    return opening if isinstance(opening, str) and opening else None


def call_form(tokenizer: Any) -> CallForm | None:
    """The form of calls; None if it is unknown, if calls are not read back the same, or if arguments are not JSON.

    Also None for calls with special tokens: those are no text, so no grammar of a text can force them.
    """
    template = response_template(tokenizer)
    opening, closing = call_opening(template), _calls_of(template).get("close")
    if opening is None or not isinstance(closing, str) or not closing:
        return None
    form = rendered_form(tokenizer, opening, closing) or (HERMES if template is TAGGED else None)
    if form is None or any(token in spelled(form) for token in tokenizer.all_special_tokens):
        return None
    ids = tokenizer(spelled(form), add_special_tokens=False)["input_ids"]
    parsed = parse(tokenizer, [], ids, [{"type": "function", "function": {"name": name}} for name in NAMES])
    written = [(name, ARGUMENTS) for name in NAMES]
    is_same = parsed is not None and [(call.name, json.loads(call.arguments)) for call in parsed.calls] == written
    return form if is_same or template is TAGGED else None


def writes_unread_calls(tokenizer: Any) -> bool:
    """True if the chat template itself writes a call that `parse` does not find."""
    if getattr(tokenizer, "response_template", None) is not None:
        return False
    name = NAMES[0]
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}]
    question = [{"role": "user", "content": "hi"}]
    calls = [{"type": "function", "function": {"name": name, "arguments": dict(ARGUMENTS)}}]
    try:
        before = tokenizer.apply_chat_template(question, tools=tools, tokenize=False)
        after = [*question, {"role": "assistant", "content": "", "tool_calls": calls}]
        answer = tokenizer.apply_chat_template(after, tools=tools, tokenize=False).removeprefix(before)
    except Exception:  # a template may raise anything, and then it writes no calls
        return False
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return name in answer and parse(tokenizer, [], ids, tools) is None


def _calls_of(template: Mapping[str, Any] | None) -> Mapping[str, Any]:
    calls = {} if template is None else template.get("fields", {}).get("tool_calls", {})
    return calls if isinstance(calls, Mapping) else {}


def _literal_beginning(pattern: str) -> str:
    """The constant text at the beginning of a regular expression."""
    text, index = "", 0
    while index < len(pattern):
        sign = pattern[index]
        if sign == "\\" and index + 1 < len(pattern) and not pattern[index + 1].isalnum():
            sign, index = pattern[index + 1], index + 1
        elif sign in "\\()[].^$*+?{}|":
            return text[:-1] if sign in "*?{|" else text
        text, index = text + sign, index + 1
    return text


def parse(
    tokenizer: Any, prompt: Sequence[int], answer: Sequence[int], tools: Sequence[Mapping[str, Any]]
) -> ParsedAnswer | None:
    """The calls of an answer; None if there are none, or they cannot be read.

    An incomplete last call, of an answer that was cut off, is dropped.
    """
    template = response_template(tokenizer)
    if template is None:
        return None
    ends = {tokenizer.eos_token_id, *tokenizer.all_special_ids}
    is_over = bool(answer) and answer[-1] in ends and tokenizer.decode([answer[-1]]) not in _marks(template)
    text = tokenizer.decode(list(answer[:-1] if is_over else answer))
    text = _with_hidden_marks(text, template, is_cut=not is_over)
    complete = _whole_calls(text, template)
    # JSON shows by itself whether a call is complete; other calls are complete only if a closing mark follows
    is_json = _calls_of(template).get("content") == "json"
    candidates = [text] if is_over else [text, complete] if is_json else [complete]
    for candidate in dict.fromkeys(candidates):
        try:
            response = tokenizer.parse_response(
                candidate, template, prefix=tokenizer.decode(list(prompt)), tools=list(tools)
            )
            calls = tuple(map(_call, response.get("tool_calls") or ()))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # a model may write anything
            continue
        if calls:
            return ParsedAnswer(str(response.get("content") or "").strip(), calls)
    return None


def _marks(template: Mapping[str, Any]) -> set[str]:
    """The texts that parts of an answer begin and end with."""
    fields = [field for field in template.get("fields", {}).values() if isinstance(field, Mapping)]
    values = [field.get(name) for field in fields for name in ("open", "close")] + [call_opening(template)]
    marks = [mark for value in values for mark in (value if isinstance(value, list) else [value])]
    return {mark for mark in marks if isinstance(mark, str) and mark}


def _with_hidden_marks(text: str, template: Mapping[str, Any], *, is_cut: bool) -> str:
    """Escape a letter of marks inside the JSON texts of calls, so that they are not taken for marks.

    is_cut: the last JSON may be incomplete.
    """
    opening = call_opening(template)
    if opening is None or _calls_of(template).get("content") != "json":
        return text
    decoder, marks, parts, position = json.JSONDecoder(), _marks(template), list[str](), 0
    while (begin := text.find(opening, position)) >= 0:
        start = end = begin + len(opening)
        if (body := JSON_BEGINS.search(text, start)) is not None:
            try:
                start, end = body.start(), decoder.raw_decode(text, body.start())[1]
            except (ValueError, RecursionError):
                start, end = (body.start(), len(text)) if is_cut else (start, end)
        parts += [text[position:start], _escaped(text[start:end], marks)]
        position = end
    return "".join([*parts, text[position:]])


def _escaped(text: str, marks: set[str]) -> str:
    for mark in marks:
        # a letter that JSON has in its strings alone, so that the mark can only be inside one
        if letter := next((character for character in mark if character not in OUTSIDE_TEXTS), ""):
            text = text.replace(mark, mark.replace(letter, f"\\u{ord(letter):04x}", 1))
    return text


def _whole_calls(text: str, template: Mapping[str, Any]) -> str:
    """An answer up to the end of its last complete call, if another call begins after it."""
    opening, closing = call_opening(template), _calls_of(template).get("close")
    if opening is None or not isinstance(closing, str) or not closing:
        return text
    end = text.rfind(closing) + len(closing) if closing in text else 0
    return text[:end] if opening in text[end:] else text


def _call(response: Mapping[str, Any]) -> ToolCall:
    """A call with a name and a JSON object of arguments, which is all that clients can read. ValueError for others."""
    function = response["function"]
    name, arguments = function["name"], function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if arguments is None:
        arguments = {}
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise ValueError(f"a call of {name!r:.80} with arguments of type {type(arguments).__name__}")
    name.encode()  # halves of surrogate pairs can be written in JSON, but not sent
    return ToolCall(name, json.dumps(arguments, allow_nan=False))
