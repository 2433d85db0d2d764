"""Simulates rounds of given costs and acceptance at random, row by row, to check the formulas."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from slipstream.bench.speed_model.accepted_lengths import Acceptance
from slipstream.bench.speed_model.round_costs import Costs


@dataclass(frozen=True)
class Load:
    """The rows of a simulated run: their number, how many at a time, and tokens per row."""

    rows: int
    batch: int
    tokens: int


def play(costs: Costs, acceptance: Acceptance | float, num_draft_tokens: int, load: Load, seed: int) -> float:
    """Milliseconds of a run whose proposed and accepted lengths are sampled round by round, as in the loop.

    Rows finish at different times; a waiting row takes the place of a finished one, and at the end the batch gets
    smaller. A row drafts at most what it can still commit. The speed-up is play(..., 0, ...) over this.
    """
    fates = acceptance if isinstance(acceptance, Acceptance) else Acceptance.constant(acceptance)
    rng, milliseconds = Random(seed), 0.0
    waiting, active = deque([load.tokens] * load.rows), list[int]()
    while waiting or active:
        while waiting and len(active) < load.batch:
            active.append(waiting.popleft())
        rounds = [_draw(fates, min(num_draft_tokens, remaining - 1), rng) for remaining in active]
        milliseconds += _milliseconds(costs, rounds, num_draft_tokens)
        remaining_after = [remaining - fate.accepted - 1 for remaining, fate in zip(active, rounds, strict=True)]
        active = [remaining for remaining in remaining_after if remaining > 0]
    return milliseconds


@dataclass(frozen=True)
class _Fate:
    """The number of tokens in a row's draft, and how many are accepted."""

    proposed: int
    accepted: int


def _draw(fates: Acceptance, limit: int, rng: Random) -> _Fate:
    """Samples the lengths of a draft of at most `limit` tokens.

    One random number decides both lengths, so that never more is accepted than proposed; each by itself follows its
    own distribution.
    """
    u = rng.random()
    proposed = bisect_left([-p for p in fates.proposed[:limit]], -u)
    return _Fate(proposed, bisect_left([-p for p in fates.accepted[:limit]], -u))


def _milliseconds(costs: Costs, fates: Sequence[_Fate], asked: int) -> float:
    """Milliseconds of one round."""
    batch, longest = len(fates), max(fate.proposed for fate in fates)
    if not asked:
        return costs.plain(batch, costs.width_for(1, batch))
    verifying = costs.verifying(batch, longest, [sum(fate.proposed for fate in fates)])[0]
    return float(verifying) + costs.drafting(batch, longest)
