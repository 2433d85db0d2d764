"""What drafts have brought, row by row: tokens drafted and accepted, and acceptance by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from slipstream.core.types import Draft, Row
from slipstream.draft_length.acceptance_model import AcceptanceModel

PRIOR = 0.75  # probability that a token is accepted if all before it were, before anything is known
PRIOR_STEP = 0.5  # positions say little, so rows are believed soon
FIRST = 2.5, 1.9  # tokens drafted and accepted, likewise
ROW_WEIGHT, SHARED_WEIGHT = 0.15, 0.03  # of a new draft, in what is known about its row and about all rows
RELAXED = 0.002  # share of what is known about all rows that a round without news takes away


@dataclass(frozen=True)
class DraftNote:
    """How one row's draft came about, kept in its `Round` for whoever learns from it.

    asked: tokens asked for; 0 teaches nothing. drafted: how many of the round's draft count; None for all.
    reading: tokens of the row's text that the draft model read first. kinds: of its own confidence in each token.
    decided: whether a choice about drafting at all was made with this row in mind, and how: it "paid", or it did not,
    so that the backoff "waited" one more round. unread: it did not pay to read a text. better: a draft model's draft
    promised more than what was retrieved; None where there was no such choice. siblings: of each of the draft's
    tokens the one beside it, and of what kind that is.
    """

    asked: int = 0
    drafted: int | None = None
    reading: int = 0
    kinds: tuple[int, ...] = ()
    decided: str = ""
    unread: bool = False
    better: bool | None = None
    siblings: tuple[tuple[int, int], ...] = ()


NOTHING = DraftNote()


@dataclass(frozen=True)
class Yield:
    """Tokens that a draft has, and how many of them are accepted, on average."""

    drafted: float
    accepted: float

    def towards(self, other: Yield, weight: float) -> Yield:
        """Moved by a share of the difference."""
        return Yield(
            self.drafted + weight * (other.drafted - self.drafted),
            self.accepted + weight * (other.accepted - self.accepted),
        )

    def cut(self, length: int) -> Yield:
        """If no draft can have more than `length` tokens."""
        share = min(1.0, length / max(self.drafted, 1e-9))
        return Yield(self.drafted * share, self.accepted * share)


class DraftYields:
    """Yields by row, beginning with what other rows have shown, and acceptance probabilities by position."""

    def __init__(self, longest: int) -> None:
        self._by_position = AcceptanceModel([PRIOR] * longest, row_step=PRIOR_STEP)
        self._last = longest - 1  # further positions count as this one
        self._rows: WeakKeyDictionary[Row, Yield] = WeakKeyDictionary()
        self._all = Yield(*FIRST)

    def learn(self, row: Row, note: DraftNote) -> int | None:
        """Take in the row's newest round: the tokens its draft brought, or None if there is no news."""
        if not note.asked or note.drafted == 0:
            return None
        done = row.rounds[-1].own
        drafted = len(done.chain) if note.drafted is None else note.drafted
        accepted = min(drafted, done.num_in_place)
        tested = min(drafted, accepted + (len(done.tokens) > done.num_in_place < len(done.chain)))
        kinds = [min(position, self._last) for position in range(tested)]
        self._by_position.learn(row, kinds, [1] * tested, [1] * accepted + [0])
        if drafted <= note.asked and row.remaining > 0:
            seen = Yield(drafted, accepted + (done.num_accepted_tokens - done.num_in_place))
            self._rows[row] = self.of(row).towards(seen, ROW_WEIGHT)
            self._all = self._all.towards(seen, SHARED_WEIGHT)
        return accepted

    def of(self, row: Row) -> Yield:
        """What to expect of the row's next draft."""
        return self._rows.get(row, self._all)

    def relax(self) -> None:
        """A round without news about new rows: what was known about them counts a little less."""
        self._all = self._all.towards(Yield(*FIRST), RELAXED)

    def at(self, row: Row, position: int) -> float:
        """The probability that the token at this position is accepted if all before it were."""
        return self._by_position.chance(row, min(position, self._last))

    def acceptance_probs(self, row: Row, length: int) -> list[float]:
        """The probability that the first 1, 2, ... of `length` tokens are all accepted, by their positions alone."""
        path, probs = 1.0, []
        for position in range(length):
            path *= self.at(row, position)
            probs.append(path)
        return probs


def with_notes(draft: Draft, decided: Sequence[DraftNote]) -> Draft:
    """The draft with what was decided for its rows noted beside what the drafter noted itself."""
    return replace(draft, notes=tuple(joined(a, b) for a, b in zip(decided, draft.notes or decided, strict=True)))


def joined(decided: DraftNote, drafted: object) -> DraftNote:
    """A decision's note with what the drafter itself noted of its draft, if anything."""
    if not isinstance(drafted, DraftNote) or drafted.drafted is None:
        return decided
    decided = replace(decided, asked=drafted.asked, drafted=drafted.drafted)
    return replace(decided, kinds=drafted.kinds, siblings=drafted.siblings)
