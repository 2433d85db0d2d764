"""What a token of a row is worth beside one of another row: a call is waited for until its last row has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import exp
from typing import NamedTuple

from slipstream.core.types import Row

SPREAD = 0.03  # how far rows move apart by their drafts, as a share of the rounds that the longest one has still
PACED = 12  # rounds of one token each, added to those a row has had to tell how fast it will go on
TYPICAL = 1e9  # tokens of a text that nothing but its limit ends
PRIOR_TOKENS, PRIOR_TEXTS = 64.0, 0.5  # tokens of a text, before any has ended; and by how many ends that is believed
REMEMBERED_TEXTS = 32  # latest texts by which it goes, about


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


class TextLengths:
    """Counts tokens and ends: at every token a text is as likely to end as at any other."""

    def __init__(self) -> None:
        self._tokens, self._ends = PRIOR_TOKENS * PRIOR_TEXTS, PRIOR_TEXTS

    def learn(self, rows: Sequence[Row]) -> None:
        """Take in the newest round of each row; a text that was cut off has not ended."""
        for row in rows:
            if not row.rounds:  # it failed before its first
                continue
            self._tokens += len(row.rounds[-1].tokens)
            self._ends += row.finish_reason == "stop"
            if row.finish_reason is not None:
                self._tokens *= 1 - 1 / REMEMBERED_TEXTS
                self._ends *= 1 - 1 / REMEMBERED_TEXTS

    @property
    def typical(self) -> float:
        """Tokens between two ends."""
        return self._tokens / self._ends

    def expected(self, row: Row) -> float:
        """Tokens that the row's text has still: as many as texts have between two ends, if it may."""
        return min(row.remaining, self.typical)
