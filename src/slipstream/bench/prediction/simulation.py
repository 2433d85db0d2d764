"""Speed-ups over draft lengths and batches, by formula; and the same rounds simulated at random, as its check."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor
from random import Random
from typing import Any

import numpy as np

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
from slipstream.bench.prediction.round_time import taken_by, verifying_milliseconds
from slipstream.errors import UsageError


@dataclass(frozen=True)
class Simulation:
    """Predicted speed-ups. speed_ups[batch][length]; best[batch]: the best length from 0 on, not only of those shown.

    Lengths of trees are their levels. tokens[length]: expected tokens per round; nodes[length]: draft tokens of a row;
    break_even[batch][length]: the acceptance per token from which chains of that length pay, None if none is enough;
    stops: the first batch at which plain decoding is best, None if there is none. chains[batch]: of trees, the best
    speed-up of their main chains alone; empty for chains.
    """

    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    speed_ups: dict[int, dict[int, float]]
    best: dict[int, int]
    tokens: dict[int, float]
    break_even: dict[int, dict[int, float | None]]
    stops: int | None
    nodes: dict[int, float]
    chains: dict[int, float]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "lengths": list(self.lengths), "batches": list(self.batches)}

    def marked(self, batch: int, length: int) -> str:
        """One speed-up as text: `*` behind the best of its batch, `-` behind what is slower than plain decoding."""
        speed_up = self.speed_ups[batch][length]
        return f"{speed_up:.2f}x{'*' if length == self.best[batch] else '-' if speed_up < 1 else ''}"


def conclusions(costs: Costs, simulation: Simulation) -> list[str]:
    """What a simulation comes to, in sentences: the best length of each batch, where speculation stops paying."""
    lines, trees = [], bool(simulation.chains)
    for batch, best in simulation.best.items():
        low = None if trees else simulation.break_even[batch].get(best)
        what = f"best {'tree depth' if trees else 'draft length'} {best}" if best else "plain decoding is best"
        needed = "" if low is None else f", which pays from an acceptance of {low:.0%} per token"
        alone = f"; without branches {simulation.chains[batch]:.2f}x at the best length" if trees else ""
        lines.append(f"batch {batch}: {what}{needed}{alone}")
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
    known = acceptance if isinstance(acceptance, Acceptance) else Acceptance.constant(acceptance)
    if known.branches and costs.trees is None:
        raise UsageError(
            f"acceptance of trees beside costs of {costs.drafter or 'a drafter'} without them; allowed: costs measured "
            "with --sibling-alpha, of a target that takes trees"
        )
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
        nodes={n: known.num_nodes(n) for n in lengths},
        chains=_best_chains(costs, known, batches, pad),
    )


def _best_chains(costs: Costs, known: Acceptance, batches: Sequence[int], pad: Pad | None) -> dict[int, float]:
    if not known.branches:
        return {}
    chain = known.main_chain
    best = {batch: best_length(costs, chain, None, batch, pad) for batch in batches}
    return {batch: predicted_speed_up(costs, chain, length, batch, pad) for batch, length in best.items()}


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
        known = taken_by(costs, fates, num_draft_tokens, len(active))
        rounds = [_draw(known, min(num_draft_tokens, remaining - 1), rng) for remaining in active]
        taken += _milliseconds(costs, known, rounds, num_draft_tokens, pad)
        left = [remaining - fate.accepted - 1 for remaining, fate in zip(active, rounds, strict=True)]
        active = [remaining for remaining in left if remaining > 0]
    return taken


@dataclass(frozen=True)
class _Fate:
    """Of a row's draft: its levels, how many tokens are accepted, whether the last of them is off the main chain."""

    proposed: int
    accepted: int
    branched: bool


def _draw(fates: Acceptance, limit: int, rng: Random) -> _Fate:
    """What becomes of a draft of at most `limit` levels.

    One number decides how many are proposed and accepted, so that never more is accepted than proposed; each by itself
    has its own distribution.
    """
    u = rng.random()
    proposed = bisect_left([-p for p in fates.proposed[:limit]], -u)
    accepted = bisect_left([-p for p in fates.accepted[:limit]], -u)
    if not accepted or not fates.branched:
        return _Fate(proposed, accepted, False)
    beyond = fates.accepted[accepted] if accepted < limit else 0.0
    ending = fates.accepted[accepted - 1] - beyond
    return _Fate(proposed, accepted, rng.random() * ending < fates.branched[accepted - 1])


def _milliseconds(costs: Costs, known: Acceptance, fates: Sequence[_Fate], asked: int, pad: Pad | None) -> float:
    """Of one round."""
    batch, longest = len(fates), max(fate.proposed for fate in fates)
    if not asked:
        return costs.plain(batch, costs.pad(1, batch) if pad is None else pad(1))
    if pad is not None:
        return costs.round(batch, pad(longest + 1), longest)
    drafted = round(sum(known.num_nodes(fate.proposed) for fate in fates), 9)
    ends = sorted({floor(drafted), ceil(drafted)})
    verifying = float(np.interp(drafted, ends, verifying_milliseconds(costs, known, batch, longest, ends)))
    return verifying + costs.drafting(batch, longest) + costs.move * sum(fate.branched for fate in fates)
