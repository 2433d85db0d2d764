"""The protocol of tokenizers: they encode and decode, render conversations, and read tool calls from answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from slipstream.errors import UsageError


@dataclass(frozen=True)
class ChatForm:
    """The settings of a chat template. tools: JSON schemas of functions that the model may call.

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
    """Optional capability of a tokenizer: it knows what its chat template reads, and which tokens are no text."""

    def template_variables(self) -> frozenset[str]:
        """The names that a caller can give the template, besides the messages."""

    def template_fields(self) -> frozenset[str]:
        """The names of all message fields that the template reads, perhaps among other names."""

    def special_ids(self) -> frozenset[int]:
        """The tokens that stand for no text: ends of turns and the like."""

    def digest(self) -> str:
        """Equal for tokenizers that make the same tokens of the same conversations."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: str  # JSON text


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer's text without its calls, and the calls."""

    content: str
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class CallForm:
    """The text that a model writes around the names and arguments (JSON) of its calls."""

    before: str  # the name
    between: str  # name and arguments
    behind: str  # the arguments
    between_calls: str  # several calls in a row

    @property
    def quotes_names(self) -> bool:
        """True if names are JSON texts."""
        return self.before.endswith('"') and self.between.startswith('"')


@runtime_checkable
class ToolCallParser(Protocol):
    """Optional capability of a tokenizer: it knows the form in which its model writes calls."""

    def call_opening(self) -> str | None:
        """The text that every call of this model begins with; None if that is not known."""

    def call_form(self) -> CallForm | None:
        """The form of the model's calls; None if it is not known, or arguments are not JSON."""

    def parse_answer(
        self, prompt: Sequence[int], answer: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> ParsedAnswer | None:
        """The calls in an answer to a prompt, both token ids; None if there are no calls that can be read."""


class Tokenizer(Protocol):
    """The methods that every tokenizer must have."""

    @property
    def has_chat_template(self) -> bool:
        """True if it has a chat template, so that `chat` can render messages."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens the model expects at its beginning."""

    def bare(self, text: str) -> list[int]:
        """Token ids of a text and nothing else."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""

    def chat(self, messages: Sequence[dict[str, Any]], form: ChatForm = PLAIN_CHAT) -> list[int]:
        """Token ids of a conversation, by default ready for the model's answer."""

    def vocabulary(self) -> dict[str, int]:
        """Token text to id, added tokens included."""


def check_text(name: str, text: str) -> None:
    """Refuse text that UTF-8 cannot encode: lone surrogates, which undecodable bytes become."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{name} has {text[error.start]!r} at character {error.start}; allowed: valid Unicode (no lone surrogates)"
        ) from None
