"""The acceptance probability of draft tokens, by their kind and by what the row has shown so far.

A token's kind is what its drafter can tell before the target verifies it: how long the match was, the draft model's
probability, or the token's position in the draft. This module knows no drafter and no model.
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

PRIOR_PRECISION = 1.5  # of a kind's weight: one over its variance before anything is learned
LEAST_STEP = 0.05  # of a kind's weight
BINS = 20  # intervals of the draft model's probability of a token; each is a kind


class AcceptanceModel:
    """Logistic regression with one weight per kind and one per row, learned token by token.

    log-odds(accepted) = weight of the kind (at first its prior's log-odds) + weight of the row (at first 0). Each token
    moves both weights by a step against the error of its prediction: stochastic gradient descent on the log-loss. A
    kind's first steps are larger (one over its precision), because a draft model can be confidently wrong.

    prior: each kind's probability before anything is learned. shared: the kinds' weights are learned, from all rows; if
    False, a row's probabilities depend on that row alone. row_step: the step of a row's weight.
    """

    def __init__(self, prior: Sequence[float], *, shared: bool = True, row_step: float = 0.2) -> None:
        self._prior = [log(chance / (1 - chance)) for chance in prior]
        self._kinds = list(self._prior)
        self._precisions = [PRIOR_PRECISION] * len(prior)  # of the kinds' weights
        self._rows: WeakKeyDictionary[Row, float] = WeakKeyDictionary()
        self._shared, self._row_step = shared, row_step

    def chance(self, row: Row, kind: int) -> float:
        """The probability that the row accepts a token of this kind, given that it accepted those before it."""
        return self.chances(row)(kind)

    def chances(self, row: Row) -> Callable[[int], float]:
        """`chance` of one row as a function of the kind, valid until something is learned; cheaper for many kinds."""
        kinds, weight = self._kinds, self._rows.get(row, 0.0)
        return lambda kind: 1 / (1 + exp(-weight - kinds[kind]))

    def learn(self, row: Row, kinds: Sequence[int], drafted: Sequence[int], text: Sequence[int]) -> None:
        """Compare a draft with the text that came in its place: tokens count as accepted up to the first that differs.

        kinds: of the drafted tokens. text: may be shorter or longer than the draft.
        """
        for kind, token, actual in zip(kinds, drafted, text, strict=False):
            row_weight = self._rows.get(row, 0.0)
            chance = 1 / (1 + exp(-self._kinds[kind] - row_weight))
            error = (token == actual) - chance
            self._rows[row] = row_weight + self._row_step * error
            if self._shared:
                self._precisions[kind] += chance * (1 - chance)
                self._kinds[kind] += max(LEAST_STEP, 1 / self._precisions[kind]) * error
            if token != actual:
                break

    def forget(self) -> None:
        self._kinds, self._precisions = list(self._prior), [PRIOR_PRECISION] * len(self._prior)
        self._rows.clear()


@dataclass(frozen=True)
class Yield:
    """The expected length of a draft, and the expected number of its tokens that are accepted."""

    drafted: float
    accepted: float

    def towards(self, other: Yield, weight: float) -> Yield:
        """The weighted mean of this and `other`, which counts `weight`."""
        return Yield(
            self.drafted + weight * (other.drafted - self.drafted),
            self.accepted + weight * (other.accepted - self.accepted),
        )

    def cut(self, length: int) -> Yield:
        """The yield of drafts of at most `length` tokens."""
        share = min(1.0, length / max(self.drafted, 1e-9))
        return Yield(self.drafted * share, self.accepted * share)


FIRST_YIELD = Yield(2.5, 1.9)  # of a draft model, before it has drafted anything


class ModelDrafts:
    """Learns how many tokens of a draft model are accepted: by row, by position, and by the draft model's probability.

    The `chances` of its methods are the draft model's probabilities of a row's draft tokens.
    """

    def __init__(self, longest: int) -> None:
        bins = [(i + 0.5) / BINS for i in range(BINS)]
        self._by_chance, self._runners_up = AcceptanceModel(bins), AcceptanceModel(bins)
        self._by_position = Positions(longest)
        self._rows: WeakKeyDictionary[Row, Yield] = WeakKeyDictionary()
        self._all = FIRST_YIELD

    def learn(self, row: Row, newest: Round) -> None:
        """Learn from the row's newest round, without forced tokens, which the draft model drafted."""
        drafted = len(newest.origin.kinds) or len(newest.chain)  # kinds count tokens that were cut, too
        if not drafted:
            return
        self._learn_chances(row, newest)
        self._by_position.learn(row, newest, drafted)
        on_chain = newest.num_accepted_on_chain
        observed = Yield(drafted, min(drafted, on_chain) + newest.num_accepted_tokens - on_chain)
        self._rows[row] = self.of(row).towards(observed, weight=0.15)
        self._all = self._all.towards(observed, weight=0.03)

    def _learn_chances(self, row: Row, newest: Round) -> None:
        chain, place, runners_up = newest.chain, newest.num_accepted_on_chain, newest.origin.runners_up
        self._by_chance.learn(row, newest.origin.kinds, chain, newest.tokens)
        if place < min(len(chain), len(newest.tokens), len(runners_up)):
            token, kind = runners_up[place]
            self._runners_up.learn(row, [kind], [token], newest.tokens[place:])

    def of(self, row: Row) -> Yield:
        """The expected yield of the row's next draft; until it has had one, that of all rows."""
        return self._rows.get(row, self._all)

    def chance_of_next(self, row: Row, chances: Sequence[float]) -> float:
        """The probability that all tokens so far and the next one, which is not drafted yet, are accepted."""
        return self.acceptance_probs(row, chances)[-1] * self._by_position.chance(row, len(chances))

    def acceptance_probs(self, row: Row, chances: Sequence[float]) -> list[float]:
        """The probability that the first 1, 2, ... tokens are all accepted."""
        accepted = self._by_chance.chances(row)
        return list(accumulate((accepted(bin_of(chance)) for chance in chances), mul))

    def runner_up_probs(self, row: Row, chances: Sequence[float], runner_up_chances: Sequence[float]) -> list[float]:
        """For each token, the probability that the text follows the draft up to it and has the runner-up instead."""
        path, probs = 1.0, []
        accepted, accepted_instead = self._by_chance.chances(row), self._runners_up.chances(row)
        for chance, runner_up_chance in zip(chances, runner_up_chances, strict=True):
            prob = accepted(bin_of(chance))
            probs.append(path * (1 - prob) * accepted_instead(sibling_bin(chance, runner_up_chance)))
            path *= prob
        return probs


class Positions:
    """Acceptance probabilities by position alone, for drafters that report nothing else."""

    def __init__(self, longest: int) -> None:
        # a position is a weak hint, so a row's own results soon outweigh it
        self._model = AcceptanceModel([0.75] * longest, row_step=0.5)
        self._last = longest - 1  # further positions count as this one

    def learn(self, row: Row, newest: Round, drafted: int) -> None:
        """Learn from the first `drafted` tokens of a round's main chain, up to the first that was rejected."""
        on_chain = newest.num_accepted_on_chain
        was_rejected = len(newest.tokens) > on_chain < len(newest.chain)  # the token after the accepted ones
        accepted, tested = min(drafted, on_chain), min(drafted, on_chain + was_rejected)
        kinds = [min(position, self._last) for position in range(tested)]
        self._model.learn(row, kinds, [1] * tested, [1] * accepted + [0])

    def chance(self, row: Row, position: int) -> float:
        """The probability that the token at this position is accepted, given that all before it were."""
        return self._model.chance(row, min(position, self._last))

    def acceptance_probs(self, row: Row, length: int) -> list[float]:
        """The probability that the first 1, 2, ... of `length` tokens are all accepted."""
        chance = self._model.chances(row)
        return list(accumulate((chance(min(position, self._last)) for position in range(length)), mul))


def bin_of(chance: float) -> int:
    """The kind of a token, by the draft model's probability of it."""
    return min(BINS - 1, int(chance * BINS))


def sibling_bin(chance: float, runner_up_chance: float) -> int:
    """The kind of a runner-up, by the draft model's probability of it given that the drafted token is wrong."""
    return bin_of(runner_up_chance / max(1e-6, 1 - chance))
