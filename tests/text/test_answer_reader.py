"""Answers are read from tokens, of which marks may be special ones."""

from __future__ import annotations

import re
from typing import Any

import pytest

from slipstream.text.answer_reader import AnswerReader, begins_in_thought, ends_thought
from slipstream.tokenization.answer_forms import CALLS, THOUGHTS
from slipstream.tokenization.answer_parser import AnswerParser
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from tests.support import tiny_models

TOOLS: Any = [{"type": "function", "function": {"name": "probe_one"}}]
SPECIAL = re.compile(r"</?[^<>\s\"=a-z]*[|｜][^<>\s]*>|\[[A-Z_]+\]")  # noqa: RUF001 - DeepSeek's sign


def tokenizer(thought: str, example: str, signs: tuple[str, ...]) -> HFTokenizer:
    """A tokenizer of characters whose chat template names the marks of a form; marks of control are special tokens."""
    text = f"{thought} {example} {' '.join(signs)}"
    extra = sorted({*text, "\n", *'<>/_{}":1234567890[]'} - {*tiny_models.LETTERS})
    inner = tiny_models.tokenizer(extra, "{% if tools %}{% endif %}{# " + text + " #}a:")
    inner.add_special_tokens({"additional_special_tokens": sorted({*SPECIAL.findall(text), "<|im_end|>"})})
    return HFTokenizer(inner)


@pytest.mark.parametrize("name", [form.name for form in CALLS])
def test_an_answer_fed_by_tokens_is_that_of_its_text(name: str) -> None:
    form = next(form for form in CALLS if form.name == name)
    thought = THOUGHTS[0] if name == "channels" else THOUGHTS[2] if "Cohere" in name else THOUGHTS[-1]
    ours = tokenizer(f"{thought.opening}{thought.closing}", form.example, form.template_marks)
    assert ours.answer_form().calls == form and ours.answer_form().thought == thought
    text = f"{thought.opening}hm{thought.closing}\n\n{form.example}"
    reader = AnswerReader(ours, ours.bare("a:"), TOOLS)
    ids = [*ours.bare(text), *ours.bare("<|im_end|>")]  # the end of a turn is no mark
    pieces = [piece for token in ids for piece in reader.push([token])] + reader.end()
    parser = AnswerParser(ours.answer_form(), TOOLS)
    whole = parser.feed(text) + parser.end()

    def shown(parts: Any) -> Any:
        return ["".join(p.text for p in parts if p.kind == kind) for kind in ("thought", "text")], [
            piece.call for piece in parts if piece.call
        ]

    assert shown(pieces) == shown(whole) and len(shown(whole)[1]) == 1 and shown(whole)[0] == ["hm", ""]
    marks = [thought.opening, thought.closing] if thought.anywhere else ["hm", thought.opening, thought.closing]
    assert len(ours.bare("hm")) < reader.num_thought_tokens <= sum(len(ours.bare(mark)) for mark in [*marks, "hm"])


def test_stop_strings_cut_the_parts() -> None:
    ours = tokenizer("<think></think>", "<tool_call>", ())
    reader = AnswerReader(ours, [], TOOLS, ["o p"])
    pieces = reader.push(ours.bare("<think>hm</think>so to pay")) + reader.end()
    kinds = [(kind, "".join(p.text for p in pieces if p.kind == kind)) for kind in ("thought", "text")]
    assert kinds == [("thought", "hm"), ("text", "so t")]


def test_the_end_of_the_prompt_tells_whether_a_thought_is_open() -> None:
    ours = tokenizer("<think></think>", "<tool_call>", ())
    for prompt, begins, ends in (
        ("say <think> a:", False, False),
        ("a:<think>\n", True, False),
        ("a:<think>\n\n</think>\n\n", False, True),
    ):
        ids = ours.bare(prompt)
        assert (begins_in_thought(ours, ids), ends_thought(ours, ids)) == (begins, ends)
