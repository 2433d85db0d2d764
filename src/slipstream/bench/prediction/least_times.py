"""The least milliseconds seen of each part of a round, by its shape."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.bench.prediction.cost_tables import TokenCosts


@dataclass
class Least:
    """The least milliseconds seen, by batch and width, tokens or length."""

    seen: dict[int, dict[int, float]] = field(default_factory=dict)

    def add(self, batch: int, width: int, seconds: float) -> None:
        """Note a time."""
        points = self.seen.setdefault(batch, {})
        points[width] = min(points.get(width, float("inf")), 1e3 * max(seconds, 0.0))


@dataclass
class RoundTimes(Least):
    """The same of forwards, and of the rest of their rounds."""

    rest: Least = field(default_factory=Least)

    @property
    def overhead(self) -> dict[int, dict[int, float]]:
        """Milliseconds of what is no forward."""
        return self.rest.seen

    @property
    def costs(self) -> TokenCosts | None:
        """Both, None where nothing was noted."""
        return TokenCosts(self.seen, self.overhead) if self.seen else None

    def note(self, batch: int, tokens: int, forward: float, rest: float) -> None:
        """Note the seconds of a round."""
        self.add(batch, tokens, forward)
        self.rest.add(batch, tokens, rest)

    def alone(self, padded: RoundTimes) -> None:
        """A single row's rounds are the padded ones."""
        self.seen[1], self.overhead[1] = dict(padded.seen[1]), dict(padded.overhead[1])


@dataclass
class Times:
    """All that a probe notes."""

    padded: RoundTimes = field(default_factory=RoundTimes)
    ragged: RoundTimes = field(default_factory=RoundTimes)
    trees: RoundTimes = field(default_factory=RoundTimes)
    drafting: Least = field(default_factory=Least)
    move: float = float("inf")
