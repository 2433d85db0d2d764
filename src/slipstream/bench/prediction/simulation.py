"""Speed-ups over draft lengths and batches, by formula; and the same rounds simulated at random, as its check."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from slipstream.bench.prediction.accepted_lengths import Acceptance
from slipstream.bench.prediction.costs import Costs
from slipstream.bench.prediction.formula import (
    Pad,
    best_length,
    break_even_acceptance,
    expected_tokens,
    longest_known,
    pays_until,
    predicted_speed_up,
)
from slipstream.errors import UsageError


@dataclass(frozen=True)
class Simulation:
    """Predicted speed-ups. speed_ups[batch][length]; best[batch]: the best length from 0 on, not only of those shown.

    tokens[length]: expected tokens per round; break_even[batch][length]: the acceptance per token from which that
    length pays, None if none is enough; stops: the first batch at which plain decoding is best, None if there is none.
    """

    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    speed_ups: dict[int, dict[int, float]]
    best: dict[int, int]
    tokens: dict[int, float]
    break_even: dict[int, dict[int, float | None]]
    stops: int | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "lengths": list(self.lengths), "batches": list(self.batches)}

    def marked(self, batch: int, length: int) -> str:
        """One speed-up as text: `*` behind the best of its batch, `-` behind what is slower than plain decoding."""
        speed_up = self.speed_ups[batch][length]
        return f"{speed_up:.2f}x{'*' if length == self.best[batch] else '-' if speed_up < 1 else ''}"


def conclusions(costs: Costs, simulation: Simulation) -> list[str]:
    """What a simulation comes to, in sentences: the best length of each batch, where speculation stops paying."""
    lines = []
    for batch, best in simulation.best.items():
        low = simulation.break_even[batch].get(best)
        what = f"best draft length {best}" if best else "plain decoding is best"
        needed = "" if low is None else f", which pays from an acceptance of {low:.0%} per token"
        lines.append(f"batch {batch}: {what}{needed}")
    if simulation.stops is None:
        lines.append(f"speculation pays in batches up to {costs.batches[-1]} rows")
    else:
        lines.append(f"speculation stops paying at {simulation.stops} rows")
    return [*lines, f"costs: {costs.machine}; drafter {costs.drafter}; prompt processing is not counted"]


def simulate(
    costs: Costs,
    acceptance: Acceptance | float,
    lengths: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    pad: Pad | None = None,
) -> Simulation:
    """Predicted speed-up for every draft length and batch; by default all that the costs and the acceptance cover."""
    if lengths is None:
        lengths = range(1, longest_known(costs, acceptance, pad) + 1)
    batches = costs.batches if batches is None else batches
    for name, values in (("lengths", lengths), ("batches", batches)):
        if not values:
            raise UsageError(
                f"{name}={list(values)!r}; allowed: at least one, within what the costs and acceptance cover"
            )
    return Simulation(
        lengths=tuple(lengths),
        batches=tuple(batches),
        speed_ups={b: {n: predicted_speed_up(costs, acceptance, n, b, pad) for n in lengths} for b in batches},
        best={b: best_length(costs, acceptance, None, b, pad) for b in batches},
        tokens={n: expected_tokens(acceptance, n) for n in lengths},
        break_even={b: {n: break_even_acceptance(costs, n, b, pad) if n else None for n in lengths} for b in batches},
        stops=pays_until(costs, acceptance, None, pad),
    )


@dataclass(frozen=True)
class Load:
    """Rows to decode in a played run: how many in all, how many at a time, and tokens per row."""

    rows: int
    batch: int
    tokens: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}={value!r}; allowed: a whole number >= 1")


def play(
    costs: Costs, acceptance: Acceptance | float, num_draft_tokens: int, load: Load, seed: int, pad: Pad | None = None
) -> float:
    """Milliseconds of a run whose accepted and proposed lengths are sampled, round by round, as the loop would go.

    Rows finish at different times; a waiting row takes the place of a finished one, and at the end the batch gets
    smaller. A row drafts at most what it can still commit. The speed-up is play(..., 0, ...) over this.
    """
    fates = acceptance if isinstance(acceptance, Acceptance) else Acceptance.constant(acceptance)
    rng, taken = Random(seed), 0.0
    waiting, active = deque([load.tokens] * load.rows), list[int]()
    while waiting or active:
        while waiting and len(active) < load.batch:
            active.append(waiting.popleft())
        longest = 0
        for row, remaining in enumerate(active):
            limit = min(num_draft_tokens, remaining - 1)
            proposed, accepted = _draw(fates, limit, rng)
            longest = max(longest, proposed)
            active[row] = remaining - accepted - 1
        taken += _milliseconds(costs, len(active), longest, num_draft_tokens, pad)
        active = [remaining for remaining in active if remaining > 0]
    return taken


def _draw(fates: Acceptance, limit: int, rng: Random) -> tuple[int, int]:
    """How many tokens a row proposes and how many of them are accepted.

    One number decides both, so that never more is accepted than proposed; each by itself has its own distribution.
    """
    u = rng.random()
    proposed = bisect_left([-p for p in fates.proposed[:limit]], -u)
    accepted = bisect_left([-p for p in fates.accepted[:limit]], -u)
    return proposed, accepted


def _milliseconds(costs: Costs, batch: int, drafted: int, asked: int, pad: Pad | None) -> float:
    width = (pad or costs.pad)(drafted + 1)
    return costs.round(batch, width, drafted) if asked else costs.plain(batch, width)
