"""The protocol of tokenizers: they encode and decode, render conversations, and know the form of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from slipstream.errors import UsageError
from slipstream.tokenization.answer_forms import AnswerForm, CallText


@dataclass(frozen=True)
class ChatForm:
    """The settings of a chat template."""

    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas of functions that the model may call
    opens_answer: bool = True  # the rendered text ends with the beginning of an answer
    goes_on: bool = False  # it ends with the last message, which the model continues
    reasoning_effort: str | None = None  # for templates that read it
    variables: Mapping[str, Any] = field(default_factory=dict)  # others that the template reads


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
    id: str = ""  # as the model wrote it, if its calls have one

    def to_dict(self) -> dict[str, str]:
        """The name, the arguments, and the id if there is one."""
        return {"name": self.name, "arguments": self.arguments} | ({"id": self.id} if self.id else {})


@runtime_checkable
class AnswerTokenizer(Protocol):
    """Optional capability of a tokenizer: it knows the form of its model's answers."""

    def answer_form(self) -> AnswerForm:
        """The form in which the model writes thoughts and tool calls."""

    def call_text(self) -> CallText | None:
        """The text around the parts of a call; None if calls cannot be forced."""

    def bare(self, text: str) -> list[int]:
        """Token ids of a text without special tokens."""

    def decode_marked(self, ids: Sequence[int]) -> str:
        """Text with those special tokens that are marks of the form."""

    def special_tokens(self) -> dict[str, int]:
        """The ids of tokens that stand for no text, by name."""


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
