"""Calls of tools in an answer that is being written: text up to the first, and the calls at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.apps.server.choice_state import ChoiceState, Piece
from slipstream.text.detokenizer import StopStrings, Tokenizer
from slipstream.text.tokenizer import ParsedAnswer, ToolCallParser


class ToolWatch:
    """Watches one choice. tools: those that the request offers; without any, all text is passed on.

    several: whether an answer may have more than one call; else those after the first are left out.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, tools: Sequence[Mapping[str, Any]], *, several: bool = True
    ) -> None:
        self._parser = tokenizer if tools and isinstance(tokenizer, ToolCallParser) else None
        self._opening = None if self._parser is None else self._parser.call_opening()
        self._before = None if self._opening is None else StopStrings((self._opening,))
        self._tools, self._several, self._passed = tools, several, 0

    def passed(self, piece: Piece) -> str:
        """The part of a piece's text that belongs to no call, as far as is known yet."""
        if self._before is None:
            return piece.text
        text = "" if self._before.found else self._before.push(piece.text)
        self._passed += len(text)
        return text

    def calls(self, choice: ChoiceState) -> ParsedAnswer | None:
        """What a finished choice calls, and what it says before: of tags that are no text only the parser knows."""
        if self._opening is None or self._parser is None:
            return None
        parsed = self._parser.parse_answer(choice.prompt, choice.token_ids, self._tools)
        if parsed is None:
            return None
        before, opening, _ = choice.text.partition(self._opening)
        said = before.strip() if opening else parsed.content
        return ParsedAnswer(said, parsed.calls if self._several else parsed.calls[:1])

    def held_back(self, choice: ChoiceState) -> str:
        """Text of a finished choice without calls that was not passed on."""
        return "" if self._before is None else choice.text[self._passed :]


def shown_calls(parsed: ParsedAnswer, prefix: str, *, numbered: bool) -> list[dict[str, Any]]:
    """Calls as OpenAI shows them. prefix: of their ids; numbered: as parts of a stream are."""
    return [
        ({"index": at} if numbered else {})
        | {
            "id": f"call_{prefix}_{at}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for at, call in enumerate(parsed.calls)
    ]
