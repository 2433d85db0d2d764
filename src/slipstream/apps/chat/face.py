"""Where a conversation shows itself; the terminal is in `slipstream.apps.cli.chat`."""

from __future__ import annotations

from typing import Protocol

from rich.text import Text


class Face(Protocol):
    """Where a conversation shows itself."""

    def piece(self, text: str) -> None:
        """A part of the answer as it comes; the last one ends the line."""

    def say(self, line: str | Text) -> None:
        """What the user asked to see."""

    def note(self, line: str) -> None:
        """A remark beside the answers."""

    def error(self, line: str) -> None:
        """Why something was not done."""
