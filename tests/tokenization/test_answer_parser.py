"""Thoughts, text and calls are read from every form of answers, whole or in pieces, and nothing is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from slipstream.text.detokenizer import TextStream
from slipstream.tokenization.answer_forms import CALLS, HERMES, THOUGHTS, AnswerForm
from slipstream.tokenization.answer_parser import AnswerParser, AnswerPiece
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from tests.support.markers import subcases
from tests.support.tiny_models import byte_tokenizer

NUMBER, TEXT = {"type": "integer"}, {"type": "string"}
PROPERTIES = {"first": NUMBER, "second": NUMBER, "text": TEXT, "flag": {"type": ["boolean", "null"]}, "list": {}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "probe_one", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "mcp.edit-file"}},
]
EXAMPLE = ("call", "probe_one", '{"first": 7, "second": 8}')
FORMS = {
    form.name: AnswerForm(THOUGHTS[0] if form.name == "channels" else THOUGHTS[number % 6 + 1], form)
    for number, form in enumerate(CALLS)
}
HERMES_FORM, TAGS, CHANNELS = AnswerForm(THOUGHTS[-1], HERMES), FORMS["functions in tags"], FORMS["channels"]
ONE = '{"name": "probe_one", "arguments": {"first": 1}}'
READ = ("call", "probe_one", '{"first": 1}')
DEEP = "[" * 9_000 + "]" * 9_000


@cache
def byte_reader() -> HFTokenizer:
    """Of tokens that are bytes, and marks."""
    inner = byte_tokenizer(None)
    inner.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>", "<|channel|>", "[THINK]"])
    return HFTokenizer(inner)


def pieces(form: AnswerForm, text: str, step: int | str = 0, **options: Any) -> list[AnswerPiece]:
    """The pieces of an answer that comes in steps of so many characters, by tokens, or whole."""
    parser = AnswerParser(form, options.pop("tools", TOOLS), **options)
    parts = [text]
    if step == "tokens":
        stream, reader = TextStream(byte_reader().decode_marked), byte_reader()
        parts = [*map(stream.push, reader.bare(text)), stream.flush()]
    elif isinstance(step, int) and step:
        parts = [text[i : i + step] for i in range(0, len(text), step)]
    found = [piece for part in parts for piece in parser.feed(part)] + parser.end()
    assert "".join(piece.source for piece in found) == text
    return found


def joined(parts: Sequence[AnswerPiece]) -> list[tuple[str, ...]]:
    """Neighbors of one kind as one, without empty ones."""
    shown: list[tuple[str, ...]] = []
    for piece in parts:
        if piece.call is not None:
            shown.append(("call", piece.call.name, piece.call.arguments))
        elif piece.text:
            before = shown.pop()[1] if shown and shown[-1][0] == piece.kind else ""
            shown.append((piece.kind, before + piece.text))
    return shown


def read(form: AnswerForm, text: str, **options: Any) -> list[tuple[str, ...]]:
    """An answer's parts, the same however it comes."""
    whole = joined(pieces(form, text, **options))
    for step in (1, 2, 5, "tokens"):
        assert joined(pieces(form, text, step, **options)) == whole
    return whole


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_read_after_a_thought_and_between_texts(name: str) -> None:
    form = FORMS[name]
    assert form.thought is not None
    example, thought = form.calls.example, form.thought.opening + "hm\n" + form.thought.closing
    assert read(form, example) == [EXAMPLE]
    assert read(form, f"{thought}\n\n{example}") == [("thought", "hm"), EXAMPLE]
    assert read(form, f"hm {form.thought.closing}{example}", in_thought=True) == [("thought", "hm"), EXAMPLE]
    if name != "JSON after a tag":  # JSON alone is a call only where an answer begins
        assert read(form, f"so {example}\n{example}\nlo") == [("text", "so"), EXAMPLE, EXAMPLE, ("text", "\nlo")]
    assert read(form, example, tools=[])[0][0] == "text"


def tag(value: str, key: str = "text") -> str:
    return f"<tool_call>\n<function=probe_one>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"


@subcases("value", ["    return 1\n", "", "\n", "a</parameter> b", "</function>", "<b>\n</b>", '{"a": 1}', "null"])
def test_texts_between_tags_are_kept_but_for_the_newlines_of_the_tags(value: str) -> None:
    ((_, _, arguments),) = read(TAGS, tag(value))
    assert json.loads(arguments) == {"text": value}


@subcases(
    "key, value, meant",
    [
        *(("first", "7", 7), ("first", "7.0", 7), ("first", "x", "x"), ("list", "[1]", "[1]"), ("else", "1", "1")),
        *(("flag", "true", True), ("flag", "True", True), ("flag", "null", None)),
    ],
)
def test_values_between_tags_have_the_types_of_the_schema(key: str, value: str, meant: Any) -> None:
    ((_, _, arguments),) = read(TAGS, tag(value, key))
    assert json.loads(arguments) == {key: meant}


@subcases(
    "text, parts",
    [
        ("<think>a</think>\n<think>b</think>\ny", [("thought", "a\nb"), ("text", "y")]),
        (f"<think>a</think>x {HERMES.example}<think>b</think>", [("thought", "a"), ("text", "x"), EXAMPLE]),
        ("the mark `<think>` or <think>", [("text", "the mark `<think>` or <think>")]),
        ("<think>\n\n</think>\n\n", []),
        ("<think>cut o", [("thought", "cut o")]),
        (" \nplain \n", [("text", " \nplain \n")]),
        ("<tool_call> is a mark", [("text", "<tool_call> is a mark")]),
        ("<tool_call>[]</tool_call>", [("text", "<tool_call>[]</tool_call>")]),
        (f'<tool_call>{{"a</tool_call> <tool_call>{ONE}', [("text", '<tool_call>{"a</tool_call>'), READ]),
        (f"<tool_call>{{oops}}</tool_call>{HERMES.example}", [("text", "<tool_call>{oops}</tool_call>"), EXAMPLE]),
        (f"<tool_call>[{ONE}, {ONE}]</tool_call>", [READ, READ]),
        (f"<tool_call>{ONE[:-1]}", [("text", f"<tool_call>{ONE[:-1]}")]),
    ],
)
def test_marks_count_where_a_model_means_them(text: str, parts: list[Any]) -> None:
    shown = read(HERMES_FORM, text)
    assert shown[: len(parts)] == parts or shown == parts


@subcases(
    "text, parts",
    [
        (f"<mode>\n<tools>\n{ONE}\n{ONE}\n</tools>\n<mode>", [("text", "<mode>"), READ, READ, ("text", "\n<mode>")]),
        *((f"<{tag}>{ONE}</{tag}>", [READ]) for tag in ("tool", "function_call", "response", "json", "xml")),
        (f"<tools>\n{ONE}", [READ]),
        *((text, [("text", text)]) for text in (f"<table>{ONE}</table>", "<tools>{}</tools>", "<json>[1]</json>")),
        # the list of tools, as prompts have it
        *((text, [("text", text)]) for text in (f"<tools>\n{json.dumps(tool)}\n</tools>" for tool in TOOLS)),
        *((text, [("text", text)]) for text in (f"<tools>{json.dumps(tool['function'])}</tools>" for tool in TOOLS)),
    ],
)
def test_a_call_may_stand_in_another_tag_than_the_templates(text: str, parts: list[Any]) -> None:
    assert read(HERMES_FORM, text) == parts


def test_marks_inside_strings_are_text() -> None:
    written = ONE.replace("1", '"a</tool_call>b<tool_call>{"')
    ((_, _, arguments),) = read(HERMES_FORM, f"<tool_call>{written}</tool_call>")
    assert json.loads(arguments) == {"first": "a</tool_call>b<tool_call>{"}


@subcases(
    "call",
    [
        '{"name": null, "arguments": {}}',
        '{"name": ["probe_one"], "arguments": {}}',
        '{"name": "", "arguments": {}}',
        r'{"name": "\ud800", "arguments": {}}',
        *(f'{{"name": "probe_one", "arguments": {arguments}}}' for arguments in ("5", "[1]", '"the sum"')),
        *(f'{{"name": "probe_one", "arguments": {{"first": {value}}}}}' for value in ("NaN", "1e999", DEEP)),
    ],
)
def test_a_call_that_no_client_could_read_stays_text(call: str) -> None:
    text = f"<tool_call>{call}</tool_call>"
    assert joined(pieces(HERMES_FORM, text)) == [("text", text)]


def test_halves_of_surrogate_pairs_in_arguments_are_replaced() -> None:
    """They can be written in JSON, but no client could send them back."""
    arguments = r'{"text": "a\ud83d\ude00 \ud800b\udc00", "\ud800": 1}'
    (piece,) = pieces(HERMES_FORM, f'<tool_call>{{"name": "probe_one", "arguments": {arguments}}}</tool_call>')
    assert piece.call is not None
    assert json.loads(piece.call.arguments) == {"text": "a\U0001f600 \ufffdb\ufffd", "\ufffd": 1}


def test_a_call_without_arguments_gets_an_empty_object() -> None:
    for arguments in (', "arguments": null', ""):
        call = f'<tool_call>{{"name": "probe_one"{arguments}}}</tool_call>'
        assert read(HERMES_FORM, call) == [("call", "probe_one", "{}")]


def test_a_call_ends_a_thought_unless_the_thought_goes_on() -> None:
    call = f"<tool_call>{ONE}</tool_call>"
    assert read(HERMES_FORM, f"hm {call}\n{call}\n", in_thought=True) == [("thought", "hm"), READ, READ]
    quoted = f"say {call} or so</think>ok"
    assert read(HERMES_FORM, quoted, in_thought=True) == [("thought", quoted[:-10]), ("text", "ok")]
    assert read(HERMES_FORM, f"hm</think>{call}", in_thought=True) == [("thought", "hm"), READ]
    assert read(HERMES_FORM, "<think>hm</think>ok", in_thought=True) == [("thought", "hm"), ("text", "ok")]


@subcases(
    "text, parts",
    [
        (ONE, [READ]),
        (f"```json\n{ONE}\n```\n", [READ]),
        (f"<think>hm</think>{ONE}", [("thought", "hm"), READ]),
        (f"{ONE}; {ONE}", [READ, READ]),
        (f"{{{ONE}}}", [READ]),
        (f"{{{ONE}\n}}\n{ONE}", [READ, READ]),
        (f"```json\n{{{ONE}}}\n```", [READ]),
        (f"<tool_call>\n{{{ONE}}}\n</tool_call>", [READ]),
        (f"<tool_call>{{{ONE}</tool_call>ok", [READ, ("text", "ok")]),
        *((text, [("text", text)]) for text in ("{{ name }}", f"{{{{{ONE}}}}}", f"{{{ONE[:-1]}", "{{")),
        (f"```json\n{ONE}\n{ONE}\n```", [READ, READ]),
        (f"```json\n{ONE},\n{ONE}\n```\n\n```\n{ONE}\n```\n", [READ, READ, READ]),
        *((text, [("text", text)]) for text in (f"```json\n{ONE}\n{{}}\n```", f"```json\n{ONE}\n```\n```json\n{{}}")),
        (f"[{ONE}]", [READ]),
        ('{"type": "function", "function": ' + ONE + "}", [READ]),
        (ONE.replace("arguments", "parameters"), [READ]),
        (f"{ONE}\nDone.", [READ, ("text", "Done.")]),
        *((text, [("text", text)]) for text in (f"so {ONE}", f"```json\n{ONE}\n```\nDone.", f"```json\n{ONE}", "{}")),
        *((text, [("text", text)]) for text in (ONE.replace("probe", "other"), '{"name": "Bob"}', ONE[:-1])),
        *((text, [("text", text)]) for text in (ONE.replace('{"first": 1}', "3"), '```json\n{"a": 1}\n```')),
    ],
)
def test_json_without_marks_is_a_call_of_an_offered_tool_where_an_answer_begins(text: str, parts: list[Any]) -> None:
    assert read(HERMES_FORM, text) == parts


@subcases(
    "text, parts",
    [
        (' to=functions.probe_one<|channel|>commentary json<|message|>{"first": 1}<|call|>', [READ]),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.probe_one "
            '<|constrain|>json<|message|>{"first": 1}<|call|>',
            [("thought", "hm"), READ],
        ),
        (
            "<|channel|>analysis<|message|>hm<|start|>assistant<|channel|>commentary<|message|>so<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Done<|return|>",
            [("thought", "hm"), ("text", "so\nDone")],
        ),
        ("<|channel|>commentary to=functions.probe_one<|message|>{<|call|>", None),
    ],
)
def test_channels_are_read_in_both_orders(text: str, parts: Any) -> None:
    shown = read(CHANNELS, text)
    assert shown == parts or (parts is None and shown[0][0] == "text")


def test_wide_names_nested_values_and_identifiers_are_read() -> None:
    gemma, kimi = FORMS["Gemma 4's marks"], FORMS["Kimi's marks"]
    text = '<|tool_call>call:mcp.edit-file{a:<|"|>x{}"\'<|"|>,b:[1,-2.5,true,{c:null}],d:"e\\"f"}<tool_call|>'
    ((_, name, arguments),) = read(gemma, text)
    assert (name, json.loads(arguments)) == (
        "mcp.edit-file",
        {"a": "x{}\"'", "b": [1, -2.5, True, {"c": None}], "d": 'e"f'},
    )
    assert pieces(kimi, kimi.calls.example)[0].call.id == "functions.probe_one:0"  # type: ignore[union-attr]
    python = FORMS["Python calls between marks"]
    text = (
        "<|tool_call_start|>[probe_one(text='it\\'s [f(x=1)]', flag=None), probe_one(list=(1, 'b'))]<|tool_call_end|>"
    )
    values = [json.loads(arguments) for _, _, arguments in read(python, text)]
    assert values == [{"text": "it's [f(x=1)]", "flag": None}, {"list": [1, "b"]}]


def test_texts_come_as_soon_as_no_mark_can_begin_in_them() -> None:
    parser = AnswerParser(HERMES_FORM, TOOLS)
    assert [piece.text for piece in parser.feed("I look <")] == ["I look"]
    assert [piece.text for piece in parser.feed("b> now.")] == [" <b> now."]
    assert next(piece.call for piece in parser.feed(f"<tool_call>{ONE}</tool_call>")) is not None


def test_json_that_is_no_call_comes_at_once() -> None:
    parser = AnswerParser(HERMES_FORM, TOOLS)
    assert [[piece.text for piece in parser.feed(text)] for text in ("{", '"', 'city": "')] == [[], [], ['{"city": "']]


def broken_answer(draw: random.Random, form: AnswerForm) -> str:
    """Marks, examples cut anywhere and other text, at random."""
    assert form.thought is not None
    parts = [form.thought.opening, form.thought.closing, form.calls.example, ONE, "```json\n", "```", " ", "\n", "so"]
    parts += [
        '{"name": "',
        '"',
        "{",
        "{{",
        "}",
        "]",
        "<",
        "é\N{GRINNING FACE}",
        "\\",
        "\\u12",
        ":",
        "1e",
        "probe_one",
        "[f(",
    ]
    text = ""
    for _ in range(draw.randrange(1, 9)):
        part = draw.choice(parts)
        if draw.random() < 0.4:
            start = draw.randrange(len(part))
            part = part[start : draw.randrange(start, len(part)) + 1]
        text += part
    return text


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.exhaustive)])
def test_no_broken_answer_raises_or_loses_a_character(count: int) -> None:
    draw, forms = random.Random(1), [*FORMS.values()]
    for number in range(count):
        form = forms[number % len(forms)]
        text, in_thought = broken_answer(draw, form), draw.random() < 0.3
        whole = joined(pieces(form, text, in_thought=in_thought))
        for step in (1, draw.randrange(2, 7), "tokens"):
            assert joined(pieces(form, text, step, in_thought=in_thought)) == whole, (form.calls.name, text, step)
        lost = text
        for piece in pieces(form, text, in_thought=in_thought):
            if piece.call is None and piece.text.strip():  # what is shown is in the source, in order
                assert piece.text.strip() in piece.source
                lost = lost.replace(piece.source, "", 1)
            elif piece.call is not None:
                lost = lost.replace(piece.source, "", 1)
        assert form.thought is not None
        thought = form.thought
        for pattern in (thought.opening_pattern, thought.closing_pattern, thought.hidden_pattern):
            lost = lost if pattern is None else pattern.sub("", lost)
        assert not lost.strip(), (form.calls.name, text, lost)
