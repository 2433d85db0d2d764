"""How many tokens a text is expected to have still, by how often texts have ended."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.types import Row

FIRST, WEIGHT = 64.0, 0.5  # tokens of a text, before any has ended; and by how many ends that is believed
REMEMBERED = 32  # latest texts by which it goes, about


class TextLengths:
    """Counts tokens and ends: at every token a text is as likely to end as at any other."""

    def __init__(self) -> None:
        self._tokens, self._ends = FIRST * WEIGHT, WEIGHT

    def learn(self, rows: Sequence[Row]) -> None:
        """Take in the newest round of each row; a text that was cut off has not ended."""
        for row in rows:
            if not row.rounds:  # it failed before its first
                continue
            self._tokens += len(row.rounds[-1].tokens)
            self._ends += row.finish_reason == "stop"
            if row.finish_reason is not None:
                self._tokens *= 1 - 1 / REMEMBERED
                self._ends *= 1 - 1 / REMEMBERED

    @property
    def typical(self) -> float:
        """Tokens between two ends."""
        return self._tokens / self._ends

    def expected(self, row: Row) -> float:
        """Tokens that the row's text has still: as many as texts have between two ends, if it may."""
        return min(row.remaining, self.typical)
