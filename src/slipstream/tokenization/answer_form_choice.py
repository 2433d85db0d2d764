"""Chooses the form of a model's thoughts and calls by what its chat template writes.

A made-up call is rendered, and the form that reads it back is the model's. Where the template renders no calls, the
tokenizer's response template is used, or the marks that the chat template names.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.tokenization.answer_forms import (
    CALLS,
    EXAMPLE,
    HERMES,
    THOUGHTS,
    AnswerForm,
    CallForm,
    CallText,
    ThoughtForm,
)
from slipstream.tokenization.answer_parser import AnswerParser

NUMBER = {"type": "integer"}
SCHEMA = {"type": "object", "properties": dict.fromkeys(EXAMPLE[1], NUMBER), "required": [*EXAMPLE[1]]}
PROBE = {"type": "function", "function": {"name": EXAMPLE[0], "description": "A probe.", "parameters": SCHEMA}}
QUESTION = {"role": "user", "content": "hi"}


@dataclass(frozen=True)
class Template:
    """A chat template, and what its tokenizer says about answers."""

    text: str
    # (messages, tools, whether the answer begins) -> text; may raise anything
    render: Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str]
    names: Collection[str]  # of the tokenizer's added tokens
    response_template: Mapping[str, Any] | None = None
    reads_tools: bool = True  # False: prompts describe tools in a text, which asks for calls in Hermes' form

    def written_calls(self, count: int = 1) -> str | None:
        """An answer with calls as the template writes it; None if it writes none."""
        name, arguments = EXAMPLE
        for value in (arguments, json.dumps(arguments)):  # some templates read an object, others its JSON
            call = {"id": "123456789", "type": "function", "function": {"name": name, "arguments": value}}
            answer = {"role": "assistant", "content": "", "tool_calls": [call] * count}
            try:
                before = self.render([QUESTION], [PROBE], True)
                after = self.render([QUESTION, answer], [PROBE], False)
            except Exception:  # a template may raise anything, and then it writes no calls
                continue
            same = next((i for i, pair in enumerate(zip(before, after, strict=False)) if len({*pair}) > 1), len(before))
            # the answer begins with a whole mark, also where the prompt ends with one that begins alike: <think>
            opening = max(after.rfind(bracket, 0, same) for bracket in "<[")
            same = opening if opening > max(after.rfind(bracket, 0, same) for bracket in ">]") else same
            if name in after[same:]:
                return after[same:]
        return None


def answer_form(template: Template) -> AnswerForm:
    """The form of a model's answers."""
    thought = _thought_form(template)
    if not template.reads_tools:
        declared = None if template.response_template is None else _declared_forms(template.response_template)[0]
        return AnswerForm(declared or thought, HERMES)
    written = template.written_calls()
    for form in CALLS if written is not None else ():
        if _example_calls(AnswerForm(thought, form), written or ""):
            return AnswerForm(thought, form)
    if template.response_template is not None:
        declared_thought, declared_calls = _declared_forms(template.response_template)
        thought = declared_thought or thought
        if declared_calls is not None:
            return AnswerForm(thought, declared_calls)
    for texts in (template.text, template.names):
        if named := [form for form in CALLS if all(mark in texts for mark in form.template_marks)]:
            return AnswerForm(thought, named[0])
    return AnswerForm(thought, HERMES)


def call_text(form: AnswerForm, template: Template) -> CallText | None:
    """The text of calls, as the chat template writes them or else as the table does; None if neither is read."""
    for text in (template.written_calls(), form.calls.example):
        around = _text_around(form, text) if text is not None and _example_calls(form, text) else None
        if around is not None:
            two = template.written_calls(2) or ""
            places = _example_calls(form, two)
            between = two[places[0][1] : places[1][0]] if len(places) == 2 else "\n"
            # a mark such as <|call|> ends the turn
            around = replace(around, after=around.after.removesuffix("<|call|>"))
            return replace(around, between_calls=between) if between.strip() == "" else around
    return None


def reads_written_calls(form: AnswerForm, template: Template) -> bool:
    """False if the chat template writes calls that are not read."""
    written = template.written_calls()
    return written is None or bool(_example_calls(form, written))


def _text_around(form: AnswerForm, text: str) -> CallText | None:
    """The text around the name and the arguments of the example."""
    ((start, end), *_) = _example_calls(form, text)
    name, arguments = EXAMPLE
    text = text[start:end]
    before, _, rest = text.partition(name)
    if form.calls.arguments in ("call", "json"):
        for separators in ((", ", ": "), (",", ":")):
            between, match, after = rest.partition(json.dumps(arguments, separators=separators))
            if match:
                return CallText(before, between, after, "\n")
        return None
    first, second = arguments
    opening, _, rest = rest.partition(first)
    value, _, rest = rest.partition(str(arguments[first]))
    middle, _, rest = rest.partition(second)
    if not rest.startswith(value):
        return None
    after = rest[len(value) + len(str(arguments[second])) :]
    key = os.path.commonprefix([opening[::-1], middle[::-1]])[::-1]  # noqa: RUF071 - of texts
    value_end = middle.removesuffix(key)
    if any(name in part for name in arguments for part in (key, value, value_end, after)):
        return None  # names occur in further places, such as closing tags
    separates = not after.startswith(value_end)
    after = after if separates else after.removeprefix(value_end)
    return CallText(before, opening.removesuffix(key), after, "\n", True, key, value, value_end, separates)


def _example_calls(form: AnswerForm, written: str) -> list[tuple[int, int]]:
    """Where the calls of an answer begin and end; none if one of them is not the example, or in another form."""
    parser = AnswerParser(form, [PROBE])
    places, place = list[tuple[int, int]](), 0
    for piece in parser.feed(written) + parser.end():
        begin, place = place, place + len(piece.source)
        if piece.call is None:
            continue
        if (piece.call.name, json.loads(piece.call.arguments)) != EXAMPLE:
            return []
        opening = form.calls.opening_pattern.search(written, begin)
        if form.calls.example.startswith("{"):  # JSON without marks is read in every form, but it is that of one
            places.append((written.index("{", begin), place))
        elif opening is None or opening.start() >= place:
            return []
        else:
            places.append((opening.start(), place))
    return places


def _thought_form(template: Template) -> ThoughtForm | None:
    by_text = (form for form in THOUGHTS if (form.template_mark or form.closing) in template.text)
    by_token = (form for form in THOUGHTS if (form.template_mark or form.closing) in template.names)
    return next(by_text, None) or next(by_token, None)


def _declared_forms(response_template: Mapping[str, Any]) -> tuple[ThoughtForm | None, CallForm | None]:
    """The forms that a response template of transformers describes; None for kinds that are not in the table."""
    fields = response_template.get("fields", {})
    thought, calls = None, None
    for name in ("reasoning_content", "thinking", "reasoning"):
        field = fields.get(name) or {}
        if isinstance(field.get("open"), str) and isinstance(field.get("close"), str):
            thought = thought or ThoughtForm(field["open"], field["close"])
    field = fields.get("tool_calls") or {}
    opening = field.get("open_pattern") or re.escape(str(field.get("open") or ""))
    closing = field.get("close_pattern") or re.escape(str(field.get("close") or ""))
    pairs = (field.get("content_args") or {}).get("tag_pattern", "")
    kinds = {"json": "call" if "(?P<name>" not in opening else "json", "xml-inline": "tags" if pairs else ""}
    kind: Any = kinds.get(str(field.get("content")), "")
    if opening and kind and (kind == "call" or "(?P<name>" in opening):
        tail = f"(?={closing})" if kind == "tags" else ""
        example = f"{field.get('open') or ''}{field.get('close') or ''}"
        calls = CallForm("response template", f"(?={opening})", example, kind, opening, tail, closing, pairs)
    return thought, calls
