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

from slipstream.core.types import Draft, Row
from slipstream.draft_length.acceptance_model import AcceptanceModel
from slipstream.draft_length.cost_model import CostModel, best_lengths
from slipstream.draft_length.draft_yields import Backoff, DraftYields, Yield

LONGEST = 15  # tokens of a look-up
STEPS = 8  # steps of a draft model
HORIZON = 64  # tokens that a text is expected to have still, if it may
BINS = 20  # of the draft model's own probability of a token


@dataclass
class DraftController:
    """What is known about costs and drafts, shared by the policy and the drafters of one decoder.

    reads: the drafter must read a text before its first draft, as a draft model with a memory of its own does.
    """

    cost_model: CostModel
    longest: int = LONGEST
    steps: int = STEPS
    reads: bool = True
    draft_yields: DraftYields = field(init=False)
    sure: AcceptanceModel = field(init=False)
    backoff: Backoff = field(default_factory=Backoff)
    _read: WeakSet[Row] = field(default_factory=WeakSet)  # rows whose text the draft model has read
    _reading: int = 0  # tokens it reads in this round

    def __post_init__(self) -> None:
        self.draft_yields = DraftYields(max(self.longest, self.steps))
        self.sure = AcceptanceModel([(i + 0.5) / BINS for i in range(BINS)])

    def learn(self, rows: Sequence[Row]) -> None:
        """Take in the rows' newest round."""
        self.cost_model.learn(rows, self._reading)
        self._reading = 0
        for row in rows:
            if (kept := self.draft_yields.learn(row)) is not None:
                self.backoff.tried(row, kept)

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """How many tokens to ask a drafter for whose drafts cost time: as many as it can, or none.

        A draft model stops by itself where the next step would not pay.
        """
        count = len(rows)
        rate = self._stepping([self.draft_yields.of(row) for row in rows], count, [])
        if self._pays(rows, rows, rate, count / self.cost_model.verify(count, 0)):
            return [self._ask(row, self.steps) for row in rows]
        tried = self._tried(rows)
        return [self._ask(row, 1) if tried and self._has_read(row) else 0 for row in rows]

    def cut(self, rows: Sequence[Row], draft: Draft) -> Draft:
        """The draft as far as it is worth verifying.

        Drawn drafts stay whole, and rows that asked for a length, and rows of a draft that says what to hope for of
        others only. Where no draft does, a looked-up token's chance is that of its position.
        """
        acceptance_probs = self._acceptance_probs(rows, draft)
        whole = [
            n for n, acceptance_prob in zip(draft.lengths, acceptance_probs, strict=True) if acceptance_prob is None
        ]
        least, beside = max(whole, default=0), sum(whole)
        chosen, _ = best_lengths(
            [acceptance_prob or [] for acceptance_prob in acceptance_probs],
            lambda longest, drafted: self.cost_model.verify(len(rows), max(longest, least), drafted + beside),
            len(rows)
            + sum(
                self.draft_yields.of(row).brought
                for row, acceptance_prob in zip(rows, acceptance_probs, strict=True)
                if acceptance_prob is None
            ),
            even=self.cost_model.even,
        )
        lengths = [
            n if acceptance_prob is None else min(n, length)
            for n, acceptance_prob, length in zip(draft.lengths, acceptance_probs, chosen, strict=True)
        ]
        if draft.acceptance_probs is None:
            lengths = [self._watched(*one) for one in zip(rows, draft.lengths, acceptance_probs, lengths, strict=True)]
        return draft.cut(lengths)

    def prefer_model(
        self, rows: Sequence[Row], acceptance_probs: Sequence[Sequence[float]], asked: Sequence[int]
    ) -> list[bool]:
        """For which rows a draft model's draft is worth more than a look-up of which `hopes` are held.

        asked: tokens each row may draft.
        """
        count, most = len(rows), [min(n, self.steps) for n in asked]
        lengths, without = best_lengths(
            acceptance_probs, partial(self.cost_model.verify, count), count, even=self.cost_model.even
        )
        expected = [self.draft_yields.of(row).cut(n) for row, n in zip(rows, most, strict=True)]
        better = [
            one.brought > sum(acceptance_prob[:n])
            for one, acceptance_prob, n in zip(expected, acceptance_probs, lengths, strict=True)
        ]
        looked_up = [
            acceptance_prob for acceptance_prob, model in zip(acceptance_probs, better, strict=True) if not model
        ]
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
            self.acceptance_probs(row, own)[-1] * self.draft_yields.hold(row, drafted)
            for row, own in zip(rows, chances, strict=True)
        )
        verify = partial(self.cost_model.verify, batch)
        more = (
            self.cost_model.step(batch)
            + verify(drafted + 1, (drafted + 1) * len(rows))
            - verify(drafted, drafted * len(rows))
        )
        return brought > more * self._stepping([self.draft_yields.of(row) for row in rows], len(rows), [])

    def acceptance_probs(self, row: Row, chances: Sequence[float]) -> list[float]:
        """The chance that the first 1, 2, ... tokens all come true, by the draft model's own probabilities."""
        path, acceptance_probs = 1.0, []
        for chance in chances:
            path *= self.sure.chance(row, bin_of(chance))
            acceptance_probs.append(path)
        return acceptance_probs

    def _pays(self, rows: Sequence[Row], drafting: Sequence[Row], rate: float, without: float) -> bool:
        """Whether the draft model, at this rate, saves more time than it takes to read the texts it has not read."""
        unread = sum(len(row.tokens) for row in drafting if not self._has_read(row))
        tokens = sum(min(row.remaining, HORIZON) for row in rows)
        pays = tokens / rate + self.cost_model.reading(unread) < tokens / without
        if pays:
            self.backoff.over(rows[0])
        elif unread:
            self.draft_yields.relax()
            self.cost_model.doubt_reading()
        return pays

    def _has_read(self, row: Row) -> bool:
        return not self.reads or row in self._read

    def _tried(self, rows: Sequence[Row]) -> bool:
        """Whether a draft model that does not seem to pay is tried now: for all rows at once, which share its steps."""
        return self.backoff.due(rows[0])

    def _ask(self, row: Row, length: int) -> int:
        self.draft_yields.ask(row, length)
        if not self._has_read(row):
            self._read.add(row)
            self._reading += len(row.tokens)
        return length

    def _watched(self, row: Row, drafted: int, acceptance_prob: Sequence[float] | None, length: int) -> int:
        """Of a draft whose tokens are judged by position; one that does not seem to pay is verified at times."""
        if acceptance_prob is None:
            return length
        if not length and drafted and self.backoff.due(row):
            length = drafted
        self.draft_yields.ask(row, drafted, length)
        return length

    def _acceptance_probs(self, rows: Sequence[Row], draft: Draft) -> list[Sequence[float] | None]:
        told: Sequence[Sequence[float] | None]
        if draft.acceptance_probs is not None:
            told = draft.acceptance_probs
        elif draft.probs is None and not draft.steps:
            told = [
                self.draft_yields.acceptance_probs(row, length) for row, length in zip(rows, draft.lengths, strict=True)
            ]
        else:
            told = [None] * len(rows)
        return [
            acceptance_prob if row.params.num_draft_tokens is None else None
            for row, acceptance_prob in zip(rows, told, strict=True)
        ]

    def _stepping(self, expected: Sequence[Yield], rows: int, beside: Sequence[Sequence[float]]) -> float:
        """Tokens per second of a round in which a draft model drafts for some rows, beside look-ups of others."""
        longest, total = max((one.drafted for one in expected), default=0.0), sum(one.drafted for one in expected)

        def seconds(looked_up: int, drafted: int) -> float:
            verify = self.cost_model.verify(rows, max(looked_up, round(longest)), drafted + round(total))
            return longest * self.cost_model.step(rows) + verify

        return best_lengths(beside, seconds, rows + sum(one.brought for one in expected), even=self.cost_model.even)[1]


def bin_of(chance: float) -> int:
    """The kind of a token by the draft model's own probability of it."""
    return min(BINS - 1, int(chance * BINS))
