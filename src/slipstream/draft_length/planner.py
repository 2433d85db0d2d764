"""Chooses which source drafts for each row, and how many tokens, to maximize expected tokens per second.

A text lookup offers tokens and estimates how likely its 1st, 2nd, ... is to be accepted; for a draft model the planner
knows how many tokens it usually drafts, and how many are accepted. A row takes the draft model where that promises more
tokens, if this saves time on the rest of the texts (`model_lengths`). Each draft is then cut to the part that makes the
batch's expected tokens per second highest (`worth_verifying`). Likelihoods are those of each kind of token, corrected
by this row (`acceptance_model.py`); seconds are the calibration, corrected by what rounds took (`costs.py`). If a draft
model must read a text first, that time must be saved on the tokens that the text is expected to have left. A source
that was passed over is tried in the 4th round, then after 8, 16, ... 64 rounds while that brings nothing. A draft model
that has not read the text of a row that runs alone is tried when reading takes little of the time spent without it.

Dropping a sampled token because of what it is would bias the text, so a sampled draft is never shortened afterwards: it
only stops growing. `observe` learns; everything else answers and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import exp
from operator import mul
from statistics import fmean
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from slipstream.core.interfaces import Source
from slipstream.core.rounds import MODEL, PREDICTION, RETRIEVAL, Round, depths
from slipstream.core.types import Draft, Row
from slipstream.draft_length.acceptance_model import ModelDrafts, Positions
from slipstream.draft_length.costs import CostModel, best_lengths

LONGEST, IN_BATCH = 63, 15  # most tokens of a retrieval draft: of a row alone, and of each in a large batch
STEPS = 8  # most steps of a draft model in a round
SOONEST, LATEST = 4, 64  # rounds until a source that was passed over is tried again
# `RowPlan.share_left` is averaged over this many tokens of a row, and for new rows over this many of all rows
OWN_TOKENS, ALL_TOKENS = 16, 128
SEARCHES = 32  # the seconds that searches take and save are averaged over this many searches of a row
PACED = 12  # a row's pace is estimated as if it had had this many more rounds, of one token each
TRIAL = 0.05  # to be tried again, a draft model may read for this share of the time that was spent without it
SPREAD = 0.07  # of the longest row's rounds: how far drafts move rows apart
TYPICAL = 64.0  # tokens after which a text is expected to end, if its limit is not reached before


@contextmanager
def awaited_together(rows: Sequence[Row]) -> Iterator[None]:
    """Mark these rows as one call, whose caller waits until the last of them has ended."""
    for row in rows:
        row.call_rows = rows
    try:
        yield
    finally:
        for row in rows:
            row.call_rows = ()  # rows that refer to each other would outlive their call


class Worth(NamedTuple):
    """Value of one more token of a row, relative to an average row: base + if_last * exp(-ahead / spread)."""

    base: float = 1.0  # in any case
    if_last: float = 0.0  # in addition, if the row is the last to end
    # tokens; the chance of ending last falls by a factor of e for each `spread` that a token puts its row ahead
    spread: float = 1.0

    def of(self, ahead: float) -> float:
        """The worth of a token that puts the row `ahead` tokens further than the others."""
        return self.base + self.if_last * exp(-ahead / self.spread) if self.if_last else self.base

    def of_draft(self, probs: Sequence[float], depths: Sequence[int], common: float) -> list[float]:
        """The expected worth of a draft's tokens, which never rises from one to the next.

        probs: each token's probability of being accepted; depths: number of draft tokens before it in the text.
        common: tokens that all rows gain, which put no row ahead.
        """
        if not self.if_last:
            return list(accumulate((self.base * prob for prob in probs), min))
        worths = (self.of(max(0.0, depth + 1 - common)) for depth in depths)
        return list(accumulate(map(mul, worths, probs), min))


def worth_of_tokens(rows: Sequence[Row], seconds: Callable[[int, int], float]) -> list[Worth]:
    """The value of one more token, for each row.

    For a caller who waits for all rows of a call, one more token of the row that ends last saves a whole round; one of
    any other row saves only that row's part of a round. So drafts that put a row ahead of the others are hardly worth
    verifying, and drafts of the row that ends last are worth more than usual. For other callers all tokens are worth
    the same. The further limits are beyond a typical length, the less is known about which row ends last.

    seconds: (number of rows, longest draft) -> seconds of a forward.
    """
    call = rows[0].call_rows if rows else ()
    if len(rows) < 2 or not call or any(row.call_rows is not call for row in rows):
        return [Worth()] * len(rows)
    if any(not row.rounds and row.finish_reason is None for row in call):  # a row of the call waits for a place
        return [Worth()] * len(rows)
    paces = [(len(row.rounds) + PACED) / (row.num_output_tokens + PACED) for row in rows]  # rounds per token
    tokens_left = [0 if row.finish_reason else min(row.remaining, TYPICAL) for row in rows]
    rounds_left = [tokens * pace for tokens, pace in zip(tokens_left, paces, strict=True)]
    total, longest = seconds(len(rows), 0), max(1.0, *rounds_left)
    base = min(1.0, max(0.0, (total - seconds(len(rows) - 1, 0)) * len(rows) / total))
    # where limits are far beyond a typical length, the ends of texts are spread as widely as the texts are long
    open_ended = max(0.0, 1 - TYPICAL / max(1, *(row.remaining for row in rows)))
    spread = (SPREAD + open_ended) * longest
    weights = [exp((rounds - longest) / spread) for rounds in rounds_left]  # relative chances of ending last
    return [Worth(base, (1 - base) * len(rows) * weight / sum(weights), spread) for weight in weights]


def lengths_without_costs(lengths: Sequence[int], draft: Draft, room: Sequence[int]) -> list[int]:
    """These lengths as far as there is room, but 0 for rows whose draft so far promises enough.

    Enough is 1.2 expected tokens, or 60 % of the length if that is less.
    """
    limited = map(min, lengths, room)
    return [0 if tokens >= min(1.2, 0.6 * n) else n for n, tokens in zip(limited, draft.promised, strict=True)]


@dataclass
class Pause:
    """The pause before a source that was passed over is tried again."""

    length: int = SOONEST  # rounds
    waited: int = 0  # rounds that have passed

    @property
    def is_due(self) -> bool:
        """True if the source is tried in this round."""
        return self.waited + 1 >= self.length

    def observe(self, *, drafted: bool, accepted: int) -> None:
        """Double the pause after a trial in which nothing was accepted; reset it when drafting helps."""
        if not drafted:
            self.waited += 1
            return
        has_failed = self.waited > 0 and not accepted
        self.length, self.waited = min(LATEST, 2 * self.length) if has_failed else SOONEST, 0


@dataclass
class RowPlan:
    """The planner's memory of a row."""

    model: Pause = field(default_factory=Pause)
    retrieval: Pause = field(default_factory=Pause)
    # share of the tokens that came in rounds in which retrieval brought fewer than the draft model would have
    share_left: float = 1.0


@dataclass(eq=False)
class Planner:
    """The policy of one decoder; its drafters ask it, too."""

    costs: CostModel
    longest: int = LONGEST  # most tokens of a retrieval draft
    room: int = STEPS  # most tokens of a draft model's draft, with runners-up and the tokens that retrieval adds
    has_model: bool = False  # there is a draft model, or another drafter that takes a forward pass for each token
    only_model: bool = False  # nothing else drafts but predictions
    reads: bool = True  # the draft model must read a row's tokens before its first draft
    is_plain: bool = False  # nothing drafts but predictions
    fixed_length: int = 0  # tokens for rows that `is_fixed`, whatever they cost: a seed gives the same text again
    is_fixed: Callable[[Row], bool] = lambda row: False  # the row's output depends on its drafts
    has_cached: Callable[[Row], bool] = lambda row: False  # the draft model has read the row's tokens ahead
    to_read: Callable[[Row], int] = lambda row: len(row.tokens)  # tokens of a row that the draft model reads
    model_drafts: ModelDrafts = field(init=False)
    _positions: Positions = field(init=False)  # for retrieval drafts without acceptance probabilities
    _rows: WeakKeyDictionary[Row, RowPlan] = field(default_factory=WeakKeyDictionary)
    _unread_seconds: float = 0.0  # spent on rows that ran alone since the draft model last read one
    _read: WeakSet[Row] = field(default_factory=WeakSet)
    _share_left: float = 1.0  # of new rows, see `RowPlan`
    # running means, per row: what a search for retrieval drafts takes, and what its drafts save after the cost of
    # verifying them; None before the first search
    _search_seconds: float = 0.0
    _saved_seconds: float | None = None

    def __post_init__(self) -> None:
        self.model_drafts, self._positions = ModelDrafts(STEPS), Positions(self.longest)

    def observe(self, rows: Sequence[Row]) -> None:
        """Learn from the newest round of each row, which may have been its last."""
        if self.is_plain and not any(row.prediction for row in rows):
            return
        rows = [row for row in rows if row.rounds]
        drafted = {row for row in rows if self._is_of_model(row.rounds[-1])}
        new = [row for row in drafted if self.reads and row not in self._read]
        self.costs.learn(
            [row for row in rows if row.finish_reason is None],
            sum(self.to_read(row) - len(row.rounds[-1].tokens) for row in new),
        )
        self._read.update(new)
        self._learn_search(rows)
        for row in rows:
            self._learn(row, is_of_model=row in drafted)

    def lengths(self, rows: Sequence[Row], source: Source, draft: Draft, room: Sequence[int]) -> list[int]:
        """The most tokens that can pay; `worth_verifying` cuts drafts to those that do."""
        longest = min(self.longest, max(IN_BATCH, self.longest // max(len(rows), 1)))
        if source.takes_forwards:
            offers = [probs or () for probs in draft.acceptance_probs]
            chosen = self.model_lengths(rows, offers, [min(longest, self.room, n) for n in room])
        else:
            is_asked = source.of_predictions or self._searches(rows)
            chosen = [min(longest, n) if is_asked else 0 for n in room]
        if not any(map(self.is_fixed, rows)):
            return chosen
        fixed = lengths_without_costs([self.fixed_length] * len(rows), draft, room)
        return [fixed[i] if self.is_fixed(row) else chosen[i] for i, row in enumerate(rows)]

    def model_lengths(self, rows: Sequence[Row], offers: Sequence[Sequence[float]], room: Sequence[int]) -> list[int]:
        """Number of tokens to ask the draft model for: 0 for rows for which it promises less than what is offered.

        offers: acceptance probabilities of retrieval drafts. room: the most tokens to ask for; the draft model stops
        earlier where the next step would not pay.
        """
        count = len(rows)
        lengths, other_rate = best_lengths(offers, partial(self.costs.verify, count), count, even=self.costs.even)
        yields = [self.model_drafts.of(row).cut(min(n, STEPS)) for row, n in zip(rows, room, strict=True)]
        drafting = [i for i in range(count) if yields[i].accepted > sum(offers[i][: lengths[i]])]
        if not drafting:
            return [0] * count
        retrieved = [offers[i] for i in range(count) if i not in drafting]
        rate = self.costs.rate([yields[i] for i in drafting], count, retrieved)
        unread = [i for i in drafting if not self._has_read(rows[i])]
        if not self._pays(rows, [rows[i] for i in drafting], [rows[i] for i in unread], rate, other_rate):
            is_due = self._plan_of(rows[0]).model.is_due  # one row decides, so that all are tried in the same round
            drafting = [i for i in drafting if is_due and i not in unread]
        return [n if i in drafting else 0 for i, n in enumerate(room)]

    def next_step_pays(self, rows: Sequence[Row], chances: Sequence[Sequence[float]], batch: int) -> bool:
        """True if the draft model should draft another token for these rows, while all `batch` rows wait.

        chances[i]: the draft model's probability of each token of row i so far.
        """
        if not rows:
            return False
        drafted = len(chances[0])
        ahead = drafted + 1 if len(rows) < batch else 0  # if every row drafts, none gets ahead
        gain = sum(
            worth.of(ahead) * self.model_drafts.chance_of_next(row, row_chances)
            for worth, row, row_chances in zip(worth_of_tokens(rows, self.costs.verify), rows, chances, strict=True)
        )
        seconds = partial(self.costs.verify, batch)
        wider = seconds(drafted + 1, (drafted + 1) * len(rows)) - seconds(drafted, drafted * len(rows))
        usual_rate = self.costs.rate([self.model_drafts.of(row) for row in rows], batch, [])
        return gain > (self.costs.step(batch) + wider) * max(usual_rate, batch / seconds(0))

    def worth_verifying(self, rows: Sequence[Row], draft: Draft) -> Draft:
        """The draft, cut where verifying more would cost more than it brings.

        Never cut are drafts of rows whose request sets a length, drafts of a model that reports no probabilities, and
        all drafts of a round in which one is sampled.
        """
        if not any(draft.lengths) or any(map(self.is_fixed, rows)):
            return draft
        offers = self._offers(rows, draft)
        uncut = [n for n, probs in zip(draft.lengths, offers, strict=True) if probs is None]
        longest_uncut, num_uncut = max(uncut, default=0), sum(uncut)
        accepted_uncut = sum(
            self.model_drafts.of(row).accepted for row, probs in zip(rows, offers, strict=True) if probs is None
        )
        common = min(sum(probs or ()) for probs in offers)
        depths_of_rows = [range(draft.width)] * len(rows) if draft.parents is None else map(depths, draft.parents)
        worths = worth_of_tokens(rows, self.costs.verify)
        chosen, _ = best_lengths(
            [
                worth.of_draft(probs or (), row_depths, common)
                for worth, probs, row_depths in zip(worths, offers, depths_of_rows, strict=True)
            ],
            lambda longest, drafted: self.costs.verify(len(rows), max(longest, longest_uncut), drafted + num_uncut),
            len(rows) + accepted_uncut,
            even=self.costs.even,
        )
        lengths = list(draft.lengths)
        for i, (row, origin, probs, length) in enumerate(zip(rows, draft.records, offers, chosen, strict=True)):
            if probs is None:
                continue
            if not length and origin.acceptance_probs is None and self._plan_of(row).retrieval.is_due:
                length = IN_BATCH  # a trial of drafts that are judged by position alone
            lengths[i] = min(lengths[i], length)
        return draft.cut(lengths)

    @property
    def plain_times(self) -> CostModel | None:
        """The measured costs; None where nothing is drafted that they could be compared with."""
        return None if self.is_plain else self.costs

    def expects_drafts(self, row: Row) -> bool:
        """True if the draft model would save a row that is alone more time than reading its tokens takes."""
        rate = self.costs.rate([self.model_drafts.of(row)], 1, [])
        unread = [] if self._has_read(row) else [row]
        return self.is_fixed(row) or self._pays([row], [row], unread, rate, 1 / self.costs.verify(1, 0))

    def _pays(
        self, rows: Sequence[Row], drafting: Sequence[Row], unread: Sequence[Row], rate: float, other_rate: float
    ) -> bool:
        """True if drafting with the model, at `rate`, saves more time than reading the rows it has not read takes."""
        # the draft model saves nothing on tokens for which retrieval does as well (`RowPlan.share_left`)
        tokens = fmean(self._plan_of(row).share_left for row in drafting) * sum(
            min(row.remaining, TYPICAL) for row in rows
        )
        reading = self.costs.reading(sum(map(self.to_read, unread)))
        if unread and len(rows) == 1 and reading < TRIAL * self._unread_seconds:
            return True
        # reading must save half as much again as it takes, as the text's length is a guess
        return tokens / rate + 1.5 * reading < tokens / other_rate

    def _offers(self, rows: Sequence[Row], draft: Draft) -> list[Sequence[float] | None]:
        """Each row's acceptance probabilities; None for drafts that must not be cut."""
        offers = []
        for row, origin, length in zip(rows, draft.records, draft.lengths, strict=True):
            probs = origin.acceptance_probs
            if probs is None and draft.probs is None and origin.source != MODEL and not draft.steps:
                probs = self._positions.acceptance_probs(row, length)
            offers.append(probs if row.params.num_draft_tokens is None else None)
        return offers

    def _searches(self, rows: Sequence[Row]) -> bool:
        """True if looking for retrieval drafts saves more time than it takes, or is due."""
        if self._saved_seconds is None or self._saved_seconds > self._search_seconds:
            return True
        return any(self._plan_of(row).retrieval.is_due for row in rows)

    def _learn(self, row: Row, *, is_of_model: bool) -> None:
        newest = row.rounds[-1]
        plan = self._rows[row] = self._plan_of(row)
        unforced = newest.without_forced
        accepted = unforced.num_accepted_tokens
        if is_of_model:
            self.model_drafts.learn(row, unforced)
        elif newest.origin.source != PREDICTION:
            if newest.origin.acceptance_probs is None and unforced.draft:
                self._positions.learn(row, unforced, len(unforced.chain))
            has_searched = newest.origin.source == RETRIEVAL or bool(unforced.draft)
            plan.retrieval.observe(drafted=has_searched, accepted=accepted)
        plan.model.observe(drafted=is_of_model, accepted=accepted)
        if self.has_model and not self.only_model:
            is_left = is_of_model or accepted < self.model_drafts.of(row).accepted
            plan.share_left += min(1.0, len(newest.tokens) / OWN_TOKENS) * (is_left - plan.share_left)
            self._share_left += min(1.0, len(newest.tokens) / ALL_TOKENS) * (is_left - self._share_left)
        if newest.num_rows == 1 and self.reads and self.has_model:
            self._unread_seconds = 0.0 if self._has_read(row) else self._unread_seconds + newest.seconds.total

    def _learn_search(self, rows: Sequence[Row]) -> None:
        """Learn what the newest round's search for retrieval drafts took, and what its drafts saved."""
        rounds = [row.rounds[-1] for row in rows]
        # with steps of a draft model, the seconds are theirs as well
        if not any(round.origin.source == RETRIEVAL for round in rounds) or rounds[0].num_draft_steps:
            return
        rounds = [round.without_forced for round in rounds]
        count, drafted = rounds[0].num_rows, [len(round.draft) for round in rounds]
        accepted = [round.num_accepted_tokens for round in rounds]
        tokens = sum(
            sum(worth.of_draft([1.0] * n, range(n), min(accepted)))
            for worth, n in zip(worth_of_tokens(rows, self.costs.verify), accepted, strict=True)
        )
        plain = self.costs.verify(count, 0)
        token_seconds = plain / count  # without drafts, which is what one more accepted token saves
        wider = self.costs.verify(count, max(drafted), sum(drafted)) - plain
        saved = (tokens * token_seconds - wider) / count
        if count == 1:  # a row alone: drafts that are not worth verifying are cut in any case
            saved = max(0.0, saved)
        before = token_seconds if self._saved_seconds is None else self._saved_seconds
        weight = 1 - (1 - 1 / SEARCHES) ** count
        self._saved_seconds = before + weight * (saved - before)
        self._search_seconds += weight * (rounds[0].seconds.draft / count - self._search_seconds)

    def _is_of_model(self, newest: Round) -> bool:
        source = newest.origin.source
        # a drafter object of the user's need not name its source
        return source == MODEL or (self.only_model and source != PREDICTION and newest.draft != ())

    def _plan_of(self, row: Row) -> RowPlan:
        plan = self._rows.get(row)
        return RowPlan(share_left=self._share_left) if plan is None else plan

    def _has_read(self, row: Row) -> bool:
        return not self.reads or row in self._read or self.has_cached(row)
