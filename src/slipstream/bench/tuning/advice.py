"""Both stages of a tuning for every batch size, and what they advise: what to use, and why the others lost.

    space = SearchSpace(decoder, drafts, params)
    meter = Meter(space.lineup, folder, Budget(300), print)
    result = tune(space, meter, prompts, batches=[1, 4], longest=8)
    [advice.sentence for advice in result.advice]

The arm that comes out first is first in part by luck. What luck gives is estimated as Efron's optimism ("Estimating the
Error Rate of a Prediction Rule", JASA 1983): choose again on bootstrap resamples, and see how much better each choice
looks on its resample than on all the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table
from rich.text import Text

from slipstream import drafters
from slipstream.bench.arms import PLAIN
from slipstream.bench.plan import BenchPrompt, Group, groups
from slipstream.bench.records import Run
from slipstream.bench.summary import RESAMPLES, SEED, ArmSummary, Estimate, summarise
from slipstream.bench.tuning.search import (
    Candidate,
    Entry,
    Meter,
    Screened,
    SearchSpace,
    in_turn,
    screen,
    search,
    shortlist,
    too_little,
)
from slipstream.errors import SlipstreamError
from slipstream.text.round_view import percent

LEAST = 1.02  # a smaller gain is not worth the trouble
DEAR = 0.1  # the share of its time from which drafting may be what an arm lost by
LEAST_UNITS = 2  # an interval needs as many


Floats = NDArray[np.float64]


def optimism(logs: Floats) -> float:
    """What the best mean gains from being chosen; >= 0. logs: [A, U], log speed-ups of A arms on U prompts."""
    if logs.shape[0] < 2 or logs.shape[1] < 2:
        return 0.0
    sampled = np.random.default_rng(SEED).integers(0, logs.shape[1], (RESAMPLES, logs.shape[1]))
    means = logs[:, sampled].mean(axis=2)
    chosen = means.argmax(axis=0)
    gained = means[chosen, np.arange(RESAMPLES)] - logs.mean(axis=1)[chosen]
    return max(0.0, float(gained.mean()))


def log_speed_ups(runs: Sequence[Run], arms: Sequence[str], reference: str) -> Floats:
    """[A, U]: of medians over repeats by group of prompts; of single repeats where there is one group only.

    Groups that not all arms have run are left out.
    """
    names = [reference, *arms]
    found: dict[tuple[str, ...], dict[int, dict[str, float]]] = {}
    for run in runs:
        if run.error is None and run.arm in names:
            repeats = found.setdefault(tuple(run.prompts), {})
            repeats.setdefault(run.repeat, {})[run.arm] = run.seconds / run.num_output_tokens
    whole = [[one for one in repeats.values() if len(one) == len(names)] for repeats in found.values()]
    shared = [repeats for repeats in whole if repeats]
    units = [[one] for one in shared[0]] if len(shared) == 1 else shared
    costs = np.array([[np.median([one[name] for one in unit]) for unit in units] for name in names], dtype=np.float64)
    logs: Floats = np.log(costs[0]) - np.log(costs[1:])
    return logs


def without(estimate: Estimate, flattery: float) -> Estimate:
    """The estimate and its interval, lowered by `flattery` (of the log)."""
    share = exp(-flattery)
    low, high = (None if end is None else end * share for end in (estimate.low, estimate.high))
    return replace(estimate, value=estimate.value * share, low=low, high=high)


@dataclass(frozen=True)
class Standing:
    """How a candidate did. measured: against plain decoding, None if it was not run to the end or not at all.

    units: how often it ran on a group of prompts; predicted: prompts left out; lost: why it is not the advice;
    failed: it broke down, or its text is not plain decoding's.
    """

    name: str
    candidate: Candidate
    measured: Estimate | None = None
    predicted: float | None = None
    texts: Mapping[str, int] | None = None
    acceptance_rate: float | None = None
    acceptance_by_position: tuple[float, ...] = ()
    tokens_per_round: float | None = None
    draft_share: float | None = None
    units: int = 0
    lost: str = ""
    failed: bool = False


@dataclass(frozen=True)
class Advice:
    """What to do at a batch size. best: None where the answer is not to speculate.

    expected: the speed-up of `best` with the gain from being chosen taken off (docs/tune.md). others: best first.
    """

    batch: int
    best: Standing | None
    expected: Estimate | None
    optimism: float
    others: tuple[Standing, ...]
    units: int
    plain: Estimate

    @property
    def sentence(self) -> str:
        """The advice in words."""
        if self.best is None or self.expected is None:
            text = f"batch {self.batch}: do not speculate (plain decoding, {self.plain.value:.1f} tok/s)"
            first = next((one for one in self.others if one.measured is not None and not one.failed), None)
            if first is None or first.measured is None or first.measured.value < LEAST:
                return text
            return f"{text}; {first.name} at {first.measured.value:.2f}x may be chance: more prompts or time would tell"
        low, high = self.expected.low, self.expected.high
        interval = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
        draft = f" with draft model {self.best.candidate.draft}" if needs_draft(self.best.candidate) else ""
        setting = self.best.candidate.setting
        return f"batch {self.batch}: {setting}{draft}, {self.expected.value:.2f}x plain decoding{interval}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"sentence": self.sentence, "speculate": self.best is not None}


def needs_draft(candidate: Candidate) -> bool:
    """Whether the candidate uses a draft model."""
    return drafters.traits(candidate.kind).needs_draft_model


def advise(batch: int, entries: Mapping[str, Entry], runs: Sequence[Run]) -> Advice:
    """entries: by arm name, the simplest first, which wins among equals. runs: whole units of this batch size."""
    summaries = {one.arm: one for one in summarise(runs, PLAIN)}
    plain = summaries.get(PLAIN)
    if plain is None or plain.speed is None:
        raise SlipstreamError(
            f"plain decoding failed, so nothing can be compared: {plain.error if plain else 'no run'}"
        )
    standings = [_standing(name, entry, summaries.get(name), runs) for name, entry in entries.items()]
    units = sum(run.arm == PLAIN for run in runs)
    best, expected, flattery = _choose(standings, runs, units)
    rival = {one.arm: one.speed.speed_up for one in summarise(runs, PLAIN if best is None else best.name) if one.speed}
    others = [replace(one, lost=one.lost or _lost(one, best, rival[one.name])) for one in standings if one is not best]
    others.sort(key=lambda one: -(one.measured.value if one.measured else 0.0))
    return Advice(batch, best, expected, flattery, tuple(others), units, plain.speed.tokens_per_second)


def _standing(name: str, entry: Entry, one: ArmSummary | None, runs: Sequence[Run]) -> Standing:
    standing = Standing(name, entry.candidate, predicted=entry.predicted, lost=entry.out or "", failed=entry.failed)
    if one is None:
        return replace(standing, lost=standing.lost or "not measured")
    lost = f"failed: {one.error}" if one.failed else ""
    if one.verdicts.get("different"):
        wrong, texts = one.verdicts["different"], sum(one.verdicts.values())
        lost = f"{wrong} of {texts} texts differ from plain decoding and are no ties"
    stats, units = one.stats, sum(run.arm == name for run in runs)
    return replace(
        standing,
        measured=None if one.speed is None else one.speed.speed_up,
        texts=one.verdicts,
        acceptance_rate=None if stats is None else stats.acceptance_rate,
        acceptance_by_position=tuple(one.acceptance_by_position),
        tokens_per_round=None if stats is None else stats.block_efficiency,
        draft_share=None if one.time_split is None else one.time_split["draft"],
        units=units,
        lost=lost,
        failed=bool(lost),
    )


def _choose(
    standings: Sequence[Standing], runs: Sequence[Run], units: int
) -> tuple[Standing | None, Estimate | None, float]:
    """The best arm that certainly pays; of equals the first. Only arms that ran all units take part."""
    able = [one for one in standings if not one.lost and one.measured is not None and one.units == units]
    if not able:
        return None, None, 0.0
    flattery = optimism(log_speed_ups(runs, [one.name for one in able], PLAIN))
    for one in sorted(able, key=lambda one: -one.measured.value if one.measured else 0.0):
        assert one.measured is not None
        expected = without(one.measured, flattery)
        if expected.low is not None and expected.low >= 1 and expected.value >= LEAST:
            return one, expected, flattery
    return None, None, flattery


def _lost(one: Standing, best: Standing | None, ratio: Estimate | None) -> str:
    """Why a candidate is not the advice. ratio: its speed relative to the best arm's, or to plain decoding's."""
    if one.measured is None or ratio is None or ratio.high is None or ratio.high >= 1:
        gains = best is None and one.measured is not None and one.measured.low is not None and one.measured.low > 1
        return f"gains less than {LEAST - 1:.0%}" if gains else "no difference beyond the noise"
    to_beat = 1.0 if best is None or best.measured is None else best.measured.value
    share = one.draft_share or 0.0
    if DEAR < share < 1 and one.measured.value / (1 - share) >= to_beat:
        return f"draft steps too dear ({share:.0%} of the time)"
    return "drafts too rarely accepted"


def advice_table(advice: Advice) -> Table:
    """A line per candidate, the advised one first: speed-ups, parity, acceptance, and why the others lost."""
    title = f"batch size {advice.batch}; speed-up over plain decoding, 95 % intervals; measured {advice.units} times"
    table = Table(box=box.SIMPLE, pad_edge=False, title=title, title_justify="left", padding=(0, 1, 0, 0))
    for name in ("candidate", "speed-up", "", "predic-\nted", "texts", "accep-\ntance", "tokens\nper round", ""):
        left = name in ("candidate", "texts", "")
        table.add_column(name, justify="left" if left else "right", no_wrap=name == "candidate", overflow="fold")
    if advice.best is not None:
        table.add_row(*_line(advice.best, advice.expected), Text("use this", "green"))
    for one in advice.others:
        table.add_row(*_line(one, one.measured), Text(one.lost))
    return table


def positions(advice: Advice) -> str:
    """The acceptance of the advised drafts, position by position."""
    shares = () if advice.best is None else advice.best.acceptance_by_position
    return f"accepted at position 1, 2, ...: {' '.join(map(percent, shares))}" if shares else ""


def _line(one: Standing, estimate: Estimate | None) -> list[str | Text]:
    speed, interval = "-", ""
    if estimate is not None:
        speed = f"{estimate.value:.2f}x"
        interval = "" if estimate.low is None else f"{estimate.low:.2f} to {estimate.high:.2f}"
    return [
        Text(one.name),
        speed,
        interval,
        "-" if one.predicted is None else f"{one.predicted:.2f}x",
        _texts(one),
        percent(one.acceptance_rate),
        "-" if one.tokens_per_round is None else f"{one.tokens_per_round:.2f}",
    ]


def _texts(one: Standing) -> Text:
    found = Text()
    for name, number in (one.texts or {}).items():
        if number:
            bad = name == "different"
            found.append(f"{', ' if found else ''}{number} {name.upper() if bad else name}", "bold red" if bad else "")
    return found


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
