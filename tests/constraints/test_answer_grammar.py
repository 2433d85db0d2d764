"""Calls and thoughts that a grammar forces in a model's own form are what the reader of answers finds."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from slipstream import Constraint
from slipstream.constraints.answer_grammar import call_grammar, thought_rules
from slipstream.constraints.grammar_text import in_lark, load_llguidance
from slipstream.constraints.grammar_trial import byte_tokenizer
from slipstream.tokenization.answer_form_choice import Template, answer_form, call_text
from slipstream.tokenization.answer_forms import CALLS, THOUGHTS, AnswerForm
from slipstream.tokenization.answer_parser import AnswerParser

SCHEMA: Any = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "text": {"type": "string"},
        "unit": {"enum": ["km", "a <b>"]},
        "day": {"type": "string", "pattern": "^[a-z]{3}/[0-9]$"},
        "code": {"type": "string", "minLength": 1, "maxLength": 3},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["text", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "measure", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop_now"}},
]
SCHEMAS = {"measure": SCHEMA, "stop_now": {"type": "object", "maxProperties": 0}}
FORMS = {
    form.name: AnswerForm(THOUGHTS[0] if form.name == "channels" else THOUGHTS[number % 6 + 1], form)
    for number, form in enumerate(CALLS)
}


def written(*args: Any) -> str:
    raise ValueError  # a chat template that writes no calls


def drawn(constraint: Constraint, thought: str, closings: list[str], draw: random.Random) -> str:
    """A text of a grammar, byte by byte, in which open texts end soon. thought: the closing mark of a thought."""
    matcher = load_llguidance().LLMatcher(byte_tokenizer(), constraint.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    output, closings = list[int](), [thought, *filter(None, closings)]
    while not matcher.is_stopped() and len(output) < 4000:
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        legal = [byte for byte in range(257) if mask[byte]]
        legal = [byte for byte in legal if byte < 127 or byte == 256] or legal
        ends = [[*closing.encode()] for closing in closings]
        draw.shuffle(ends)
        end = next((end for end in ends if matcher.validate_tokens(end) == len(end)), None)
        chosen = end if end and draw.random() < 0.4 else [256] if 256 in legal else [draw.choice(legal)]
        assert matcher.consume_tokens(chosen)
        output += chosen
        if chosen == [*thought.encode()]:  # its mark is no text of an answer
            closings = [closing for closing in closings if closing != thought]
    assert matcher.is_stopped(), bytes(byte for byte in output if byte < 256)[:400]
    return bytes(byte for byte in output if byte < 256).decode()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("is_open", [False, True])
def test_forced_calls_are_read_back(name: str, is_open: bool) -> None:
    form = FORMS[name]
    assert form.thought is not None
    text, draw = call_text(form, Template("", written, ())), random.Random(name)
    assert text is not None
    rules, schemas = call_grammar(form.calls, text, TOOLS, {}, several=False)
    preamble = thought_rules(form.thought, {}, is_open=is_open, with_text=False)
    constraint = Constraint(
        grammar="\n".join(["start: calls", *rules]), schemas=schemas, whitespace="spaced", preamble=preamble
    )
    closings = [text.value_end.strip(), '"', "0", *form.calls.quotes]
    for _ in range(3):
        answer = drawn(constraint, form.thought.closing, closings, draw)
        parser = AnswerParser(form, TOOLS, in_thought=is_open)
        pieces = [piece for piece in parser.feed(answer) + parser.end() if piece.text or piece.call]
        (call,) = [piece.call for piece in pieces if piece.call is not None]
        assert {piece.kind for piece in pieces} <= {"thought", "call"}, answer
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "options", [{"json_schema": SCHEMA}, {"regex": "[0-9]{4}"}, {"choice": ["yes", "no"]}, {"grammar": 'start: "a"+'}]
)
def test_every_constraint_begins_after_a_thought(name: str, options: Any) -> None:
    form = FORMS[name]
    assert form.thought is not None
    draw, plain = random.Random(name), Constraint(**options)
    for is_open in (True, False):
        preamble = thought_rules(form.thought, {}, is_open=is_open, with_text=True)
        constraint = Constraint(**options, preamble=preamble)
        assert Constraint(**constraint.to_dict()).text == constraint.text != plain.text
        answer = drawn(constraint, form.thought.closing, ['"', "0"], draw)
        parser = AnswerParser(form, in_thought=is_open)
        content = "".join(piece.text for piece in parser.feed(answer) + parser.end() if piece.kind == "text")
        matcher = load_llguidance().LLMatcher(byte_tokenizer(), plain.text, log_level=0)
        assert matcher.consume_tokens([*content.encode()]) and matcher.is_accepting(), (answer, content)


def test_special_tokens_stand_in_grammars_by_their_ids() -> None:
    form = FORMS["Gemma 4's marks"]
    text = call_text(form, Template("", written, ()))
    assert text is not None
    names = ("<|tool_call>", "<tool_call|>", '<|"|>')
    rules, _ = call_grammar(form.calls, text, TOOLS, {name: 300 + i for i, name in enumerate(names)}, several=False)
    lark = "\n".join(rules)
    assert all(f"<[{300 + i}]>" in lark for i in range(3)) and not any(name in lark for name in names)
    (think,) = [thought for thought in THOUGHTS if thought.opening == "[THINK]"]
    lark = thought_rules(think, {"[THINK]": 7, "[/THINK]": 8}, is_open=False, with_text=True)
    assert lark.startswith("thought: (<[7]> inside <[8]>")


def test_tokens_are_named_outside_of_texts_only() -> None:
    lark = 'start: <tool_call> "a<b>" /<c>/ <[5]> // <d>\n'
    assert in_lark(lark, lambda name: name.upper()) == 'start: <TOOL_CALL> "a<b>" /<c>/ <[5]> // <d>\n'
    assert json.loads(in_lark(json.dumps({"grammars": [{"lark_grammar": lark}]}), lambda name: "x"))["grammars"] == [
        {"lark_grammar": 'start: x "a<b>" /<c>/ x // <d>\n'}
    ]


QWEN35 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_the_form_is_chosen_by_what_the_template_writes() -> None:
    import jinja2

    def template(text: str, names: tuple[str, ...] = (), told: Any = None) -> Template:
        def render(messages: Any, tools: Any, opens: bool) -> str:
            made = jinja2.Environment().from_string(text)
            return made.render(messages=messages, tools=tools, add_generation_prompt=opens)

        return Template(text, render, names, told)

    form = answer_form(template(QWEN35))
    assert form.calls.name == "functions in tags" and form.thought is not None and form.thought.opening == "<think>"
    text = call_text(form, template(QWEN35))
    assert text is not None and text.has_keys and text.before == "<tool_call>\n<function="
    described = answer_form(replace(template(QWEN35), reads_tools=False))
    assert described.thought == form.thought and described.calls.name == "JSON in tags"
    silent = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert answer_form(template(silent)).calls.name == "JSON in tags"
    assert answer_form(template(silent, ("<|tool_call_start|>", "[THINK]"))).calls.arguments == "python"
    assert answer_form(template(silent + "<tool_call><arg_key><arg_value>")).calls.arguments == "tags"
    mistral = "{% for m in messages %}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    mistral += "{{ c.function.arguments | string }}{% endfor %}{% endfor %}"  # an object has other quotes
    assert answer_form(template(mistral)).calls.name == "names before arguments"
