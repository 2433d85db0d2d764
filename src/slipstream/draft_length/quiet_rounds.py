"""Rounds in which no draft is looked for: where looking takes a notable part of a round and has found little lately.

What a draft model takes is no looking; whether it pays is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from slipstream.core.types import Row

AFTER = 3  # rounds in a row whose drafts were worth no verification, or turned out so
PAID = 0.5  # share of the drafted tokens that are accepted where drafts are worth it
NOTABLE = 0.02  # share of a round's time from which on looking is left out then
SHARE = 0.01  # of their time that looking takes on average, once it is
MOST = 7  # rounds left out, at most


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
