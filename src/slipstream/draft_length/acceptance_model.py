"""How likely draft tokens are accepted, by what kind they are and by what the row has shown so far.

A kind is whatever a drafter can tell before the target has spoken: how long the match was, how sure the draft model
is, at which place of the draft the token stands. This module knows no drafter and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log
from operator import mul
from weakref import WeakKeyDictionary

from slipstream.core.rounds import Round
from slipstream.core.types import Row

ROW_STEP = 0.2  # how far one token moves a row's weight
SHARED_STEP = 0.05  # and the weight of its kind, which all rows share
CERTAIN = 0.995  # nothing is taken for surer than this
PRIOR = 0.75  # probability that a token is accepted if all before it were, before anything is known
PRIOR_STEP = 0.5  # positions say little, so rows are believed soon
FIRST = 2.5, 1.9  # tokens drafted and accepted, likewise
ROW_WEIGHT, SHARED_WEIGHT = 0.15, 0.03  # of a new draft, in what is known about its row and about all rows
RELAXED = 0.02  # share of what is known about all rows that a round without a draft model takes away
BINS = 20  # of how sure the draft model is of a token, from 0 to 1


class AcceptanceModel:
    """Logistic regression with a weight per kind and one per row, learned token by token.

    The log-odds that a token is accepted are those of the prior for its kind, plus what all rows have shown about the
    kind, plus what its row has shown. Each token moves the weights by a step against the error of its prediction
    (stochastic gradient descent on the log-loss).

    prior: the chance of each kind before anything is known. shared: whether rows learn from each other about kinds; if
    not, a row's probabilities depend on that row alone. row_step: how far one token moves its row's weight.
    """

    def __init__(self, prior: Sequence[float], *, shared: bool = True, row_step: float = ROW_STEP) -> None:
        self._prior = [_logit(chance) for chance in prior]
        self._kinds = list(self._prior)
        self._rows: WeakKeyDictionary[Row, float] = WeakKeyDictionary()
        self._shared, self._row_step = shared, row_step

    def chance(self, row: Row, kind: int) -> float:
        """The probability that a token of this kind is accepted in this row, given that those before it were."""
        return self.chances(row)(kind)

    def chances(self, row: Row) -> Callable[[int], float]:
        """`chance` in one row by kind, until something is learned; many at once cost less this way."""
        kinds, weight = self._kinds, self._rows.get(row, 0.0)
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
        error = accepted - _sigmoid(self._kinds[kind] + known)
        self._rows[row] = known + self._row_step * error
        if self._shared:
            self._kinds[kind] += SHARED_STEP * error

    def forget(self) -> None:
        """Return to the prior."""
        self._kinds = list(self._prior)
        self._rows.clear()


def _sigmoid(log_odds: float) -> float:
    return 1 / (1 + exp(-log_odds))


def _logit(chance: float) -> float:
    return log(chance / (1 - chance))


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


class ModelDrafts:
    """What the drafts of a draft model have brought: by row, by position, and by how sure it was of each token."""

    def __init__(self, longest: int) -> None:
        bins = [(i + 0.5) / BINS for i in range(BINS)]
        self._sure, self._runners_up = AcceptanceModel(bins), AcceptanceModel(bins)
        self._by_position = Positions(longest)
        self._rows: WeakKeyDictionary[Row, Yield] = WeakKeyDictionary()
        self._all = Yield(*FIRST)

    def learn(self, row: Row) -> int | None:
        """Take in the row's newest round, in which the draft model drafted for it: how many tokens that brought.

        None if there is nothing to learn.
        """
        done = row.rounds[-1].without_forced
        drafted = len(done.origin.kinds) or len(done.chain)  # also where none of it was worth verifying
        if not drafted:
            return None
        self._learn_sureness(row, done)
        accepted = min(drafted, done.num_accepted_on_chain)
        self._by_position.learn(row, done, drafted)
        if row.remaining > 0:
            seen = Yield(drafted, accepted + (done.num_accepted_tokens - done.num_accepted_on_chain))
            self._rows[row] = self.of(row).towards(seen, ROW_WEIGHT)
            self._all = self._all.towards(seen, SHARED_WEIGHT)
        return accepted

    def _learn_sureness(self, row: Row, done: Round) -> None:
        place, beside = done.num_accepted_on_chain, done.origin.runners_up
        self._sure.learn(row, done.origin.kinds, done.chain, done.tokens)
        if place < min(len(done.chain), len(done.tokens), len(beside)):
            token, kind = beside[place]
            self._runners_up.learn(row, [kind], [token], done.tokens[place:])

    def of(self, row: Row) -> Yield:
        """What to expect of the row's next draft; at first what other rows have shown."""
        return self._rows.get(row, self._all)

    def relax(self) -> None:
        """What is known about new rows counts a little less, as a draft model that is passed over shows nothing."""
        self._all = self._all.towards(Yield(*FIRST), RELAXED)

    def chance_of_next(self, row: Row, chances: Sequence[float]) -> float:
        """The probability that the next token brings something. chances: how sure the draft model is so far."""
        return self.acceptance_probs(row, chances)[-1] * self._by_position.chance(row, len(chances))

    def acceptance_probs(self, row: Row, chances: Sequence[float]) -> list[float]:
        """The probability that the first 1, 2, ... tokens are all accepted. chances: how sure it is of each."""
        return list(accumulate((self._sure.chance(row, bin_of(chance)) for chance in chances), mul))

    def runner_up_probs(self, row: Row, chances: Sequence[float], beside: Sequence[float]) -> list[float]:
        """The probability that the text follows the draft up to each token and has the runner-up instead.

        beside: how sure the draft model is of each of these.
        """
        path, probs = 1.0, []
        for chance, other in zip(chances, beside, strict=True):
            own = self._sure.chance(row, bin_of(chance))
            probs.append(path * (1 - own) * self._runners_up.chance(row, sibling_bin(chance, other)))
            path *= own
        return probs


class Positions:
    """How likely tokens are accepted by their positions alone, for drafters that say nothing of them."""

    def __init__(self, longest: int) -> None:
        self._model = AcceptanceModel([PRIOR] * longest, row_step=PRIOR_STEP)
        self._last = longest - 1  # further positions count as this one

    def learn(self, row: Row, done: Round, drafted: int) -> None:
        """Take in what became of the first `drafted` tokens of a round's main chain."""
        accepted = min(drafted, done.num_accepted_on_chain)
        tested = min(drafted, accepted + (len(done.tokens) > done.num_accepted_on_chain < len(done.chain)))
        kinds = [min(position, self._last) for position in range(tested)]
        self._model.learn(row, kinds, [1] * tested, [1] * accepted + [0])

    def chance(self, row: Row, position: int) -> float:
        """The probability that the token at this position is accepted if all before it were."""
        return self._model.chance(row, min(position, self._last))

    def acceptance_probs(self, row: Row, length: int) -> list[float]:
        """The probability that the first 1, 2, ... of `length` tokens are all accepted."""
        return list(accumulate((self.chance(row, position) for position in range(length)), mul))


def bin_of(chance: float) -> int:
    """The kind of a token by how sure the draft model is of it."""
    return min(BINS - 1, int(chance * BINS))


def sibling_bin(chance: float, other: float) -> int:
    """The kind of a token beside a draft's own: by how sure the draft model is of it if its own is wrong."""
    return bin_of(other / max(1e-6, 1 - chance))
