"""How much of a row's text retrieval leaves to a draft model, by the rounds in which that would have been better."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from slipstream.core.types import Row

WEIGHT = 8.0  # tokens of its own until a row is believed as much as the rows before it
REMEMBERED = 128  # latest tokens of all rows by which those go, about


class LeftToModel:
    """Counts tokens: a text that retrieval drafts saves little by a draft model, which must read all of it first."""

    def __init__(self) -> None:
        self._shared = 1.0
        self._rows: WeakKeyDictionary[Row, tuple[float, float]] = WeakKeyDictionary()  # tokens left; all

    def learn(self, row: Row, tokens: int, *, left: bool) -> None:
        """A round of so many tokens, in which a draft model promised more than retrieval, or did not."""
        some, every = self._of(row)
        self._rows[row] = (some + tokens * left, every + tokens)
        self._shared += min(1.0, tokens / REMEMBERED) * (left - self._shared)

    def share(self, row: Row) -> float:
        """0 to 1: of the row's tokens, those that came in such rounds."""
        some, every = self._of(row)
        return some / every

    def _of(self, row: Row) -> tuple[float, float]:
        return self._rows.get(row, (WEIGHT * self._shared, WEIGHT))
