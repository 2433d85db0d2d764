"""Both stages of a tuning for every batch size, and what they advise: what to use, and why the others lost.

    space = SearchSpace(decoder, drafts, params)
    meter = Meter(space.lineup, folder, Budget(300), print)
    result = tune(space, meter, prompts, batches=[1, 4], longest=8)
    [advice.sentence for advice in result.advice]

The best arm of a run looks better than it is, because it was chosen for its result in that very run. This selection
bias is estimated as Efron's optimism ("Estimating the Error Rate of a Prediction Rule", JASA 1983): choose again on
bootstrap resamples, and see how much better each choice looks on its resample than on all the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream import drafters
from slipstream.bench.arms import PLAIN, Arm
from slipstream.bench.plan import BenchPrompt, groups
from slipstream.bench.records import Run
from slipstream.bench.result_tables import Cell, Table, cell, verdict_cell
from slipstream.bench.summary import RESAMPLES, SEED, ArmSummary, Estimate, summarise
from slipstream.bench.tuning.search import (
    MIN_UNITS,
    TOO_RARELY_ACCEPTED,
    Candidate,
    Entry,
    Meter,
    Screened,
    SearchSpace,
    in_turn,
    screen,
    search,
    shortlist,
    too_few_tokens,
)
from slipstream.checks import counted
from slipstream.errors import SlipstreamError
from slipstream.text.results import Stats
from slipstream.text.round_view import percent

MIN_SPEED_UP = 1.02  # a smaller gain is not worth the trouble
COSTLY_DRAFT_SHARE = 0.1  # of an arm's time; a larger share may be why it lost

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
    """[A, U] log speed-ups over `reference`, one for each arm and unit.

    A unit is a group of prompts (its median over repeats), or a single repeat if there is only one group. Groups that
    not all arms have run are left out.
    """
    names = [reference, *arms]
    by_group: dict[tuple[str, ...], dict[int, dict[str, float]]] = {}  # seconds per token, by repeat and arm
    for run in runs:
        if run.error is None and run.arm in names:
            repeats = by_group.setdefault(tuple(run.prompts), {})
            repeats.setdefault(run.repeat, {})[run.arm] = run.seconds / run.num_output_tokens
    complete = [[costs for costs in repeats.values() if len(costs) == len(names)] for repeats in by_group.values()]
    shared = [repeats for repeats in complete if repeats]
    units = [[costs] for costs in shared[0]] if len(shared) == 1 else shared
    medians = np.array([[np.median([costs[name] for costs in unit]) for unit in units] for name in names])
    logs: Floats = np.log(medians[0]) - np.log(medians[1:])
    return logs


def lowered_by_selection_bias(estimate: Estimate, bias: float) -> Estimate:
    """The estimate and its interval, lowered by `bias`, which is that of the logarithm."""
    share = exp(-bias)
    low, high = (None if end is None else end * share for end in (estimate.low, estimate.high))
    return replace(estimate, value=estimate.value * share, low=low, high=high)


@dataclass(frozen=True)
class CandidateResult:
    """The results of a candidate. measured: its speed-up over plain decoding, None if it was not run to the end.

    units: how often it ran on a group of prompts; predicted: its predicted speed-up, prompt processing left out;
    draft_share: of the time; drafted_rounds: the share of rounds with a draft; lost: why it is not the advice; failed:
    whether it raised an error, or its text is not plain decoding's.
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
    drafted_rounds: float | None = None
    units: int = 0
    lost: str = ""
    failed: bool = False


@dataclass(frozen=True)
class Advice:
    """What to do at a batch size. best: None if the answer is not to speculate.

    expected: the speed-up of `best` with the gain from being chosen taken off (docs/tune.md). others: best first.
    needed_seconds: a budget with which all candidates could have been compared; None if they were.
    """

    batch: int
    best: CandidateResult | None
    expected: Estimate | None
    optimism: float
    others: tuple[CandidateResult, ...]
    units: int
    plain: Estimate
    needed_seconds: int | None = None

    @property
    def sentence(self) -> str:
        if self.needed_seconds is None:
            return self._finding
        runs = counted(self.units, "run")
        return (
            f"{self._finding}; not confirmed ({runs} of each): give --budget {self.needed_seconds} or more to be sure"
        )

    @property
    def _finding(self) -> str:
        if self.best is None or self.expected is None:
            text = f"batch {self.batch}: do not speculate (plain decoding, {self.plain.value:.1f} tok/s)"
            first = next((other for other in self.others if other.measured is not None and not other.failed), None)
            if first is None or first.measured is None or first.measured.value < MIN_SPEED_UP:
                return text
            if self.needed_seconds is not None:
                return text
            return f"{text}; {first.name} at {first.measured.value:.2f}x may be chance: more prompts or time would tell"
        low, high = self.expected.low, self.expected.high
        interval = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
        draft = f" with draft model {self.best.candidate.draft}" if needs_draft(self.best.candidate) else ""
        setting = self.best.candidate.setting
        return f"batch {self.batch}: {setting}{draft}, {self.expected.value:.2f}x plain decoding{interval}"

    def to_dict(self) -> dict[str, Any]:
        """The advice as JSON has it, with its sentence and whether to speculate at all."""
        return asdict(self) | {"sentence": self.sentence, "speculate": self.best is not None}


def needs_draft(candidate: Candidate) -> bool:
    """Whether the candidate uses a draft model."""
    return drafters.traits(candidate.kind).needs_draft_model


def advise(batch: int, entries: Mapping[str, Entry], runs: Sequence[Run], needed_seconds: int | None = None) -> Advice:
    """The advice for a batch size.

    entries: by arm name, the simplest first, as the first of equals wins. runs: whole units of this batch size.
    needed_seconds: see `Advice`; if given, a single unit is enough to advise a candidate.
    """
    summaries = {summary.arm: summary for summary in summarise(runs, PLAIN)}
    plain = summaries.get(PLAIN)
    if plain is None or plain.speed is None:
        raise SlipstreamError(
            f"plain decoding failed, so nothing can be compared: {plain.error if plain else 'no run'}"
        )
    results = [_result(name, entry, summaries.get(name), runs) for name, entry in entries.items()]
    units = sum(run.arm == PLAIN for run in runs)
    best, expected, bias = _choose(results, runs, units, without_interval=needed_seconds is not None)
    against_best = summarise(runs, PLAIN if best is None else best.name)
    ratios = {summary.arm: summary.speed_up for summary in against_best}
    others = [
        replace(result, lost=result.lost or _reason_not_chosen(result, best, ratios[result.name]))
        for result in results
        if result is not best
    ]
    others.sort(key=lambda result: -(result.measured.value if result.measured else 0.0))
    return Advice(batch, best, expected, bias, tuple(others), units, plain.speed.tokens_per_second, needed_seconds)


def _result(name: str, entry: Entry, summary: ArmSummary | None, runs: Sequence[Run]) -> CandidateResult:
    result = CandidateResult(
        name, entry.candidate, predicted=entry.predicted, lost=entry.out or "", failed=entry.failed
    )
    if summary is None:
        return replace(result, lost=result.lost or "not measured")
    lost = f"failed: {summary.error}" if summary.failed else ""
    if summary.verdicts.get("different"):
        wrong, texts = summary.verdicts["different"], sum(summary.verdicts.values())
        lost = f"{wrong} of {texts} texts differ from plain decoding and are no ties"
    stats, units = summary.stats, sum(run.arm == name for run in runs)
    return replace(
        result,
        measured=summary.speed_up,
        texts=summary.verdicts,
        acceptance_rate=None if stats is None else stats.acceptance_rate,
        acceptance_by_position=tuple(summary.acceptance_by_position),
        tokens_per_round=None if stats is None else stats.block_efficiency,
        draft_share=None if summary.time_split is None else summary.time_split["draft"],
        drafted_rounds=None if stats is None or not stats.num_rounds else _drafted_rounds(stats),
        units=units,
        lost=lost,
        failed=bool(lost),
    )


def _drafted_rounds(stats: Stats) -> float:
    return stats.drafted_per_position[0] / stats.num_rounds if stats.drafted_per_position else 0.0


def _choose(
    results: Sequence[CandidateResult], runs: Sequence[Run], units: int, *, without_interval: bool
) -> tuple[CandidateResult | None, Estimate | None, float]:
    """The best arm that certainly pays; of equals the first. Only arms that ran all units take part.

    without_interval: whether one that ran only once may be chosen.
    """
    able = [result for result in results if not result.lost and result.measured is not None and result.units == units]
    if not able:
        return None, None, 0.0
    bias = optimism(log_speed_ups(runs, [result.name for result in able], PLAIN))
    for result in sorted(able, key=lambda result: -result.measured.value if result.measured else 0.0):
        assert result.measured is not None
        expected = lowered_by_selection_bias(result.measured, bias)
        pays = without_interval if expected.low is None else expected.low >= 1
        if pays and expected.value >= MIN_SPEED_UP:
            return result, expected, bias
    return None, None, bias


def _reason_not_chosen(result: CandidateResult, best: CandidateResult | None, ratio: Estimate | None) -> str:
    """Why a candidate is not the advice. ratio: its speed relative to the best arm's, or to plain decoding's."""
    if ratio is not None and ratio.high is None:
        return "too few runs to tell"
    if result.measured is None or ratio is None or ratio.high is None or ratio.high >= 1:
        gains = best is None and result.measured is not None and result.measured.is_above_one
        return f"gains less than {MIN_SPEED_UP - 1:.0%}" if gains else "no difference beyond the noise"
    to_beat = 1.0 if best is None or best.measured is None else best.measured.value
    share = result.draft_share or 0.0
    if COSTLY_DRAFT_SHARE < share < 1 and result.measured.value / (1 - share) >= to_beat:
        return f"drafting costs too much ({share:.0%} of the time)"
    accepted = 1.0 if result.acceptance_rate is None else result.acceptance_rate  # None: nothing was drafted
    why = too_few_tokens(result.drafted_rounds or 0.0, accepted)
    is_accepted_more = best is not None and accepted > (best.acceptance_rate or 0.0)
    return "too few tokens per forward" if why == TOO_RARELY_ACCEPTED and is_accepted_more else why


def advice_table(advice: Advice) -> Table:
    """A line per candidate, the advised one first: speed-ups, parity, acceptance, and why the others lost."""
    times = counted(advice.units, "time")
    title = f"batch size {advice.batch}: speed-up over plain decoding, 95 % intervals; measured {times}"
    columns = ("candidate", "speed-up", "predicted", "same\ntexts", "acceptance\nrate", "tokens per\nforward", "why")
    rows = [[*_cells(result, result.measured), result.lost] for result in advice.others]
    if advice.best is not None:
        rows.insert(0, [*_cells(advice.best, advice.expected), Cell("use this", tone="good")])
    optional = ("predicted", "tokens per\nforward", "acceptance\nrate")
    return Table(title, columns, rows, words=("same\ntexts", "why"), optional=optional)


def _cells(result: CandidateResult, speed_up: Estimate | None) -> list[Cell | str]:
    return [
        result.name,
        cell(speed_up, unit="x"),
        "-" if result.predicted is None else f"{result.predicted:.2f}x",
        _same_texts(result.texts or {}),
        percent(result.acceptance_rate),
        "-" if result.tokens_per_round is None else f"{result.tokens_per_round:.2f}",
    ]


def _same_texts(texts: Mapping[str, int]) -> Cell:
    """How many of a candidate's texts are plain decoding's, and of how many: not all candidates finish all texts."""
    same, total = texts.get("identical", 0) + texts.get("reference", 0), sum(texts.values())
    if not total:
        return Cell("-")
    others = {name: count for name, count in texts.items() if count and name not in ("identical", "reference")}
    return Cell(", ".join([f"{same} of {total}", str(verdict_cell(others))] if others else [f"{same} of {total}"]))


def positions(advice: Advice) -> str:
    """The acceptance of the advised drafts, position by position."""
    shares = () if advice.best is None else advice.best.acceptance_by_position
    return f"accepted at position 1, 2, ...: {' '.join(map(percent, shares))}" if shares else ""


@dataclass(frozen=True)
class Tuned:
    """The results of stage one, and the advice by batch size. unmeasured: batch sizes for which no time was left."""

    screened: tuple[Screened, ...]
    advice: tuple[Advice, ...]
    unmeasured: tuple[int, ...]

    @property
    def wrong(self) -> list[tuple[Advice, CandidateResult]]:
        """Candidates that failed, or whose text is not plain decoding's."""
        return [(advice, result) for advice in self.advice for result in advice.others if result.failed]

    def to_dict(self) -> dict[str, Any]:
        """Everything that was screened and advised, as JSON has it."""
        return {
            "screened": [screened.to_dict() for screened in self.screened],
            "advice": [advice.to_dict() for advice in self.advice],
            "unmeasured": list(self.unmeasured),
        }


def tune(
    space: SearchSpace, meter: Meter, prompts: Sequence[BenchPrompt], batches: Sequence[int], longest: int
) -> Tuned:
    """Screen all drafters, then measure the shortlist of each batch size. longest: the longest draft considered.

    The next batch sizes get what one leaves of its share of the budget. Where there is no time to compare all
    candidates, the first batch size is advised by the runs of stage one.
    """
    work = {batch: in_turn(groups(prompts, batch)) for batch in batches}
    screened, screening = screen(space, meter, work[batches[0]], batches, longest)
    advice, unmeasured = list[Advice](), list[int]()
    for number, batch in enumerate(batches):
        shares = len(batches) - number
        deadline = meter.budget.now + meter.budget.left / shares
        entries = shortlist(screened, space.drafts, batch, longest)
        arms = _arms(space, entries)
        fits = MIN_UNITS * meter.expected(arms, batch) <= deadline - meter.budget.now
        runs, needed = search(meter, arms, work[batch], batch, deadline) if fits or number else [], None
        if _cut_short(runs):
            needed = meter.enough(shares * MIN_UNITS * meter.expected(arms, batch))
        if not runs and number == 0:  # the screened drafters are fewer, and ran already
            entries = [drafter.at_length(longest) for drafter in screened]
            runs = [*screening, *search(meter, _arms(space, entries), work[batch], batch, deadline)]
        if runs:
            advice.append(advise(batch, {space.name(entry.candidate): entry for entry in entries}, runs, needed))
        else:
            unmeasured.append(batch)
    return Tuned(tuple(screened), tuple(advice), tuple(unmeasured))


def _arms(space: SearchSpace, entries: Sequence[Entry]) -> list[Arm]:
    return [space.plain, *(space.arm(entry.candidate) for entry in entries if entry.out is None)]


def _cut_short(runs: Sequence[Run]) -> bool:
    """Whether time was too short for the units that an interval needs, though there was something to compare."""
    failed = {run.arm for run in runs if run.error is not None}
    is_over = PLAIN in failed or {run.arm for run in runs} - failed == {PLAIN}
    return not is_over and sum(run.arm == PLAIN for run in runs) < MIN_UNITS
