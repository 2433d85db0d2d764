"""How likely draft tokens are accepted, by what kind they are and by what the row has shown so far.

A kind is whatever a drafter can tell before the target has spoken: how long the match was, how sure the draft model
is, at which place of the draft the token stands. This module knows no drafter and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log
from weakref import WeakKeyDictionary

from slipstream.core.types import Row

ROW_STEP = 0.2  # how far one token moves a row's weight
SHARED_STEP = 0.05  # and the weight of its kind, which all rows share
COMMON_STEP = 0.1  # and the weight that greedy rows may share for all kinds
CERTAIN = 0.995  # nothing is taken for surer than this


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
