"""How far drafts get, as probabilities: assumed, or estimated from a run's statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

from slipstream.checks import is_number, is_whole
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.errors import UsageError


@dataclass(frozen=True)
class Acceptance:
    """How far drafts get. accepted[i]: probability that a round accepts more than i draft tokens; proposed[i]: that it
    proposes more than i, since drafters that find nothing propose less than they are asked for.

    By linearity of expectation, tokens per round depend on these two alone, whether or not positions are independent.
    """

    accepted: tuple[float, ...]
    proposed: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.proposed) != len(self.accepted):
            counts = f"accepted for {len(self.accepted)} positions, proposed for {len(self.proposed)}"
            raise UsageError(f"acceptance: {counts}; allowed: the same number")
        for name in ("accepted", "proposed"):
            values = getattr(self, name)
            if not all(is_number(p, 0, 1) for p in values) or any(b > a for a, b in pairwise(values)):
                raise UsageError(f"acceptance: {name}={values!r}; allowed: probabilities from 0 to 1 that never rise")
        if any(a > p for a, p in zip(self.accepted, self.proposed, strict=True)):
            raise UsageError(f"acceptance: accepted={self.accepted!r}; allowed: at most proposed={self.proposed!r}")

    @classmethod
    def constant(cls, alpha: float) -> Acceptance:
        """Every draft token is accepted with probability alpha, independently (Leviathan et al. 2023, section 3.1)."""
        return cls.by_position([alpha] * MAX_DRAFT_TOKENS)

    @classmethod
    def by_position(cls, alphas: Sequence[float], proposed: Sequence[float] | None = None) -> Acceptance:
        """alphas[i]: probability that draft token i is accepted if all before it were, and it was proposed.

        proposed: as in the class; all of them by default. Lengths are taken as independent of what is accepted.
        """
        sizes = tuple(proposed) if proposed is not None else (1.0,) * len(alphas)
        if wrong := [alpha for alpha in alphas if not is_number(alpha, 0, 1)]:
            raise UsageError(f"acceptance {wrong[0]!r}; allowed: from 0 to 1")
        if len(sizes) != len(alphas):
            raise UsageError(f"acceptance: {len(alphas)} alphas, proposed for {len(sizes)}; allowed: the same number")
        reached = accumulate(alphas, mul)
        return cls(tuple(chance * size for chance, size in zip(reached, sizes, strict=True)), sizes)

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any]) -> Acceptance:
        """The acceptance in a run, from its `Stats.to_dict()`; its drafts must not have branched.

        It is known up to the longest draft of that run. Drafts are shortened at a text's end; in short runs this shows
        as positions that were not proposed.
        """
        rounds = stat(stats, "num_rounds")
        if not rounds:
            raise UsageError("stats: num_rounds=0; allowed: at least one round")
        accepted, proposed = counts_of(stats, "accepted_per_position"), counts_of(stats, "drafted_per_position")
        if (drafted := stat(stats, "num_draft_tokens")) > sum(proposed):
            raise UsageError(
                f"stats: {drafted} draft tokens in {sum(proposed)} places, which were trees; allowed: statistics of "
                "drafts without branches, as of the arm auto@chain"
            )
        return cls(tuple(n / rounds for n in accepted), tuple(n / rounds for n in proposed))

    @property
    def longest(self) -> int:
        """The longest draft whose acceptance is known."""
        return len(self.accepted)


def stat(stats: Mapping[str, Any], name: str) -> Any:
    """A total of `Stats.to_dict()`."""
    value = _field(stats, name)
    if not is_number(value, 0):
        raise UsageError(f"stats: {name}={value!r:.60}; allowed: a number >= 0")
    return value


def counts_of(stats: Mapping[str, Any], name: str) -> Sequence[int]:
    """The totals by position of `Stats.to_dict()`."""
    value = _field(stats, name)
    if not isinstance(value, list | tuple) or not all(map(is_whole, value)):
        raise UsageError(f"stats: {name}={value!r:.60}; allowed: a list of whole numbers >= 0")
    return value


def _field(stats: Mapping[str, Any], name: str) -> Any:
    if name not in stats:
        raise UsageError(f"stats: {name} is missing; allowed: what Stats.to_dict() gives")
    return stats[name]
