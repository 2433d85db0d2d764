# ruff: noqa: RUF001 - DeepSeek's marks have wide characters
"""The forms in which models write thoughts and tool calls.

One table serves reading and forcing. The facts are those of the models' chat templates, checked against transformers'
and TRL's response templates and xgrammar's structural tags (all Apache-2.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import regex

Arguments = Literal["call", "json", "tags", "lax", "python"]


def _unescaped(*patterns: str) -> str:
    return "\n".join(pattern.replace("\\", "") for pattern in patterns)


@dataclass(frozen=True)
class ThoughtForm:
    """The marks around a thought."""

    opening: str
    closing: str
    template_mark: str = ""  # a text of the chat template or the name of a token, if not the closing mark
    opens: str = ""  # pattern of the opening mark, if it has several spellings
    closes: str = ""  # the same of the closing mark
    anywhere: bool = False  # the mark is a special token, which no text quotes; other thoughts open an answer
    hidden: str = ""  # pattern of further marks, which belong to no part of an answer
    turn: str = ""  # between a thought and what follows
    text: str = ""  # before text

    @cached_property
    def opening_pattern(self) -> Any:
        return regex.compile(self.opens or regex.escape(self.opening))

    @cached_property
    def closing_pattern(self) -> Any:
        return regex.compile(self.closes or regex.escape(self.closing))

    @cached_property
    def hidden_pattern(self) -> Any:
        return regex.compile(self.hidden) if self.hidden else None

    @property
    def forced_end(self) -> str:
        """The text that ends a thought whose budget is used up."""
        return self.closing if self.anywhere else f"\n{self.closing}"

    @property
    def marks(self) -> str:
        """Text in which every mark occurs."""
        return "\n".join((self.opening, self.closing, _unescaped(self.opens, self.closes, self.hidden)))


@dataclass(frozen=True)
class CallForm:
    """The parts of a section of calls, as patterns: opening, one or more of (head, arguments, tail), closing.

    arguments: "call" is JSON with the name, or a list of such objects; "json" an object; "tags" the keys and values
    that `pairs` finds; "lax" an object with unquoted keys; "python" a list of Python calls. Where the arguments do not
    hold the name, the head does.
    """

    name: str
    opening: str
    example: str  # `EXAMPLE` in this form
    arguments: Arguments
    head: str = r"\s*"
    tail: str = ""
    closing: str = ""  # may be missing in an answer
    pairs: str = ""
    quotes: tuple[str, ...] = ()  # of strings in lax objects
    padding: str = ""  # belongs to the tags where a value between them begins or ends with it
    template_marks: tuple[str, ...] = ()  # texts in the template of a model that writes this form

    @cached_property
    def opening_pattern(self) -> Any:
        return regex.compile(self.opening, regex.S)

    @cached_property
    def head_pattern(self) -> Any:
        return regex.compile(self.head, regex.S)

    @cached_property
    def tail_pattern(self) -> Any:
        # atomic: a value never grows over the next key because what follows is broken
        return regex.compile((f"(?>(?:{self.pairs})*)" if self.pairs else "") + self.tail, regex.S)

    @cached_property
    def closing_pattern(self) -> Any:
        return regex.compile(self.closing, regex.S) if self.closing else None

    @property
    def marks(self) -> str:
        """Text in which every mark occurs."""
        patterns = _unescaped(self.opening, self.head, self.pairs, self.tail, self.closing)
        return "\n".join((self.example, *self.quotes, patterns))


@dataclass(frozen=True)
class AnswerForm:
    """The form of a model's answers."""

    thought: ThoughtForm | None  # None for models that write no thoughts
    calls: CallForm

    @property
    def marks(self) -> str:
        """Text in which every mark occurs."""
        return self.calls.marks if self.thought is None else f"{self.thought.marks}\n{self.calls.marks}"


@dataclass(frozen=True)
class CallText:
    """The text around the parts of a call, from which grammars force calls.

    Arguments are one JSON value, or keys and values if `key` and what follows it are used (`has_keys`).
    """

    before: str  # the name
    between: str  # the name and the arguments, or what precedes the first key
    after: str  # the arguments
    between_calls: str
    has_keys: bool = False
    key: str = ""  # before a key
    value: str = ""  # before a value
    value_end: str = ""  # after each value; only between two values if `separates`
    separates: bool = False

    @property
    def quotes_names(self) -> bool:
        """True if names are JSON texts."""
        return self.before.endswith('"') and self.between.startswith('"')


EXAMPLE = ("probe_one", {"first": 7, "second": 8})  # name and arguments
JSON_CALL = '{"name": "probe_one", "arguments": {"first": 7, "second": 8}}'
JSON_ARGUMENTS = '{"first": 7, "second": 8}'
WRONG_TAG = "<(?:tools?|function_call|response|json|JSON|xml)>"  # that models write around a call in JSON

THOUGHTS = (
    ThoughtForm(
        opening="<|channel|>analysis<|message|>",
        closing="<|end|>",
        template_mark="<|channel|>",
        opens=r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
        closes=r"<\|end\|>|(?=<\|start\|>|<\|channel\|>)",
        anywhere=True,
        hidden=r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>\w+)?<\|message\|>"
        r"|<\|end\|>|<\|return\|>|<\|call\|>",
        turn="<|start|>assistant",
        text="<|channel|>final<|message|>",
    ),
    ThoughtForm("<|channel>thought\n", "<channel|>", template_mark="<|channel>", anywhere=True),
    ThoughtForm("[THINK]", "[/THINK]", anywhere=True),
    ThoughtForm("<|START_THINKING|>", "<|END_THINKING|>", anywhere=True),
    ThoughtForm("<seed:think>", "</seed:think>"),
    ThoughtForm("◁think▷", "◁/think▷"),
    ThoughtForm("<think>", "</think>"),
)


def _tags(*, key: str, after_key: str, end: str, after: str) -> str:
    """The pattern of one argument between tags: its value ends at the first closing tag that further tags follow."""
    return rf"{key}(?P<value>.*?){end}\s*(?={after})".replace("KEY", rf"(?P<key>[^<>\"\n]+){after_key}")


CALLS = (
    CallForm(
        "functions in tags",  # Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5, Seed-OSS
        r"(?:<tool_call>|<seed:tool_call>)(?=\s*<function=)|(?=<function=[^<>\n]+>\s*<parameter=)",
        "<tool_call>\n<function=probe_one>\n<parameter=first>\n7\n</parameter>\n<parameter=second>\n8\n</parameter>\n"
        "</function>\n</tool_call>",
        "tags",
        head=r"\s*<function=(?P<name>[^<>\n]+)>\s*",
        pairs=_tags(key="<parameter=KEY", after_key=">", end="</parameter>", after="<parameter=|</function>"),
        tail="</function>",
        closing=r"\s*(?:</tool_call>|</seed:tool_call>)",
        padding="\n",
        template_marks=("<function=", "<parameter="),
    ),
    CallForm(
        "keys and values in tags",  # GLM 4.5 to 5
        r"<tool_call>(?=\s*[^\s<>{}\[\]]+\s*(?:<arg_key>|</tool_call>))",
        "<tool_call>probe_one\n<arg_key>first</arg_key>\n<arg_value>7</arg_value>\n<arg_key>second</arg_key>\n"
        "<arg_value>8</arg_value>\n</tool_call>",
        "tags",
        head=r"\s*(?P<name>[^\s<>{}\[\]]+)\s*",
        pairs=_tags(
            key="<arg_key>KEY",
            after_key=r"</arg_key>\s*<arg_value>",
            end="</arg_value>",
            after="<arg_key>|</tool_call>",
        ),
        tail="(?=</tool_call>)",
        closing="</tool_call>",
        template_marks=("<arg_key>", "<arg_value>"),
    ),
    CallForm(
        "invocations",  # MiniMax M2
        r"<minimax:tool_call>(?=\s*<invoke)",
        '<minimax:tool_call>\n<invoke name="probe_one">\n<parameter name="first">7</parameter>\n'
        '<parameter name="second">8</parameter>\n</invoke>\n</minimax:tool_call>',
        "tags",
        head=r'\s*<invoke name="(?P<name>[^"<>\n]+)">\s*',
        pairs=_tags(key='<parameter name="KEY', after_key='">', end="</parameter>", after="<parameter name=|</invoke>"),
        tail="</invoke>",
        closing=r"\s*</minimax:tool_call>",
        template_marks=("<minimax:tool_call>",),
    ),
    CallForm(
        "typed invocations",  # DeepSeek V3.2, V4
        r"<｜DSML｜(?:function_calls|tool_calls)>(?=\s*<｜DSML｜invoke)",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="probe_one">\n'
        '<｜DSML｜parameter name="first" string="false">7</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="second" string="false">8</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "tags",
        head=r'\s*<｜DSML｜invoke name="(?P<name>[^"<>\n]+)">\s*',
        pairs=_tags(
            key='<｜DSML｜parameter name="KEY',
            after_key=r'" string="(?P<string>true|false)">',
            end="</｜DSML｜parameter>",
            after="<｜DSML｜parameter name=|</｜DSML｜invoke>",
        ),
        tail="</｜DSML｜invoke>",
        closing=r"\s*</｜DSML｜(?:function_calls|tool_calls)>",
        template_marks=("<｜DSML｜",),
    ),
    CallForm(
        "DeepSeek's marks",  # R1, V3: with a type and a fence; V3.1: without
        r"<｜tool▁calls▁begin｜>(?=\s*<｜tool▁call▁begin｜>)",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>probe_one<｜tool▁sep｜>"
        + JSON_ARGUMENTS
        + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "json",
        head=r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n"
        r"|(?P<name>[^\n<]+)<｜tool▁sep｜>)",
        tail=r"\s*(?:```)?\s*<｜tool▁call▁end｜>",
        closing=r"\s*<｜tool▁calls▁end｜>",
        template_marks=("<｜tool▁calls▁begin｜>",),
    ),
    CallForm(
        "Kimi's marks",  # Kimi K2
        r"<\|tool_calls_section_begin\|>(?=\s*<\|tool_call_begin\|>)",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.probe_one:0<|tool_call_argument_begin|>"
        + JSON_ARGUMENTS
        + "<|tool_call_end|><|tool_calls_section_end|>",
        "json",
        head=r"\s*<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*"
        r"<\|tool_call_argument_begin\|>\s*",
        tail=r"\s*<\|tool_call_end\|>",
        closing=r"\s*<\|tool_calls_section_end\|>",
        template_marks=("<|tool_calls_section_begin|>",),
    ),
    CallForm(
        "channels",  # gpt-oss: the recipient stands before the channel in templates, after it in answers
        r"(?=(?:\A|<\|start\|>)(?:assistant)? to=functions\.[^\s<]+\s*<\|channel\|>"
        r"|(?:<\|start\|>assistant)?<\|channel\|>\w+ to=functions\.)",
        "<|channel|>commentary to=functions.probe_one <|constrain|>json<|message|>" + JSON_ARGUMENTS + "<|call|>",
        "json",
        head=r"(?:(?:\A|<\|start\|>)(?:assistant)? to=functions\.(?P<name>[^\s<]+)\s*<\|channel\|>\w+"
        r"|(?:<\|start\|>assistant)?<\|channel\|>\w+ to=functions\.(?P<name>[^\s<]+))"
        r"\s*(?:<\|constrain\|>)?\w*\s*<\|message\|>\s*",
        closing=r"\s*<\|call\|>",
        template_marks=("<|channel|>", "to=functions."),
    ),
    CallForm(
        "Gemma 4's marks",
        r"<\|tool_call>(?=\s*call:)",
        "<|tool_call>call:probe_one{first:7,second:8}<tool_call|>",
        "lax",
        head=r"\s*call:(?P<name>[^{\s]+)\s*",
        closing=r"\s*<tool_call\|>",
        quotes=('<|"|>', '"'),
        template_marks=("<|tool_call>", "call:"),
    ),
    CallForm(
        "FunctionGemma's marks",
        r"<start_function_call>(?=\s*call:)",
        "<start_function_call>call:probe_one{first:7,second:8}<end_function_call>",
        "lax",
        head=r"\s*call:(?P<name>[^{\s]+)\s*",
        closing=r"\s*<end_function_call>",
        quotes=("<escape>", '"'),
        template_marks=("<start_function_call>",),
    ),
    CallForm(
        "Python calls between marks",  # LFM2
        r"<\|tool_call_start\|>(?=\s*\[)",
        "<|tool_call_start|>[probe_one(first=7, second=8)]<|tool_call_end|>",
        "python",
        closing=r"\s*<\|tool_call_end\|>",
        template_marks=("<|tool_call_start|>",),
    ),
    CallForm(
        "Python calls in tags",  # Olmo 3
        r"<function_calls>(?=\s*\w)",
        "<function_calls>\nprobe_one(first=7, second=8)\n</function_calls>",
        "python",
        closing=r"\s*</function_calls>",
        template_marks=("<function_calls>",),
    ),
    CallForm(
        "names before arguments",  # Mistral from version 11 of its tokenizers on
        r"\[TOOL_CALLS\](?=\s*[^\s\[{]+(?:\[CALL_ID\]|\[ARGS\]))",
        "[TOOL_CALLS]probe_one[ARGS]" + JSON_ARGUMENTS,
        "json",
        head=r"\s*(?P<name>[^\s\[{]+)(?:\[CALL_ID\](?P<id>[^\s\[]+))?\[ARGS\]\s*",
        template_marks=("[TOOL_CALLS]", "[ARGS]"),
    ),
    CallForm(
        "a list after a mark",  # Mistral before
        r"\[TOOL_CALLS\](?=\s*\[)",
        f"[TOOL_CALLS][{JSON_CALL}]",
        "call",
        template_marks=("[TOOL_CALLS]",),
    ),
    CallForm(
        "actions",  # Cohere
        r"<\|START_ACTION\|>(?=\s*[\[{])",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "probe_one", "parameters": '
        + JSON_ARGUMENTS
        + "}\n]<|END_ACTION|>",
        "call",
        closing=r"\s*<\|END_ACTION\|>",
        template_marks=("<|START_ACTION|>",),
    ),
    CallForm(
        "a list in tags",  # Nemotron Nano 2
        r"<TOOLCALL>(?=\s*[\[{])",
        f"<TOOLCALL>[{JSON_CALL}]</TOOLCALL>",
        "call",
        closing=r"\s*</TOOLCALL>",
        template_marks=("<TOOLCALL>",),
    ),
    CallForm(
        "a list after a token",  # Granite 3, Phi-4 mini
        r"<\|tool_call\|>(?=\s*[\[{])",
        f"<|tool_call|>[{JSON_CALL}]",
        "call",
        closing=r"\s*<\|/tool_call\|>",
        template_marks=("<|tool_call|>",),
    ),
    CallForm(
        "JSON in tags",  # Hermes, Qwen2.5, Qwen3, SmolLM3, Granite 4; Qwen2.5-Coder writes other tags as well
        rf"<tool_call>(?=\s*[\[{{])|{WRONG_TAG}(?=\s*\{{\s*\"name\"\s*:\s*\"[^\"\n]+\"\s*,\s*\"arguments\"\s*:)",
        f"<tool_call>\n{JSON_CALL}\n</tool_call>",
        "call",
        closing=rf"\s*(?:</tool_call>|{WRONG_TAG.replace('<', '</')})",
        template_marks=("<tool_call>",),
    ),
    CallForm(
        "JSON after a tag",  # Llama 3
        r"<\|python_tag\|>(?=\s*\{)",
        '{"name": "probe_one", "parameters": ' + JSON_ARGUMENTS + "}",
        "call",
        template_marks=('"parameters": ', '{"name": '),
    ),
)

HERMES = next(
    form for form in CALLS if form.name == "JSON in tags"
)  # what models without a form of their own are shown
