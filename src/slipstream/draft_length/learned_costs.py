"""How fast the machine is, and how dear drafted tokens are beside what was measured: two numbers that all rounds tell.

A Kalman filter (R. E. Kalman, "A New Approach to Linear Filtering and Prediction Problems", 1960) of both, which moves
the one of which a round says more: rounds without drafts the speed, wide ones the other as well.
"""

from __future__ import annotations

from math import exp, log

NOISE = 0.04  # of one round's time
DRIFT = 0.02, 0.01  # of the speed and of the dearness from round to round
UNSURE = 0.4  # how far a measured dearness may be off
LEAST, MOST = 0.25, 4.0  # of the dearness
LEAP = 3.0  # standard deviations of a surprise that only another speed of the machine can explain
SURPRISE = 0.4  # what counts of a round at most; all but LEAST and MOST in natural logarithms or shares


class LearnedCosts:
    """speed: seconds per unit of the measurements, as a logarithm; None before the first round.

    dearness: what a round's drafted tokens add to a round without any, as a multiple of what was measured.
    """

    def __init__(self) -> None:
        self.speed: float | None = None
        self.dearness = 1.0
        self._speed_variance, self._dearness_variance, self._together = NOISE**2, UNSURE**2, 0.0

    def units(self, plain: float, whole: float) -> float:
        """What a forward of `whole` measured units takes, if one without drafts takes `plain` units."""
        return plain + self.dearness * max(0.0, whole - plain)

    def take_in(self, plain: float, whole: float, seconds: float, known: float) -> float:
        """Learn from a round; how far it differed from what was expected. known: of its shape, as a logarithm."""
        if self.speed is None:
            self.speed = log(seconds / self.units(plain, whole)) - known
        surprise = log(seconds / self.units(plain, whole)) - known - self.speed
        surprise = max(-SURPRISE, min(SURPRISE, surprise))
        by = max(0.0, whole - plain) / self.units(plain, whole)  # what the logarithm grows by with the dearness
        speed, dearness, both = self._speed_variance, self._dearness_variance, self._together
        if surprise**2 > LEAP**2 * (speed + by * (2 * both + by * dearness) + NOISE**2):
            speed += surprise**2
        speed_moves, dearness_moves = speed + by * both, both + by * dearness
        total = speed_moves + by * dearness_moves + NOISE**2
        self.speed += speed_moves / total * surprise
        self.dearness = max(LEAST, min(MOST, self.dearness + dearness_moves / total * surprise))
        self._speed_variance = speed - speed_moves**2 / total + DRIFT[0] ** 2
        self._dearness_variance = min(UNSURE**2, dearness - dearness_moves**2 / total + DRIFT[1] ** 2)
        self._together = both - speed_moves * dearness_moves / total
        return surprise

    def seconds(self, plain: float, whole: float) -> float:
        """Of a forward."""
        return self.units(plain, whole) * (1e-3 if self.speed is None else exp(self.speed))
