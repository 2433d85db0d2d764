"""What the predictions of rows propose next, and how likely each token is to be accepted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple
from weakref import WeakKeyDictionary

from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.types import Row
from slipstream.draft_length.acceptance_model import AcceptanceModel
from slipstream.predicted_outputs.alignment import Alignment

AGREED = (2, 3, 4, 6, 10, 16, 32)  # kinds of tokens: by how many before them agree, from 0 to these
BY_AGREED = (0.6, 0.7, 0.78, 0.84, 0.9, 0.94, 0.97, 0.985)  # the chance of each, before the row has shown anything
BY_GUESS = (0.7, 0.6, 0.5, 0.45)  # of the first token at a guessed place, by `Guess`
ROW_STEP = 0.5  # how far one token moves what is known of its row
LEAST = 0.35  # a prediction whose next token is less likely than this leaves the draft to the decoder's drafter
CREDIT, MOST_CREDIT = 6.0, 64.0  # tokens of a row's prediction that may be rejected: at first, and ever
MOST_LOST = 8.0  # of it that one round may take: one edit ends a draft of any length
REGAINED = 1 / 128  # of one, with every token of the text
GUESSED = 2  # tokens drafted at a guessed place, until proposals have brought anything
LONG, AGAIN = 12, 4  # tokens that agree, behind which a prediction without credit is tried again, and how many of it
UNLIKELY = 0.01  # a draft ends where it is less likely than this to be accepted so far


class Proposal(NamedTuple):
    """Tokens, and the probability that the first 1, 2, ... of them are all accepted."""

    tokens: list[int]
    acceptance_probs: list[float]


NOTHING = Proposal([], [])


@dataclass
class _Followed:
    """A row's prediction as far as its output has come.

    read: tokens of the output taken in, in `rounds` rounds; proposed: after them, with their kinds; guess: of the first
    one's place. credit: how many tokens more may be rejected; brought: what all proposals have earned so far.
    """

    alignment: Alignment
    read: int = 0
    proposed: Proposal = NOTHING
    kinds: tuple[int, ...] = ()
    guess: int | None = None
    rounds: int = 0
    credit: float = CREDIT
    brought: float = 0.0

    @property
    def only_guesses(self) -> bool:
        """Whether the place is guessed and earlier proposals have brought nothing."""
        place = self.alignment.place
        return place is not None and place.guess is not None and self.brought <= 0

    @property
    def length(self) -> int:
        """How much of the proposal is worth a try, by what earlier ones have brought."""
        place = self.alignment.place
        if place is None or not self.proposed.tokens or self.proposed.acceptance_probs[0] < LEAST:
            return 0
        if self.only_guesses:
            return min(GUESSED, int(self.credit))
        return max(int(self.credit), AGAIN if place.known >= LONG else 0)

    def settle(self, row: Row, new: list[int]) -> None:
        """Earn or lose credit by what became of the last proposal; one that was not verified earns half."""
        done = [one.without_forced for one in row.rounds[self.rounds :]]
        verified = sum(one.num_prediction_tokens or 0 for one in done)
        right = sum(min(one.num_prediction_tokens or 0, one.num_accepted_tokens) for one in done)
        earned = right - min(MOST_LOST, max(0, verified - right))
        if not verified:
            pairs = zip(self.proposed.tokens, new, strict=False)
            earned = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / 2
        self.brought, self.rounds = self.brought + earned, len(row.rounds)
        self.credit = max(0.0, min(MOST_CREDIT, self.credit + earned + REGAINED * len(new)))


class RowPredictions:
    """The predictions of rows, each followed by itself: what is learned of a row depends on that row alone.

    ends_line: whether a token ends a line. Every proposal is compared with what the text became, verified or not.
    """

    def __init__(self, ends_line: Callable[[int], bool]) -> None:
        self._ends_line = ends_line
        self._followed: WeakKeyDictionary[Row, _Followed] = WeakKeyDictionary()
        self._matched = AcceptanceModel(BY_AGREED, shared=False, row_step=ROW_STEP)
        self._guessed = AcceptanceModel(BY_GUESS, shared=False, row_step=ROW_STEP)

    def proposal(self, row: Row) -> Proposal:
        """What the row's prediction has to say; nothing without one, or where it is not worth asking the target."""
        if not row.prediction:
            return NOTHING
        followed = self._followed.get(row)
        if followed is None:
            followed = self._followed[row] = _Followed(Alignment(row.prediction, self._ends_line))
            self._propose(row, followed)
        if followed.read < row.num_output_tokens:
            self._read(row, followed)
            self._propose(row, followed)
        length, proposed = followed.length, followed.proposed
        return Proposal(proposed.tokens[:length], proposed.acceptance_probs[:length]) if length else NOTHING

    def only_guesses(self, row: Row) -> bool:
        """Whether a row's prediction has shown nothing that would put it before a draft of the decoder's drafter."""
        return row in self._followed and self._followed[row].only_guesses

    def _read(self, row: Row, followed: _Followed) -> None:
        """Take in the new tokens, and learn from them what the last proposal was worth."""
        new = row.tokens[row.prompt_length + followed.read :]
        tokens, kinds = followed.proposed.tokens, followed.kinds
        followed.settle(row, new)
        if followed.guess is not None:
            self._guessed.learn(row, [followed.guess], tokens, new)
        if followed.guess is None or tokens[:1] == new[:1]:
            skip = followed.guess is not None
            self._matched.learn(row, kinds[skip:], tokens[skip:], new[skip:])
        followed.alignment.read(new)
        followed.read += len(new)

    def _propose(self, row: Row, followed: _Followed) -> None:
        place = followed.alignment.place
        followed.proposed, followed.kinds, followed.guess = NOTHING, (), None
        if place is None:
            return
        tokens, probs, kinds, path = list[int](), list[float](), list[int](), 1.0
        most = min(MAX_DRAFT_TOKENS, max(int(followed.credit), AGAIN))
        expected = followed.alignment.prediction[place.at : place.at + most]
        for offset, token in enumerate(expected):
            kind = bisect_right(AGREED, place.known + offset)
            guessed = place.guess is not None and not offset
            path *= self._guessed.chance(row, place.guess or 0) if guessed else self._matched.chance(row, kind)
            if path < UNLIKELY:
                break
            tokens.append(token)
            probs.append(path)
            kinds.append(kind)
        followed.proposed, followed.kinds = Proposal(tokens, probs), tuple(kinds)
        followed.guess = None if place.guess is None or not tokens else int(place.guess)
