"""Calls of tools in what a model says, for tokenizers that can tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class ToolCall:
    """One call. arguments: JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedAnswer:
    """What an answer says besides its calls, and these."""

    content: str
    calls: tuple[ToolCall, ...]


@runtime_checkable
class ToolCallParser(Protocol):
    """Optional capability of a tokenizer: it knows how its model writes calls."""

    def call_opening(self) -> str | None:
        """The text that every call begins with; None if this model's calls cannot be told."""

    def call_tags(self) -> tuple[str, str] | None:
        """What stands before and behind a call that is {"name": ..., "arguments": {...}}; None for another form."""

    def parse_answer(
        self, prompt: Sequence[int], answer: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> ParsedAnswer | None:
        """The calls in an answer (token ids) to a prompt (likewise); None if it has none that can be read."""
