"""Stage one: what a round costs and how far drafts get give the speed-up of every draft length without running it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.bench.arms import PLAIN
from slipstream.bench.plan import Group
from slipstream.bench.prediction.accepted_lengths import Acceptance
from slipstream.bench.prediction.formula import Costs, longest_known, measure_costs, predicted_speed_up
from slipstream.bench.records import Run
from slipstream.bench.summary import total_stats
from slipstream.bench.tuning.candidates import Candidate, SearchSpace, at_length, predictable, unpredictable
from slipstream.bench.tuning.meter import SCREENING, Meter
from slipstream.errors import UsageError

SCREENED = 4  # groups of prompts
RUNS_SHARE, COSTS_SHARE = 0.2, 0.4  # of the budget: when the runs of this stage end, and when its costs do
WORTH = 1.1  # a drafter that would gain this if its drafts cost nothing lost by their cost
FLOOR = 0.8  # predictions leave out prompts and move with the machine: what is below this is not measured
TURNS, DRAFTING = 4, 10  # `measure_costs` takes every shape at least so often; its drafting, in plain steps

log = logging.getLogger("slipstream")


@dataclass(frozen=True)
class Entry:
    """A candidate at one batch size. predicted: its speed-up, prompts left out; out: why it is not measured.

    failed: it broke down.
    """

    candidate: Candidate
    predicted: float | None = None
    out: str | None = None
    failed: bool = False


@dataclass(frozen=True)
class Screened:
    """What stage one found out about a drafter; None where there was no time or nothing to find."""

    candidate: Candidate
    acceptance: Acceptance | None = None
    costs: Costs | None = None
    failed: str | None = None

    def entry(self, batch: int, longest: int) -> Entry:
        """The drafter at its best predicted length, or at its own where nothing can be predicted."""
        own = at_length(self.candidate, min(self.candidate.tokens, longest))
        if self.failed is not None:
            return Entry(own, out=f"failed: {self.failed}", failed=True)
        if self.acceptance is None or self.costs is None:
            return Entry(own)
        known = range(1, longest_known(self.costs, self.acceptance) + 1)
        if not known:
            return Entry(own, out="drafts too rarely found (never)")
        speeds = {n: predicted_speed_up(self.costs, self.acceptance, n, batch) for n in known}
        best = max(known, key=lambda n: (speeds[n], -n))
        out = None if speeds[best] >= FLOOR else self._why_not(best, batch)
        return Entry(at_length(self.candidate, best), speeds[best], out)

    def _why_not(self, length: int, batch: int) -> str:
        assert self.costs is not None and self.acceptance is not None
        free = replace(self.costs, draft_step={1: 0.0, batch: 0.0}, draft_round={1: 0.0, batch: 0.0})
        dear = predicted_speed_up(free, self.acceptance, length, batch) >= WORTH
        return "draft steps too dear" if dear else "drafts too rarely accepted"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **vars(self.candidate),
            "acceptance": None if self.acceptance is None else vars(self.acceptance),
            "costs": None if self.costs is None else self.costs.to_dict(),
            "failed": self.failed,
        }


def screen(
    space: SearchSpace, meter: Meter, groups: Sequence[Group], batches: Sequence[int], longest: int
) -> list[Screened]:
    """Every predictable drafter: run at the longest length on some groups (of the first batch size), then its costs.

    Too small a budget for a single group is refused.
    """
    kinds = predictable(space.drafts)
    arms = [space.plain, *(space.arm(at_length(kind, longest)) for kind in kinds)]
    runs: list[Run] = []
    for number, group in enumerate(groups[:SCREENED]):
        until = meter.budget.seconds * (RUNS_SHARE if number else 1)
        made = meter.unit(arms, group, batches[0], SCREENING, until)
        if made is None:
            break
        runs += made
    if not runs:
        raise too_little(meter)
    found = [
        _accepted(kind, [run for run in runs if run.arm == arm.name]) for kind, arm in zip(kinds, arms[1:], strict=True)
    ]
    return _with_costs(found, space, meter, batches, longest, _step_seconds(runs))


def shortlist(screened: Sequence[Screened], drafts: Sequence[str], batch: int, longest: int) -> list[Entry]:
    """What is in question at a batch size: drafters at their best predicted lengths, then the unpredictable ones."""
    return [*(one.entry(batch, longest) for one in screened), *map(Entry, unpredictable(drafts))]


def too_little(meter: Meter) -> UsageError:
    """The refusal of a budget that compares nothing."""
    return UsageError(
        f"--budget {meter.budget.seconds:g} is over after {meter.budget.now:.1f} s without a comparison of all "
        "candidates on two groups of prompts; allowed: more seconds, or fewer --draft, --batch-sizes or --max-tokens"
    )


def _accepted(kind: Candidate, runs: Sequence[Run]) -> Screened:
    errors = [run.error for run in runs if run.error is not None]
    if errors:
        return Screened(kind, failed=errors[0])
    return Screened(kind, Acceptance.from_stats(total_stats([run.stats for run in runs if run.stats]).to_dict()))


def _step_seconds(runs: Sequence[Run]) -> float:
    """Seconds of a plain step, prompts left out; 0 if plain decoding failed."""
    counted = [run.stats for run in runs if run.arm == PLAIN and run.stats is not None]
    total = total_stats(counted)
    return (total.total_seconds - total.prefill_seconds) / total.num_steps if total.num_steps else 0.0


def _with_costs(
    found: Sequence[Screened], space: SearchSpace, meter: Meter, batches: Sequence[int], longest: int, step: float
) -> list[Screened]:
    """Target forwards are timed with the first drafter only: for the others they are the same."""
    widths = sorted({*range(1, min(longest, 5) + 1), *range(7, longest + 1, 2), longest + 1})
    first: Costs | None = None
    known = []
    for number, one in enumerate(found):
        own = widths if first is None else [1]
        least = TURNS * (len(own) + DRAFTING) * step * sum(batches)
        left = meter.budget.seconds * COSTS_SHARE - meter.budget.now
        if one.failed is None and least < left:
            meter.tell("costs of a round", space.name(one.candidate))
            try:
                costs = measure_costs(space.decoder(one.candidate), batches, own, seconds=left / (len(found) - number))
            except UsageError as error:  # a context too short for the probe: the drafter is measured unpredicted
                log.warning("no prediction for %s: %s", space.name(one.candidate), error)
            else:
                first = first or costs
                one = replace(one, costs=replace(costs, target=first.target, overhead=first.overhead))
        known.append(one)
    return known
