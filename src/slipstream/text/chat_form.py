"""How a conversation is rendered, besides its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class ChatForm:
    """What a chat template is told. tools: JSON schemas of functions that the model may call.

    opens_answer: the rendered text ends with the beginning of an answer. goes_on: it ends with the last message, which
    the model continues. reasoning_effort: for templates that read it. variables: others that the template reads.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    opens_answer: bool = True
    goes_on: bool = False
    reasoning_effort: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


PLAIN_CHAT = ChatForm()


@runtime_checkable
class TokenizerDetails(Protocol):
    """Optional capability of a tokenizer: it tells what its chat template reads, and which tokens control a model."""

    def template_variables(self) -> frozenset[str]:
        """The names that a caller can give the template, besides the messages."""

    def template_fields(self) -> frozenset[str]:
        """The names of a message's parts that the template mentions, and others: no field that it reads is missing."""

    def special_ids(self) -> frozenset[int]:
        """The tokens that stand for no text: ends of turns and the like."""

    def digest(self) -> str:
        """Equal for tokenizers that make the same tokens of the same conversations."""
