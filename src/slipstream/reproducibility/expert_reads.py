"""Predicts the distinct experts that a layer of a mixture reads in a forward, and the time of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, pow

PRIOR = 0.85  # exponent: trained mixtures have 0.75 to 0.9 on texts
SHARE = 0.1  # of a round's exponent that corrects the learned one


@dataclass
class ExpertReads:
    """Predicts the distinct experts of a forward by a formula with one number, `exponent`, that is learned from counts.

    Tokens that choose independently miss an expert with a chance of 1 - used / count each. Neighbors in a text choose
    alike: w tokens of a row miss as many experts as w ** exponent independent ones would. Rows are independent.
    """

    count: int  # experts of a layer
    used: int  # by a token
    milliseconds: float  # of one more distinct expert in every layer
    exponent: float = PRIOR  # 0: all tokens of a row choose the same experts; 1: they choose independently

    def expected(self, rows: int, tokens: int) -> float:
        """The distinct experts of a layer that rows with this many tokens in all are expected to read."""
        independent = rows * pow(tokens / rows, self.exponent)
        return self.count * (1 - pow(1 - self.used / self.count, independent))

    def learn(self, rows: int, tokens: int, distinct: float) -> None:
        """Learn from the distinct experts that a layer has read in a forward."""
        if tokens <= rows:  # says nothing about tokens of one row
            return
        missed = max(1e-9, 1 - distinct / self.count)
        independent = log(missed) / log(1 - self.used / self.count)
        observed = log(independent / rows) / log(tokens / rows)
        self.exponent += SHARE * (min(1.0, max(0.0, observed)) - self.exponent)

    def timed(self, tokens: int) -> int:
        """The distinct experts that calibration makes a forward of this many tokens read."""
        return round(self.expected(1, tokens))

    def left_out(self, milliseconds: Mapping[int, float]) -> dict[int, float]:
        """Calibrated times of forwards, by tokens, without those of the experts that they read."""
        return {tokens: ms - self.milliseconds * self.timed(tokens) for tokens, ms in milliseconds.items()}
