"""Whether, with what and how far to draft: by measured costs, and by what drafts have brought.

Of the ways a round can go the one that promises the most tokens per second is taken. That is the rate of this round and
not of the whole text: a token that is accepted saves what it would take to get it a moment later, at the rate that is
possible here. Choices between tokens are never made: a sampled draft is not cut, it ends (docs/exactness.md).

`observe` learns, from rounds and the notes in them; everything else answers and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp
from statistics import fmean
from typing import NamedTuple
from weakref import WeakSet

from slipstream.core.types import Draft, Row
from slipstream.draft_length.acceptance_model import NOTHING, Confidence, DraftNote, DraftYields
from slipstream.draft_length.costs import CostModel, best_lengths
from slipstream.draft_length.row_history import Backoff, LeftToModel, QuietRounds, TextLengths

SPREAD = 0.03  # how far rows move apart by their drafts, as a share of the rounds that the longest one has still
PACED = 12  # rounds of one token each, added to those a row has had to tell how fast it will go on
TYPICAL = 1e9  # tokens of a text that nothing but its limit ends
LONGEST, IN_BATCH = 63, 15  # tokens of a retrieval draft: of a row alone, and of one in a batch at least
TRIED = 15  # of one that does not seem to pay and is verified to see
STEPS = 8  # steps of a draft model


@contextmanager
def awaited_together(rows: Sequence[Row]) -> Iterator[None]:
    """The caller goes on when the last of these rows has ended."""
    for row in rows:
        row.call_rows = rows
    try:
        yield
    finally:
        for row in rows:
            row.call_rows = ()  # rows that refer to each other would outlive their call


class Worth(NamedTuple):
    """What a row's tokens are worth beside those of a row like all others.

    sure: in any case. last: besides, if the row is the one that ends last; that becomes less likely with each token
    that puts it ahead, by a factor of e in `spread` tokens.
    """

    sure: float = 1.0
    last: float = 0.0
    spread: float = 1.0

    def of(self, ahead: float) -> float:
        """Of a token before which the row is so many ahead of where the others are by then."""
        return self.sure + self.last * exp(-ahead / self.spread) if self.last else self.sure


def worth_of_tokens(rows: Sequence[Row], seconds: Callable[[int], float], typical: float = TYPICAL) -> list[Worth]:
    """For each row, what a token of it is worth.

    A caller who waits for all rows of a call gains by a token of the row that ends last what a round costs, by a token
    of any other only what a row adds to a round. So drafts that put a row ahead of the others are hardly worth their
    verification, and those of the row behind them are worth more than usual. Everywhere else (rows of their own, rows
    of the call that wait for a place) tokens are worth the same.

    seconds: of a forward of that many rows without drafts. typical: tokens that texts have before they end by
    themselves: the more likely that is, the less it says who has the most to do.
    """
    call = rows[0].call_rows if rows else ()
    if len(rows) < 2 or not call or any(row.call_rows is not call for row in rows):
        return [Worth()] * len(rows)
    if any(not row.rounds and row.finish_reason is None for row in call):
        return [Worth()] * len(rows)
    left = [row.remaining * (len(row.rounds) + PACED) / (row.num_output_tokens + PACED) for row in rows]  # rounds
    whole, longest = seconds(len(rows)), max(1.0, *left)
    sure = min(1.0, max(0.0, (whole - seconds(len(rows) - 1)) * len(rows) / whole))
    spread = longest * (SPREAD + 1 - exp(-longest / typical))
    likely = [exp((one - longest) / spread) for one in left]  # to be the last one
    return [Worth(sure, (1 - sure) * len(rows) * one / sum(likely), spread) for one in likely]


class Decision(NamedTuple):
    """What a draft model is asked for. lengths: 0 where it is not; notes: for `observe`; both per row."""

    lengths: list[int]
    notes: list[DraftNote]


@dataclass
class DraftController:
    """What is known about costs and drafts, shared by the policy and the drafters of one decoder.

    reads: the drafter must read a text before its first draft, as a draft model with a KV cache of its own does.
    has_cached: whether it has a row's text in its cache from reading ahead; to_read: how many of its tokens it reads.
    """

    cost_model: CostModel
    longest: int = LONGEST
    steps: int = STEPS
    reads: bool = True
    has_cached: Callable[[Row], bool] = lambda row: False
    to_read: Callable[[Row], int] = lambda row: len(row.tokens)
    draft_yields: DraftYields = field(init=False)
    confidence: Confidence = field(default_factory=Confidence)
    backoff: Backoff = field(default_factory=Backoff)
    text_lengths: TextLengths = field(default_factory=TextLengths)
    quiet: QuietRounds = field(default_factory=QuietRounds)
    left_to_model: LeftToModel = field(default_factory=LeftToModel)
    _read: WeakSet[Row] = field(default_factory=WeakSet)  # rows whose text the draft model has read
    _unread: WeakSet[Row] = field(default_factory=WeakSet)  # those whose text it did not pay to read, at first

    def __post_init__(self) -> None:
        self.draft_yields = DraftYields(max(self.longest, self.steps))

    def observe(self, rows: Sequence[Row]) -> None:
        """Learn from the newest round of each row; of those that have ended, that they have."""
        self.text_lengths.learn(rows)
        self.quiet.learn(rows)
        rows = [row for row in rows if row.finish_reason is None]
        noted = [(row, note) for row in rows if isinstance(note := row.rounds[-1].note, DraftNote)]
        self.cost_model.learn(rows, sum(note.reading for _, note in noted))
        for row, note in noted:
            if note.reading or (note.asked and self.reads):
                self._read.add(row)
            if note.decided == "paid":
                self.backoff.reset(row)
            elif note.decided == "waited":
                self.backoff.waited(row)
            if note.unread:
                self.draft_yields.relax()
                if row not in self._unread:
                    self.cost_model.doubt_drafting()
                    self._unread.add(row)
            if note.better is not None:
                self.left_to_model.learn(row, len(row.rounds[-1].tokens), left=note.better)
            self.confidence.learn(row, note)
            if (accepted := self.draft_yields.learn(row, note)) is not None:
                self.backoff.tried(row, accepted)

    def longest_of(self, rows: int) -> int:
        """Tokens of a retrieval draft of one of so many rows, at most."""
        return min(self.longest, max(IN_BATCH, self.longest // max(rows, 1)))

    def stepping(self, rows: Sequence[Row]) -> Decision:
        """How many tokens to ask a drafter for whose drafts cost time: as many as it can, or none.

        A draft model stops by itself where the next step would not pay.
        """
        count = len(rows)
        rate = self.cost_model.rate([self.draft_yields.of(row) for row in rows], count, [])
        pays, first = self._pays(rows, rows, rate, count / self.cost_model.verify(count, 0))
        due = not pays and self.backoff.due(rows[0])
        lengths = [self.steps if pays else int(due and self._has_read(row)) for row in rows]
        return Decision(lengths, self._notes(rows, lengths, first))

    def cut(self, rows: Sequence[Row], draft: Draft) -> Draft:
        """The draft as far as it is worth verifying.

        Sampled drafts stay whole, and rows that asked for a length, and rows without acceptance probabilities in a
        draft that has some. Where no row of a retrieval draft has any, a token's is that of its position.
        """
        if not any(draft.lengths):
            return draft
        probs = self._known_probs(rows, draft)
        whole = [n for n, known in zip(draft.lengths, probs, strict=True) if known is None]
        least, beside = max(whole, default=0), sum(whole)
        sure = sum(self.draft_yields.of(row).accepted for row, known in zip(rows, probs, strict=True) if known is None)
        together = min(sum(known or ()) for known in probs)  # what all rows have ahead puts none ahead of the others
        chosen, _ = best_lengths(
            [
                [by.of(max(0.0, n - together)) * prob for n, prob in enumerate(known or ())]
                for by, known in zip(self._worth(rows), probs, strict=True)
            ],
            lambda longest, drafted: self.cost_model.optimistic(len(rows), max(longest, least), drafted + beside),
            len(rows) + sure,
            even=self.cost_model.even,
        )
        lengths = [
            n if known is None else min(n, length)
            for n, known, length in zip(draft.lengths, probs, chosen, strict=True)
        ]
        if draft.acceptance_probs is None and any(known is not None for known in probs):
            lengths, notes = self._with_trials(rows, draft, probs, lengths)
            draft = replace(draft, notes=notes)
        return draft.cut(lengths)

    def least_useful(self, rows: Sequence[Row]) -> list[float]:
        """A retrieved token of a row that is accepted less likely than this pays in no draft of these rows, about."""
        if self.cost_model.even:
            return [0.0] * len(rows)
        plain, further = self.cost_model.verify(len(rows), 0), self.cost_model.further(len(rows))
        least = max(0.0, further) * len(rows) / plain
        return [least / worth.of(0) for worth in self._worth(rows)]

    def prefer_model(self, rows: Sequence[Row], probs: Sequence[Sequence[float]], asked: Sequence[int]) -> Decision:
        """For which rows a draft model's draft is worth more than a retrieval draft of these acceptance probs.

        asked: tokens each row may draft. The decision's lengths are 0 for the others.
        """
        count, most = len(rows), [min(n, self.steps) for n in asked]
        verify = partial(self.cost_model.verify, count)
        lengths, without = best_lengths(probs, verify, count, even=self.cost_model.even)
        expected = [self.draft_yields.of(row).cut(n) for row, n in zip(rows, most, strict=True)]
        better = [one.accepted > sum(known[:n]) for one, known, n in zip(expected, probs, lengths, strict=True)]
        beside = [known for known, model in zip(probs, better, strict=True) if not model]
        rate = self.cost_model.rate([one for one, model in zip(expected, better, strict=True) if model], count, beside)
        drafting = [row for row, model in zip(rows, better, strict=True) if model]
        first, chosen = NOTHING, better
        if drafting:
            pays, first = self._pays(rows, drafting, rate, without)
            if not pays:
                due = self.backoff.due(rows[0])
                chosen = [model and due and self._has_read(row) for row, model in zip(rows, better, strict=True)]
        wanted = [n if model else 0 for model, n in zip(chosen, most, strict=True)]
        notes = self._notes(rows, wanted, first)
        better = [model and rate > without for model in better]
        return Decision(wanted, [replace(note, better=model) for note, model in zip(notes, better, strict=True)])

    def another_step(self, rows: Sequence[Row], chances: Sequence[Sequence[float]], batch: int) -> bool:
        """Whether a draft model should go on, for these rows of a batch, all of which wait meanwhile.

        chances[i]: how sure it is of each token of row i so far.
        """
        if not rows:
            return False
        drafted = len(chances[0])
        worth = self._worth(rows)
        brought = sum(
            by.of(0) * self.confidence.acceptance_probs(row, own)[-1] * self.draft_yields.at(row, drafted)
            for by, row, own in zip(worth, rows, chances, strict=True)
        )
        seconds = partial(self.cost_model.optimistic, batch)
        longer = seconds(drafted + 1, (drafted + 1) * len(rows)) - seconds(drafted, drafted * len(rows))
        more = self.cost_model.step(batch) + longer
        return brought > more * self.cost_model.rate([self.draft_yields.of(row) for row in rows], batch, [])

    def pays_for(self, row: Row) -> bool:
        """Whether a draft model promises to save a row, by itself, more time than it takes to read its text."""
        rate = self.cost_model.rate([self.draft_yields.of(row)], 1, [])
        return self._pays([row], [row], rate, 1 / self.cost_model.verify(1, 0))[0]

    def _pays(
        self, rows: Sequence[Row], drafting: Sequence[Row], rate: float, without: float
    ) -> tuple[bool, DraftNote]:
        """Whether the draft model, at this rate, saves more time than it takes to read the texts it has not read.

        And what to note of it, with the first row. Only the tokens that retrieval leaves to it can save time.
        """
        unread = sum(self.to_read(row) for row in drafting if not self._has_read(row))
        left = fmean(map(self.left_to_model.share, drafting))
        tokens = left * sum(map(self.text_lengths.expected, rows))
        if tokens / rate + self.cost_model.reading(unread) < tokens / without:
            return True, DraftNote(decided="paid")
        return False, DraftNote(decided="waited", unread=unread > 0)

    def _notes(self, rows: Sequence[Row], lengths: Sequence[int], first: DraftNote) -> list[DraftNote]:
        notes = [
            DraftNote(n, reading=0 if self._has_read(row) else self.to_read(row)) if n else NOTHING
            for row, n in zip(rows, lengths, strict=True)
        ]
        if notes:
            notes[0] = replace(notes[0], decided=first.decided, unread=first.unread)
        return notes

    def _worth(self, rows: Sequence[Row]) -> list[Worth]:
        return worth_of_tokens(rows, partial(self.cost_model.verify, longest=0), self.text_lengths.typical)

    def _has_read(self, row: Row) -> bool:
        return not self.reads or row in self._read or self.has_cached(row)

    def _with_trials(
        self, rows: Sequence[Row], draft: Draft, probs: Sequence[Sequence[float] | None], lengths: Sequence[int]
    ) -> tuple[list[int], tuple[object, ...]]:
        """Lengths of drafts whose tokens are judged by position: one that does not seem to pay is verified at times."""
        notes, chosen = list(draft.notes or [NOTHING] * len(rows)), list(lengths)
        for i, (row, drafted, known) in enumerate(zip(rows, draft.lengths, probs, strict=True)):
            if known is None:
                continue
            waits = not lengths[i] and drafted > 0
            if waits and self.backoff.due(row):
                chosen[i] = min(drafted, TRIED)
            notes[i] = DraftNote(drafted, chosen[i], decided="waited" if waits else "")
        return chosen, tuple(notes)

    def _known_probs(self, rows: Sequence[Row], draft: Draft) -> list[Sequence[float] | None]:
        told: Sequence[Sequence[float] | None]
        if draft.acceptance_probs is not None:
            told = draft.acceptance_probs
        elif draft.probs is None and not draft.steps:
            yields = self.draft_yields
            told = [yields.acceptance_probs(row, length) for row, length in zip(rows, draft.lengths, strict=True)]
        else:
            told = [None] * len(rows)
        return [known if row.params.num_draft_tokens is None else None for row, known in zip(rows, told, strict=True)]
