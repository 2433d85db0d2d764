"""Measurements one by one within a time limit: what to measure next may depend on what came before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from time import perf_counter

from slipstream.bench.lineup import Lineup
from slipstream.bench.plan import Group, Measurement
from slipstream.bench.records import Arm, Run
from slipstream.bench.runner import Runner

Clock = Callable[[], float]
Tell = Callable[[str, str], None]
SCREENING = 0  # the repeat that runs of stage one are recorded as


class Budget:
    """Seconds, from now on."""

    def __init__(self, seconds: float, clock: Clock = perf_counter) -> None:
        self.seconds, self.clock = seconds, clock
        self.begin = clock()

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return self.clock() - self.begin

    @property
    def left(self) -> float:
        """Seconds left; below 0 where a run took longer than expected."""
        return self.seconds - self.now


class Meter:
    """Makes measurements through one `Runner`, so that arms stay warm and reference texts known.

    tell: called before every run with the stage and what is being done.
    """

    def __init__(self, lineup: Lineup, folder: Path, budget: Budget, tell: Tell) -> None:
        self.budget, self.tell = budget, tell
        self._plan: list[Measurement] = []  # grows while the runner goes through it
        self._runs = Runner(lineup, self._plan, folder).run([])
        self._seen: dict[int, dict[str, list[float]]] = {}

    def unit(self, arms: Sequence[Arm], group: Group, batch: int, repeat: int, until: float) -> list[Run] | None:
        """All arms in turn on one group of prompts; None if that does not fit before `until`, or did not.

        until: seconds of the budget. Runs of a unit that was cut short are on the disk, but compare nothing.
        """
        if self.budget.now + self.expected(arms, batch) > until:
            return None
        made = []
        for arm in arms:
            if self.budget.now + self.expected([arm], batch) > until:
                return None
            stage = "screening" if repeat == SCREENING else f"batch size {batch}"
            self.tell(stage, f"{group.ids[0]} {arm.name}")
            begun = self.budget.now
            self._plan.append(Measurement(arm, group, batch, repeat))
            made.append(next(self._runs))
            self._seen.setdefault(batch, {}).setdefault(arm.name, []).append(self.budget.now - begun)
        return None if self.budget.now > max(until, self.budget.seconds) else made

    def expected(self, arms: Sequence[Arm], batch: int) -> float:
        """Seconds that these arms will take, from what they took; one not run yet takes as long as the longest."""
        own = self._seen.get(batch) or {name: t for seen in self._seen.values() for name, t in seen.items()}
        longest = max((fmean(times) for times in own.values()), default=0.0)
        return sum(fmean(own[arm.name]) if arm.name in own else longest for arm in arms)
