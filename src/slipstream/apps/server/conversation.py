"""A conversation as all endpoints read it, and the form in which a model's chat template takes it.

Templates differ: in where system messages may stand, in the name of an earlier answer's thought, in whether arguments
of calls are objects or JSON texts, and in whether they know tools at all. Each template is tried once with small
conversations. How a turn is written depends on the turns before it alone, so the beginning of a prompt stays the same
from turn to turn, and the prompt cache finds it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from slipstream.errors import UsageError
from slipstream.tokenization.tokenizer import ChatForm, Tokenizer, TokenizerDetails

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of a message's field for what the model thought
GAP = "\n\n"  # between texts that become one
FIRST, ASKED, LATER = "alpha", "beta", "gamma"  # texts of the conversations that try a template
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


@dataclass(frozen=True)
class TemplateTraits:
    """What a chat template takes."""

    system: Literal["anywhere", "first", "nowhere"] = "anywhere"  # where system messages may stand
    alternates: bool = False  # two messages of the user in a row are refused
    knows_tools: bool = True
    arguments_as_text: bool = False
    short_ids: bool = False
    thought: str | None = None  # the field of an earlier answer's thought; None: it is left out
    thought_with_text: bool = True  # both in a message with calls

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
        )
        forms = [
            replace(traits, short_ids=short, arguments_as_text=text)
            for short in (False, True)
            for text in (False, True)
        ]
        called = Turn("assistant", calls=(Call(FIRST, {ASKED: LATER}, "call"),)), Turn("tool", LATER, call_id="call")
        traits = next((form for form in forms if trial.takes(form, *called)), traits)
        for name in filter(fields.__contains__, THOUGHTS):
            thinking = replace(traits, thought=name)
            for answer in (Turn("assistant", ASKED, LATER),), (replace(called[0], thought=LATER),):
                if traits.thought is None and LATER in trial.text(*thinking.messages([Turn("user", "?"), *answer])):
                    traits = thinking
        spoken = replace(called[0], text=ASKED, thought=LATER), called[1]
        return replace(traits, thought_with_text=not traits.thought or trial.takes(traits, *spoken))

    def messages(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
        """A conversation as the template's messages. tools: those that are offered, for templates that know none."""
        turns = list(turns)
        if not self.knows_tools:
            turns = [_spelled(turn) for turn in turns]
            if tools:
                schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
                turns = _after_system(turns, TOOL_PROMPT.format(schemas=schemas))
        if self.system != "anywhere":
            turns = _folded(turns, has_head=self.system == "first")
        if self.alternates:
            turns = _alternating(turns)
        return [self._message(turn) for turn in turns]

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
    """Renders small conversations."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def ids(self, *messages: dict[str, Any]) -> list[int] | None:
        """The tokens of messages; None if the template refuses them."""
        try:
            return self._tokenizer.chat(list(messages), ChatForm(opens_answer=False))
        except UsageError:
            return None

    def text(self, *messages: dict[str, Any]) -> str:
        return self._tokenizer.decode(self.ids(*messages) or [])

    def takes(self, traits: TemplateTraits, *turns: Turn) -> bool:
        """True if the template renders a question and these turns."""
        return self.ids(*traits.messages([Turn("user", ASKED), *turns])) is not None


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _system_place(trial: _Trial) -> Literal["anywhere", "first", "nowhere"]:
    head, later = {"role": "system", "content": FIRST}, {"role": "system", "content": LATER}
    before = [head, _user(ASKED)]
    for earlier in (before, [*before, {"role": "assistant", "content": "?"}]):
        ids, as_user = trial.ids(*earlier, later), trial.ids(*earlier, _user(LATER))
        text = trial.text(*earlier, later)
        is_marked = ids is not None and ids != as_user  # else the model would not see that it is no user's
        if not is_marked or text.count(LATER) != 1 or text.find(LATER) < text.find(ASKED):
            return "first" if FIRST in trial.text(*before) else "nowhere"
    return "anywhere"


def _spelled(turn: Turn) -> Turn:
    """A turn of a template without tools, with its calls and results as texts in Hermes' form."""
    if turn.role == "tool":
        return Turn("user", f"<tool_response>\n{turn.text}\n</tool_response>")
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(c.name)}, "arguments": {c.as_text}}}\n</tool_call>' for c in turn.calls
    ]
    return replace(turn, text="\n".join(filter(None, [turn.text, *calls])), calls=()) if calls else turn


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
    held = [head] if head and not has_head else []
    num_open = 0  # calls whose results have not come
    for turn in turns[count:]:
        if turn.role == "system":
            held.append(f"<system-reminder>\n{turn.text}\n</system-reminder>")
            if result and (result[-1].role == "user" or (result[-1].role == "tool" and not num_open)):
                result[-1], held = _joined(result[-1], *held), []
            continue
        if turn.role == "tool":
            num_open = max(0, num_open - 1)
        elif held and result and result[-1].role == "tool":
            result[-1], held = _joined(result[-1], *held), []
        if held and turn.role == "user":
            turn, held = replace(turn, text=GAP.join(filter(None, (*held, turn.text)))), []
        elif held and turn.role == "assistant":
            result, held = [*result, Turn("user", GAP.join(held))], []
        if held and turn.role == "tool" and not num_open:
            turn, held = _joined(turn, *held), []
        if turn.role == "assistant":
            num_open = len(turn.calls)
        result.append(turn)
    if held and result and result[-1].role == "tool":
        return [*result[:-1], _joined(result[-1], *held)]
    return [*result, Turn("user", GAP.join(held))] if held else result


def _alternating(turns: list[Turn]) -> list[Turn]:
    """The turns with neighbours of the same role as one, except tool results."""
    result: list[Turn] = []
    for turn in turns:
        if result and turn.role == result[-1].role != "tool":
            merged = _joined(result[-1], turn.text)
            thought = GAP.join(filter(None, (merged.thought, turn.thought)))
            result[-1] = replace(merged, thought=thought, calls=(*merged.calls, *turn.calls))
        else:
            result.append(turn)
    return result
