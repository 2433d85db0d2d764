"""What is counted along the way: when to try again what did not pay, how long texts get, and what retrieval leaves to
the draft model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from weakref import WeakKeyDictionary

from slipstream.core.types import Row

SOONEST, LATEST = 4, 64  # rounds until a drafter that did not pay is tried again
AFTER = 3  # rounds in a row whose drafts were worth no verification, or turned out so
PAID = 0.5  # share of the drafted tokens that are accepted where drafts are worth it
NOTABLE = 0.02  # share of a round's time from which on looking is left out then
SHARE = 0.01  # of their time that looking takes on average, once it is
MOST = 7  # rounds left out, at most
PRIOR_TOKENS, PRIOR_TEXTS = 64.0, 0.5  # tokens of a text, before any has ended; and by how many ends that is believed
REMEMBERED_TEXTS = 32  # latest texts by which it goes, about
PRIOR_OWN_TOKENS = 8.0  # tokens of its own until a row is believed as much as the rows before it
REMEMBERED_TOKENS = 128  # latest tokens of all rows by which those go, about


@dataclass
class Backoff:
    """A drafter that does not seem to pay is tried after 4 rounds, then 8 ... up to 64.

    A trial that brings a token makes the next pause a shorter one.
    """

    _pauses: WeakKeyDictionary[Row, tuple[int, int]] = field(default_factory=WeakKeyDictionary)  # length; waited

    def due(self, row: Row) -> bool:
        """Whether this is the round of a trial."""
        length, waited = self._pauses.get(row, (SOONEST, 0))
        return waited + 1 >= length

    def waited(self, row: Row) -> None:
        """A round has passed in which drafting did not seem to pay; if a trial was due, the next pause is longer."""
        length, waited = self._pauses.get(row, (SOONEST, 0))
        self._pauses[row] = (min(LATEST, 2 * length), 0) if self.due(row) else (length, waited + 1)

    def tried(self, row: Row, brought: int) -> None:
        """A draft of the row brought this many tokens."""
        length, waited = self._pauses.get(row, (SOONEST, 0))
        if brought and length > SOONEST:
            self._pauses[row] = max(SOONEST, length // 4), waited

    def reset(self, row: Row) -> None:
        """Drafting pays; the next pause is the shortest."""
        self._pauses.pop(row, None)


class QuietRounds:
    """Counts rounds whose drafts brought little, and how many of the next are left out; other rows begin anew."""

    def __init__(self) -> None:
        self.left = 0
        self._empty = self._rows = 0

    def learn(self, rows: Sequence[Row]) -> None:
        """Take in the newest round of each row."""
        done = [row.rounds[-1] for row in rows if row.rounds]
        if not done:
            return
        drafted, accepted = sum(len(one.draft) for one in done), sum(one.num_accepted_tokens for one in done)
        seconds, steps = done[0].seconds, done[0].num_draft_steps
        if len(done) != self._rows or steps or (drafted and accepted >= PAID * drafted):
            self._rows, self._empty, self.left = len(done), 0, 0
        elif self.left:
            self.left -= 1
        elif seconds.draft > 0:
            self._empty += 1
            looking = seconds.draft / max(1e-9, seconds.total - seconds.prefill)
            if self._empty >= AFTER and looking > NOTABLE:
                self.left = min(MOST, ceil(looking / SHARE) - 1)


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


class LeftToModel:
    """Counts tokens: a text that retrieval drafts saves little by a draft model, which must read all of it first."""

    def __init__(self) -> None:
        self._shared = 1.0
        self._rows: WeakKeyDictionary[Row, tuple[float, float]] = WeakKeyDictionary()  # tokens left; all

    def learn(self, row: Row, tokens: int, *, left: bool) -> None:
        """A round of so many tokens, in which a draft model promised more than retrieval, or did not."""
        some, every = self._of(row)
        self._rows[row] = (some + tokens * left, every + tokens)
        self._shared += min(1.0, tokens / REMEMBERED_TOKENS) * (left - self._shared)

    def share(self, row: Row) -> float:
        """0 to 1: of the row's tokens, those that came in such rounds."""
        some, every = self._of(row)
        return some / every

    def _of(self, row: Row) -> tuple[float, float]:
        return self._rows.get(row, (PRIOR_OWN_TOKENS * self._shared, PRIOR_OWN_TOKENS))
