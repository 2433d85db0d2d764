"""Conversations in the chat templates of ten families: nothing is refused or lost, and turns read only what is new.

The templates are short ones with the same rules, and the models' own where `make clients` has fetched them.
"""

from __future__ import annotations

from itertools import pairwise, takewhile

import pytest

from slipstream.apps.server.conversation import Call, TemplateTraits, Turn
from slipstream.apps.server.request_reading import Reading, rendered_messages
from slipstream.apps.server.request_rows import answer_constraint
from slipstream.apps.server.schemas import ChatFields
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from slipstream.tokenization.tokenizer import ChatForm
from tests.apps.server.test_recorded_requests import REQUESTS, TURNS, chat_of
from tests.support.chat_templates import FAMILIES, REAL, TEMPLATES, fetched
from tests.support.tiny_models import byte_tokenizer

OWN = {f"{family}, own": template for family in FAMILIES if (template := fetched(family)) is not None}
ALL = TEMPLATES | REAL | FAMILIES | OWN
over_families = pytest.mark.parametrize("template", (FAMILIES | OWN).values(), ids=(FAMILIES | OWN).keys())

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer", "enum": [1, 2], "default": 1}}}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "hear", "description": None}},
]
LOOK, HEAR = Call("look", {"x": 1}, "call_1"), Call("hear", '{"y": "z"}', "call_2")
SEEN, HEARD = Turn("tool", "a heron", call_id="call_1"), Turn("tool", "a song", call_id="call_2")
ASK, ANSWER = Turn("user", "What is it?"), Turn("assistant", "It is so.")
CONVERSATIONS = {
    "calls at once": [ASK, Turn("assistant", calls=(LOOK, HEAR)), SEEN, HEARD],
    "results in another order": [ASK, Turn("assistant", calls=(LOOK, HEAR)), HEARD, SEEN, ANSWER],
    "calls without ids": [
        ASK,
        Turn("assistant", calls=(Call("look", {}), Call("hear", {}))),
        Turn("tool", "a heron"),
        Turn("tool", "a song"),
    ],
    "a call without a result": [ASK, Turn("assistant", calls=(LOOK,)), Turn("user", "Stop.")],
    "a question after a result": [ASK, Turn("assistant", calls=(LOOK,)), SEEN, Turn("user", "Sure?")],
    "no question": [ANSWER, ASK],
    "two answers": [ASK, ANSWER, Turn("assistant", "Really."), ASK],
    "an answer cut off in its thought": [ASK, Turn("assistant", "", "Hm."), Turn("user", "Go on.")],
    "arguments that are no JSON": [ASK, Turn("assistant", calls=(Call("look", "{oops", "call_1"),)), SEEN],
    "a system message at the end": [ASK, Turn("assistant", calls=(LOOK,)), SEEN, Turn("system", "Nine tokens.")],
}


def tokenizer(template: str) -> HFTokenizer:
    inner = byte_tokenizer(template)
    inner.bos_token = "<pad>"
    return HFTokenizer(inner)


def num_same(first: list[int], second: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


@pytest.mark.parametrize("template", ALL.values(), ids=ALL.keys())
def test_every_recorded_request_is_rendered_and_a_second_turn_continues_the_first(template: str) -> None:
    reader = tokenizer(template)
    reading = Reading(template=TemplateTraits.of(reader))
    prompts: dict[str, list[list[int]]] = {}
    for client, request in REQUESTS:
        if request["path"] == "/api/show" or "previous_response_id" in request["body"]:
            continue
        chat = chat_of(request)
        chat.add_generation_prompt = False if not chat.continue_final_message else None
        prompts.setdefault(client, []).append(rendered_messages(chat, reader, reading).ids)
    for client in TURNS:
        first, second = prompts[client][-2:]
        assert num_same(first, second) == len(first) < len(second), client


@over_families
def test_no_conversation_is_refused_and_no_message_is_lost(template: str) -> None:
    reader = tokenizer(template)
    traits = TemplateTraits.of(reader)
    for tools in (TOOLS, []):
        for name, turns in CONVERSATIONS.items():
            text = reader.decode(reader.chat(traits.messages(turns, tools), ChatForm(traits.tools(tools))))
            for turn in turns:
                assert turn.text in text, (name, turn.text)
                assert all(call.name in text for call in turn.calls), name


def six_turns() -> list[list[Turn]]:
    """Six requests of an agent: a question, two calls with results, and the next question, twice over."""
    turns = [Turn("system", "Be brief."), Turn("user", "Question 0.")]
    requests = [list(turns)]
    for number in range(1, 6):
        if number == 3:
            turns += [Turn("assistant", "Answer.", "Thought 3."), Turn("user", "Question 3.")]
        else:
            call = Call("look", {"x": number}, f"call_{number}")
            thinking = Turn("assistant", "", f"Thought {number}.", (call,))
            turns += [thinking, Turn("tool", f"Result {number}.", call_id=call.id)]
        requests.append(list(turns))
    return requests


@over_families
def test_six_turns_read_only_what_is_new_but_for_what_the_template_moves(template: str) -> None:
    reader = tokenizer(template)
    traits = TemplateTraits.of(reader)
    prompts = [
        reader.chat(traits.messages(turns, TOOLS), ChatForm(traits.tools(TOOLS), opens_answer=False))
        for turns in six_turns()
    ]
    first_call = len(reader.decode(prompts[0]))
    for number, (first, second) in enumerate(pairwise(prompts), 1):
        same = num_same(first, second)
        if number != 3:
            assert same == len(first), number
        else:  # a new question: thoughts of calls before it go, and Mistral's tools move to it
            assert same >= len(reader.bare(reader.decode(first).partition("[AVAILABLE_TOOLS]")[0][:first_call]))


@over_families
def test_calls_can_be_forced_whatever_their_arguments_are(template: str) -> None:
    reader = tokenizer(template)
    for schema in ({"type": "string"}, {"type": "integer"}, {"enum": ["a", "b"]}, {"anyOf": [{"type": "string"}]}):
        parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
        tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
        fields = ChatFields.model_validate(
            {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": "required"}
        )
        assert answer_constraint(fields, reader, strict=False) is not None, schema


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_traits_of_its_models_own_template(family: str) -> None:
    template = fetched(family)
    if template is None:
        pytest.skip("needs .clients/chat_templates: make clients")
    short, own = tokenizer(FAMILIES[family]), tokenizer(template)
    assert TemplateTraits.of(short) == TemplateTraits.of(own)
    assert short.answer_form() == own.answer_form()


@pytest.mark.parametrize("fields", ["p.description | trim", "p.type"])
def test_tools_get_the_parts_that_a_template_cannot_do_without(fields: str) -> None:
    """Hermes' template needs the description of every property, Seed's the object of properties."""
    shown = f"{{% for n, p in t.function.parameters.properties | items %}}{{{{ n + {fields} }}}},{{% endfor %}}"
    reader = tokenizer(
        f"{{% for t in tools or [] %}}{{{{ t.function.name }}}}({shown}){{% endfor %}}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    traits, tools = TemplateTraits.of(reader), [*TOOLS]
    for schema in ({}, {"type": "object"}, {"properties": None}, {"properties": {"y": {"type": "string"}}}):
        tools.append({"type": "function", "function": {"name": "touch", "parameters": schema}})
    ids = reader.chat(traits.messages([ASK], tools), ChatForm(traits.tools(tools)))
    assert reader.decode(ids).startswith("look(xinteger," if "type" in fields else "look(x,")


def efforts(template: str) -> TemplateTraits:
    return TemplateTraits.of(tokenizer(template + "{{ messages[0].content }}"))


def test_an_effort_becomes_the_nearest_level_that_the_template_takes() -> None:
    any_level = efforts("{{ reasoning_effort }}")
    assert [any_level.effort(level) for level in ("none", "minimal", "low", "xhigh", "max", "9")] == [
        *("low", "low", "low", "high", "high", "9")
    ]
    unknown = "reasoning_effort is defined and reasoning_effort not in ('low', 'medium', 'xhigh')"
    some = f"{{% if {unknown} %}}" + "{{ raise_exception('level') }}{% endif %}"
    assert [efforts(some).effort(level) for level in ("minimal", "medium", "high", "max")] == [
        *("low", "medium", "xhigh", "xhigh")
    ]
    assert efforts("{% if reasoning_effort == 'max' %}much{% endif %}").effort("max") == "max"
