"""Finds where a text stands in its prediction, also after the two have differed.

While they agree, the place moves on with every token. When they differ, the place is found again by the longest suffix
of the text that occurs in the prediction; of equally long ones, by the next after the place that was lost. Before the
text is long enough for that, the place is guessed from the commonest edits: a token replaced, a few left out, lines
inserted. An edit that was made once is expected again: the rest of the prediction is rewritten with it, as when a
variable is renamed, unless that made it far longer. This module knows neither rows nor models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

LIMIT = 32  # tokens of a match; longer ones count as this long
MAX_EDIT = 8  # tokens on either side of an edit that is expected again


class Guess(IntEnum):
    """How a place was guessed that no match has confirmed yet."""

    OPENING = 0  # the text begins as the prediction does
    NEXT_LINE = 1  # a new line of the text continues at the beginning of a line of the prediction
    LEFT_OUT = 2  # the text's last token stands a little further on in the prediction
    ONE_REPLACED = 3  # the text's tokens since the lost place replace one token


class Place(NamedTuple):
    """The index at which the prediction continues, and how many tokens before it agree with the text.

    guess: how the place was guessed; None for a match.
    """

    start: int
    agreeing: int
    guess: Guess | None = None


class Alignment:
    """Follows a text through its prediction, token by token.

    prediction: token ids; edits of the text are applied to the rest of them. ends_line: whether a token ends a line.
    """

    def __init__(self, prediction: Sequence[int], ends_line: Callable[[int], bool]) -> None:
        self.prediction, self._ends_line = list(prediction), ends_line
        self._max_length = 2 * len(self.prediction) + MAX_EDIT
        self._places_after = _places_after(self.prediction)
        self._tail: deque[int] = deque(maxlen=LIMIT)  # of the text
        self._anchor = self._run = 0  # the place up to which text and prediction agreed last, and for how many tokens
        self._num_lost = 0  # tokens of the text since then
        self._has_agreed = False
        self._matches: dict[int, int] = {}  # place -> how many of the text's last tokens stand before it
        self._instead: list[int] = []  # the text since the anchor
        self._kept: set[int] = set()  # tokens of the prediction that the text repeated
        self._edits: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}  # (old, new) -> how often
        self.place: Place | None = Place(0, 0, Guess.OPENING)

    def read(self, tokens: Iterable[int]) -> None:
        """Follow the text through its next tokens."""
        for token in tokens:
            place = self.place
            if place is not None and place.start < len(self.prediction) and self.prediction[place.start] == token:
                if self._num_lost:
                    self._learn_edit(place)
                self._kept.add(token)
                self.place = Place(place.start + 1, place.agreeing + 1)
                self._anchor, self._run = place.start + 1, place.agreeing + 1
                self._num_lost, self._has_agreed = 0, True
            else:
                self._lose(token)
            self._tail.append(token)

    def _lose(self, token: int) -> None:
        if not self._num_lost:
            self._matches, self._instead = {}, []
            for earlier in self._tail:
                self._matches = self._matches_after(earlier)
        self._matches = self._matches_after(token)
        self._instead.append(token)
        self._num_lost += 1
        self.place = self._search(token)

    def _learn_edit(self, place: Place) -> None:
        """Make the edit before a place in the rest of the prediction, too, if the text is likely to repeat it."""
        agreeing = {None: place.agreeing, Guess.LEFT_OUT: 1}.get(place.guess, 0)
        end, shared = place.start - agreeing, min(agreeing, len(self._instead))
        old, new = tuple(self.prediction[self._anchor : end]), tuple(self._instead[: len(self._instead) - shared])
        if agreeing != shared or not 0 < len(old) <= MAX_EDIT or not 0 < len(new) <= MAX_EDIT:
            return
        self._edits[old, new] = times = self._edits.get((old, new), 0) + 1
        if times == 1 and old[0] in self._kept:  # the old tokens are not always replaced
            return
        ahead = place.start + 1
        rewritten = _replaced(self.prediction[ahead:], list(old), list(new))
        if ahead + len(rewritten) <= self._max_length:  # an edit whose new tokens contain the old ones multiplies them
            self.prediction[ahead:] = rewritten
            self._places_after = _places_after(self.prediction)

    def _matches_after(self, token: int) -> dict[int, int]:
        """The matches that `token` continues or begins."""
        return {place: min(LIMIT, self._matches.get(place - 1, 0) + 1) for place in self._places_after.get(token, ())}

    def _search(self, token: int) -> Place | None:
        """Where the prediction continues after the text's last token, which is not the expected one."""
        match = self._longest_match()
        # a match of four tokens counts anywhere, a shorter one only near the lost place and within a line
        if match is not None and (match.agreeing >= 4 or (self._is_near(match.start) and not self._ends_line(token))):
            return match
        return self._guess(token) or match

    def _longest_match(self) -> Place | None:
        anchor = self._anchor
        best = max(
            self._matches, key=lambda place: (self._matches[place], place > anchor, -abs(place - anchor)), default=0
        )
        if not best:
            return None
        if self._matches[best] < 2:  # one token is enough only where it begins a line of both
            is_first_of_line = not self._tail or self._ends_line(self._tail[-1])
            places = self._nearest_first() if is_first_of_line else []
            best = next((place for place in places if self._begins_line(place - 1)), 0)
        return Place(best, self._matches[best]) if best else None

    def _nearest_first(self) -> list[int]:
        """The matches' places, those after the lost place before the others."""
        return sorted(self._matches, key=lambda place: (place <= self._anchor, abs(place - self._anchor)))

    def _begins_line(self, index: int) -> bool:
        return index == 0 or self._ends_line(self.prediction[index - 1])

    def _is_near(self, place: int) -> bool:
        return -32 <= place - self._anchor <= 256

    def _guess(self, token: int) -> Place | None:
        """Where the prediction continues if the text was edited in one of the commonest ways."""
        anchor = self._anchor
        if self._ends_line(token):
            may_be_inserted = self._num_lost <= 96 or not self._has_agreed
            return Place(self._line_start(anchor), 0, Guess.NEXT_LINE) if may_be_inserted else None
        further_on = next((place for place in self._nearest_first() if 0 < place - anchor <= 16), None)
        if further_on is not None:
            return Place(further_on, 1, Guess.LEFT_OUT)
        if self._num_lost <= 3 and anchor + 1 < len(self.prediction):
            return Place(anchor + 1, min(self._run, 3), Guess.ONE_REPLACED)
        return None

    def _line_start(self, index: int) -> int:
        """The beginning of the first line that begins at `index` or later."""
        while index < len(self.prediction) and not self._begins_line(index):
            index += 1
        return index


def _places_after(tokens: Sequence[int]) -> dict[int, list[int]]:
    """For each token, the index after each of its occurrences."""
    places: dict[int, list[int]] = {}
    for place, token in enumerate(tokens, 1):
        places.setdefault(token, []).append(place)
    return places


def _replaced(tokens: list[int], old: list[int], new: list[int]) -> list[int]:
    """The tokens with every occurrence of `old` replaced."""
    result, index = list[int](), 0
    while index < len(tokens):
        if tokens[index] == old[0] and tokens[index : index + len(old)] == old:
            result += new
            index += len(old)
        else:
            result.append(tokens[index])
            index += 1
    return result
