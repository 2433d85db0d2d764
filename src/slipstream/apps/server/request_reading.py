"""Turns a request's fields into token ids, tools and `SamplingParams`. Runs in the text pool."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.apps.server.error_objects import misspelled, refused, sent
from slipstream.apps.server.schemas import (
    MAX_ROWS,
    THOUGHTS,
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
from slipstream.constraints.constraint import Constraint
from slipstream.errors import did_you_mean
from slipstream.sampling.params import SamplingParams
from slipstream.tokenization.tokenizer import ChatForm, Tokenizer, TokenizerDetails, check_text

log = logging.getLogger("slipstream.server")
MAX_NAME_LENGTH = 256
MAX_NAMED = 100  # fields without effect that the log names
NUMBER = re.compile(r"\.\d+(?=\.)")  # the index of a list's item in the address of a field
ROLES = {"developer": "system", "function": "tool"}
# fields whose name and meaning are those of SamplingParams; None leaves its default
SAME_NAMES = (
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "thinking_token_budget",
    "ignore_eos",
    "stop",
    "num_draft_tokens",
)


def checked_tools(fields: ConversationFields) -> list[dict[str, Any]]:
    """The tools of a request; ApiError names the first invalid one."""
    tools = fields.tools or []
    for index, tool in enumerate(tools):
        _check_tool(f"tools.{index}", tool)
    names = [tool["function"]["name"] for tool in tools]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise refused(f"tools: {repeated[0]!r} occurs twice; allowed: each name once", "tools")
    return tools


def _check_tool(place: str, tool: dict[str, Any]) -> None:
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
    _check_parameters(f"{place}.function.parameters", function.get("parameters"))
    check_json(place, tool)


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


def forced_tools(fields: ConversationFields, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools of which one must be called: all for "required", else the one that `tool_choice` names."""
    if not tools:
        raise refused("tool_choice without tools; allowed: 'none', 'auto'", "tool_choice")
    if fields.tool_choice == "required":
        return tools
    assert isinstance(fields.tool_choice, ToolChoice)
    name = fields.tool_choice.function.name
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        offered = ", ".join(tool["function"]["name"] for tool in tools)
        near = did_you_mean(name, *(tool["function"]["name"] for tool in tools))
        raise refused(f"tool_choice: {name!r:.80} is not offered; allowed: {offered:.200}{near}", "tool_choice")
    return named


@dataclass(frozen=True)
class Rendered:
    """One prompt."""

    ids: list[int]
    text: str | None = None  # as it was sent; None for ids and cut prompts
    messages: list[dict[str, Any]] | None = None  # for draft models with another format


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
        check_plain([("prompt", text) for text in prompts if isinstance(text, str)], tokenizer)
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
    if not isinstance(prompt, str):
        return Rendered(_cut(prompt, fields.truncate_prompt_tokens))
    check_text("prompt", prompt)
    all_ids = encoder(fields, tokenizer)(prompt)
    ids = _cut(all_ids, fields.truncate_prompt_tokens)
    return Rendered(ids, prompt if len(ids) == len(all_ids) else None)


def rendered_chat(fields: ChatFields, tokenizer: Tokenizer | None, *, plain_texts: bool = False) -> Rendered:
    """The conversation of a chat request, rendered by the model's template; without one its texts, line by line.

    plain_texts: refuse strings that have special tokens.
    """
    messages, ids = rendered_messages(fields, tokenizer, plain_texts=plain_texts)
    is_plain = (  # else another model's chat format may have no form for it
        not fields.continue_final_message
        and (fields.tool_choice == "none" or not fields.tools)
        and _needed(tokenizer).has_chat_template
        and all({*message} == {"role", "content"} for message in messages)
    )
    return Rendered(_cut(ids, fields.truncate_prompt_tokens), messages=messages if is_plain else None)


def rendered_messages(
    fields: ChatFields | TokenizeFields, tokenizer: Tokenizer | None, *, plain_texts: bool = False
) -> tuple[list[dict[str, Any]], list[int]]:
    """The messages of a conversation in the form that a chat template reads, and their token ids."""
    read = _message_fields(tokenizer)
    messages = [_message(number, message, read) for number, message in enumerate(fields.messages or ())]
    tools = () if fields.tool_choice == "none" else checked_tools(fields)
    _check_shown(fields, _needed(tokenizer), read)
    check_json("chat_template_kwargs", fields.chat_template_kwargs)
    if plain_texts:
        parts: list[tuple[str, Any]] = [(f"messages.{number}", message) for number, message in enumerate(messages)]
        parts += [("tools", tools), ("chat_template_kwargs", fields.chat_template_kwargs)]
        check_plain(((name, text) for name, part in parts for text in _texts_of(part)), tokenizer)
    if not _needed(tokenizer).has_chat_template:
        return messages, encoder(fields, tokenizer)("\n".join(message["content"] for message in messages))
    if fields.add_special_tokens:
        name = "add_special_tokens"
        raise refused(f"{name}=true; allowed: false, the chat template writes its own", name)
    has_opening = True if fields.add_generation_prompt is None else fields.add_generation_prompt
    is_continued = bool(fields.continue_final_message)
    if is_continued and fields.add_generation_prompt:
        raise refused("continue_final_message with add_generation_prompt; allowed: one", "continue_final_message")
    variables = fields.chat_template_kwargs or {}
    form = ChatForm(tools, has_opening and not is_continued, is_continued, fields.reasoning_effort, variables)
    return messages, _needed(tokenizer).chat(messages, form)


def _message_fields(tokenizer: Tokenizer | None) -> frozenset[str]:
    """The names of a message's fields that the model's chat template reads."""
    templated = isinstance(tokenizer, TokenizerDetails) and tokenizer.has_chat_template
    return tokenizer.template_fields() if isinstance(tokenizer, TokenizerDetails) and templated else frozenset()


def count_unknown_fields(fields: Fields, tokenizer: Tokenizer | None, named: set[str]) -> int:
    """Number of a request's fields without effect; the log names each once. named: fields named already."""
    read, count = _message_fields(tokenizer), 0
    for place, part in nested(fields):
        for name in part.extra:
            if name in part.REFUSED or (isinstance(part, MessageFields) and name in read):
                continue
            count = count + 1
            kind = NUMBER.sub("", place + name)
            if kind not in named and len(named) < MAX_NAMED and name not in part.SILENT:
                named.add(kind)
                near = did_you_mean(name, *type(part).model_fields) or "; it is unknown"
                log.warning("requests have the field %r, which has no effect%s", f"{place}{name}"[:80], near)
    return count


def _check_shown(fields: ChatFields | TokenizeFields, tokenizer: Tokenizer, read: frozenset[str]) -> None:
    """Refuse fields that the chat template would leave out; none if the tokenizer does not know what it reads."""
    templated, variables = tokenizer.has_chat_template, frozenset[str]()
    if templated and not isinstance(tokenizer, TokenizerDetails):
        return
    if templated and isinstance(tokenizer, TokenizerDetails):
        variables = tokenizer.template_variables()
    if fields.tools and fields.tool_choice in (None, "auto"):  # a constraint forces calls that no template shows
        check_tools_read(tokenizer)
    fields_asked: list[tuple[str, Any, bool]] = [
        ("tools", fields.tool_choice != "none" and fields.tools, templated),
        ("reasoning_effort", fields.reasoning_effort, "reasoning_effort" in variables),
        ("chat_template_kwargs", fields.chat_template_kwargs, templated),  # the tokenizer checks each variable
        ("continue_final_message", fields.continue_final_message, templated),
        ("add_generation_prompt", fields.add_generation_prompt is not None, templated),
    ]
    for number, message in enumerate(fields.messages or ()):
        parts = {"tool_calls": message.tool_calls} | {name: message.extra.get(name) for name in THOUGHTS}
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


def _message(number: int, message: MessageFields, read: frozenset[str]) -> dict[str, Any]:
    """A message in the form of chat templates. read: names of further fields that this model's template reads."""
    name = f"messages.{number}.content"
    if message.content in (None, []) and not (message.content is None and _speaks_otherwise(message)):
        near = misspelled("content", message.extra) or "; allowed: a string, or text parts"
        raise refused(f"{name} is {json.dumps(message.content)}{near}", name)
    rendered: dict[str, Any] = {
        name: value for name, value in message.extra.items() if name in read - message.REFUSED.keys()
    }
    rendered |= {"role": ROLES.get(message.role, message.role), "content": content_text(message.content, name)}
    if message.tool_calls:
        rendered["tool_calls"] = [
            _call(f"messages.{number}.tool_calls.{index}", call) for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        rendered["name"] = message.name
    check_json(f"messages.{number}", {name: value for name, value in rendered.items() if name != "content"})
    return rendered


def _speaks_otherwise(message: MessageFields) -> bool:
    """True if an assistant's message without content has tool calls or reasoning."""
    return message.role == "assistant" and bool(message.tool_calls or any(map(message.extra.get, THOUGHTS)))


def content_text(content: str | list[ContentPart] | None, name: str, between: str = "\n") -> str:
    """The text of a message's content, or of its parts."""
    if isinstance(content, list):
        for number, part in enumerate(content):
            if part.type != "text":
                raise refused(f"{name} has a part of type {part.type!r:.40}; allowed: 'text'", name)
            if part.text is None:
                raise refused(f"{name}.{number} has no text; allowed: a string", f"{name}.{number}")
        content = between.join(part.text or "" for part in content)
    check_text(name, content or "")
    return content or ""


def _call(place: str, call: CallFields) -> dict[str, Any]:
    """A call that the assistant made, with its arguments as an object, as templates expect."""
    name, arguments = f"{place}.function.arguments", call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise refused(f"{name} is not valid JSON; allowed: a JSON object", name) from None
    if not isinstance(arguments, dict | None):
        raise refused(f"{name} is of type {type(arguments).__name__}; allowed: a JSON object", name)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments or {}}}


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
    fields: SamplingFields, max_tokens: int, vocab_size: int, constraint: Constraint | None = None
) -> SamplingParams:
    """The options of a request's rows, except `n`. ApiError or UsageError names a field that cannot be honored."""
    check_supported(fields)
    options: dict[str, Any] = {name: getattr(fields, name) for name in SAME_NAMES if getattr(fields, name) is not None}
    options["temperature"] = 1.0 if fields.temperature is None else fields.temperature
    options["top_k"] = max(0, fields.top_k or 0)
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


def check_supported(fields: SamplingFields) -> None:
    """Refuse fields that are not supported and would change the answer."""
    check_extra(fields)
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
    if isinstance(fields, CompletionFields) and fields.suffix:
        raise refused("suffix: filling in the middle is not supported", "suffix")
    if isinstance(fields, ChatFields) and fields.top_logprobs is not None and not fields.logprobs:
        raise refused("top_logprobs needs logprobs=true", "top_logprobs")


def check_extra(fields: Fields) -> None:
    """Refuse fields that `REFUSED` lists, at every depth."""
    for place, part in nested(fields):
        for name, why in part.REFUSED.items():
            if says_something(part.extra.get(name)):
                raise refused(f"{place}{name}: {why}", place + name)


def predicted_text(fields: SamplingFields) -> str | None:
    """The expected answer, its parts joined."""
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
