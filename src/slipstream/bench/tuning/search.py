"""Which settings are worth measuring, and measuring them within a time limit.

Stage one screens: the cost of a round and how far drafts get give the speed-up of every draft length without running
it. Stage two races: the candidates take turns on every group of prompts, and one that is clearly beaten is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, zip_longest
from math import ceil
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, Protocol

from slipstream import drafters
from slipstream.bench.arms import PLAIN, Arm
from slipstream.bench.lineup import Lineup, Runner
from slipstream.bench.plan import Group, Measurement
from slipstream.bench.records import Run
from slipstream.bench.speed_model.accepted_lengths import Acceptance
from slipstream.bench.speed_model.formula import longest_known, predicted_speed_up
from slipstream.bench.speed_model.probe import measure_costs
from slipstream.bench.speed_model.round_costs import Costs
from slipstream.bench.summary import ArmSummary, Estimate, summarise, total_stats
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import UsageError
from slipstream.sampling.params import SamplingParams

FIRST_RUNG, NEXT_RUNG = 6, 1.5  # units (all arms once on one group) before arms are first dropped; factor to the next
NARROW = 0.03  # an interval within this share of its value is good enough
SCREENING = 0  # the repeat that runs of stage one are recorded as
SCREENED = 4  # groups of prompts that stage one runs at most
RUNS_SHARE, COSTS_SHARE = 0.2, 0.4  # of the budget: stage one ends its runs, and its measuring of costs, by then
RARE = 0.5  # a drafter that drafts in fewer rounds may lose for that
TOO_RARELY_ACCEPTED = "drafts too rarely accepted"
WORTH = 1.1  # a drafter that would reach this speed-up if drafting were free is said to cost too much
FLOOR = 0.8  # candidates predicted to be slower are not measured; below 1, as predictions are not exact
MIN_UNITS = 2  # that an interval needs
MARGIN = 1.3  # a budget that is advised is this many times what was estimated
TURNS, DRAFTING = 4, 10  # least turns of `measure_costs`; about how many plain steps the drafting of a turn takes

Clock = Callable[[], float]
ShowProgress = Callable[[str, str], None]
log = logging.getLogger("slipstream")


class Measures(Protocol):
    """Runs all arms once on a group of prompts, as `Meter` does."""

    def unit(self, arms: Sequence[Arm], group: Group, batch: int, repeat: int, deadline: float) -> list[Run] | None:
        """The runs; None if there is no time left."""


def in_turn(groups: Sequence[Group]) -> list[Group]:
    """The groups ordered so that every family comes early."""
    families: dict[str, list[Group]] = {}
    for group in groups:
        families.setdefault(group.family, []).append(group)
    return [group for line in zip_longest(*families.values()) for group in line if group is not None]


def search(meter: Measures, arms: Sequence[Arm], groups: Sequence[Group], batch: int, deadline: float) -> list[Run]:
    """Measure until the deadline, or until the best arm's interval is narrow or no rival is left.

    arms: plain decoding first, which is never dropped. deadline: in seconds of the budget. Returns the runs of whole
    units.
    """
    runs: list[Run] = []
    active, rung = list(arms), FIRST_RUNG
    for units, (repeat, group) in enumerate(_order(groups), 1):
        unit_runs = meter.unit(active, group, batch, repeat, deadline)
        if unit_runs is None:
            return runs
        runs += unit_runs
        failed = {run.arm for run in unit_runs if run.error is not None}
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
    active_runs = [run for run in runs if run.arm in active]
    ratios = _ratios(summarise(active_runs, PLAIN))
    leader = max(active, key=lambda name: ratios[name].value if name in ratios else 0.0)
    against = _ratios(summarise(active_runs, leader))
    return [name for name in active if name in (PLAIN, leader) or not _below_one(against.get(name))]


def settled(runs: Sequence[Run], active: Sequence[str]) -> bool:
    """Whether the best arm's interval is within `NARROW` of its value."""
    ratios = _ratios(summarise([run for run in runs if run.arm in active], PLAIN))
    candidates = [ratios[name] for name in active if name != PLAIN and name in ratios]
    best = max(candidates, key=lambda ratio: ratio.value, default=None)
    if best is None or best.low is None or best.high is None:
        return False
    return best.high <= best.value * (1 + NARROW) and best.low >= best.value * (1 - NARROW)


def _order(groups: Sequence[Group]) -> Iterator[tuple[int, Group]]:
    return ((repeat, group) for repeat in count(1) for group in groups)


def _ratios(summaries: Sequence[ArmSummary]) -> dict[str, Estimate]:
    """Speed-ups by arm, of one batch size; arms without one are left out."""
    return {arm.arm: arm.speed_up for arm in summaries if arm.speed_up is not None}


def _below_one(estimate: Estimate | None) -> bool:
    return estimate is None or (estimate.high is not None and estimate.high < 1)


@dataclass(frozen=True)
class Candidate:
    """One way to speculate. length: None for the drafter's own; draft: the draft model, as the user named it."""

    drafter: str
    length: int | None = None
    draft: str | None = None

    @property
    def kind(self) -> str:
        """The drafter, with "auto" resolved."""
        if self.drafter != "auto":
            return self.drafter
        return drafters.preferred(draft_model=self.draft is not None, costs=True)

    @property
    def tokens(self) -> int:
        """Tokens asked for in a round."""
        return drafters.traits(self.kind).default_length if self.length is None else self.length

    @property
    def setting(self) -> str:
        """As an arm of a benchmark is written, without the draft model."""
        return self.drafter if self.length is None else f"{self.drafter}@{self.length}"


def predictable(drafts: Sequence[str]) -> list[Candidate]:
    """The drafters whose speed follows from costs and acceptance, the cheapest to set up first; lengths are open."""
    traits_of = {name: drafters.traits(name) for name in drafters.names()}
    names = [name for name, traits in traits_of.items() if traits.in_other_engines]
    alone = [Candidate(name) for name in names if not traits_of[name].needs_draft_model]
    return alone + [
        Candidate(name, draft=draft) for draft in drafts for name in names if traits_of[name].needs_draft_model
    ]


def unpredictable(drafts: Sequence[str]) -> list[Candidate]:
    """Candidates that choose their lengths or drafters while they run, and so are measured only as they are."""
    if not drafts:
        return [Candidate("auto")]
    return [Candidate(name, draft=draft) for draft in drafts for name in ("auto", "model")]


class SearchSpace:
    """One target, any number of draft models, and a lineup that arms join when they are first asked for.

    decoder: has the first of `drafts` as its draft model, or none.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, drafts: Sequence[str], params: SamplingParams, *, chat: bool = True
    ) -> None:
        if twice := [draft for draft in drafts if drafts.count(draft) > 1]:
            raise UsageError(f"draft {twice[0]!r} is given twice; allowed: each draft model once")
        self.drafts = list(drafts)
        self.plain = Arm(PLAIN, PLAIN)
        self.lineup = Lineup(decoder, [self.plain], params, chat=chat)
        self._decoders = {draft: decoder.with_draft(draft) for draft in self.drafts[1:]}

    def name(self, candidate: Candidate) -> str:
        """The arm's name, with its draft model if there are several."""
        shown = candidate.draft is not None and len(self.drafts) > 1
        return f"{candidate.setting} {candidate.draft}" if shown else candidate.setting

    def arm(self, candidate: Candidate) -> Arm:
        """The arm of a candidate, in the lineup from now on."""
        arm = Arm(self.name(candidate), candidate.drafter, candidate.length)
        if arm.name not in self.lineup.decoders:
            self.lineup.decoders[arm.name] = self.decoder(candidate)
            self.lineup.arms.append(arm)
        return arm

    def decoder(self, candidate: Candidate) -> SpeculativeDecoder:
        """The loaded models under a candidate's settings."""
        base = self._decoders.get(candidate.draft or "", self.lineup.decoder)
        return base.using(candidate.drafter, num_draft_tokens=candidate.length)

    def stops_early(self, candidate: Candidate) -> bool:
        """Whether the candidate's draft model ends a draft once it is unsure."""
        on_cpu = self.lineup.decoder.target.backend.device.type == "cpu"
        return on_cpu and candidate.length is None and drafters.traits(candidate.kind).needs_draft_model


class Budget:
    """A number of seconds that begin now."""

    def __init__(self, seconds: float, clock: Clock = perf_counter) -> None:
        self.seconds, self.clock = seconds, clock
        self.begin = clock()

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return self.clock() - self.begin

    @property
    def left(self) -> float:
        """Seconds left; below 0 if a run took longer than expected."""
        return self.seconds - self.now


class Meter:
    """Makes measurements through one `Runner`, so that arms stay warm and reference texts known.

    show_progress: called before every run with the stage and what is being done.
    """

    def __init__(self, lineup: Lineup, folder: Path, budget: Budget, show_progress: ShowProgress) -> None:
        self.budget, self.show_progress = budget, show_progress
        self._plan: list[Measurement] = []  # grows while the runner goes through it
        self._runs = Runner(lineup, self._plan, folder).run([])
        self._seen: dict[int, dict[str, list[float]]] = {}

    def unit(self, arms: Sequence[Arm], group: Group, batch: int, repeat: int, deadline: float) -> list[Run] | None:
        """All arms in turn on one group of prompts; None if they have not ended by the deadline, or are not going to.

        deadline: in seconds of the budget. Runs of a unit that was cut short stay on the disk, but are not compared.
        """
        runs = []
        for number, arm in enumerate(arms):
            if self.budget.now + self.expected(arms[number:], batch) > deadline:
                return None
            stage = "screening" if repeat == SCREENING else f"batch size {batch}"
            self.show_progress(stage, f"{group.ids[0]} {arm.name}")
            begun = self.budget.now
            self._plan.append(Measurement(arm, group, batch, repeat))
            runs.append(next(self._runs))
            self._seen.setdefault(batch, {}).setdefault(arm.name, []).append(self.budget.now - begun)
        return runs

    def expected(self, arms: Sequence[Arm], batch: int) -> float:
        """Seconds that these arms will take, judging by their runs; an arm without one counts as the slowest."""
        seconds_of = self._seen.get(batch) or {name: t for seen in self._seen.values() for name, t in seen.items()}
        longest = max((fmean(times) for times in seconds_of.values()), default=0.0)
        return sum(fmean(seconds_of[arm.name]) if arm.name in seconds_of else longest for arm in arms)

    def enough(self, more_seconds: float) -> int:
        """The budget, in round figures, for all that was done so far and for so many seconds more."""
        return 10 * ceil(MARGIN * (self.budget.now + more_seconds) / 10)


@dataclass(frozen=True)
class Entry:
    """A candidate at one batch size. predicted: its speed-up, prompt processing left out; out: why it is not measured.

    failed: whether it raised an error.
    """

    candidate: Candidate
    predicted: float | None = None
    out: str | None = None
    failed: bool = False


def too_few_tokens(drafted: float, accepted: float) -> str:
    """Why drafts bring few tokens. drafted: the share of rounds with a draft; accepted: that of draft tokens."""
    return f"drafts in only {drafted:.0%} of the rounds" if drafted < min(RARE, accepted) else TOO_RARELY_ACCEPTED


@dataclass(frozen=True)
class Screened:
    """What stage one measured of a drafter; None if there was no time for it, or if the drafter failed."""

    candidate: Candidate
    acceptance: Acceptance | None = None
    costs: Costs | None = None
    failed: str | None = None

    def at_length(self, length: int) -> Entry:
        """The drafter at a length for which nothing is predicted."""
        out = None if self.failed is None else f"failed: {self.failed}"
        return Entry(replace(self.candidate, length=length), out=out, failed=self.failed is not None)

    def entry(self, batch: int, longest: int) -> Entry:
        """The drafter at its best predicted length, or at its own if nothing can be predicted."""
        at_own_length = self.at_length(min(self.candidate.tokens, longest))
        if self.acceptance is None or self.costs is None:
            return at_own_length
        lengths = range(1, longest_known(self.costs, self.acceptance) + 1)
        if not lengths:
            return replace(at_own_length, out="drafts too rarely found (never)")
        speeds = {n: predicted_speed_up(self.costs, self.acceptance, n, batch) for n in lengths}
        best = max(lengths, key=lambda n: (speeds[n], -n))
        out = None if speeds[best] >= FLOOR else self._why_not(best, batch)
        return Entry(replace(self.candidate, length=best), speeds[best], out)

    def _why_not(self, length: int, batch: int) -> str:
        assert self.costs is not None and self.acceptance is not None
        free = replace(self.costs, draft_step={1: 0.0, batch: 0.0}, draft_round={1: 0.0, batch: 0.0})
        would_pay = predicted_speed_up(free, self.acceptance, length, batch) >= WORTH
        drafted, accepted = self.acceptance.proposed[0], sum(self.acceptance.accepted) / sum(self.acceptance.proposed)
        return "drafting costs too much" if would_pay else too_few_tokens(drafted, accepted)

    def to_dict(self) -> dict[str, Any]:
        """The candidate, what was measured of it, and whether it failed, as JSON has them."""
        return {
            **vars(self.candidate),
            "acceptance": None if self.acceptance is None else vars(self.acceptance),
            "costs": None if self.costs is None else self.costs.to_dict(),
            "failed": self.failed,
        }


def screen(
    space: SearchSpace, meter: Meter, groups: Sequence[Group], batches: Sequence[int], longest: int
) -> tuple[list[Screened], list[Run]]:
    """Run every predictable drafter at the longest length on some groups (of the first batch size), then time rounds.

    Returns the runs as well. UsageError if the budget is too small for a single group.
    """
    kinds = predictable(space.drafts)
    arms = [space.plain, *(space.arm(replace(kind, length=longest)) for kind in kinds)]
    to_race = [*arms, *map(space.arm, unpredictable(space.drafts))]  # as many as may be, at other lengths
    runs: list[Run] = []
    for number, group in enumerate(groups[:SCREENED]):
        deadline = meter.budget.seconds * (RUNS_SHARE if number else 1)
        group_runs = meter.unit(arms, group, batches[0], SCREENING, deadline)
        if group_runs is None:
            break
        runs += group_runs
    racing = MIN_UNITS * sum(meter.expected(to_race, batch) for batch in batches)
    if not runs:
        raise UsageError(
            f"--budget {meter.budget.seconds:g} is too small to run every drafter once; allowed: about "
            f"{meter.enough(meter.expected(arms, batches[0]) + racing)} s here, or fewer --draft or --max-tokens"
        )
    screened = [
        _accepted(kind, [run for run in runs if run.arm == arm.name]) for kind, arm in zip(kinds, arms[1:], strict=True)
    ]
    deadline = min(meter.budget.seconds * COSTS_SHARE, meter.budget.seconds - racing)
    return _with_costs(screened, space, meter, batches, longest, _step_seconds(runs), deadline), runs


def shortlist(screened: Sequence[Screened], drafts: Sequence[str], batch: int, longest: int) -> list[Entry]:
    """The candidates for a batch size: drafters at their best predicted lengths, then the unpredictable ones."""
    return [*(drafter.entry(batch, longest) for drafter in screened), *map(Entry, unpredictable(drafts))]


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
    screened: Sequence[Screened],
    space: SearchSpace,
    meter: Meter,
    batches: Sequence[int],
    longest: int,
    step: float,
    deadline: float,
) -> list[Screened]:
    """Add the costs of rounds. Target forwards are timed with the first drafter only: they are the same for all.

    step: seconds of a plain step; deadline: in seconds of the budget.
    """
    widths = sorted({*range(1, min(longest, 5) + 1), *range(7, longest + 1, 2), longest + 1})
    first: Costs | None = None
    with_costs = []
    for number, drafter in enumerate(screened):
        own_widths = widths if first is None else [1]
        least = TURNS * (len(own_widths) + DRAFTING) * step * sum(batches)
        time_left = deadline - meter.budget.now
        if drafter.failed is None and least < time_left:
            meter.show_progress("costs of a round", space.name(drafter.candidate))
            try:
                chains = space.decoder(drafter.candidate).using(num_draft_tokens="chain")  # trees are not predicted
                seconds = time_left / (len(screened) - number)
                costs = measure_costs(chains, batches, own_widths, seconds=seconds)
            except UsageError as error:  # a context too short for the probe: the drafter is measured unpredicted
                log.warning("no prediction for %s: %s", space.name(drafter.candidate), error)
            else:
                first = first or costs
                costs = replace(costs, target=first.target, overhead=first.overhead, ragged=first.ragged)
                drafter = replace(drafter, costs=costs)
        with_costs.append(drafter)
    return with_costs
