"""From a request's prompts and messages to token ids. Runs in the text pool, where each thread has a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.apps.server.error_objects import refused
from slipstream.apps.server.request_fields import MOST_ROWS, ChatFields, CompletionFields, ContentPart, MessageFields
from slipstream.apps.server.tool_fields import check_json, checked_tools
from slipstream.text.chat_form import ChatForm
from slipstream.text.detokenizer import Tokenizer
from slipstream.text.prompts import check_text

ROLES = {"developer": "system", "function": "tool"}


@dataclass(frozen=True)
class Rendered:
    """One prompt. text: as it was sent, unless it was cut; messages: for draft models with a format of their own."""

    ids: list[int]
    text: str | None = None
    messages: list[dict[str, Any]] | None = None


def rendered_prompts(fields: CompletionFields, tokenizer: Tokenizer | None) -> list[Rendered]:
    """The prompts of a completions request: a text, a list of texts, ids, or a list of lists of ids."""
    prompt = fields.prompt
    if isinstance(prompt, str):
        several: list[Any] = [prompt]
    else:
        several = [prompt] if prompt and isinstance(prompt[0], int) else list(prompt)
    if not several:
        raise refused("prompt is an empty list; allowed: at least one prompt", "prompt")
    if len(several) * (fields.n or 1) > MOST_ROWS:  # before any is tokenised
        raise refused(f"{len(several)} prompts with n={fields.n or 1}; allowed: at most {MOST_ROWS} texts", "n")
    return [_prompt(one, fields, tokenizer) for one in several]


def _prompt(prompt: str | list[int], fields: CompletionFields, tokenizer: Tokenizer | None) -> Rendered:
    if not isinstance(prompt, str):
        return Rendered(_cut(prompt, fields.truncate_prompt_tokens))
    check_text("prompt", prompt)
    encode = _needed(tokenizer).bare if fields.add_special_tokens is False else _needed(tokenizer).encode
    whole = encode(prompt)
    ids = _cut(whole, fields.truncate_prompt_tokens)
    return Rendered(ids, prompt if len(ids) == len(whole) else None)


def rendered_chat(fields: ChatFields, tokenizer: Tokenizer | None) -> Rendered:
    """The conversation of a chat request, rendered by the model's template; without one its texts, line by line."""
    messages = [_message(number, one) for number, one in enumerate(fields.messages)]
    tools = () if fields.tool_choice == "none" else checked_tools(fields)
    if not _needed(tokenizer).has_chat_template:
        _check_plain(fields)
        ids = _lines(messages, tokenizer, fields.add_special_tokens)
        return Rendered(_cut(ids, fields.truncate_prompt_tokens))
    _check_special_tokens(fields.add_special_tokens)
    opens = True if fields.add_generation_prompt is None else fields.add_generation_prompt
    goes_on = bool(fields.continue_final_message)
    if goes_on and fields.add_generation_prompt:
        raise refused("continue_final_message beside add_generation_prompt; allowed: one", "continue_final_message")
    variables = fields.chat_template_kwargs or {}
    check_json("chat_template_kwargs", variables)
    form = ChatForm(tools, opens and not goes_on, goes_on, fields.reasoning_effort, variables)
    ids = _needed(tokenizer).chat(messages, form)
    plain = not tools and not goes_on and all(set(message) == {"role", "content"} for message in messages)
    return Rendered(_cut(ids, fields.truncate_prompt_tokens), messages=messages if plain else None)


def _check_plain(fields: ChatFields) -> None:
    """Refuse what only a chat template could show to the model."""
    for name, given in (
        ("tools", fields.tool_choice != "none" and fields.tools),
        ("chat_template_kwargs", fields.chat_template_kwargs),
        ("reasoning_effort", fields.reasoning_effort),
        ("continue_final_message", fields.continue_final_message),
        ("add_generation_prompt", fields.add_generation_prompt is not None),
        *((f"messages.{number}.tool_calls", one.tool_calls) for number, one in enumerate(fields.messages)),
    ):
        if given:
            raise refused(f"{name}: this model has no chat template; allowed: messages with texts", name)


def rendered_messages(
    messages: Sequence[MessageFields], tokenizer: Tokenizer | None, special_tokens: bool | None, *, opens: bool
) -> list[int]:
    """Token ids of messages alone. special_tokens: `add_special_tokens`."""
    made = [_message(n, one) for n, one in enumerate(messages)]
    if not _needed(tokenizer).has_chat_template:
        return _lines(made, tokenizer, special_tokens)
    _check_special_tokens(special_tokens)
    return _needed(tokenizer).chat(made, ChatForm(opens_answer=opens))


def _lines(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer | None, special_tokens: bool | None
) -> list[int]:
    """What stands for a conversation where there is no chat template: its texts, line by line."""
    encode = _needed(tokenizer).bare if special_tokens is False else _needed(tokenizer).encode
    return encode("\n".join(message["content"] for message in messages))


def _check_special_tokens(wanted: bool | None) -> None:
    if wanted:
        raise refused("add_special_tokens=true; allowed: false, the chat template writes its own", "add_special_tokens")


def _message(number: int, message: MessageFields) -> dict[str, Any]:
    """A message as chat templates read it."""
    made: dict[str, Any] = {
        "role": ROLES.get(message.role, message.role),
        "content": content_text(message.content, f"messages.{number}.content"),
    }
    if message.tool_calls:
        made["tool_calls"] = [_call(number, call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        made["name"] = message.name
    check_json(f"messages.{number}", {name: value for name, value in made.items() if name != "content"})
    return made


def content_text(content: str | list[ContentPart] | None, name: str, between: str = "\n") -> str:
    """A content's text: its own, or that of its parts."""
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise refused(f"{name} has a part of type {part.type!r:.40}; allowed: 'text'", name)
        content = between.join(part.text or "" for part in content)
    check_text(name, content or "")
    return content or ""


def _call(number: int, call: dict[str, Any]) -> dict[str, Any]:
    """A call that the assistant made, its arguments as an object, which is what templates print."""
    name = f"messages.{number}.tool_calls"
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refused(f"{name}: a call without a function's name", name)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise refused(f"{name}: arguments that are not JSON", name) from None
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _cut(ids: list[int], most: int | None) -> list[int]:
    return ids if most is None else ids[-most:]


def _needed(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise refused("this model has no tokenizer; allowed: prompts as token ids", "prompt")
    return tokenizer
