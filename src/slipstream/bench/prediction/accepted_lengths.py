"""How far drafts get, as probabilities: assumed, or estimated from a run's statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Any

from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.errors import UsageError


@dataclass(frozen=True)
class Acceptance:
    """How far drafts get. accepted[i]: probability that a round accepts more than i draft tokens; proposed[i]: that it
    proposes more than i, where drafters that find nothing propose less than they are asked for.

    By linearity of expectation these two are all that the speed depends on, whether or not positions are independent.
    """

    accepted: tuple[float, ...]
    proposed: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.accepted) != len(self.proposed):
            counts = f"accepted for {len(self.accepted)} positions, proposed for {len(self.proposed)}"
            raise UsageError(f"acceptance: {counts}; allowed: the same number")
        for name in ("accepted", "proposed"):
            values = getattr(self, name)
            if not all(map(_is_probability, values)) or any(b > a for a, b in pairwise(values)):
                raise UsageError(f"acceptance: {name}={values!r}; allowed: probabilities from 0 to 1 that never rise")
        if any(a > p for a, p in zip(self.accepted, self.proposed, strict=True)):
            raise UsageError(f"acceptance: accepted={self.accepted!r}; allowed: at most proposed={self.proposed!r}")

    @classmethod
    def constant(cls, alpha: float, longest: int = MAX_DRAFT_TOKENS) -> Acceptance:
        """Every draft token is accepted with probability alpha, independently (Leviathan et al. 2023, section 3.1)."""
        return cls.by_position([alpha] * longest)

    @classmethod
    def by_position(cls, alphas: Sequence[float], proposed: Sequence[float] | None = None) -> Acceptance:
        """alphas[i]: probability that draft token i is accepted if all before it were, and it was proposed.

        proposed: as in the class; all of them by default. Lengths are taken as independent of what is accepted.
        """
        if bad := [alpha for alpha in alphas if not _is_probability(alpha)]:
            raise UsageError(f"acceptance {bad[0]!r}; allowed: from 0 to 1")
        sizes = tuple(proposed) if proposed is not None else (1.0,) * len(alphas)
        if len(sizes) != len(alphas):
            raise UsageError(f"acceptance: {len(alphas)} alphas, proposed for {len(sizes)}; allowed: the same number")
        accepted, reached = [], 1.0
        for alpha, size in zip(alphas, sizes, strict=True):
            reached *= alpha
            accepted.append(reached * size)
        return cls(tuple(accepted), sizes)

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any]) -> Acceptance:
        """What a run's `Stats.to_dict()` says. Known up to the longest draft of that run.

        Drafts are shortened at a text's end; in short runs this shows as positions not proposed.
        """
        rounds = stat(stats, "num_rounds")
        if not rounds:
            raise UsageError("stats: num_rounds=0; allowed: at least one round")
        accepted, proposed = stat(stats, "accepted_per_position"), stat(stats, "drafted_per_position")
        if (drafted := stat(stats, "num_draft_tokens")) > sum(proposed):
            raise UsageError(
                f"stats: {drafted} draft tokens in {sum(proposed)} places, which were trees; allowed: chains, as "
                "num_draft_tokens='chain' drafts them, since the model knows no cost of branches"
            )
        return cls(tuple(n / rounds for n in accepted), tuple(n / rounds for n in proposed))

    @property
    def longest(self) -> int:
        """The longest draft about which something is known."""
        return len(self.accepted)

    @property
    def alphas(self) -> tuple[float | None, ...]:
        """Probability that position i is proposed and accepted, given that position i - 1 was; None if that never was.

        Where everything is proposed this is the acceptance by position.
        """
        before = (1.0, *self.accepted)
        return tuple(now / last if last else None for last, now in zip(before, self.accepted, strict=False))


def stat(stats: Mapping[str, Any], name: str) -> Any:
    """A figure of `Stats.to_dict()`."""
    if name not in stats:
        raise UsageError(f"stats: {name} is missing; allowed: what Stats.to_dict() gives")
    return stats[name]


def _is_probability(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and 0 <= value <= 1
