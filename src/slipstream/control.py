"""Whether, with what and how far to draft: by measured costs, and by what drafts have brought.

Of the ways a round can go the one that promises the most tokens per second is taken. That is the rate of this round and
not of the whole text: a token that comes true saves what it would take to get it a moment later, at the rate that is
possible here. Choices between tokens are never made: a draft that was drawn is not cut, it ends (docs/exactness.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakSet

from slipstream.odds import Odds
from slipstream.pace import Pace, best_lengths
from slipstream.prospects import Prospects, Rest, Yield
from slipstream.types import Draft, Row

LONGEST = 15  # tokens of a look-up
STEPS = 8  # steps of a draft model
HORIZON = 64  # tokens that a text is expected to have still, if it may
BINS = 20  # of the draft model's own probability of a token


@dataclass
class Control:
    """What is known about costs and drafts, shared by the policy and the drafters of one decoder.

    reads: the drafter must read a text before its first draft, as a draft model with a memory of its own does.
    """

    pace: Pace
    longest: int = LONGEST
    steps: int = STEPS
    reads: bool = True
    prospects: Prospects = field(init=False)
    sure: Odds = field(init=False)
    rest: Rest = field(default_factory=Rest)
    _read: WeakSet[Row] = field(default_factory=WeakSet)  # rows whose text the draft model has read
    _reading: int = 0  # tokens it reads in this round

    def __post_init__(self) -> None:
        self.prospects = Prospects(max(self.longest, self.steps))
        self.sure = Odds([(i + 0.5) / BINS for i in range(BINS)])

    def learn(self, rows: Sequence[Row]) -> None:
        """Take in the rows' newest round."""
        self.pace.learn(rows, self._reading)
        self._reading = 0
        for row in rows:
            if (kept := self.prospects.learn(row)) is not None:
                self.rest.tried(row, kept)

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """How many tokens to ask a drafter for whose drafts cost time: as many as it can, or none.

        A draft model stops by itself where the next step would not pay.
        """
        count = len(rows)
        rate = self._stepping([self.prospects.of(row) for row in rows], count, [])
        if self._pays(rows, rows, rate, count / self.pace.verify(count, 0)):
            return [self._ask(row, self.steps) for row in rows]
        tried = self._tried(rows)
        return [self._ask(row, 1) if tried and self._has_read(row) else 0 for row in rows]

    def cut(self, rows: Sequence[Row], draft: Draft) -> Draft:
        """The draft as far as it is worth verifying.

        Drawn drafts stay whole, and rows that asked for a length, and rows of a draft that says what to hope for of
        others only. Where no draft does, a looked-up token's chance is that of its position.
        """
        hopes = self._hopes(rows, draft)
        whole = [n for n, hope in zip(draft.lengths, hopes, strict=True) if hope is None]
        least, beside = max(whole, default=0), sum(whole)
        chosen, _ = best_lengths(
            [hope or [] for hope in hopes],
            lambda longest, drafted: self.pace.verify(len(rows), max(longest, least), drafted + beside),
            len(rows)
            + sum(self.prospects.of(row).brought for row, hope in zip(rows, hopes, strict=True) if hope is None),
            even=self.pace.even,
        )
        lengths = [
            n if hope is None else min(n, length) for n, hope, length in zip(draft.lengths, hopes, chosen, strict=True)
        ]
        if draft.hopes is None:
            lengths = [self._watched(*one) for one in zip(rows, draft.lengths, hopes, lengths, strict=True)]
        return draft.cut(lengths)

    def prefer_model(self, rows: Sequence[Row], hopes: Sequence[Sequence[float]], asked: Sequence[int]) -> list[bool]:
        """For which rows a draft model's draft is worth more than a look-up of which `hopes` are held.

        asked: tokens each row may draft.
        """
        count, most = len(rows), [min(n, self.steps) for n in asked]
        lengths, without = best_lengths(hopes, partial(self.pace.verify, count), count, even=self.pace.even)
        expected = [self.prospects.of(row).cut(n) for row, n in zip(rows, most, strict=True)]
        better = [one.brought > sum(hope[:n]) for one, hope, n in zip(expected, hopes, lengths, strict=True)]
        looked_up = [hope for hope, model in zip(hopes, better, strict=True) if not model]
        rate = self._stepping([one for one, model in zip(expected, better, strict=True) if model], count, looked_up)
        drafting = [row for row, model in zip(rows, better, strict=True) if model]
        if not drafting or not self._pays(rows, drafting, rate, without):
            tried = bool(drafting) and self._tried(rows)
            better = [model and tried and self._has_read(row) for row, model in zip(rows, better, strict=True)]
        for row, model, n in zip(rows, better, most, strict=True):
            if model:
                self._ask(row, n)
        return better

    def another_step(self, rows: Sequence[Row], chances: Sequence[Sequence[float]], batch: int) -> bool:
        """Whether a draft model should go on, for these rows of a batch.

        chances[i]: its own probability of each token of row i so far.
        """
        if not rows:
            return False
        drafted = len(chances[0])
        brought = sum(
            self.hopes(row, own)[-1] * self.prospects.hold(row, drafted) for row, own in zip(rows, chances, strict=True)
        )
        verify = partial(self.pace.verify, batch)
        more = (
            self.pace.step(batch)
            + verify(drafted + 1, (drafted + 1) * len(rows))
            - verify(drafted, drafted * len(rows))
        )
        return brought > more * self._stepping([self.prospects.of(row) for row in rows], len(rows), [])

    def hopes(self, row: Row, chances: Sequence[float]) -> list[float]:
        """The chance that the first 1, 2, ... tokens all come true, by the draft model's own probabilities."""
        path, hopes = 1.0, []
        for chance in chances:
            path *= self.sure.chance(row, bin_of(chance))
            hopes.append(path)
        return hopes

    def _pays(self, rows: Sequence[Row], drafting: Sequence[Row], rate: float, without: float) -> bool:
        """Whether the draft model, at this rate, saves more time than it takes to read the texts it has not read."""
        unread = sum(len(row.tokens) for row in drafting if not self._has_read(row))
        tokens = sum(min(row.remaining, HORIZON) for row in rows)
        pays = tokens / rate + self.pace.reading(unread) < tokens / without
        if pays:
            self.rest.over(rows[0])
        elif unread:
            self.prospects.relax()
            self.pace.doubt_reading()
        return pays

    def _has_read(self, row: Row) -> bool:
        return not self.reads or row in self._read

    def _tried(self, rows: Sequence[Row]) -> bool:
        """Whether a draft model that does not seem to pay is tried now: for all rows at once, which share its steps."""
        return self.rest.due(rows[0])

    def _ask(self, row: Row, length: int) -> int:
        self.prospects.ask(row, length)
        if not self._has_read(row):
            self._read.add(row)
            self._reading += len(row.tokens)
        return length

    def _watched(self, row: Row, drafted: int, hope: Sequence[float] | None, length: int) -> int:
        """Of a draft whose tokens are judged by position; one that does not seem to pay is verified at times."""
        if hope is None:
            return length
        if not length and drafted and self.rest.due(row):
            length = drafted
        self.prospects.ask(row, drafted, length)
        return length

    def _hopes(self, rows: Sequence[Row], draft: Draft) -> list[Sequence[float] | None]:
        told: Sequence[Sequence[float] | None]
        if draft.hopes is not None:
            told = draft.hopes
        elif draft.probs is None and not draft.steps:
            told = [self.prospects.hopes(row, length) for row, length in zip(rows, draft.lengths, strict=True)]
        else:
            told = [None] * len(rows)
        return [hope if row.params.num_draft_tokens is None else None for row, hope in zip(rows, told, strict=True)]

    def _stepping(self, expected: Sequence[Yield], rows: int, beside: Sequence[Sequence[float]]) -> float:
        """Tokens per second of a round in which a draft model drafts for some rows, beside look-ups of others."""
        longest, total = max((one.drafted for one in expected), default=0.0), sum(one.drafted for one in expected)

        def seconds(looked_up: int, drafted: int) -> float:
            verify = self.pace.verify(rows, max(looked_up, round(longest)), drafted + round(total))
            return longest * self.pace.step(rows) + verify

        return best_lengths(beside, seconds, rows + sum(one.brought for one in expected), even=self.pace.even)[1]


def bin_of(chance: float) -> int:
    """The kind of a token by the draft model's own probability of it."""
    return min(BINS - 1, int(chance * BINS))
