"""Renders chat templates by jinja2 alone; the specification is transformers' `apply_chat_template`.

Templates come with models from anywhere, so they run in a sandbox and are given plain data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import numpy
from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning; templates read the first
MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # stands after the message that the model is to continue


class _Generation(Extension):
    """Renders what stands between {% generation %} and {% endgeneration %}, which mark answers for training."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Macro) -> str:
        return str(caller())


class _Dictionary:
    """The function `dict` without the attributes of the class, which lead out of the sandbox."""

    def __call__(self, *items: Any, **named: Any) -> dict[Any, Any]:
        return dict(*items, **named)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """jinja2's namespace, whose attributes may not begin with an underscore."""

    def __init__(*values: Any, **named: Any) -> None:
        self, *items = values  # no parameter is called `self`, which a template may use as a name
        attributes = dict(*items, **named)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"{name!r} as an attribute of a namespace; allowed: names without a leading underscore")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike jinja2's own filter, this escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(16)
def compiled(template: str) -> Template:
    """Raises `TemplateError` for a template that cannot be read."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dictionary(),
        "namespace": _Namespace,
    }
    return environment.from_string(template)


def rendered(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    opens_answer: bool = False,
    continues: bool = False,
    variables: Mapping[str, Any],
) -> str:
    """The conversation as text. opens_answer: ends with the opening of an answer; continues: with the last message.

    variables: others of the template, such as the special tokens. Raises `TemplateError` and `ValueError`.
    """
    if not messages:
        raise ValueError("the conversation is empty; allowed: at least one message")
    conversation = [_message(message) for message in messages]
    final = _marked(conversation[-1], template) if continues else ""
    text = compiled(template).render(
        messages=conversation,
        tools=_plain(tools),
        documents=None,
        add_generation_prompt=opens_answer,
        **_plain(variables),
    )
    if not continues:
        return text
    begin = text.rfind(MARK.strip())
    if begin < 0 or final.strip() not in text:
        raise ValueError("the last message, which is to be continued, is not in the rendered text as it is")
    # without its space the mark shows that the template strips messages
    return text[:begin] if text.startswith(MARK, begin) else text[:begin].rstrip()


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates read it: without keys of None, and with its reasoning under the usual name."""
    values: dict[str, Any] = _plain({name: value for name, value in message.items() if value is not None})
    reasoning = next((values[name] for name in REASONING if name in values), None)
    return values if reasoning is None else {"thinking": reasoning, **values, "reasoning_content": reasoning}


def _marked(message: dict[str, Any], template: str) -> str:
    """Put a mark after the content of the last message, and return the text before the mark."""
    content = message.get("content")
    if content is None or "content" not in template:
        raise ValueError("the last message, which is to be continued, has no content that the template reads")
    if isinstance(content, str):
        message["content"] = content + MARK
        return content
    part = next((part for part in reversed(content) if "text" in part), None)
    if part is None:
        raise ValueError("the last message, which is to be continued, has no text")
    text: str = part["text"]
    part["text"] = text + MARK
    return text


def _plain(value: Any) -> Any:
    """A copy in JSON's own types; of anything else, such as an image, only the name of its type."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, numpy.generic):
        return _plain(value.item())
    for kind in (str, int, float):  # subclasses, such as enumerations, have further methods
        if isinstance(value, kind):
            return str.__str__(value) if kind is str else kind(value)
    return f"<{type(value).__name__}>"
