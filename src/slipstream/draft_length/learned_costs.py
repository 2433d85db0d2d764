"""How fast the machine is, and what drafted tokens cost beside what was measured: two numbers that all rounds tell.

A Kalman filter (R. E. Kalman, "A New Approach to Linear Filtering and Prediction Problems", 1960) of both, which moves
the one of which a round says more: rounds without drafts the speed, wide ones the other as well.
"""

from __future__ import annotations

from math import exp, log

NOISE = 0.04  # of one round's time: a standard deviation of its logarithm
SPEED_DRIFT, COST_DRIFT = 0.02, 0.01  # how far either number moves from round to round, likewise
UNSURE = 0.4  # how far a measured cost may be off, likewise
LEAST, MOST = 0.25, 4.0  # what drafted tokens may cost
LEAP = 3.0  # standard deviations of a surprise that only another speed of the machine can explain
SURPRISE = 0.4  # what counts of a round at most, as a logarithm


class LearnedCosts:
    """speed: seconds per unit of the measurements, as a logarithm; None before the first round.

    draft_cost: what a round's drafted tokens add to a round without any, as a multiple of what was measured.
    """

    def __init__(self) -> None:
        self.speed: float | None = None
        self.draft_cost = 1.0
        self._speed_variance, self._cost_variance, self._together = NOISE**2, UNSURE**2, 0.0

    def units(self, plain: float, whole: float) -> float:
        """What a forward of `whole` measured units takes, if one without drafts takes `plain` units."""
        return plain + self.draft_cost * max(0.0, whole - plain)

    def take_in(self, plain: float, whole: float, seconds: float, shown: float) -> float:
        """Learn from a round; how far it differed from what was expected. shown: by rounds of its shape."""
        if self.speed is None:
            self.speed = log(seconds / self.units(plain, whole)) - shown
        surprise = log(seconds / self.units(plain, whole)) - shown - self.speed
        surprise = max(-SURPRISE, min(SURPRISE, surprise))
        by = max(0.0, whole - plain) / self.units(plain, whole)  # what the logarithm grows by with draft_cost
        speed, cost, both = self._speed_variance, self._cost_variance, self._together
        if surprise**2 > LEAP**2 * (speed + by * (2 * both + by * cost) + NOISE**2):
            speed += surprise**2
        speed_moves, cost_moves = speed + by * both, both + by * cost
        total = speed_moves + by * cost_moves + NOISE**2
        self.speed += speed_moves / total * surprise
        self.draft_cost = max(LEAST, min(MOST, self.draft_cost + cost_moves / total * surprise))
        self._speed_variance = speed - speed_moves**2 / total + SPEED_DRIFT**2
        self._cost_variance = min(UNSURE**2, cost - cost_moves**2 / total + COST_DRIFT**2)
        self._together = both - speed_moves * cost_moves / total
        return surprise

    def seconds(self, plain: float, whole: float) -> float:
        """Of a forward."""
        return self.units(plain, whole) * (1e-3 if self.speed is None else exp(self.speed))
