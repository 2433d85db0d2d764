"""Every form in which a caller may give prompts, as texts, lists of token ids and lists of chat messages.

Token ids also come as PyTorch tensors, numpy arrays and what Hugging Face tokenizers return (a mapping with
`input_ids` and `attention_mask`); transformers is not imported for that. This module knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from slipstream.errors import UsageError

ALLOWED = "a text, a list of token ids or a list of chat messages"
MEDIA = ("pixel", "image", "video", "audio", "input_features", "input_values")  # in names of what processors return
SHAPES = "(n,) or (1, n) for one prompt, (batch, n) for several"


@dataclass(frozen=True)
class Prompts:
    """What was asked for. single: one prompt, whose answer is one `Result`, rather than a list of them."""

    items: list[Any]
    single: bool


def read_prompts(prompt: Any) -> Prompts:
    """The prompts a caller gave: one of any form, or a list of them. UsageError for arrays of other shapes.

    Arrays [n] and [1, n] are one prompt. Arrays [B, n] are B prompts, from which `attention_mask` (of a tokenizer's
    mapping) drops the padding. What is none of these forms is left as it is, for its reader to refuse.
    """
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        for name in prompt:
            if any(kind in name for kind in MEDIA) and prompt[name] is not None:
                raise UsageError(f"prompt has {name!r}; allowed: text only, as input_ids and attention_mask")
        return _from_tokenizer(prompt)
    if isinstance(prompt, Tensor | np.ndarray):
        return _from_array(prompt)
    if isinstance(prompt, str) or not isinstance(prompt, list | tuple) or not prompt:
        return Prompts([prompt], True)
    if is_chat(prompt):
        _check_messages(prompt)
    if is_ids(prompt) or is_chat(prompt) or isinstance(prompt[0], int):
        return Prompts([_plain(prompt)], True)
    return Prompts([_one(i, item) for i, item in enumerate(prompt)], False)


def is_ids(prompt: Any) -> bool:
    """Whether this is a list of whole numbers, Python's or numpy's."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return all(isinstance(token, int | np.integer) and not isinstance(token, bool) for token in prompt)


def is_chat(prompt: Any) -> bool:
    """Whether this is meant as a list of chat messages."""
    if not isinstance(prompt, list | tuple):
        return False
    return any(isinstance(message, Mapping) and ("role" in message or "content" in message) for message in prompt)


def _check_messages(messages: Sequence[Any]) -> None:
    """Refuse what is no chat message, and images, videos or sounds, which no model is given here."""
    for number, message in enumerate(messages):
        what = f"message {number}"
        if not isinstance(message, Mapping):
            raise UsageError(f"{what} is a {type(message).__name__}; allowed: a dictionary with role and content")
        if not isinstance(message.get("role"), str):
            raise UsageError(f"{what} has the role {message.get('role')!r:.40}; allowed: a name, such as 'user'")
        if message.keys() == {"role"}:  # a message that calls tools has no content
            raise UsageError(f"{what} has a role alone; allowed: with content, or with tool_calls")
        content = message.get("content")
        if not (content is None or isinstance(content, str | list | tuple)):
            raise UsageError(f"{what} has the content {content!r:.40}; allowed: a text, or a list of text parts")
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text":
                raise UsageError(f"{what} has a part of type {kind!r}; allowed: 'text'")
            if not isinstance(part.get("text"), str):
                raise UsageError(f"{what} has a part without a text; allowed: {{'type': 'text', 'text': ...}}")


def _plain(prompt: Any) -> Any:
    return [int(token) for token in prompt] if is_ids(prompt) else prompt


def _one(index: int, item: Any) -> Any:
    """An item of a list of prompts; an array or a tokenizer's mapping must be one prompt."""
    found = read_prompts(item)
    if not found.single and isinstance(item, Tensor | np.ndarray | Mapping):
        raise UsageError(f"prompt {index} holds {len(found.items)} prompts; allowed: one per item of a list")
    return found.items[0] if found.single else item


def _from_array(array: Any, name: str = "prompt") -> Prompts:
    kind = str(array.dtype).removeprefix("torch.")
    if not kind.startswith(("int", "uint")):
        raise UsageError(f"{name} is an array of {kind}; allowed: whole numbers (token ids)")
    if array.ndim not in (1, 2):
        raise UsageError(f"{name} has shape {tuple(array.shape)}; allowed: {SHAPES}")
    rows = array.tolist() if array.ndim == 2 else [array.tolist()]
    return Prompts(rows, len(rows) == 1)


def _from_tokenizer(inputs: Mapping[str, Any]) -> Prompts:
    ids = _table("input_ids", inputs["input_ids"])
    if inputs.get("attention_mask") is None:
        return ids
    mask = _table("attention_mask", inputs["attention_mask"])
    if [len(row) for row in mask.items] != [len(row) for row in ids.items]:
        raise UsageError("attention_mask and input_ids differ in shape; allowed: one shape")
    rows = []
    for index, (tokens, real) in enumerate(zip(ids.items, mask.items, strict=True)):
        places = [at for at, value in enumerate(real) if value]
        if places and places[-1] - places[0] >= len(places):
            raise UsageError(f"attention_mask: row {index} has padding inside; allowed: padding on the left or right")
        rows.append([tokens[at] for at in places])
    return Prompts(rows, ids.single)


def _table(name: str, values: Any) -> Prompts:
    """Rows of whole numbers from an array, a list, or a list of lists or arrays."""
    if isinstance(values, Tensor | np.ndarray):
        return _from_array(values.long() if isinstance(values, Tensor) else values, name)
    if is_ids(values):
        return Prompts([_plain(values)], True)
    rows = [row.tolist() if isinstance(row, Tensor | np.ndarray) else row for row in values or ()]
    if not rows or not all(is_ids(row) for row in rows):
        raise UsageError(f"{name}={values!r:.80}; allowed: token ids, or rows of them")
    return Prompts([_plain(row) for row in rows], False)
