"""A conversation as all endpoints read it, and the form in which a model's chat template takes it.

Templates differ: in where system messages may stand, in the name of an earlier answer's thought, in whether arguments
of calls are objects or JSON texts, and in whether they know tools at all. Each template is tried once with small
conversations. How a turn is written depends on the turns before it alone, so the beginning of a prompt stays the same
from turn to turn, and the prompt cache finds it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal

from slipstream.errors import UsageError
from slipstream.text.pictures import MARKS, Picture
from slipstream.tokenization.tokenizer import ChatForm, Tokenizer, TokenizerDetails

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of a message's field for what the model thought
GAP = "\n\n"  # between texts that become one
FIRST, ASKED, LATER, LAST = "alpha", "beta", "gamma", "delta"  # texts of the conversations that try a template
MARK = re.compile(rf"\n?({MARKS})\n?")
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
SHORT_ID = 9  # characters of the only ids that Mistral's templates take
TOOL_PROMPT = """You can call functions. These are their JSON schemas, one per line:
<tools>
{schemas}
</tools>
To call a function, write its name and its arguments as one JSON object:
<tool_call>
{{"name": "the name", "arguments": {{}}}}
</tool_call>
The result comes between <tool_response> and </tool_response>."""


@dataclass(frozen=True)
class Call:
    """A call of a tool that the model made."""

    name: str
    arguments: Mapping[str, Any] | str  # as the client sent them; a text need not be JSON, since models write anything
    id: str | None = None

    @property
    def as_object(self) -> Mapping[str, Any]:
        """The arguments as an object; a text that is none becomes its only member."""
        if not isinstance(self.arguments, str):
            return self.arguments
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        return value if isinstance(value, dict) else {"arguments": self.arguments}

    @property
    def as_text(self) -> str:
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Turn:
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    thought: str = ""  # of the assistant, before its text
    calls: tuple[Call, ...] = ()
    call_id: str | None = None  # of the call whose result this is
    extra: Mapping[str, Any] = field(default_factory=dict)  # further fields that the template reads
    pictures: Mapping[str, Picture] = field(default_factory=dict)  # by the marks that stand for them in the text


@dataclass(frozen=True)
class TemplateTraits:
    """The abilities and limits of a chat template."""

    system: Literal["anywhere", "first", "nowhere"] = "anywhere"  # where system messages may stand
    alternates: bool = False  # two messages of the user in a row are refused
    knows_tools: bool = True
    describes_tools: bool = False  # tools are refused if a description, or the object of properties, is missing
    single_calls: bool = False  # a message has one call at most
    arguments_as_text: bool = False
    short_ids: bool = False
    thought: str | None = None  # the field of an earlier answer's thought; None: it is left out
    thought_with_text: bool = True  # both in a message with calls
    efforts: tuple[str, ...] = ("low", "medium", "high")  # the levels of its `reasoning_effort`

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> TemplateTraits:
        """Try a tokenizer's chat template."""
        if tokenizer is None or not tokenizer.has_chat_template:
            return cls()
        trial = _Trial(tokenizer)
        if trial.ids(_user(ASKED)) is None:  # nothing can be learnt from this template
            return cls()
        details = tokenizer if isinstance(tokenizer, TokenizerDetails) else None
        fields = frozenset(THOUGHTS) if details is None else details.template_fields()
        traits = cls(
            _system_place(trial),
            alternates=trial.ids(_user(ASKED), _user(LATER)) is None,
            knows_tools=details is None or "tools" in details.template_variables(),
            efforts=_efforts(trial, details),
        )
        shapes: list[dict[str, Any]] = [{}, {"parameters": {"type": "object"}}]
        shapes += [{"parameters": {"type": "object", "properties": {ASKED: {"type": "string"}}}}]
        bare = [{"type": "function", "function": {"name": FIRST, **shape}} for shape in shapes]
        full = replace(traits, describes_tools=True)
        if traits.knows_tools and not trial.takes_tools(bare) and trial.takes_tools(full.tools(bare)):
            traits = full
        forms = [
            replace(traits, short_ids=short, arguments_as_text=text)
            for short in (False, True)
            for text in (False, True)
        ]
        called = Turn("assistant", calls=(Call(FIRST, {ASKED: LATER}, "call"),)), Turn("tool", LATER, call_id="call")
        traits = next((form for form in forms if trial.takes(form, *called)), traits)
        calls = Call(FIRST, {}, "first"), Call(LAST, {}, "last")
        both = [Turn("user", "?"), Turn("assistant", calls=calls)]
        both += [Turn("tool", "?", call_id=call.id) for call in calls]
        one_by_one = replace(traits, single_calls=True)
        if LAST not in trial.text(*traits.messages(both)) and LAST in trial.text(*one_by_one.messages(both)):
            traits = one_by_one
        for name in filter(fields.__contains__, THOUGHTS):
            thinking = replace(traits, thought=name)
            for answer in (Turn("assistant", ASKED, LATER),), (replace(called[0], thought=LATER),):
                if traits.thought is None and LATER in trial.text(*thinking.messages([Turn("user", "?"), *answer])):
                    traits = thinking
        spoken = replace(called[0], text=ASKED, thought=LATER), called[1]
        return replace(traits, thought_with_text=not traits.thought or trial.takes(traits, *spoken))

    def messages(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
        """A conversation as the template's messages. tools: those that are offered, for templates that know none."""
        pictures = {mark: picture for turn in turns for mark, picture in turn.pictures.items()}
        turns = _with_ordered_results(turns)
        if pictures:
            turns = _shown_after_results(turns)
        if not self.knows_tools:
            turns = [_spelled(turn) for turn in turns]
            if tools:
                schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
                turns = _after_system(turns, TOOL_PROMPT.format(schemas=schemas))
        if self.system != "anywhere":
            turns = _folded(turns, has_head=self.system == "first")
        if self.alternates:
            turns = _alternating(turns)
        if self.single_calls:
            turns = _with_single_calls(turns)
        if self.short_ids:
            turns = _identified(turns)
        return [_with_parts(self._message(turn), pictures) for turn in turns]

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The tools that are offered, as the template takes them."""
        if not self.knows_tools:
            return []
        if not self.describes_tools:
            return [dict(tool) for tool in tools]
        described = []
        for tool in tools:
            function = {name: value for name, value in tool["function"].items() if value is not None}
            schema = {"type": "object", "properties": {}} | _with_text_defaults(function.get("parameters", {}))
            properties = {
                name: {"description": "", **value} if isinstance(value, Mapping) else value
                for name, value in (schema["properties"] or {}).items()
            }
            parameters = {**schema, "properties": properties}
            described.append({**tool, "function": {"description": "", **function, "parameters": parameters}})
        return described

    def effort(self, level: str) -> str | None:
        """The template's level of thinking that is nearest to this one; None if it has none."""
        if level not in ("none", *EFFORTS):
            return level  # for the template to judge
        place = EFFORTS.index(level) if level != "none" else 0
        return min(
            self.efforts,
            key=lambda effort: (abs(EFFORTS.index(effort) - place), effort in EFFORTS[:place]),
            default=None,
        )

    def _message(self, turn: Turn) -> dict[str, Any]:
        message: dict[str, Any] = {**turn.extra, "role": turn.role, "content": turn.text}
        if turn.calls:
            message["tool_calls"] = [self._call(call) for call in turn.calls]
        if turn.call_id is not None:
            message["tool_call_id"] = self._id(turn.call_id)
        if turn.thought and self.thought and (self.thought_with_text or not (turn.text and turn.calls)):
            message[self.thought] = turn.thought
        return message

    def _call(self, call: Call) -> dict[str, Any]:
        arguments = call.as_text if self.arguments_as_text else call.as_object
        identity = None if call.id is None else self._id(call.id)
        return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": arguments}}

    def _id(self, identity: str) -> str:
        return hashlib.sha256(identity.encode()).hexdigest()[:SHORT_ID] if self.short_ids else identity


class _Trial:
    """Renders the small conversations that try a template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def ids(
        self, *messages: dict[str, Any], tools: Sequence[Mapping[str, Any]] = (), effort: str | None = None
    ) -> list[int] | None:
        """The tokens of messages; None if the template refuses them."""
        try:
            return self._tokenizer.chat(list(messages), ChatForm(tools, opens_answer=False, reasoning_effort=effort))
        except UsageError:
            return None

    def takes_tools(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """True if the template describes each of these tools."""
        return all(self.ids(_user(ASKED), tools=[tool]) is not None for tool in tools)

    def text(self, *messages: dict[str, Any]) -> str:
        return self._tokenizer.decode(self.ids(*messages) or [])

    def takes(self, traits: TemplateTraits, *turns: Turn) -> bool:
        """True if the template renders a question and these turns."""
        return self.ids(*traits.messages([Turn("user", ASKED), *turns])) is not None


_ANSWER = {"role": "assistant", "content": "?"}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _system_place(trial: _Trial) -> Literal["anywhere", "first", "nowhere"]:
    head, later = {"role": "system", "content": FIRST}, {"role": "system", "content": LATER}
    before = [head, _user(ASKED)]
    for earlier in (before, [*before, _ANSWER]):
        ids, as_user = trial.ids(*earlier, later), trial.ids(*earlier, _user(LATER))
        text = trial.text(*earlier, later)
        is_marked = ids is not None and ids != as_user  # else the model would not see that it is no user's
        if not is_marked or text.count(LATER) != 1 or text.find(LATER) < text.find(ASKED):
            # some templates show it before the last question only, and not at all after the results of tools
            moves = FIRST not in trial.text(*before, _ANSWER, _user(LATER)).partition(ASKED)[0]
            return "nowhere" if moves else "first"
    return "anywhere"


def _efforts(trial: _Trial, details: TokenizerDetails | None) -> tuple[str, ...]:
    usual = TemplateTraits.efforts
    if details is None or "reasoning_effort" not in details.template_variables():
        return usual
    levels = [level for level in EFFORTS if trial.ids(_user(ASKED), effort=level) is not None]
    if len(levels) < len(EFFORTS):
        return tuple(levels)
    named = details.template_fields()  # it writes any level, but knows these
    return tuple(level for level in EFFORTS if level in usual or level in named)


def _with_text_defaults(schema: Any) -> Any:
    """A schema without defaults that gpt-oss's template cannot write: those of choices that are not strings."""
    if isinstance(schema, list):
        return [_with_text_defaults(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    is_choice = isinstance(schema.get("enum") or schema.get("oneOf"), list)
    is_unreadable = is_choice and not isinstance(schema.get("default", ""), str)
    return {
        name: _with_text_defaults(value) for name, value in schema.items() if not (is_unreadable and name == "default")
    }


def _spelled(turn: Turn) -> Turn:
    """A turn of a template without tools, with its calls and results as texts in Hermes' form."""
    if turn.role == "tool":
        return Turn("user", f"<tool_response>\n{turn.text}\n</tool_response>")
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(c.name)}, "arguments": {c.as_text}}}\n</tool_call>' for c in turn.calls
    ]
    return replace(turn, text="\n".join(filter(None, [turn.text, *calls])), calls=()) if calls else turn


def _with_ordered_results(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with results in the order of their calls: many templates show no ids, so the place tells them apart."""
    result: list[Turn] = []
    places: dict[str | None, int] = {}
    first = 0  # of the results that follow each other
    for turn in turns:
        result.append(turn)
        if turn.role != "tool":
            first = len(result)
        if turn.role in ("user", "assistant"):
            places = {call.id: place for place, call in enumerate(turn.calls)}
        elif turn.role == "tool" and turn.call_id in places:
            result[first:] = sorted(result[first:], key=lambda tool: places.get(tool.call_id, len(places)))
    return result


def _after_system(turns: list[Turn], text: str) -> list[Turn]:
    """The turns with a text at the end of the first system message, or as one."""
    if turns and turns[0].role == "system":
        return [_joined(turns[0], text), *turns[1:]]
    return [Turn("system", text), *turns]


def _joined(turn: Turn, *texts: str) -> Turn:
    return replace(turn, text=GAP.join(filter(None, (turn.text, *texts))))


def _folded(turns: list[Turn], *, has_head: bool) -> list[Turn]:
    """The turns without system messages, except one at the beginning if `has_head`.

    Their texts join the user's message or the last tool result before them. Between a call and its results there is no
    place for them, and after results no new message of the user: templates would take it for the next question.
    """
    count = next((number for number, turn in enumerate(turns) if turn.role != "system"), len(turns))
    head = GAP.join(turn.text for turn in turns[:count])
    result = [Turn("system", head)] if head and has_head else []
    texts = [head] if head and not has_head else []
    num_open = 0  # calls whose results have not come
    for turn in turns[count:]:
        if turn.role == "system":
            texts.append(f"<system-reminder>\n{turn.text}\n</system-reminder>")
            if result and (result[-1].role == "user" or (result[-1].role == "tool" and not num_open)):
                result[-1], texts = _joined(result[-1], *texts), []
            continue
        if turn.role == "tool":
            num_open = max(0, num_open - 1)
        elif texts and result and result[-1].role == "tool":
            result[-1], texts = _joined(result[-1], *texts), []
        if texts and turn.role == "user":
            turn, texts = replace(turn, text=GAP.join(filter(None, (*texts, turn.text)))), []
        elif texts and turn.role == "assistant":
            result, texts = [*result, Turn("user", GAP.join(texts))], []
        if texts and turn.role == "tool" and not num_open:
            turn, texts = _joined(turn, *texts), []
        if turn.role == "assistant":
            num_open = len(turn.calls)
        result.append(turn)
    if texts and result and result[-1].role == "tool":
        return [*result[:-1], _joined(result[-1], *texts)]
    return [*result, Turn("user", GAP.join(texts))] if texts else result


def _alternating(turns: list[Turn]) -> list[Turn]:
    """The turns with questions and answers by turns; calls and their results may stand between them.

    Neighbors of the same role become one. Where an answer or the first question is missing, a note stands for it.
    """
    result: list[Turn] = []
    expected = "user"
    for turn in turns:
        if turn.role == "assistant" and not turn.calls and not turn.text:
            continue  # cut off within its thought; templates refuse answers without a text
        if result and turn.role == result[-1].role in ("user", "assistant"):
            merged = _joined(result[-1], turn.text)
            thought = GAP.join(filter(None, (merged.thought, turn.thought)))
            turn = replace(merged, thought=thought, calls=(*merged.calls, *turn.calls))
            del result[-1]
        elif turn.role in ("user", "assistant") and turn.role != expected and not turn.calls:
            result.append(Turn("user", "(no question)") if expected == "user" else Turn("assistant", "(no answer)"))
        if turn.role in ("user", "assistant"):
            expected = "assistant" if turn.role == "user" or turn.calls else "user"
        result.append(turn)
    return result


def _with_single_calls(turns: list[Turn]) -> list[Turn]:
    """The turns with one call in a message at most, and its result after it."""
    result: list[Turn] = []
    results: list[Turn] = []  # of the calls of the message before, which have been placed
    for place, turn in enumerate(turns):
        if any(turn is placed for placed in results):
            continue
        if len(turn.calls) < 2:
            result.append(turn)
            continue
        results = list(takewhile(lambda later: later.role == "tool", turns[place + 1 :]))
        waiting = list(results)
        for number, call in enumerate(turn.calls):
            result.append(Turn("assistant", calls=(call,)) if number else replace(turn, calls=(call,)))
            if answer := next((item for item in waiting if item.call_id == call.id), None):
                waiting = [item for item in waiting if item is not answer]
                result.append(answer)
        result += waiting
    return result


def _shown_after_results(turns: list[Turn]) -> list[Turn]:
    """The turns with the pictures of tools' results in the user's turn after them, as few templates show them there."""
    result: list[Turn] = []
    waiting: list[str] = []
    for turn in turns:
        if waiting and turn.role != "tool":
            shown = "\n".join(waiting)
            result.append(replace(turn, text=f"{shown}\n{turn.text}") if turn.role == "user" else Turn("user", shown))
            waiting = []
            if turn.role == "user":
                continue
        if turn.role == "tool" and turn.pictures:
            waiting += turn.pictures
            text = turn.text
            for mark in turn.pictures:
                text = text.replace(mark, "[the image follows]")
            turn = replace(turn, text=text)
        result.append(turn)
    return [*result, Turn("user", "\n".join(waiting))] if waiting else result


def _with_parts(message: dict[str, Any], pictures: Mapping[str, Picture]) -> dict[str, Any]:
    """The message with its content in parts if that has marks of pictures; line breaks next to them are dropped."""
    pieces = MARK.split(message["content"]) if pictures else []
    if len(pieces) < 2:
        return message
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(pieces):  # texts and digests by turns
        if number % 2 and piece in pictures:
            parts.append({"type": "image", "image": pictures[piece]})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return {**message, "content": parts}


def _identified(turns: list[Turn]) -> list[Turn]:
    """The turns with an id for each call that has none, as Ollama's have, and for the result in its place."""
    result: list[Turn] = []
    waiting: list[str | None] = []
    for place, turn in enumerate(turns):
        if turn.calls:
            calls = tuple(replace(call, id=call.id or f"{place}.{n}") for n, call in enumerate(turn.calls))
            turn, waiting = replace(turn, calls=calls), [call.id for call in calls]
        elif turn.role == "tool":
            call_id = waiting.pop(0) if waiting else None
            turn = replace(turn, call_id=turn.call_id or call_id or "unknown")
        result.append(turn)
    return result
