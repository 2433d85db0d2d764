"""Rounds of predicted costs and acceptance played at random, row by row: the check of the formulas."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor
from random import Random

import numpy as np

from slipstream.bench.speed_model.accepted_lengths import Acceptance
from slipstream.bench.speed_model.formula import verified_drafts, verifying_milliseconds
from slipstream.bench.speed_model.round_costs import Costs


@dataclass(frozen=True)
class Load:
    """Rows to decode in a played run: how many in all, how many at a time, and tokens per row."""

    rows: int
    batch: int
    tokens: int


def play(costs: Costs, acceptance: Acceptance | float, num_draft_tokens: int, load: Load, seed: int) -> float:
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
        known = verified_drafts(costs, fates, num_draft_tokens, len(active))
        rounds = [_draw(known, min(num_draft_tokens, remaining - 1), rng) for remaining in active]
        taken += _milliseconds(costs, known, rounds, num_draft_tokens)
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


def _milliseconds(costs: Costs, known: Acceptance, fates: Sequence[_Fate], asked: int) -> float:
    """Of one round."""
    batch, longest = len(fates), max(fate.proposed for fate in fates)
    if not asked:
        return costs.plain(batch, costs.width_for(1, batch))
    drafted = round(sum(known.num_nodes(fate.proposed) for fate in fates), 9)
    ends = sorted({floor(drafted), ceil(drafted)})
    verifying = float(np.interp(drafted, ends, verifying_milliseconds(costs, known, batch, longest, ends)))
    return verifying + costs.drafting(batch, longest) + costs.move * sum(fate.branched for fate in fates)
