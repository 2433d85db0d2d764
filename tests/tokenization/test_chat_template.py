"""Chat templates are rendered as transformers renders them."""

from __future__ import annotations

import re
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy
import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from slipstream.tokenization.chat_template import rendered
from tests.support.markers import subcases

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FEATURES = """{%- set seen = namespace(count=0, names=[]) %}
{%- for m in messages %}
    {%- set seen.count = seen.count + 1 %}
    {% if loop.index > 3 %}{% break %}{% endif %}
    {% generation %}
  {{ loop.index }} {{ m.role | upper }}: {{ m.content | string | trim }}
    {% endgeneration %}
    {%- if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{{ m.thinking }}{% endif %}
    {%- if m.tool_calls %}{{ m.tool_calls | tojson }}{{ m.tool_calls | tojson(indent=2) }}{% endif %}
{%- endfor %}
{{ seen.count }} {{ dict(a=1, b="é<&>") | tojson }} {{ dict.fromkeys(["x"], 2) }} {{ bos_token }} {{ flag }}
{{ strftime_now("%Y") }} {{ tools | tojson if tools is not none else "no tools" }} {{ documents }}
{% if add_generation_prompt %}Answer:{% endif %}"""
PARTS = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text | trim }}|{% endfor %}{% endfor %}"
QUESTION = {"role": "user", "content": "  Why?\n<b> é \t"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


class Kind(StrEnum):
    """A kind of message."""

    USER = "user"


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [QUESTION],
    [{"role": Kind.USER, "content": "a", "name": None}],
    [QUESTION, {"role": "assistant", "content": " An answer. "}],
    [
        QUESTION,
        {"role": "assistant", "content": "", "reasoning": "so", "tool_calls": [{"id": numpy.int64(3), "x": (1, 2.5)}]},
        {"role": "tool", "content": "7", "more": [True, None, {"a": numpy.float32(0.5)}]},
        {"role": "user", "content": "one too many"},
    ],
]


def by_transformers(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({"<s>": 0}, [])), chat_template=template, bos_token="<s>"
    )
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def ours(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    names = {"add_generation_prompt": "opens_answer", "continue_final_message": "continues"}
    settings = {names.get(name, name): value for name, value in options.items() if name in names or name == "tools"}
    variables = {name: value for name, value in options.items() if name not in names and name != "tools"}
    return rendered(template, messages, **settings, variables={"bos_token": "<s>"} | variables)


@subcases(
    "template, options",
    [
        (template, options)
        for template in (CHATML, FEATURES)
        for options in ({}, {"add_generation_prompt": True, "flag": [1, {"x": None}]}, {"tools": TOOLS})
    ],
)
def test_text_is_that_of_transformers(template: str, options: dict[str, Any]) -> None:
    texts = [ours(template, messages, **options) for messages in CONVERSATIONS]
    assert texts == [by_transformers(template, messages, **options) for messages in CONVERSATIONS]
    assert len(set(texts)) == len(texts)


@pytest.mark.smollm2
def test_the_default_models_template_is_rendered_alike() -> None:
    from slipstream.models.weights.default_model import embedded_model

    template = Path(embedded_model() / "chat_template.jinja").read_text(encoding="utf-8")
    for messages in CONVERSATIONS:
        for options in ({}, {"add_generation_prompt": True}, {"tools": TOOLS}):
            assert ours(template, messages, **options) == by_transformers(template, messages, **options)


@subcases(
    "template, content",
    [
        (CHATML, "  It is "),
        (CHATML, "x"),
        (FEATURES, "  It is  "),  # stripped
        (PARTS, [{"type": "text", "text": "first"}, {"type": "text", "text": "It is "}, {"type": "image"}]),
    ],
)
def test_a_final_message_is_continued_as_by_transformers(template: str, content: Any) -> None:
    is_text = isinstance(content, str)
    first = QUESTION if is_text else QUESTION | {"content": [{"text": "Why?"}]}
    messages = [first, {"role": "assistant", "content": content}]
    text = ours(template, messages, continue_final_message=True)
    assert text == by_transformers(template, messages, continue_final_message=True)
    assert "CONTINUE" not in text and "CONTINUE" not in str(messages)  # the caller's messages stay


@subcases(
    "template, messages, reason",
    [
        (CHATML, [], "the conversation is empty"),
        (
            "{{ messages[0].content }}",
            [QUESTION, {"role": "assistant", "content": "It"}],
            "is not in the rendered text",
        ),
        ("{{ messages[0].content }}", [{"role": "assistant", "content": None}], "has no content"),
        (PARTS, [{"role": "assistant", "content": [{"type": "image"}]}], "has no text"),
    ],
)
def test_what_cannot_be_continued_is_refused(template: str, messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        ours(template, messages, continue_final_message=True)


@subcases(
    "template",
    [
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(template: str) -> None:
    for render in (ours, by_transformers):
        with pytest.raises(SecurityError):
            render(template, [QUESTION])


def test_a_templates_own_refusal_is_its_message() -> None:
    with pytest.raises(TemplateError, match="no system messages"):
        ours("{{ raise_exception('no system messages') }}", [QUESTION])


def test_the_time_is_now() -> None:
    assert ours("{{ strftime_now('%Y') }}", [QUESTION]) in {str(datetime.now().year + i) for i in (-1, 0)}
