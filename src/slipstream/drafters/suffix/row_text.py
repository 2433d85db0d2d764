"""A row's text as the suffix drafter reads it: where its end was seen before, and what is left when the row ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import finalize

from slipstream.core.types import Row
from slipstream.draft_length.best_first import Node
from slipstream.drafters.suffix.automaton import LIMIT, NOTHING, Match, SuffixAutomaton

OPENING = 16  # last tokens of the prompt, saved with the output so that its first words are found


class Guess(NamedTuple):
    """A draft that can be compared with what the text became, and where it should stand."""

    start: int
    nodes: list[Node]


class Source(NamedTuple):
    """Where a draft comes from. occurrences: of the match, counting one more that went on in some other way."""

    automaton: SuffixAutomaton
    match: Match
    occurrences: int


@dataclass(frozen=True)
class EndedOutput:
    """A row's list of tokens without the row, which may be gone by the time they are wanted."""

    tokens: list[int]
    prompt_length: int
    group: str = ""

    def saved(self) -> list[int]:
        """What the store keeps: the output behind the end of the prompt; nothing if there is no output."""
        return self.tokens[max(0, self.prompt_length - OPENING) :] if len(self.tokens) > self.prompt_length else []


class RowText:
    """A row's text as far as it has been read: its automaton, and where its end stands in those of the store."""

    def __init__(self, row: Row, ended: deque[EndedOutput]) -> None:
        output = EndedOutput(row.tokens, row.prompt_length, row.group)
        self.leave = finalize(row, ended.append, output)  # called when the row has finished, or is dropped
        self.leave.atexit = False
        self.own = SuffixAutomaton()
        self._prompt_length = row.prompt_length
        self._read = 0
        self._found: dict[SuffixAutomaton, tuple[int, Match]] = {}  # with the size the automaton had
        self.guess = Guess(0, [])

    def read(self, tokens: Sequence[int], stored: Sequence[SuffixAutomaton]) -> None:
        """Take in the tokens that came since the last call."""
        new = tokens[self._read :]
        prompt = max(0, self._prompt_length - self._read)
        self._read = len(tokens)
        self.own.learn(new[:prompt], newest=False)  # what is copied is copied from its beginning on
        self.own.learn(new[prompt:])  # what goes on as it did lately may do so again
        before, self._found = self._found, {}
        for automaton in stored:
            size, match = before.get(automaton, (-1, NOTHING))
            extend = size == automaton.num_tokens and len(new) < LIMIT
            match = automaton.find(new, match) if extend else automaton.find(tokens[-LIMIT:])
            self._found[automaton] = automaton.num_tokens, match

    def source(self) -> Source:
        """The longest match that goes on somewhere: of equals the row's own, then that in newer outputs."""
        match = self.own.followed(self.own.end)
        best = Source(self.own, match, self.own.count(match))  # one of the occurrences is the text's end itself
        for automaton, (_, found) in self._found.items():
            match = automaton.followed(found)
            if match.length > best.match.length:
                best = Source(automaton, match, automaton.count(match) + 1)
        return best
