"""How a conversation is rendered, besides its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


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
