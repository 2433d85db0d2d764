"""Both stages for every batch size within one budget.

space = SearchSpace(decoder, drafts, params)
meter = Meter(space.lineup, folder, Budget(300), print)
result = tune(space, meter, prompts, batches=[1, 4], longest=8)
[advice.sentence for advice in result.advice]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.bench.arms import PLAIN
from slipstream.bench.plan import BenchPrompt, Group, groups
from slipstream.bench.records import Run
from slipstream.bench.tuning.advice import Advice, Standing, advise
from slipstream.bench.tuning.candidates import SearchSpace
from slipstream.bench.tuning.meter import Meter
from slipstream.bench.tuning.screen import Entry, Screened, screen, shortlist, too_little
from slipstream.bench.tuning.search import in_turn, search

LEAST_UNITS = 2  # an interval needs as many


@dataclass(frozen=True)
class Tuned:
    """The advice for every batch size but those in `unmeasured`, for which there was no time; what stage one found."""

    screened: tuple[Screened, ...]
    advice: tuple[Advice, ...]
    unmeasured: tuple[int, ...]

    @property
    def wrong(self) -> list[tuple[Advice, Standing]]:
        """Candidates that failed, or whose text is not plain decoding's."""
        every = [(advice, one) for advice in self.advice for one in advice.others]
        return [(advice, one) for advice, one in every if one.failed]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "screened": [one.to_dict() for one in self.screened],
            "advice": [one.to_dict() for one in self.advice],
            "unmeasured": list(self.unmeasured),
        }


def tune(
    space: SearchSpace, meter: Meter, prompts: Sequence[BenchPrompt], batches: Sequence[int], longest: int
) -> Tuned:
    """longest: the longest draft considered. What a batch size leaves of its share of the budget, the next one gets.

    A budget that is too small for any of them is refused.
    """
    work = {batch: in_turn(groups(prompts, batch)) for batch in batches}
    screened = screen(space, meter, work[batches[0]], batches, longest)
    made: dict[int, Advice | None] = {}
    for number, batch in enumerate(batches):
        until = meter.budget.now + meter.budget.left / (len(batches) - number)
        made[batch] = _batch(space, meter, shortlist(screened, space.drafts, batch, longest), work[batch], until)
    advice = tuple(one for one in made.values() if one is not None)
    if not advice:
        raise too_little(meter)
    return Tuned(tuple(screened), advice, tuple(batch for batch, one in made.items() if one is None))


def _batch(
    space: SearchSpace, meter: Meter, entries: Sequence[Entry], work: Sequence[Group], until: float
) -> Advice | None:
    """None where there was no time for the two units that an interval needs."""
    named, batch = {space.name(one.candidate): one for one in entries}, len(work[0].prompts)
    arms = [space.plain, *(space.arm(one.candidate) for one in entries if one.out is None)]
    runs: list[Run] = search(meter, arms, work, batch, until)
    if sum(run.arm == PLAIN for run in runs) < LEAST_UNITS and all(run.error is None for run in runs):
        return None
    return advise(batch, named, runs)
