"""Stage two: the candidates in turn on every group of prompts, repeat after repeat; what is clearly beaten leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, zip_longest
from math import ceil
from typing import Protocol

from slipstream.bench.arms import PLAIN
from slipstream.bench.bootstrap import Estimate
from slipstream.bench.plan import Group
from slipstream.bench.records import Arm, Run
from slipstream.bench.summary import ArmSummary, summarise

FIRST_RUNG, NEXT_RUNG = 6, 1.5  # units (all arms once on one group) before arms may leave; each time so many more
NARROW = 0.03  # an interval within this share of its value is good enough


class Measures(Protocol):
    """What runs all arms once on a group of prompts; see `Meter`."""

    def unit(self, arms: Sequence[Arm], group: Group, batch: int, repeat: int, until: float) -> list[Run] | None:
        """The runs; None if there is no time left."""


def in_turn(groups: Sequence[Group]) -> list[Group]:
    """The groups ordered so that every family comes early."""
    families: dict[str, list[Group]] = {}
    for group in groups:
        families.setdefault(group.family, []).append(group)
    return [group for line in zip_longest(*families.values()) for group in line if group is not None]


def search(meter: Measures, arms: Sequence[Arm], groups: Sequence[Group], batch: int, until: float) -> list[Run]:
    """Measure until `until` (seconds of the budget), or until the best arm's interval is narrow or nothing is left.

    arms: plain decoding first, which never leaves. Returns the runs of whole units.
    """
    runs: list[Run] = []
    active, rung = list(arms), FIRST_RUNG
    for units, (repeat, group) in enumerate(_order(groups), 1):
        made = meter.unit(active, group, batch, repeat, until)
        if made is None:
            return runs
        runs += made
        failed = {run.arm for run in made if run.error is not None}
        active = [arm for arm in active if arm.name not in failed or arm.name == PLAIN]
        if units == rung and PLAIN not in failed:
            staying = survivors(runs, [arm.name for arm in active])
            active = [arm for arm in active if arm.name in staying]
            rung = ceil(NEXT_RUNG * rung)
            if units >= len(groups) and settled(runs, staying):
                return runs
        if len(active) == 1 or PLAIN in failed:
            return runs
    return runs


def survivors(runs: Sequence[Run], active: Sequence[str]) -> list[str]:
    """The arms that the leader does not clearly beat: the interval of their speed relative to it reaches 1.

    active: arms that have run all units so far. Plain decoding always stays, as what the others are compared with.
    """
    own = [run for run in runs if run.arm in active]
    ratios = _ratios(summarise(own, PLAIN))
    leader = max(active, key=lambda name: ratios[name].value if name in ratios else 0.0)
    against = _ratios(summarise(own, leader))
    return [name for name in active if name in (PLAIN, leader) or not _below_one(against.get(name))]


def settled(runs: Sequence[Run], active: Sequence[str]) -> bool:
    """Whether the best arm's interval is within `NARROW` of its value."""
    ratios = _ratios(summarise([run for run in runs if run.arm in active], PLAIN))
    best = max((ratios[name] for name in active if name != PLAIN and name in ratios), key=_value, default=None)
    if best is None or best.low is None or best.high is None:
        return False
    return best.high <= best.value * (1 + NARROW) and best.low >= best.value * (1 - NARROW)


def _order(groups: Sequence[Group]) -> Iterator[tuple[int, Group]]:
    return ((repeat, group) for repeat in count(1) for group in groups)


def _ratios(summaries: Sequence[ArmSummary]) -> dict[str, Estimate]:
    """Speed-ups by arm, of one batch size; arms without one are left out."""
    return {
        one.arm: one.speed.speed_up for one in summaries if one.speed is not None and one.speed.speed_up is not None
    }


def _value(estimate: Estimate) -> float:
    return estimate.value


def _below_one(estimate: Estimate | None) -> bool:
    return estimate is None or (estimate.high is not None and estimate.high < 1)
