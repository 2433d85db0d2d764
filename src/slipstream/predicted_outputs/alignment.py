"""Where a text stands in the prediction of it, however the two differ.

While they agree the place moves on with every token. Where they part, the place is found again by the longest suffix of
the text that occurs in the prediction, of equals the next one after the place that was lost; and before the text has
shown enough for that, by guesses at the commonest edits: a token replaced, a few left out, lines put in. An edit that
was made once is expected again: what is left of the prediction is rewritten with it, as renaming a variable would do,
unless that made it far longer.
This module knows neither rows nor models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

LIMIT = 32  # tokens of a match; longer ones count as this long
SHORTEST = 2  # tokens of a match; 1 where both are the first of a line
BACK, AHEAD = 32, 256  # tokens before and after the lost place where a short match is believed
SURE = 4  # tokens of a match that is believed anywhere
SKIPPED = 16  # tokens that may have been left out
REPLACED = 3  # tokens of the text that may stand for one of the prediction
INSERTED = 96  # tokens of lines that may have been put in
BASE = 3  # tokens that count as agreeing behind a guess at most
EDIT = 8  # tokens on either side of an edit that is expected again
GROWTH = 2  # how much longer than it was given a prediction may become


class Guess(IntEnum):
    """How a place was guessed that no match has shown yet."""

    OPENING = 0  # the text begins as the prediction does
    NEXT_LINE = 1  # a new line of the text goes on where a line of the prediction begins
    LEFT_OUT = 2  # the text's last token stands a little further on
    ONE_REPLACED = 3  # what the text has instead stands for one token


class Place(NamedTuple):
    """The prediction goes on at token `at`; `known` tokens before it agree with the text. guess: None for a match."""

    at: int
    known: int
    guess: Guess | None = None


class Alignment:
    """Follows a text through its prediction, token by token.

    prediction: token ids, rewritten with edits as they become known. ends_line: whether a token ends a line.
    """

    def __init__(self, prediction: Sequence[int], ends_line: Callable[[int], bool]) -> None:
        self.prediction, self._ends_line = list(prediction), ends_line
        self._most = GROWTH * len(self.prediction) + EDIT  # tokens
        self._after = _places(self.prediction)  # token -> the places after it
        self._tail: deque[int] = deque(maxlen=LIMIT)
        self._anchor = self._run = self._lost = 0  # where they agreed last, how long, and tokens of the text since
        self._opened = False  # whether they have agreed yet
        self._matches: dict[int, int] = {}  # place -> how many of the text's last tokens stand before it
        self._instead: list[int] = []  # the text since then
        self._kept: set[int] = set()  # tokens that were left as they are
        self._edits: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}  # old, new -> how often
        self.place: Place | None = Place(0, 0, Guess.OPENING)

    def read(self, tokens: Iterable[int]) -> None:
        """Take in what the text has become."""
        for token in tokens:
            place = self.place
            if place is not None and place.at < len(self.prediction) and self.prediction[place.at] == token:
                if self._lost:
                    self._learn_edit(place)
                self._kept.add(token)
                self.place = Place(place.at + 1, place.known + 1)
                self._anchor, self._run, self._lost, self._opened = place.at + 1, place.known + 1, 0, True
            else:
                self._lose(token)
            self._tail.append(token)

    def _lose(self, token: int) -> None:
        if not self._lost:
            self._matches, self._instead = {}, []
            for earlier in self._tail:
                self._matches = self._longer(earlier)
        self._matches = self._longer(token)
        self._instead.append(token)
        self._lost += 1
        self.place = self._found(token)

    def _learn_edit(self, place: Place) -> None:
        """The text goes on at this place: rewrite what follows it with the edit that came before, if that is likely.

        It is where the old tokens have never been left as they are, or where it is the second time.
        """
        known = {None: place.known, Guess.LEFT_OUT: 1}.get(place.guess, 0)
        end, shared = place.at - known, min(known, len(self._instead))
        old, new = tuple(self.prediction[self._anchor : end]), tuple(self._instead[: len(self._instead) - shared])
        if known != shared or not 0 < len(old) <= EDIT or not 0 < len(new) <= EDIT:
            return
        self._edits[old, new] = times = self._edits.get((old, new), 0) + 1
        if times == 1 and old[0] in self._kept:
            return
        ahead = place.at + 1
        rewritten = _replaced(self.prediction[ahead:], list(old), list(new))
        if ahead + len(rewritten) <= self._most:  # edits whose new tokens hold old ones would multiply them
            self.prediction[ahead:] = rewritten
            self._after = _places(self.prediction)

    def _longer(self, token: int) -> dict[int, int]:
        return {at: min(LIMIT, self._matches.get(at - 1, 0) + 1) for at in self._after.get(token, ())}

    def _found(self, token: int) -> Place | None:
        """Where the prediction goes on after the text's last token, which is not where it was expected."""
        match = self._longest_match()
        if match is not None and (match.known >= SURE or (self._is_near(match.at) and not self._ends_line(token))):
            return match
        return self._guess(token) or match

    def _longest_match(self) -> Place | None:
        anchor = self._anchor
        at = max(self._matches, key=lambda at: (self._matches[at], at > anchor, -abs(at - anchor)), default=0)
        if not at:
            return None
        long_enough = self._matches[at] >= SHORTEST
        if not long_enough:
            first = not self._tail or self._ends_line(self._tail[-1])
            at = next((one for one in self._near_first() if first and self._begins_line(one - 1)), 0)
        return Place(at, self._matches[at]) if at else None

    def _near_first(self) -> list[int]:
        return sorted(self._matches, key=lambda at: (at <= self._anchor, abs(at - self._anchor)))

    def _begins_line(self, at: int) -> bool:
        return at == 0 or self._ends_line(self.prediction[at - 1])

    def _is_near(self, at: int) -> bool:
        return -BACK <= at - self._anchor <= AHEAD

    def _guess(self, token: int) -> Place | None:
        """Where the prediction may go on, by what the edit may be."""
        anchor, run = self._anchor, min(self._run, BASE)
        if self._ends_line(token):
            recent = self._lost <= INSERTED or not self._opened
            return Place(self._line_start(anchor), 0, Guess.NEXT_LINE) if recent else None
        skipped = next((at for at in self._near_first() if 0 < at - anchor <= SKIPPED), None)
        if skipped is not None:
            return Place(skipped, 1, Guess.LEFT_OUT)
        if self._lost <= REPLACED and anchor + 1 < len(self.prediction):
            return Place(anchor + 1, run, Guess.ONE_REPLACED)
        return None

    def _line_start(self, at: int) -> int:
        """The first line that begins at `at` or later."""
        while at < len(self.prediction) and not self._begins_line(at):
            at += 1
        return at


def _places(tokens: Sequence[int]) -> dict[int, list[int]]:
    """Where each token stands: the places after it."""
    found: dict[int, list[int]] = {}
    for at, token in enumerate(tokens, 1):
        found.setdefault(token, []).append(at)
    return found


def _replaced(tokens: list[int], old: list[int], new: list[int]) -> list[int]:
    """The tokens with every occurrence of `old` replaced."""
    made, at = list[int](), 0
    while at < len(tokens):
        if tokens[at] == old[0] and tokens[at : at + len(old)] == old:
            made += new
            at += len(old)
        else:
            made.append(tokens[at])
            at += 1
    return made
