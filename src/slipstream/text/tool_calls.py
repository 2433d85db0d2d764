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


@dataclass(frozen=True)
class CallForm:
    """How calls are written: before the name, between name and arguments (JSON), behind them, and between calls."""

    before: str
    between: str
    behind: str
    between_calls: str

    @property
    def quotes_names(self) -> bool:
        """Whether names are JSON texts."""
        return self.before.endswith('"') and self.between.startswith('"')


@runtime_checkable
class ToolCallParser(Protocol):
    """Optional capability of a tokenizer: it knows how its model writes calls."""

    def call_opening(self) -> str | None:
        """The text that every call begins with; None if this model's calls cannot be told."""

    def call_form(self) -> CallForm | None:
        """How its model writes calls; None if that is not known, or arguments are not JSON."""

    def parse_answer(
        self, prompt: Sequence[int], answer: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> ParsedAnswer | None:
        """The calls in an answer (token ids) to a prompt (likewise); None if it has none that can be read."""
