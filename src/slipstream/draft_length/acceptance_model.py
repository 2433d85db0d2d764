"""How likely draft tokens are accepted, by what kind they are and by what the row has shown so far.

A kind is whatever a drafter can tell before the target has spoken: how long the match was, how sure the draft model
is, at which place of the draft the token stands. This module knows no drafter and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from weakref import WeakKeyDictionary

from slipstream.core.types import Draft, Row

ROW_STEP = 0.2  # how far one token moves a row's weight
SHARED_STEP = 0.05  # and the weight of its kind, which all rows share
COMMON_STEP = 0.1  # and the weight that greedy rows may share for all kinds
CERTAIN = 0.995  # nothing is taken for surer than this
PRIOR = 0.75  # probability that a token is accepted if all before it were, before anything is known
PRIOR_STEP = 0.5  # positions say little, so rows are believed soon
FIRST = 2.5, 1.9  # tokens drafted and accepted, likewise
ROW_WEIGHT, SHARED_WEIGHT = 0.15, 0.03  # of a new draft, in what is known about its row and about all rows
RELAXED = 0.002  # share of what is known about all rows that a round without news takes away
BINS = 20  # of how sure the draft model is of a token, from 0 to 1


class AcceptanceModel:
    """Logistic regression with a weight per kind and one per row, learned token by token.

    The log-odds that a token is accepted are those of the prior for its kind, plus what all rows have shown about the
    kind, plus what its row has shown. Each token moves the weights by a step against the error of its prediction
    (stochastic gradient descent on the log-loss).

    prior: the chance of each kind before anything is known. shared: whether rows learn from each other about kinds; if
    not, a row's probabilities depend on that row alone. common: then greedy rows, whose text depends on no draft, share
    one weight for all kinds. row_step: how far one token moves its row's weight.
    """

    def __init__(
        self, prior: Sequence[float], *, shared: bool = True, common: bool = False, row_step: float = ROW_STEP
    ) -> None:
        self._prior = [_logit(chance) for chance in prior]
        self._kinds = list(self._prior)
        self._rows: WeakKeyDictionary[Row, float] = WeakKeyDictionary()
        self._shared, self._has_common, self._row_step, self._common = shared, common, row_step, 0.0

    def chance(self, row: Row, kind: int) -> float:
        """The probability that a token of this kind is accepted in this row, given that those before it were."""
        return self.chances(row)(kind)

    def chances(self, row: Row) -> Callable[[int], float]:
        """`chance` in one row by kind, until something is learned; many at once cost less this way."""
        kinds, weight = self._kinds, self._rows.get(row, 0.0) + self._of_all(row)
        return lambda kind: min(CERTAIN, 1 / (1 + exp(-weight - kinds[kind])))

    def learn(self, row: Row, kinds: Sequence[int], drafted: Sequence[int], text: Sequence[int]) -> None:
        """What the text became where a draft stood: tokens count as accepted up to the first that differs.

        kinds and drafted: of the draft's tokens; text: what stands there now, which may be shorter or longer.
        """
        for kind, token, came in zip(kinds, drafted, text, strict=False):
            self._learn(row, kind, token == came)
            if token != came:
                break

    def _learn(self, row: Row, kind: int, accepted: bool) -> None:
        known = self._rows.get(row, 0.0)
        error = accepted - _sigmoid(self._kinds[kind] + known + self._of_all(row))
        self._rows[row] = known + self._row_step * error
        if self._shared:
            self._kinds[kind] += SHARED_STEP * error
        if self._has_common and not row.params.temperature:
            self._common += COMMON_STEP * error

    def _of_all(self, row: Row) -> float:
        return 0.0 if row.params.temperature else self._common

    def forget(self) -> None:
        """Return to the prior."""
        self._kinds = list(self._prior)
        self._rows.clear()
        self._common = 0.0


def _sigmoid(log_odds: float) -> float:
    return 1 / (1 + exp(-log_odds))


def _logit(chance: float) -> float:
    return log(chance / (1 - chance))


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
        done = row.rounds[-1].without_forced
        drafted = len(done.chain) if note.drafted is None else note.drafted
        accepted = min(drafted, done.num_accepted_on_chain)
        tested = min(drafted, accepted + (len(done.tokens) > done.num_accepted_on_chain < len(done.chain)))
        kinds = [min(position, self._last) for position in range(tested)]
        self._by_position.learn(row, kinds, [1] * tested, [1] * accepted + [0])
        if drafted <= note.asked and row.remaining > 0:
            seen = Yield(drafted, accepted + (done.num_accepted_tokens - done.num_accepted_on_chain))
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


class Confidence:
    """Learns, bin by bin of how sure the draft model is, how often its tokens are accepted.

    And, where its own token is not, how often the one beside it is, by the share of that among all others.
    """

    def __init__(self) -> None:
        prior = [(i + 0.5) / BINS for i in range(BINS)]
        self._own, self._beside = AcceptanceModel(prior), AcceptanceModel(prior)

    def learn(self, row: Row, note: DraftNote) -> None:
        """Take in the row's newest round."""
        done = row.rounds[-1].without_forced
        self._own.learn(row, note.kinds, done.chain, done.tokens)
        at = done.num_accepted_on_chain
        if at < min(len(done.chain), len(done.tokens), len(note.siblings)):
            token, kind = note.siblings[at]
            self._beside.learn(row, [kind], [token], done.tokens[at:])

    def acceptance_probs(self, row: Row, chances: Sequence[float]) -> list[float]:
        """The probability that the first 1, 2, ... tokens are all accepted. chances: how sure it is of each."""
        path, probs = 1.0, []
        for chance in chances:
            path *= self._own.chance(row, bin_of(chance))
            probs.append(path)
        return probs

    def sibling_probs(self, row: Row, chances: Sequence[float], beside: Sequence[float]) -> list[float]:
        """The probability that the text follows the draft up to each token and has the one beside it instead.

        beside: how sure the draft model is of each of these.
        """
        path, probs = 1.0, []
        for chance, other in zip(chances, beside, strict=True):
            own = self._own.chance(row, bin_of(chance))
            probs.append(path * (1 - own) * self._beside.chance(row, sibling_bin(chance, other)))
            path *= own
        return probs


def bin_of(chance: float) -> int:
    """The kind of a token by how sure the draft model is of it."""
    return min(BINS - 1, int(chance * BINS))


def sibling_bin(chance: float, other: float) -> int:
    """The kind of a token beside a draft's own: by how sure the draft model is of it if its own is wrong."""
    return bin_of(other / max(1e-6, 1 - chance))
