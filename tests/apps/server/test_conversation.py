"""A conversation is rendered by every kind of chat template, and its beginning stays the same from turn to turn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream import UsageError
from slipstream.apps.server.conversation import Call, TemplateTraits, Turn
from slipstream.tokenization.answer_forms import HERMES
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from slipstream.tokenization.tokenizer import ChatForm
from tests.support.chat_templates import REAL, TEMPLATES
from tests.support.tiny_models import byte_tokenizer

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
LOOK = Call("look", '{"x": 1}', "call_1")
CONVERSATION = [
    Turn("system", "Be brief."),
    Turn("system", "Be kind."),
    Turn("user", "What is it?"),
    Turn("system", "A list of skills."),
    Turn("assistant", "I look.", "Let me think.", (LOOK, Call("look", {"y": 2}, "call_2"))),
    Turn("system", "Nine tokens left."),
    Turn("tool", "a heron", call_id="call_1"),
    Turn("tool", "two herons", call_id="call_2"),
    Turn("system", "Eight tokens left."),
    Turn("assistant", "Herons."),
    Turn("user", "Sure?"),
    Turn("user", "Really?"),
]
over_templates = pytest.mark.parametrize("template", (TEMPLATES | REAL).values(), ids=(TEMPLATES | REAL).keys())


def rendered(template: str, turns: list[Turn], **form: Any) -> str:
    tokenizer = HFTokenizer(byte_tokenizer(template))
    traits = TemplateTraits.of(tokenizer)
    messages = traits.messages(turns, TOOLS)
    return tokenizer.decode(tokenizer.chat(messages, ChatForm(TOOLS if traits.knows_tools else [], **form)))


def traits(name: str) -> TemplateTraits:
    return TemplateTraits.of(HFTokenizer(byte_tokenizer((TEMPLATES | REAL)[name])))


def test_a_trial_finds_what_a_template_takes() -> None:
    assert traits("plain") == TemplateTraits()
    assert traits("system first") == TemplateTraits(system="first", thought="reasoning_content")
    assert traits("arguments as text") == TemplateTraits(arguments_as_text=True)
    assert traits("thought or text") == TemplateTraits(thought="thinking", thought_with_text=False)
    assert traits("alternation") == TemplateTraits(system="first", alternates=True, short_ids=True)
    assert traits("no tools") == TemplateTraits(knows_tools=False)
    assert traits("no system") == TemplateTraits(system="nowhere")


@pytest.mark.skipif(len(REAL) < 2, reason="needs the models smollm2 and qwen0.5b")
def test_a_trial_of_real_templates() -> None:
    assert traits("smollm2") == TemplateTraits(knows_tools=False)
    assert traits("qwen0.5b") == TemplateTraits()


@over_templates
def test_every_text_of_a_conversation_is_shown_once(template: str) -> None:
    text = rendered(template, CONVERSATION)
    for turn in CONVERSATION:
        assert text.count(turn.text) == 1, turn.text
    assert "look" in text and '"x": 1' in text and '"y": 2' in text and text.rindex("Really?") > text.rindex("Sure?")


@over_templates
def test_the_prompt_of_a_turn_begins_with_that_of_the_turn_before(template: str) -> None:
    ends = [number for number, turn in enumerate(CONVERSATION) if turn.role == "assistant"]
    before = ""
    for end in (*ends, len(CONVERSATION)):
        prompt = rendered(template, CONVERSATION[:end], opens_answer=False)
        assert prompt.startswith(before) and len(prompt) > len(before)
        before = prompt


@over_templates
def test_results_stand_in_the_order_of_their_calls(template: str) -> None:
    """Many templates show no ids: the place alone tells which call a result belongs to."""
    *before, first, second = CONVERSATION[:8]
    other = Turn("tool", "of no call", call_id="call_9")
    text = rendered(template, [*before, first, second, other])
    assert text.index(first.text) < text.index(second.text) < text.index(other.text)
    for results in ([second, first, other], [other, second, first], [second, other, first]):
        assert rendered(template, [*before, *results]) == text


def folded(*turns: Turn, template: str = "system first") -> list[tuple[str, str]]:
    messages = traits(template).messages(turns, TOOLS)
    return [(message["role"], message["content"]) for message in messages]


NOTE = "<system-reminder>\nnote\n</system-reminder>"


def test_later_system_texts_join_the_turn_before_or_the_users_after() -> None:
    user, system, answer = Turn("user", "ask"), Turn("system", "note"), Turn("assistant", "so")
    called = Turn("assistant", calls=(LOOK, LOOK))
    assert folded(system, system, user) == [("system", "note\n\nnote"), ("user", "ask")]
    assert folded(user, system) == [("user", f"ask\n\n{NOTE}")]
    assert folded(user, answer, system, user)[2:] == [("user", f"{NOTE}\n\nask")]
    assert folded(user, answer, system)[2:] == [("user", NOTE)]
    assert folded(user, answer, system, answer)[2:] == [("user", NOTE), ("assistant", "so")]
    result = Turn("tool", "seen")
    for turns in ((system, result, result), (result, system, result), (result, result, system)):
        assert folded(user, called, *turns)[2:] == [("tool", "seen"), ("tool", f"seen\n\n{NOTE}")]
        assert folded(user, called, *turns, answer)[3:] == [("tool", f"seen\n\n{NOTE}"), ("assistant", "so")]
    assert folded(user, called, result, system, user)[2:] == [("tool", f"seen\n\n{NOTE}"), ("user", "ask")]
    assert folded(system, user, template="no system") == [("user", "note\n\nask")]
    assert folded(system, template="no system") == [("user", "note")]


def test_arguments_that_are_no_json_stay_in_the_conversation() -> None:
    broken = Turn("assistant", calls=(Call("look", "{oops", "call_1"),))
    turns = [Turn("user", "ask"), broken, Turn("tool", "no", call_id="call_1")]
    for name in TEMPLATES:
        assert "{oops" in rendered(TEMPLATES[name], turns), name


def test_thoughts_go_where_the_template_reads_them() -> None:
    thinking = Turn("assistant", "", "Let me think.", (LOOK,))
    turns = [Turn("user", "ask"), thinking, Turn("tool", "seen", call_id="call_1")]
    for name, is_shown in (("plain", False), ("system first", True), ("thought or text", True), ("no tools", False)):
        assert ("Let me think." in rendered(TEMPLATES[name], turns)) == is_shown, name


def test_a_template_without_tools_gets_a_tool_prompt_and_calls_as_text() -> None:
    text = rendered(TEMPLATES["no tools"], CONVERSATION)
    assert json.dumps(TOOLS[0]) in text and "<tool_call>" in text
    assert '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>' in text
    assert "<tool_response>\na heron\n</tool_response>" in text
    assert HFTokenizer(byte_tokenizer(TEMPLATES["no tools"])).answer_form().calls is HERMES


def test_a_template_that_refuses_everything_is_left_alone() -> None:
    refusing = HFTokenizer(byte_tokenizer("{{ raise_exception('no') }}"))
    assert TemplateTraits.of(refusing) == TemplateTraits()
    with pytest.raises(UsageError, match="refuses these messages: no"):
        refusing.chat([{"role": "user", "content": "hi"}])
