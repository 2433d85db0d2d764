"""Prompts from files: JSON lines in Spec-Bench's format, or one plain text; and the set that comes with the package."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from textwrap import shorten
from typing import Any

from slipstream.checks import UNREADABLE, is_text, why_unreadable
from slipstream.errors import UsageError, did_you_mean
from slipstream.tokenization.tokenizer import check_text


@dataclass(frozen=True)
class NamedPrompt:
    """A prompt and its category."""

    prompt: str
    category: str = "prompt"
    prediction: str | None = None  # a guess of its answer

    def __post_init__(self) -> None:
        check_text("prompt", self.prompt)
        if self.prediction is not None:
            check_text("prediction", self.prediction)


def titles(prompts: Sequence[NamedPrompt], columns: int = 28) -> list[str]:
    """A short name for each: its category, or its first words if all prompts are of one category."""
    has_categories = len({prompt.category for prompt in prompts}) > 1
    return [
        prompt.category
        if has_categories and prompt.category != "prompt"
        else shorten(prompt.prompt, columns, placeholder=" ...")
        for prompt in prompts
    ]


def named_prompt(source: str, text: str, category: str = "prompt") -> NamedPrompt:
    """A whole text as a prompt; an empty one is refused. source: where the text is from, for the message."""
    if not text.strip():
        raise UsageError(f"{source} is empty; allowed: a text")
    return NamedPrompt(text.strip(), category)


def read_prompts(path: Path, *, categories: list[str] | None = None, limit: int | None = None) -> list[NamedPrompt]:
    """The prompts of a file, at most `limit` of each category.

    A .jsonl file holds one object per line, {"turns": [text, ...], "category": name} (the first turn is taken) or
    {"prompt": text}, either with "prediction": text, a guess of the answer. Any other file is one prompt.
    """
    source = f"prompt file {str(path)!r}"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{source} cannot be read: {why_unreadable(error)}") from error
    if path.suffix != ".jsonl":
        return [named_prompt(source, text, path.stem)]
    return _chosen_lines(text, source, path.stem, categories, limit)


def parse_prompts(text: str, categories: list[str] | None, limit: int | None) -> list[NamedPrompt]:
    """The prompts of standard input: JSON lines if it begins with {, else one prompt."""
    source = "standard input"
    if not text.lstrip().startswith("{"):
        return [named_prompt(source, text)]
    return _chosen_lines(text, source, "prompt", categories, limit)


def _chosen_lines(
    text: str, source: str, category: str, categories: list[str] | None, limit: int | None
) -> list[NamedPrompt]:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f"{source} holds no prompts; allowed: at least one line")
    prompts = [_parse(line, f"{source}, line {number}", category) for number, line in lines]
    return chosen_prompts(prompts, source, categories=categories, limit=limit)


def chosen_prompts(
    prompts: Sequence[NamedPrompt], source: str, *, categories: list[str] | None = None, limit: int | None = None
) -> list[NamedPrompt]:
    """The prompts of these categories (all by default), at most `limit` of each. source: where they are, in errors."""
    allowed = sorted({p.category for p in prompts})
    for category in categories or []:
        if category not in allowed:
            near = did_you_mean(category, *allowed)
            raise UsageError(f"category {category!r} is not in {source}; allowed: {', '.join(allowed)}{near}")
    chosen, counts = list[NamedPrompt](), Counter[str]()
    for prompt in prompts:
        if not categories or prompt.category in categories:
            counts[prompt.category] += 1
            if limit is None or counts[prompt.category] <= limit:
                chosen.append(prompt)
    return chosen


def builtin_prompts(*, categories: list[str] | None = None, limit: int | None = None) -> list[NamedPrompt]:
    """The prompts that come with the package, at most `limit` of each category: 8 families of 5, written for it.

    The file has Spec-Bench's line format: {"question_id": number, "category": name, "turns": [text]}.
    """
    text = resources.files("slipstream").joinpath("data/prompts.jsonl").read_text(encoding="utf-8")
    return _chosen_lines(text, "the built-in prompts", "prompt", categories, limit)


def spread(prompts: Sequence[NamedPrompt], count: int) -> list[NamedPrompt]:
    """`count` prompts, evenly spaced over the list, so that every category takes part."""
    return [prompts[i * len(prompts) // count] for i in range(min(count, len(prompts)))]


def _parse(line: str, where: str, category: str) -> NamedPrompt:
    try:
        item: Any = json.loads(line)
    except UNREADABLE as error:
        raise UsageError(f"{where}: {why_unreadable(error)}; allowed: one JSON object per line") from None
    if isinstance(item, dict):
        turns = item.get("turns")
        text = turns[0] if isinstance(turns, list) and turns else item.get("prompt")
        prediction = item.get("prediction")
        if prediction is not None and not (isinstance(prediction, str) and prediction):
            raise UsageError(f"{where}: prediction={prediction!r:.60}; allowed: a non-empty text, or none")
        if not is_text(category := item.get("category", category)):
            raise UsageError(f"{where}: category={category!r:.60}; allowed: a non-empty text, or none")
        if isinstance(text, str) and text.strip():
            return NamedPrompt(text, category, prediction)
    raise UsageError(f'{where}: no text; allowed: {{"prompt": text}} or {{"turns": [text, ...], "category": name}}')
