"""Turns a request's fields into token ids, tools and `SamplingParams`. Runs in the text pool."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.apps.server.conversation import THOUGHTS, Call, TemplateTraits, Turn
from slipstream.apps.server.error_objects import misspelled, refused, sent
from slipstream.apps.server.schemas import (
    MAX_ROWS,
    MAX_TOKENS,
    AllowedTools,
    CallFields,
    ChatFields,
    CompletionFields,
    ContentPart,
    ConversationFields,
    Fields,
    MessageFields,
    SamplingFields,
    TokenizeFields,
    ToolChoice,
    nested,
    says_something,
)
from slipstream.checks import is_whole
from slipstream.constraints.constraint import Constraint
from slipstream.core.types import PromptImages
from slipstream.errors import UsageError, did_you_mean
from slipstream.models.loaded import READS_TEXT
from slipstream.sampling.params import SamplingParams
from slipstream.text.pictures import Picture, Vision, parts_of, picture_of
from slipstream.tokenization.infill import infill
from slipstream.tokenization.tokenizer import AnswerTokenizer, ChatForm, Tokenizer, TokenizerDetails, check_text

log = logging.getLogger("slipstream.server")
MAX_NAME_LENGTH = 256
MAX_QUOTABLE = 1 << 15  # characters of results that are prepared as drafts; learning them takes 30 ms
LINE_NUMBER = re.compile(r"^ *\d+(?:\t|→|: | ?\| ?)", re.M)  # as agents' tools put it before the lines of a file
MAX_NAMED = 100  # fields without effect that the log names
NUMBER = re.compile(r"\.\d+(?=\.)")  # the index of a list's item in the address of a field
IMAGES = ("image_url", "input_image", "image")  # types of parts
ROLES = {"developer": "system", "function": "tool"}
SWITCHES = ("enable_thinking", "thinking")  # variables of templates whose thoughts are on or off
# fields that are options of the same name; `sampling_params` converts some. The two others are read elsewhere
SAME_NAMES = (SamplingFields.model_fields.keys() & vars(SamplingParams())) - {"n", "thinking_token_budget"}


@dataclass(frozen=True)
class Reading:
    """The settings and the model's traits with which requests are read."""

    strict: bool = False  # refuse what would have no effect
    plain_texts: bool = False  # refuse strings that have special tokens
    template: TemplateTraits = field(default_factory=TemplateTraits)
    vision: Vision | str = READS_TEXT  # reads images; if the model sees none, the reason


def checked_tools(fields: ConversationFields, *, strict: bool) -> list[dict[str, Any]]:
    """The tools of a request that may be called; ApiError names the first invalid one.

    Tools of other types than functions are left out unless `strict`.
    """
    tools = []
    for index, tool in enumerate(fields.tools or []):
        if not strict and tool.get("type", "function") != "function":
            fields.ignore(f"tools.{index}.type", f": {tool.get('type')!r:.40} is no function")
        else:
            tools.append(_checked_tool(f"tools.{index}", tool))
    names = [tool["function"]["name"] for tool in tools]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise refused(f"tools: {repeated[0]!r} occurs twice; allowed: each name once", "tools")
    if isinstance(fields.tool_choice, ToolChoice) and fields.tool_choice.type == "allowed_tools":
        allowed = _allowed_tools(fields.tool_choice)
        chosen = [_named_tool(tools, tool.function.name)["function"]["name"] for tool in allowed.tools]
        tools = [tool for tool in tools if tool["function"]["name"] in chosen]
    return tools


def _allowed_tools(choice: ToolChoice) -> AllowedTools:
    if choice.allowed_tools is None:
        raise refused("tool_choice.allowed_tools is missing; allowed: an object with tools", "tool_choice")
    return choice.allowed_tools


def _checked_tool(place: str, tool: dict[str, Any]) -> dict[str, Any]:
    """The tool, with properties of null as none."""
    check_json(place, tool)
    if tool.get("type", "function") != "function":
        near = did_you_mean(str(tool.get("type")), "function")
        raise refused(f"{place}.type: {tool.get('type')!r:.40}; allowed: 'function'{near}", f"{place}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        what = f"{place}.function is missing" if function is None else sent(f"{place}.function", function)
        raise refused(f"{what}; allowed: an object with a name and parameters", f"{place}.function")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise refused(
            f"{place}.function.name: {name!r:.40}; allowed: a string of at most {MAX_NAME_LENGTH} characters",
            f"{place}.function.name",
        )
    if not isinstance(function.get("description", ""), str | None):
        what = sent(f"{place}.function.description", function["description"])
        raise refused(f"{what}; allowed: a string", f"{place}.function.description")
    parameters = function.get("parameters")
    if isinstance(parameters, dict) and "properties" in parameters and parameters["properties"] is None:
        parameters = {**parameters, "properties": {}}
        tool = {**tool, "function": {**function, "parameters": parameters}}
    _check_parameters(f"{place}.function.parameters", parameters)
    return tool


def check_json(place: str, value: Any) -> None:
    """Refuse values that templates and tokenizers cannot write: lone surrogates, and JSON that is nested too deeply."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise refused(f"{place} has a lone surrogate; allowed: valid Unicode", place) from None
    except (ValueError, RecursionError):
        raise refused(f"{place} is nested too deep; allowed: what JSON can write", place) from None


def _check_parameters(place: str, parameters: Any) -> None:
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise refused(f"{sent(place, parameters)}; allowed: a JSON schema, which is an object", place)
    if parameters.get("type", "object") != "object":
        near = did_you_mean(str(parameters["type"]), "object")
        raise refused(f"{place}.type: {parameters['type']!r:.40}; allowed: 'object'{near}", place)
    properties = parameters.get("properties", {})
    if not isinstance(properties, dict):
        raise refused(f"{sent(f'{place}.properties', properties)}; allowed: an object of JSON schemas", place)
    for name, schema in properties.items():
        if not isinstance(schema, dict | bool):
            raise refused(f"{sent(f'{place}.properties.{name:.40}', schema)}; allowed: a JSON schema", place)


def is_call_forced(fields: ConversationFields) -> bool:
    """True if the answer must be a call."""
    choice = fields.tool_choice
    if isinstance(choice, ToolChoice) and choice.type == "allowed_tools":
        return _allowed_tools(choice).mode == "required"
    return choice not in (None, "none", "auto")


def forced_tools(fields: ConversationFields, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools of which one must be called: all that are allowed, or the one that `tool_choice` names."""
    _check_offered(tools)
    choice = fields.tool_choice
    if not isinstance(choice, ToolChoice) or choice.type == "allowed_tools":
        return tools
    if choice.function is None:
        raise refused("tool_choice.function is missing; allowed: an object with a name", "tool_choice")
    return [_named_tool(tools, choice.function.name)]


def _check_offered(tools: list[dict[str, Any]]) -> None:
    if not tools:
        raise refused("tool_choice without tools; allowed: 'none', 'auto'", "tool_choice")


def _named_tool(tools: list[dict[str, Any]], name: str) -> dict[str, Any]:
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    _check_offered(tools)
    names = [tool["function"]["name"] for tool in tools]
    near = did_you_mean(name, *names)
    raise refused(f"tool_choice: {name!r:.80} is not offered; allowed: {', '.join(names):.200}{near}", "tool_choice")


@dataclass(frozen=True)
class Rendered:
    """A prompt as token ids, with what its rows need besides."""

    ids: list[int]
    text: str | None = None  # as it was sent; None for ids and cut prompts
    ends: tuple[int, ...] = ()  # tokens that end the text, besides the model's own
    messages: list[dict[str, Any]] | None = None  # for draft models with another format
    images: PromptImages | None = None


def rendered_prompts(
    fields: CompletionFields, tokenizer: Tokenizer | None, *, plain_texts: bool = False
) -> list[Rendered]:
    """The prompts of a completions request: a string, a list of strings, ids, or a list of lists of ids.

    plain_texts: refuse strings that have special tokens; ids are taken as they are.
    """
    sent = fields.prompt
    if isinstance(sent, str):
        prompts: list[Any] = [sent]
    else:
        prompts = [sent] if sent and isinstance(sent[0], int) else list(sent)
    if not prompts:
        raise refused("prompt is an empty list; allowed: at least one prompt", "prompt")
    if len(prompts) * (fields.n or 1) > MAX_ROWS:  # before any is tokenized
        raise refused(f"{len(prompts)} prompts with n={fields.n or 1}; allowed: at most {MAX_ROWS} outputs", "n")
    if plain_texts:
        texts = [("prompt", text) for text in prompts if isinstance(text, str)]
        check_plain([*texts, ("suffix", fields.suffix or "")], tokenizer)
    return [_prompt(prompt, fields, tokenizer) for prompt in prompts]


def check_plain(texts: Iterable[tuple[str, str]], tokenizer: Tokenizer | None) -> None:
    """Refuse strings with special tokens, which could end a turn and begin another. texts: (field, string) pairs."""
    special = tokenizer.special_ids() if isinstance(tokenizer, TokenizerDetails) else frozenset[int]()
    for name, text in texts:
        check_text(name, text)
        if specials := special.intersection(_needed(tokenizer).bare(text)):
            token = next(word for word, number in _needed(tokenizer).vocabulary().items() if number in specials)
            raise refused(f"{name} has the special token {token!r:.80}; allowed: strings without special tokens", name)


def _texts_of(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys included, however deep it is."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            values += value


def _prompt(prompt: str | list[int], fields: CompletionFields, tokenizer: Tokenizer | None) -> Rendered:
    if fields.suffix and (not isinstance(prompt, str) or fields.echo or fields.truncate_prompt_tokens):
        what = "prompts as token ids" if not isinstance(prompt, str) else "echo or truncate_prompt_tokens"
        raise refused(f"suffix with {what}; allowed: with prompts as strings that are neither echoed nor cut", "suffix")
    if not isinstance(prompt, str):
        return Rendered(_cut(prompt, fields.truncate_prompt_tokens))
    check_text("prompt", prompt)
    if fields.suffix:
        check_text("suffix", fields.suffix)
        parts = infill(tokenizer, prompt, fields.suffix, opened=fields.add_special_tokens is not False)
        return Rendered(parts.ids, prompt, () if fields.ignore_eos else parts.ends)
    all_ids = encoder(fields, tokenizer)(prompt)
    ids = _cut(all_ids, fields.truncate_prompt_tokens)
    return Rendered(ids, prompt if len(ids) == len(all_ids) else None)


def rendered_chat(fields: ChatFields, tokenizer: Tokenizer | None, reading: Reading) -> Rendered:
    """The conversation of a chat request, rendered by the model's template; without one its texts, line by line."""
    rendered = rendered_messages(fields, tokenizer, reading)
    ids, messages = rendered.ids, rendered.messages or []
    if rendered.images is not None and fields.truncate_prompt_tokens is not None:
        raise refused("truncate_prompt_tokens with images; allowed: without it", "truncate_prompt_tokens")
    is_plain = (  # else another model's chat format may have no form for it
        not fields.continue_final_message
        and rendered.images is None
        and (fields.tool_choice == "none" or not fields.tools)
        and _needed(tokenizer).has_chat_template
        and all({*message} == {"role", "content"} for message in messages)
    )
    cut = _cut(ids, fields.truncate_prompt_tokens)
    return replace(rendered, ids=cut, messages=messages if is_plain else None)


def quotable_texts(fields: SamplingFields, tokenizer: Tokenizer | None) -> list[list[int]]:
    """The latest results of tools as the model writes them in a call: in JSON, without line numbers.

    Agents let a model write a file that it has read, or repeat the lines that it changes. In JSON their line ends and
    quotes are other tokens than in the prompt, so drafts taken from there would break off at every line.
    """
    if not (isinstance(fields, ChatFields) and fields.tools and fields.tool_choice != "none"):
        return []
    if not isinstance(tokenizer, AnswerTokenizer):
        return []
    is_json = tokenizer.answer_form().calls.arguments != "tags"
    texts: list[list[int]] = []
    room = MAX_QUOTABLE
    for message in reversed(fields.messages):
        if message.role != "tool" or not room:
            continue
        parts = message.content if isinstance(message.content, list) else []
        text = message.content if isinstance(message.content, str) else "\n".join(part.text or "" for part in parts)
        text = _inner_text(text)[:room]
        room -= len(text)
        written = LINE_NUMBER.sub("", text)
        texts.append(tokenizer.bare(json.dumps(written, ensure_ascii=False) if is_json else written))
    return texts


def _inner_text(result: str) -> str:
    """The strings with several lines in a result that is JSON, as Cline's are; any other result itself."""
    try:
        strings = _texts_of(json.loads(result)) if result.startswith(("{", "[")) else iter(())
        inner = "\n".join(text for text in strings if "\n" in text)
        return inner.encode(errors="replace").decode() or result  # JSON may name halves of surrogate pairs
    except (ValueError, RecursionError):
        return result


def rendered_messages(fields: ChatFields | TokenizeFields, tokenizer: Tokenizer | None, reading: Reading) -> Rendered:
    """A conversation, with its messages in the form that a chat template reads."""
    read = _message_fields(tokenizer)
    turns = [_turn(number, message, read, fields, reading) for number, message in enumerate(fields.messages or ())]
    tools = [] if fields.tool_choice == "none" else _listed_tools(fields, reading)
    _check_shown(fields, _needed(tokenizer), read, reading)
    check_json("chat_template_kwargs", fields.chat_template_kwargs)
    template = reading.template
    messages = template.messages(turns, tools)
    tools = template.tools(tools)
    if reading.plain_texts:
        parts: list[tuple[str, Any]] = [(f"messages.{number}", message) for number, message in enumerate(messages)]
        parts += [("tools", tools), ("chat_template_kwargs", fields.chat_template_kwargs)]
        check_plain(((name, text) for name, part in parts for text in _texts_of(part)), tokenizer)
    if not _needed(tokenizer).has_chat_template:
        ids = encoder(fields, tokenizer)("\n".join(message["content"] for message in messages))
        return Rendered(ids, messages=messages)
    if fields.add_special_tokens:
        name = "add_special_tokens"
        raise refused(f"{name}=true; allowed: false, the chat template writes its own", name)
    has_opening = True if fields.add_generation_prompt is None else fields.add_generation_prompt
    is_continued = bool(fields.continue_final_message)
    if is_continued and fields.add_generation_prompt:
        raise refused("continue_final_message with add_generation_prompt; allowed: one", "continue_final_message")
    effort, variables = _thinking(fields, tokenizer, reading)
    form = ChatForm(tools, has_opening and not is_continued, is_continued, effort, variables)
    if next(parts_of(messages), None) is None or isinstance(reading.vision, str):
        return Rendered(_needed(tokenizer).chat(messages, form), messages=messages)
    ids, images = reading.vision.read(messages, form, _needed(tokenizer))
    return Rendered(ids, messages=messages, images=images)


def _listed_tools(fields: ConversationFields, reading: Reading) -> list[dict[str, Any]]:
    """The tools that the prompt lists: without deferred ones, which a result describes once the model has found them.

    The server searches for no tools, so it lists all of them if the request leaves the search to it.
    """
    searches = any(str(tool.get("type")).startswith("tool_search") for tool in fields.tools or ())
    tools = checked_tools(fields, strict=reading.strict)
    listed = [tool for tool in tools if searches or not tool.get("defer_loading")]
    return [{name: value for name, value in tool.items() if name != "defer_loading"} for tool in listed]


def _thinking(
    fields: ChatFields | TokenizeFields, tokenizer: Tokenizer | None, reading: Reading
) -> tuple[str | None, dict[str, Any]]:
    """The template's `reasoning_effort`, and its variables, among them the switch for thinking."""
    variables = dict(fields.chat_template_kwargs or {})
    if reading.strict or not isinstance(tokenizer, TokenizerDetails):
        return fields.reasoning_effort, variables
    readable = tokenizer.template_variables()
    for name in variables.keys() - readable:
        del variables[name]
        fields.ignore(f"chat_template_kwargs.{name}", "; this chat template does not read it")
    field, effort = _asked_effort(fields)
    if effort is None:
        return None, variables
    switches = [name for name in SWITCHES if name in readable]
    for name in switches:
        variables.setdefault(name, effort != "none")
    has_levels = "reasoning_effort" in readable
    if not switches and not has_levels:
        fields.ignore(field, "; this chat template does not read it")
    is_level = has_levels and effort != "on" and not (effort == "none" and switches)
    return (reading.template.effort(effort) if is_level else None), variables


def _asked_effort(fields: ConversationFields) -> tuple[str, str | None]:
    """The field that sets the effort of thinking, and its level: none, on, low, medium, high or more."""
    if fields.reasoning_effort is not None:
        return "reasoning_effort", fields.reasoning_effort
    if isinstance(reasoning := fields.reasoning, dict):
        enabled = reasoning.get("enabled", True if reasoning.get("max_tokens") else None)
        switch = "on" if enabled is True else "none" if enabled is False else None
        effort = reasoning.get("effort", switch)
        return "reasoning", effort if isinstance(effort, str) else None
    if isinstance(thinking := fields.thinking, dict):
        return "thinking", "none" if thinking.get("type") == "disabled" else "on"
    return "reasoning_effort", None


def thought_budget(fields: SamplingFields, tokenizer: Tokenizer | None, *, strict: bool) -> int | None:
    """The most tokens of a thought; None for no limit. Models without thoughts: ignored, or refused if `strict`."""
    budgets: list[tuple[str, Any]] = [("thinking_token_budget", fields.thinking_token_budget)]
    if isinstance(fields, ChatFields):
        for field, key in (("thinking", "budget_tokens"), ("reasoning", "max_tokens")):  # Anthropic's, OpenRouter's
            options = getattr(fields, field)
            budgets += [(f"{field}.{key}", options.get(key))] if isinstance(options, dict) else []
    name, budget = next((pair for pair in budgets if pair[1] is not None), ("", None))
    if budget is None:
        return None
    if not is_whole(budget, 0, MAX_TOKENS):
        raise refused(f"{sent(name, budget)}; allowed: a whole number from 0 to {MAX_TOKENS}", name)
    if not isinstance(tokenizer, AnswerTokenizer) or tokenizer.answer_form().thought is None:
        if strict:
            raise refused(f"{name}: this model writes no thoughts; allowed: a request without it", name)
        fields.ignore(name, "; this model writes no thoughts")
        return None
    return budget


def _message_fields(tokenizer: Tokenizer | None) -> frozenset[str]:
    """The names of a message's fields that the model's chat template reads."""
    templated = isinstance(tokenizer, TokenizerDetails) and tokenizer.has_chat_template
    return tokenizer.template_fields() if isinstance(tokenizer, TokenizerDetails) and templated else frozenset()


def name_ignored(fields: Fields, tokenizer: Tokenizer | None, named: set[str]) -> list[str]:
    """The fields of a request that had no effect, without indexes of lists; the log names each once.

    named: fields named already.
    """
    read, reasons = _message_fields(tokenizer), dict[str, str | None](fields.ignored)
    for place, part in nested(fields):
        for name in part.extra:
            is_message = isinstance(part, MessageFields)
            is_thought = is_message and name in THOUGHTS and not read.isdisjoint(THOUGHTS)
            if name in part.REFUSED.keys() - part.TOLERATED or is_thought or (is_message and name in read):
                continue
            near = did_you_mean(name, *type(part).model_fields) or "; it is unknown"
            reasons[place + name] = None if name in part.SILENT else near
    labels = []
    for address, why in reasons.items():
        kind = NUMBER.sub("", address)[:80]
        if kind not in named and len(named) < MAX_NAMED:
            named.add(kind)
            if why is not None:
                log.warning("requests have the field %r, which has no effect%s", address[:80], why)
        labels.append(kind if kind in named else "other")
    return labels


def _check_shown(
    fields: ChatFields | TokenizeFields, tokenizer: Tokenizer, read: frozenset[str], reading: Reading
) -> None:
    """Refuse fields that the chat template would leave out; none if the tokenizer does not know what it reads.

    Unless the server is strict, only what no template can show is refused: tools and continued messages without any.
    """
    templated, variables = tokenizer.has_chat_template, frozenset[str]()
    if templated and not isinstance(tokenizer, TokenizerDetails):
        return
    if templated and isinstance(tokenizer, TokenizerDetails):
        variables = tokenizer.template_variables()
    if reading.strict and fields.tools and fields.tool_choice in (None, "auto"):
        check_tools_read(tokenizer)  # a constraint forces calls that no template shows
    fields_asked: list[tuple[str, Any, bool]] = [
        ("tools", fields.tool_choice != "none" and fields.tools, templated),
        ("continue_final_message", fields.continue_final_message, templated),
        ("add_generation_prompt", fields.add_generation_prompt is not None, templated),
    ]
    thinking = [
        ("reasoning_effort", fields.reasoning_effort, "reasoning_effort" in variables),
        ("reasoning", fields.reasoning, False),
        ("thinking", fields.thinking, False),
        ("chat_template_kwargs", fields.chat_template_kwargs, templated),  # the tokenizer checks each variable
    ]
    if reading.strict:
        fields_asked += thinking
    elif not templated:
        for name, value, _ in thinking:
            if says_something(value):
                fields.ignore(name, "; this model has no chat template")
    for number, message in enumerate(fields.messages or ()):
        parts = {"tool_calls": message.tool_calls} if reading.strict or not templated else {}
        parts |= {name: message.extra.get(name) for name in THOUGHTS} if reading.strict else {}
        fields_asked += [(f"messages.{number}.{name}", value, name in read) for name, value in parts.items()]
    why = "this chat template does not read it" if templated else "this model has no chat template"
    for name, value, is_read in fields_asked:
        if says_something(value) and not is_read:
            raise refused(f"{name}: {why}; allowed: a request without it", name)
    for name in variables.intersection(fields.extra) - {"messages", "documents"}:
        if says_something(fields.extra[name]):
            raise refused(f"{name}: a variable of the chat template; allowed: in chat_template_kwargs", name)


def check_tools_read(tokenizer: Tokenizer | None) -> None:
    """Refuse tools if the chat template would leave them out."""
    if not isinstance(tokenizer, TokenizerDetails) or not tokenizer.has_chat_template:
        return
    if "tools" not in tokenizer.template_variables():
        works = "allowed: a request without tools; response_format asks for JSON of a schema"
        raise refused(f"tools: this chat template does not read them; {works}", "tools")


def _turn(
    number: int, message: MessageFields, read: frozenset[str], fields: ConversationFields, reading: Reading
) -> Turn:
    """A message as a turn. read: names of further fields that this model's template reads."""
    place, role = f"messages.{number}", ROLES.get(message.role, message.role)
    name = f"{place}.content"
    if reading.strict:
        says_more = bool(message.tool_calls or any(map(message.extra.get, THOUGHTS)))
        may_be_empty = message.role == "assistant" and message.content is None and says_more
    else:
        may_be_empty = message.role in ("assistant", "tool", "function") and not misspelled("content", message.extra)
    if message.content in (None, []) and not may_be_empty:
        near = misspelled("content", message.extra) or "; allowed: a string, or text parts"
        raise refused(f"{name} is {json.dumps(message.content)}{near}", name)
    extra = {name: value for name, value in message.extra.items() if name in read - message.REFUSED.keys()}
    thought = ""
    if not reading.strict:
        thoughts = [extra.pop(name, None) or message.extra.get(name) for name in THOUGHTS]
        thought = next((text for text in thoughts if isinstance(text, str) and text), "")
        check_text(f"{place}.reasoning_content", thought)
    if message.name is not None:
        extra["name"] = message.name
    check_json(place, extra)
    pictures: dict[str, Picture] = {}
    content = message.content
    if isinstance(content, list) and not isinstance(reading.vision, str):
        content = [_marked(f"{name}.{i}", part, pictures) for i, part in enumerate(content)]
    elif role == "tool" and not reading.strict:
        content = _without_images(message, name, fields)
    text = content_text(content, name)
    if not text and role == "assistant" and not reading.strict and isinstance(message.extra.get("refusal"), str):
        text = content_text(message.extra["refusal"], f"{place}.refusal")
    calls = [_call(f"{place}.tool_calls.{i}", call, reading.strict) for i, call in enumerate(message.tool_calls or ())]
    check_json(place, [message.tool_call_id, *((call.name, call.id, call.arguments) for call in calls)])
    return Turn(role, text, thought, tuple(calls), message.tool_call_id, extra, pictures)  # type: ignore[arg-type]


def _marked(name: str, part: ContentPart, pictures: dict[str, Picture]) -> ContentPart:
    """A part with the mark of its picture, which joins `pictures`, in place of an image."""
    if part.type not in IMAGES:
        return part
    try:
        picture = picture_of(name, {"type": "image_url", "image_url": part.image_url})
    except UsageError as error:
        raise refused(str(error), name) from None
    pictures[picture.mark] = picture
    return ContentPart(type="text", text=picture.mark)


def _without_images(message: MessageFields, name: str, fields: ConversationFields) -> str | list[ContentPart] | None:
    """The content of a tool's result, with a line in place of each image: the conversation goes on without them."""
    if not isinstance(message.content, list):
        return message.content
    parts = []
    for part in message.content:
        if part.type in IMAGES:
            fields.ignore(f"{name}.{part.type}", "; this model reads texts only, and is told that an image is missing")
            part = ContentPart(type="text", text="[an image, which this model cannot see]")
        parts.append(part)
    return parts


def content_text(content: str | list[ContentPart] | None, name: str, between: str = "\n") -> str:
    """The text of a message's content, or of its parts."""
    if isinstance(content, list):
        for number, part in enumerate(content):
            if part.type in IMAGES:
                raise refused(f"{name} has an image, but this model sees none; allowed: text", name)
            if part.type != "text":
                raise refused(f"{name} has a part of type {part.type!r:.40}; allowed: 'text'", name)
            if part.text is None:
                raise refused(f"{name}.{number} has no text; allowed: a string", f"{name}.{number}")
        content = between.join(part.text or "" for part in content)
    check_text(name, content or "")
    return content or ""


def _call(place: str, call: CallFields, strict: bool) -> Call:
    """A call that the assistant made. strict: refuse arguments that are no JSON object."""
    name, arguments = f"{place}.function.arguments", call.function.arguments
    if strict and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise refused(f"{name} is not valid JSON; allowed: a JSON object", name) from None
    if not isinstance(arguments, dict | None if strict else dict | str | None):
        raise refused(f"{name} is of type {type(arguments).__name__}; allowed: a JSON object", name)
    return Call(call.function.name, arguments or {}, None if call.id is None else str(call.id))


def _cut(ids: list[int], max_tokens: int | None) -> list[int]:
    return ids if max_tokens is None else ids[-max_tokens:]


def encoder(
    fields: ChatFields | CompletionFields | TokenizeFields, tokenizer: Tokenizer | None
) -> Callable[[str], list[int]]:
    """Encodes texts with or without the tokenizer's special tokens, as the request asks."""
    return _needed(tokenizer).bare if fields.add_special_tokens is False else _needed(tokenizer).encode


def _needed(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise refused("this model has no tokenizer; allowed: prompts as token ids", "prompt")
    return tokenizer


class AllowedTokens:
    """A logits processor that allows only the given tokens."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = torch.tensor(sorted(set(ids)))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] with -inf everywhere else."""
        ids = self._ids.to(scores.device)
        kept = torch.full_like(scores, float("-inf"))
        kept[:, ids] = scores[:, ids]
        return kept


def sampling_params(
    fields: SamplingFields,
    max_tokens: int,
    vocab_size: int,
    constraint: Constraint | None = None,
    *,
    strict: bool = False,
) -> SamplingParams:
    """The options of a request's rows, except `n`. ApiError or UsageError names a field that cannot be honored.

    Options that the request leaves out are unset.
    """
    check_supported(fields, strict=strict)
    options: dict[str, Any] = {name: getattr(fields, name) for name in SAME_NAMES if getattr(fields, name) is not None}
    if fields.top_k is not None:
        options["top_k"] = max(0, fields.top_k)
    options["logit_bias"] = _biases(fields.logit_bias or {})
    options["stop_token_ids"] = tuple(fields.stop_token_ids or ())
    options["bad_words"] = tuple(fields.bad_words or ())
    options["seed"] = None if fields.seed == -1 else fields.seed
    options["max_tokens"] = max(1, max_tokens)
    options["logprobs"] = wanted_logprobs(fields)
    options["prediction"], options["constraint"] = predicted_text(fields), constraint
    if fields.allowed_token_ids is not None:
        if max(fields.allowed_token_ids) >= vocab_size:
            raise refused(
                f"allowed_token_ids: token id {max(fields.allowed_token_ids)}; allowed: 0 to {vocab_size - 1}",
                "allowed_token_ids",
            )
        options["logits_processors"] = (AllowedTokens(fields.allowed_token_ids),)
    return SamplingParams(**options)


def wanted_logprobs(fields: SamplingFields) -> int | None:
    """Number of top log-probabilities to report per token; None for no log-probabilities."""
    if isinstance(fields, CompletionFields):
        return fields.logprobs
    if isinstance(fields, ChatFields) and fields.logprobs:
        return fields.top_logprobs or 0
    return None


def check_supported(fields: SamplingFields, *, strict: bool) -> None:
    """Refuse fields that are not supported and would change the answer."""
    check_extra(fields, strict=strict)
    extra = fields.extra
    other, address = (
        (CompletionFields, "completions") if isinstance(fields, ChatFields) else (ChatFields, "chat/completions")
    )
    for name in sorted(other.model_fields.keys() & extra.keys()):
        if says_something(extra[name]):
            hint = ", here it is max_tokens" if name == "max_completion_tokens" else ""
            raise refused(f"{name} is not a field of this endpoint; allowed: on /v1/{address}{hint}", name)
    if fields.best_of not in (None, fields.n or 1):
        raise refused(f"best_of={fields.best_of}; allowed: the same as n", "best_of")
    if isinstance(fields, ChatFields) and fields.top_logprobs is not None and not fields.logprobs:
        raise refused("top_logprobs needs logprobs=true", "top_logprobs")


def check_extra(fields: Fields, *, strict: bool) -> None:
    """Refuse fields that `REFUSED` lists, at every depth; those that are tolerated, only if `strict`."""
    for place, part in nested(fields):
        for name, why in part.REFUSED.items():
            if says_something(part.extra.get(name)) and (strict or name not in part.TOLERATED):
                raise refused(f"{place}{name}: {why}", place + name)


def predicted_text(fields: SamplingFields) -> str | None:
    """The text of the request's prediction, its parts joined; None without one."""
    if fields.prediction is None:
        return None
    name = "prediction.content"
    if not (text := content_text(fields.prediction.content, name, between="")):
        raise refused(f"{name} is empty; allowed: a string, or no prediction", name)
    return text


def _biases(biases: dict[str, float]) -> dict[int, float]:
    names: dict[int, str] = {}
    for name in biases:
        if not (name.isascii() and name.isdigit() and len(name) < 12):
            raise refused(f"logit_bias: {name!r:.40}; allowed: token ids", "logit_bias")
        if (other := names.setdefault(int(name), name)) != name:
            raise refused(f"logit_bias: {other!r} and {name!r} are one token; allowed: each once", "logit_bias")
    return {token: biases[name] for token, name in names.items()}
