"""Chooses which source drafts for each row, and how many tokens, to maximise expected tokens per second.

Every round each source that can draft for a row makes an offer: how likely its 1st, 2nd, ... token is to be accepted,
and how many seconds drafting takes. The planner starts from plain decoding and adds the likeliest token of all offers
as long as that raises the expected tokens per second of the batch (`best_lengths`). How likely tokens are is counted
per kind of token, in this row first, then in all (`acceptance_model.py`); seconds are the calibration, corrected by
what rounds took (`costs.py`). A draft model that must read a text first pays for that with the tokens that the text is
expected to have left. A source that was passed over is tried again after 4, 8, ... 64 rounds.

Choices between tokens are never made: a sampled draft is not cut, it ends (docs/exactness.md). `observe` learns;
everything else answers and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from weakref import WeakKeyDictionary, WeakSet

from slipstream.core.loop import PREDICTION
from slipstream.core.rounds import Round
from slipstream.core.types import Draft, Row
from slipstream.draft_length.acceptance_model import ModelDrafts, Positions
from slipstream.draft_length.costs import CostModel, best_lengths
from slipstream.draft_length.row_worth import TextLengths, Worth, worth_of_tokens
from slipstream.draft_length.tree_growth import RETRIEVAL

LONGEST, IN_BATCH = 63, 15  # tokens of a retrieval draft: of a row alone, and of one in a batch at least
STEPS = 8  # steps of a draft model
MODEL = "model"  # the source of drafts that take a forward for each token
SOONEST, LATEST = 4, 64  # rounds until a source that was passed over is tried again
MARGIN = 1.5  # how many times what reading a text takes it must save: much of the text is not known yet
NEWEST = 0.1  # what the newest search counts in what searches have saved
OWN_TOKENS, ALL_TOKENS = (
    16,
    128,
)  # newest tokens of a row, and of all, that say what retrieval leaves to the draft model


@dataclass
class Pause:
    """Of a source that is passed over. length: rounds until it is due; waited: those that have passed."""

    length: int = SOONEST
    waited: int = 0

    @property
    def is_due(self) -> bool:
        """Whether the source is tried in this round."""
        return self.waited + 1 >= self.length

    def observe(self, *, drafted: bool, brought: int) -> None:
        """A trial in vain doubles the next pause; one that brings tokens makes it a quarter, drafting on ends it."""
        if not drafted:
            self.waited += 1
            return
        was_trial, self.waited = self.waited > 0, 0
        longer = max(SOONEST, self.length // 4) if brought else min(LATEST, 2 * self.length)
        self.length = longer if was_trial else SOONEST


@dataclass
class RowPlan:
    """What the planner remembers of a row.

    saved: seconds that a search for retrieval drafts has saved lately, less what verifying them took; None before the
    first. left: the share of tokens that come in rounds in which retrieval brings less than the draft model would.
    """

    model: Pause = field(default_factory=Pause)
    retrieval: Pause = field(default_factory=Pause)
    saved: float | None = None
    left: float = 1.0


@dataclass(eq=False)
class Planner:
    """A policy, which drafters ask as well; one for all of a decoder.

    steps: of a draft model in a round; room: tokens it may draft with them, with what stands beside its chains.
    has_model: a draft model or the like drafts, a forward for each token; asks_model: nothing else does, so that it is
    the policy that asks whether it pays. is_plain: nothing drafts but predictions. reads: the draft model must read a
    text before its first draft; has_cached: whether it has, ahead of that; to_read: how many tokens of it.
    fixed_length: tokens for rows whose text depends on its drafts (`is_fixed`), for which costs do not count, so that a
    seed gives the same text again.
    """

    costs: CostModel
    longest: int = LONGEST
    steps: int = STEPS
    room: int = STEPS
    has_model: bool = False
    asks_model: bool = False
    reads: bool = True
    is_plain: bool = False
    fixed_length: int = 0
    is_fixed: Callable[[Row], bool] = lambda row: False
    has_cached: Callable[[Row], bool] = lambda row: False
    to_read: Callable[[Row], int] = lambda row: len(row.tokens)
    model_drafts: ModelDrafts = field(init=False)
    text_lengths: TextLengths = field(default_factory=TextLengths)
    _positions: Positions = field(init=False)  # of retrieval drafts that say nothing of their tokens
    _rows: WeakKeyDictionary[Row, RowPlan] = field(default_factory=WeakKeyDictionary)
    _unread: Pause = field(default_factory=Pause)  # whose rounds are texts that the draft model has not read
    _read: WeakSet[Row] = field(default_factory=WeakSet)
    _left: float = 1.0  # of new rows, see `RowPlan`
    _search_seconds: float = 0.0  # for a row

    def __post_init__(self) -> None:
        self.model_drafts, self._positions = ModelDrafts(self.steps), Positions(self.longest)

    def observe(self, rows: Sequence[Row]) -> None:
        """Learn from the newest round of each row; of those that have ended, that they have."""
        if self.is_plain and not any(row.prediction for row in rows):
            return
        self.text_lengths.learn(rows)
        rows = [row for row in rows if row.rounds]
        drafted = [row for row in rows if self._is_of_model(row.rounds[-1])]
        new = [row for row in drafted if self.reads and row not in self._read]
        self.costs.learn(
            [row for row in rows if row.finish_reason is None],
            sum(self.to_read(row) - len(row.rounds[-1].tokens) for row in new),
        )
        self._read.update(new)
        for row in rows:
            self._learn(row)

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """As many tokens as can pay; where drafts have acceptance probabilities, as many as may be cut afterwards."""
        longest = min(self.longest, max(IN_BATCH, self.longest // max(len(rows), 1)))
        if self.asks_model:
            chosen = self.model_lengths(rows, [()] * len(rows), [self.room] * len(rows))
        else:
            chosen = [longest if self._searches(rows) else 0] * len(rows)
        return [self.fixed_length if self.is_fixed(row) else n for row, n in zip(rows, chosen, strict=True)]

    def model_lengths(self, rows: Sequence[Row], offers: Sequence[Sequence[float]], room: Sequence[int]) -> list[int]:
        """How many tokens to ask the draft model for: 0 for rows for which it promises less than what is offered.

        offers: acceptance probabilities of drafts that are there already. It stops by itself where the next step would
        not pay.
        """
        count = len(rows)
        most = [min(n, self.steps) for n in room]
        lengths, without = best_lengths(offers, partial(self.costs.verify, count), count, even=self.costs.even)
        expected = [self.model_drafts.of(row).cut(n) for row, n in zip(rows, most, strict=True)]
        better = [ours.accepted > sum(probs[:n]) for ours, probs, n in zip(expected, offers, lengths, strict=True)]
        if not any(better):
            return [0] * count
        beside = [probs for probs, is_better in zip(offers, better, strict=True) if not is_better]
        rate = self.costs.rate(
            [ours for ours, is_better in zip(expected, better, strict=True) if is_better], count, beside
        )
        drafting = [row for row, is_better in zip(rows, better, strict=True) if is_better]
        if not self._pays(rows, drafting, rate, without):
            due = self._of(rows[0]).model.is_due  # all rows in the same round
            better = [is_better and due and self._has_read(row) for row, is_better in zip(rows, better, strict=True)]
        return [n if is_better else 0 for n, is_better in zip(room, better, strict=True)]

    def next_step_pays(self, rows: Sequence[Row], chances: Sequence[Sequence[float]], batch: int) -> bool:
        """Whether a draft model should go on, for these rows of a batch, all of which wait meanwhile.

        chances[i]: how sure it is of each token of row i so far.
        """
        if not rows:
            return False
        drafted = len(chances[0])
        brought = sum(
            worth.of(0) * self.model_drafts.chance_of_next(row, sure)
            for worth, row, sure in zip(self._worth(rows), rows, chances, strict=True)
        )
        seconds = partial(self.costs.verify, batch)
        wider = seconds(drafted + 1, (drafted + 1) * len(rows)) - seconds(drafted, drafted * len(rows))
        rate = self.costs.rate([self.model_drafts.of(row) for row in rows], batch, [])
        return brought > (self.costs.step(batch) + wider) * rate

    def worth_verifying(self, rows: Sequence[Row], draft: Draft) -> Draft:
        """The draft as far as it is worth verifying.

        Sampled drafts stay whole, and rows that asked for a length, and rows of a draft model that says nothing.
        """
        if not any(draft.lengths) or any(map(self.is_fixed, rows)):
            return draft
        offers = self._offers(rows, draft)
        whole = [n for n, probs in zip(draft.lengths, offers, strict=True) if probs is None]
        least, beside = max(whole, default=0), sum(whole)
        sure = sum(self.model_drafts.of(row).accepted for row, probs in zip(rows, offers, strict=True) if probs is None)
        together = min(sum(probs or ()) for probs in offers)  # what all rows have ahead puts none ahead of the others
        chosen, _ = best_lengths(
            [
                [worth.of(max(0.0, n - together)) * prob for n, prob in enumerate(probs or ())]
                for worth, probs in zip(self._worth(rows), offers, strict=True)
            ],
            lambda longest, drafted: self.costs.verify(len(rows), max(longest, least), drafted + beside),
            len(rows) + sure,
            even=self.costs.even,
        )
        lengths = [
            n if probs is None else min(n, self._tried(row, draft, i, length))
            for i, (row, n, probs, length) in enumerate(zip(rows, draft.lengths, offers, chosen, strict=True))
        ]
        return draft.cut(lengths)

    def drafts_for(self, row: Row) -> bool:
        """Whether a draft model promises to save a row, by itself, more time than it takes to read its text."""
        rate = self.costs.rate([self.model_drafts.of(row)], 1, [])
        return self.is_fixed(row) or self._pays([row], [row], rate, 1 / self.costs.verify(1, 0))

    def _pays(self, rows: Sequence[Row], drafting: Sequence[Row], rate: float, without: float) -> bool:
        """Whether the draft model, at this rate, saves more time than it takes to read the texts it has not read.

        Only the tokens that retrieval leaves to it can save time.
        """
        unread = sum(self.to_read(row) for row in drafting if not self._has_read(row))
        tokens = fmean(self._of(row).left for row in drafting) * sum(map(self.text_lengths.expected, rows))
        if unread and len(rows) == 1 and self._unread.is_due:
            return True
        return tokens / rate + MARGIN * self.costs.reading(unread) < tokens / without

    def _offers(self, rows: Sequence[Row], draft: Draft) -> list[Sequence[float] | None]:
        """Acceptance probabilities of what may be cut."""
        offers = []
        for row, origin, length in zip(rows, draft.records, draft.lengths, strict=True):
            probs = origin.acceptance_probs
            if probs is None and draft.probs is None and origin.source != MODEL and not draft.steps:
                probs = self._positions.acceptance_probs(row, length)
            offers.append(probs if row.params.num_draft_tokens is None else None)
        return offers

    def _tried(self, row: Row, draft: Draft, place: int, chosen: int) -> int:
        """How much is verified of a draft whose tokens are judged by position, which is seen by verifying it alone."""
        if chosen or draft.records[place].acceptance_probs is not None or not self._of(row).retrieval.is_due:
            return chosen
        return IN_BATCH

    def _searches(self, rows: Sequence[Row]) -> bool:
        """Whether looking for retrieval drafts saves the time that it takes, or is due."""
        plans = [self._of(row) for row in rows]
        saved = sum(self._hoped(len(rows)) if plan.saved is None else plan.saved for plan in plans)
        return self.has_model or saved > self._search_seconds or plans[0].retrieval.is_due

    def _hoped(self, count: int) -> float:
        """Seconds that a search for one of so many rows may save: a token."""
        return self.costs.verify(count, 0) / count

    def _learn(self, row: Row) -> None:
        """Take in a row's newest round."""
        done, plan = row.rounds[-1], self._rows.setdefault(row, RowPlan(left=self._left))
        is_of_model, accepted = self._is_of_model(done), done.without_forced.num_accepted_tokens
        if is_of_model:
            self.model_drafts.learn(row)
        elif done.origin.source != PREDICTION:
            self._learn_search(row, plan)
        plan.model.observe(drafted=is_of_model, brought=accepted)
        if self.has_model and not self.asks_model:
            is_left = is_of_model or accepted < self.model_drafts.of(row).accepted
            plan.left += min(1.0, len(done.tokens) / OWN_TOKENS) * (is_left - plan.left)
            self._left += min(1.0, len(done.tokens) / ALL_TOKENS) * (is_left - self._left)
        if done.num_rows > 1 or not self.reads or not self.has_model:
            return
        if not self._has_read(row):
            self.model_drafts.relax()
        if row.finish_reason is not None:
            self._unread.observe(drafted=self._has_read(row), brought=0)

    def _learn_search(self, row: Row, plan: RowPlan) -> None:
        done = row.rounds[-1].without_forced
        drafted, accepted, count = len(done.draft), done.num_accepted_tokens, done.num_rows
        if done.origin.acceptance_probs is None and drafted:
            self._positions.learn(row, done, len(done.chain))
        searched = done.origin.source == RETRIEVAL
        was_trial = plan.retrieval.waited > 0
        plan.retrieval.observe(drafted=searched or drafted > 0, brought=accepted)
        if not searched or done.num_draft_steps:
            return
        if was_trial and accepted:
            plan.saved = None
        self._search_seconds += NEWEST * (done.seconds.draft - self._search_seconds)
        hoped = self._hoped(count)
        wider = self.costs.verify(count, drafted, drafted) - self.costs.verify(count, 0) if drafted else 0.0
        before = hoped if plan.saved is None else plan.saved
        plan.saved = before + NEWEST * (accepted * hoped - wider - before)

    def _is_of_model(self, done: Round) -> bool:
        """Whether a draft model drafted for the row; objects that users hand over need not say so."""
        return done.origin.source == MODEL or (
            self.asks_model and done.origin.source != PREDICTION and done.draft != ()
        )

    def _of(self, row: Row) -> RowPlan:
        plan = self._rows.get(row)
        return RowPlan(left=self._left) if plan is None else plan

    def _worth(self, rows: Sequence[Row]) -> list[Worth]:
        return worth_of_tokens(rows, partial(self.costs.verify, longest=0), self.text_lengths.typical)

    def _has_read(self, row: Row) -> bool:
        return not self.reads or row in self._read or self.has_cached(row)
