"""What a drafter's drafts have brought in a row, and when one that did not pay is tried again."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from slipstream.core.types import Row
from slipstream.draft_length.acceptance_model import AcceptanceModel

HOLD = 0.75  # chance that a token comes true if all before it did, before anything is known
HOLD_STEP = 0.5  # positions say little, so rows are believed soon
FIRST = 2.5, 1.9  # tokens drafted and brought, likewise
ROW_WEIGHT, SHARED_WEIGHT = 0.15, 0.03  # of a new draft, in what is known about its row and about all rows
RELAXED = 0.002  # share of what is known about all rows that a round without news takes away
SOONEST, LATEST = 4, 64  # rounds until a drafter that did not pay is tried again


@dataclass(frozen=True)
class Yield:
    """Tokens that a draft has, and that it brings, on average."""

    drafted: float
    brought: float

    def towards(self, other: Yield, weight: float) -> Yield:
        """Moved by a share of the difference."""
        return Yield(
            self.drafted + weight * (other.drafted - self.drafted),
            self.brought + weight * (other.brought - self.brought),
        )

    def cut(self, length: int) -> Yield:
        """If no draft can have more than `length` tokens."""
        share = min(1.0, length / max(self.drafted, 1e-9))
        return Yield(self.drafted * share, self.brought * share)


class DraftYields:
    """Yields by row, beginning with what other rows have shown, and the odds of a token by its position."""

    def __init__(self, longest: int) -> None:
        self._hold = AcceptanceModel([HOLD] * longest, row_step=HOLD_STEP)
        self._last = longest - 1  # further positions count as this one
        self._asked: WeakKeyDictionary[Row, tuple[int, int, int | None]] = WeakKeyDictionary()
        self._rows: WeakKeyDictionary[Row, Yield] = WeakKeyDictionary()
        self._all = Yield(*FIRST)

    def ask(self, row: Row, length: int, drafted: int | None = None) -> None:
        """Note that the row's draft of this round may have up to `length` tokens, or that it has `drafted` so far.

        What another drafter adds to it then does not count.
        """
        self._asked[row] = len(row.rounds), length, drafted

    def learn(self, row: Row) -> int | None:
        """Take in what became of the last draft asked for: the tokens it brought, or None if there is no news."""
        number, length, drafted = self._asked.pop(row, (0, 0, None))
        if not length or drafted == 0 or number != len(row.rounds) - 1:
            return None
        done = row.rounds[number]
        drafted = len(done.draft) if drafted is None else drafted
        kept = min(drafted, done.num_accepted_tokens)
        tested = min(drafted, kept + done.rejected)
        kinds = [min(position, self._last) for position in range(tested)]
        self._hold.learn(row, kinds, [1] * tested, [1] * kept + [0])
        if drafted <= length and row.remaining > 0:
            seen = Yield(drafted, kept)
            self._rows[row] = self.of(row).towards(seen, ROW_WEIGHT)
            self._all = self._all.towards(seen, SHARED_WEIGHT)
        return kept

    def of(self, row: Row) -> Yield:
        """What to expect of the row's next draft."""
        return self._rows.get(row, self._all)

    def relax(self) -> None:
        """A round without news about new rows: what was known about them counts a little less."""
        self._all = self._all.towards(Yield(*FIRST), RELAXED)

    def hold(self, row: Row, position: int) -> float:
        """The chance that the token at this position comes true if all before it did."""
        return self._hold.chance(row, min(position, self._last))

    def acceptance_probs(self, row: Row, length: int) -> list[float]:
        """The chance that the first 1, 2, ... of `length` tokens all come true, by their positions alone."""
        path, acceptance_probs = 1.0, []
        for position in range(length):
            path *= self.hold(row, position)
            acceptance_probs.append(path)
        return acceptance_probs


@dataclass
class Backoff:
    """Whether a drafter that does not seem to pay is tried in this round: after 4 rounds, then 8 ... up to 64.

    A trial that brings a token makes the next pause a shorter one.
    """

    _pause: WeakKeyDictionary[Row, tuple[int, int]] = field(default_factory=WeakKeyDictionary)  # its length; waited

    def due(self, row: Row) -> bool:
        """Ask once per round in which the row rests."""
        length, waited = self._pause.get(row, (SOONEST, 0))
        over = waited + 1 >= length
        self._pause[row] = (min(LATEST, 2 * length), 0) if over else (length, waited + 1)
        return over

    def tried(self, row: Row, brought: int) -> None:
        """A draft of the row brought this many tokens."""
        length, waited = self._pause.get(row, (SOONEST, 0))
        if brought and length > SOONEST:
            self._pause[row] = max(SOONEST, length // 4), waited

    def over(self, row: Row) -> None:
        """It pays; the next pause is the shortest."""
        self._pause.pop(row, None)
