"""When drafting that did not seem to pay is tried again."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from slipstream.core.types import Row

SOONEST, LATEST = 4, 64  # rounds until a drafter that did not pay is tried again


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
